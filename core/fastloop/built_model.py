"""The model that a task has built, before the optimizer is built: checked, and put in train mode."""

from __future__ import annotations

import logging

from torch import nn
from torch.nn.parameter import is_lazy

from fastloop.errors import PluginError
from fastloop.evaluation_results import restore_modes
from fastloop.problem import Problem, agree, counted
from fastloop.runtime.compiled_modules import is_compiled

log = logging.getLogger("fastloop")


def refuse_compiled(model: nn.Module, where: str) -> None:
    """Raise an error for the wrapper that ``torch.compile(model)`` returns. It hides the model's class, on which the
    count of targets depends, and gives weights names that ``from_pretrained`` does not know.

    Args:
        where: The recipe, for the message.
    """
    if is_compiled(model):
        raise PluginError(
            code="wrong-type",
            place=where,
            found="a model that torch.compile returned",
            expected="the model itself",
            remedy="Compile it in place, by model.compile(), or list the plugin `compile`.",
        )


def check_shapes(model: nn.Module, where: str) -> None:
    """Raise an error for a parameter that gets its shape in the first forward pass, such as that of ``LazyLinear``.

    Args:
        where: The recipe, for the message.
    """
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise PluginError(
                f"the parameter {name} of {type(model).__name__} has no shape before the first forward pass, and the "
                "optimizer is built before it.",
                code="lazy-parameter",
                place=where,
                remedy="Call the model once with a batch before the run, or use a layer of a known size.",
            )


def set_train_mode(model: nn.Module) -> None:
    """Put a model in train mode, and log the modules that stay in eval mode (frozen ones): those of a model that
    already is in train mode, and those that a ``train`` of the model's own keeps there."""
    kept = []
    if model.training:  # from_pretrained returns models in eval mode
        kept = [(module, False) for module in model.modules() if not module.training]
    model.train()
    restore_modes(kept)
    frozen = [name for name, module in model.named_modules() if not module.training]
    if frozen:
        listed = ", ".join(frozen[:3])
        if len(frozen) > 3:
            listed += ", ..."
        log.warning(
            Problem(
                f"{counted(len(frozen), 'module')} {agree(len(frozen), 'stays', 'stay')} in eval mode, as in the "
                f"model: {listed}.",
                code="stays-in-eval-mode",
            )
        )
