"""Check that the optimizer steps the parameters that the model trains.

If a plugin replaces weights after the optimizer was built, the optimizer keeps the old ones, and the new ones silently never train. The
check runs after each build hook that can replace the model or the optimizer.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from fastloop.errors import PluginError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from fastloop.hooks import PluginSet

log = logging.getLogger("fastloop")

LISTED = 5
"""Maximum number of modules in a message."""


def stepped_parameters(optimizer: Any) -> list[Tensor]:
    """The parameters that an optimizer steps: its ``model_parameters()`` if it has that method, else those in its ``param_groups``."""
    if hasattr(optimizer, "model_parameters"):
        return list(optimizer.model_parameters())
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def missing_parameters(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    """Name -> parameter, for the parameters that require gradients, but that the optimizer does not step."""
    stepped = {id(parameter) for parameter in stepped_parameters(optimizer)}
    return {name: weight for name, weight in model.named_parameters() if weight.requires_grad and id(weight) not in stepped}


def orphaned_parameters(model: nn.Module, optimizer: Any) -> list[Tensor]:
    """The parameters with gradients that the optimizer steps, but that are not in the model."""
    own = {id(parameter) for parameter in model.parameters()}
    return [parameter for parameter in stepped_parameters(optimizer) if parameter.requires_grad and id(parameter) not in own]


def by_module(names: Iterable[str]) -> str:
    """Group parameter names by module: ``encoder.0 (weight, bias), head (weight)``."""
    modules: dict[str, list[str]] = {}
    for name in names:
        module, _, parameter = name.rpartition(".")
        modules.setdefault(module or "the model itself", []).append(parameter)
    listed = ", ".join(f"{module} ({', '.join(parameters)})" for module, parameters in list(modules.items())[:LISTED])
    return listed + f" and {len(modules) - LISTED} more modules" * (len(modules) > LISTED)


class OptimizerCheck:
    """Compares the model's parameters with the optimizer's, by identity.

    A difference after ``build_optimizer`` may be intended and is logged as a warning. A difference that ``prepare`` or ``after_prepare``
    introduces is an error.

    Args:
        where: The recipe, for messages.
        model: After ``before_prepare``.
        optimizer: From ``build_optimizer``.

    Attributes:
        accepted: The parameters that differ after ``build_optimizer``, by ``id``.
    """

    def __init__(self, where: str, plugins: PluginSet, model: nn.Module, optimizer: Any) -> None:
        self.where, self.plugins, self.optimizer = where, plugins, optimizer
        self.names = {id(parameter): name for name, parameter in model.named_parameters()}
        self.built = list(model.parameters())  # keep replaced parameters alive, so that no `id` is reused
        missing, orphans = missing_parameters(model, optimizer), orphaned_parameters(model, optimizer)
        self.accepted = {id(parameter): parameter for parameter in (*missing.values(), *orphans)}
        author = self._called("build_optimizer")[-1:]
        if missing:
            log.warning(
                "%s left trained parameters out of the optimizer in build_optimizer, so they will not change: %s. "
                "If that is intended, set requires_grad to False on them, which also saves their gradients",
                _format_plugins(author),
                by_module(missing),
            )
        if orphans:
            log.warning(
                "%s put parameters into the optimizer that the model does not have, of the shapes %s. No checkpoint will hold them: "
                "register them in the model in before_prepare",
                _format_plugins(author),
                ", ".join(str(tuple(parameter.shape)) for parameter in orphans[:LISTED]),
            )

    def after_prepare(self, plugin: str, model: nn.Module) -> None:
        """Check the parameters after one plugin's ``after_prepare``."""
        self._check([plugin], "after_prepare", model)

    def prepared(self, model: nn.Module, optimizer: Any) -> None:
        """Check the parameters after ``prepare``."""
        self.optimizer = optimizer
        self._check(self._called("prepare"), "prepare", model)

    def _check(self, plugins: list[str], hook: str, model: nn.Module) -> None:
        """Compare the parameters.

        Raises:
            PluginError: They differ by more than ``accepted``. Names the plugins.
        """
        missing = [name for name, weight in missing_parameters(model, self.optimizer).items() if id(weight) not in self.accepted]
        orphans = [weight for weight in orphaned_parameters(model, self.optimizer) if id(weight) not in self.accepted]
        if not missing and not orphans:
            return
        problems = f" Not in the optimizer, so they would never train: {by_module(missing)}." if missing else ""
        if orphans:
            names = by_module(self.names.get(id(weight), "an unknown parameter") for weight in orphans)
            problems += f" In the optimizer, but no longer in the model: {names}."
        raise PluginError(
            f"{self.where}: {_format_plugins(plugins)} changed the model's parameters in {hook}, after the optimizer was built.{problems} "
            "Change parameters in before_prepare, or change the optimizer's param_groups along with them. An optimizer that holds other "
            "tensors, such as flat shards, needs a method model_parameters() that returns the parameters that it steps."
        )

    def _called(self, hook: str) -> list[str]:
        """The plugins whose hook was called, in order."""
        return [calls.plugin for calls in self.plugins.calls() if calls.hook == hook]


def _format_plugins(plugins: list[str]) -> str:
    """``plugin 'a'``, ``one of the plugins 'a', 'b'``, or without plugins, ``Accelerate``."""
    return f"{'one of the plugins' if len(plugins) > 1 else 'plugin'} {', '.join(map(repr, plugins))}" if plugins else "Accelerate"
