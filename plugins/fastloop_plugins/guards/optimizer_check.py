"""Checks that the optimizer holds the parameters that the model trains, and that its first steps change them.

    plugins:
      - optimizer-check

Weights that a plugin replaces after the optimizer was built would silently never train. A difference after
``build_optimizer`` is a warning, and one that ``prepare``, ``after_prepare`` or ``before_fit`` introduces an error.
Parameters that the first steps do not change are one warning, which ``_updates`` decides. A loss that is NaN or
infinite at a log point is one, too, unless `nan-guard` is listed.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Generator, Mapping
from typing import TYPE_CHECKING, Any

from fastloop import Plugin, PluginError, Problem, Strategy, hookimpl
from fastloop.plugins.hook_replacement import replace
from fastloop.unstepped import LISTED, by_module
from fastloop_plugins.guards._parameters import missing_parameters, orphaned_parameters

if TYPE_CHECKING:
    from torch import Tensor, nn

    from fastloop import Run
    from fastloop.recipe import Recipe
    from fastloop_plugins.guards._updates import UpdateCheck

logger = logging.getLogger("fastloop")


class OptimizerCheck(Plugin):
    """Checks that the optimizer trains the model's parameters. Examines the first optimizer steps, too.

    Attributes:
        names: Name of each parameter of the model as the optimizer was built for it, by ``id``.
        built: These parameters, until the run is built: they stay alive, so that no ``id`` is reused.
        accepted: The parameters that differ after ``build_optimizer``, by ``id``.
        updates: The check of the first optimizer steps; None: not begun, or complete.
        has_warned: Whether a loss was NaN or infinite.
    """

    name = "optimizer-check"
    numerics = "bitwise"
    recordable = True

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.names: dict[int, str] = {}
        self.built: list[Tensor] = []
        self.accepted: dict[int, Tensor] = {}
        self.updates: UpdateCheck | None = None
        self.has_warned = False

    @classmethod
    def auto_enable(cls, recipe: Recipe) -> str:
        return "every run checks its optimizer"

    @hookimpl(wrapper=True, tryfirst=True)  # the optimizer is built, and the strategy has not changed it
    def build_scheduler(self, run: Run, optimizer: Any) -> Generator[None, Any, Any]:
        self.compare_built(run, run.unwrap_model(), optimizer)
        return (yield)

    @hookimpl(tryfirst=True)
    def after_prepare(self, run: Run, model: nn.Module) -> None:
        self.compare(run, "prepare", model, run.optimizer)

    @hookimpl(tryfirst=True)
    def check_run(self, run: Run) -> None:
        from fastloop_plugins.guards._new_weights import report_frozen
        from fastloop_plugins.guards._updates import UpdateCheck

        report_frozen(run)
        self.compare(run, "after_prepare", run.model, run.optimizer)
        self.built.clear()
        self.updates = UpdateCheck(run.model, run.unwrap_model(), run.optimizer, run.device, self.accepted)

    @hookimpl(wrapper=True, tryfirst=True)
    def before_fit(self, run: Run) -> Generator[None, None, None]:
        """Find the plugin that replaces what was prepared: the loop trains ``run.model``, and the optimizer steps the
        old parameters."""
        model = run.model
        optimizer = run.optimizer
        parameters = dict(run.unwrap_model().named_parameters())

        def find_replaced() -> str:
            """The name of a replaced part of the run, or names of replaced weights; empty: nothing."""
            if run.model is not model:
                return "run.model"
            if run.optimizer is not optimizer:
                return "run.optimizer"
            weights = run.unwrap_model().named_parameters()
            return by_module(name for name, weight in weights if weight is not parameters.get(name))

        def compare(plugin: Plugin, hook: str, function: Callable[..., Any], is_wrapper: bool) -> Callable[..., Any]:
            def call(*arguments: Any) -> None:
                function(*arguments)
                replaced = find_replaced()
                if replaced:
                    raise PluginError(
                        f"plugin {plugin.name!r} replaced {replaced} in before_fit, after the optimizer was built, so "
                        "these weights would never train.",
                        code="parameters-replaced",
                        place=run.recipe.where,
                        remedy=(
                            "Replace the model or its parameters in before_prepare, and the optimizer in "
                            "build_optimizer."
                        ),
                    )

            return call if hook == "before_fit" and not is_wrapper else function

        undo = replace(run.plugins, compare)
        try:
            yield
        finally:
            undo(["before_fit"])

    @hookimpl(trylast=True)  # after plugins that change gradients
    def before_optimizer_step(self, run: Run) -> None:
        if self.updates is not None and not run.is_recording:
            self.updates.before_step()

    @hookimpl(tryfirst=True)  # before plugins that change weights
    def after_step(self, run: Run) -> None:
        assert self.updates is not None
        self.updates.after_step(run.step_was_skipped)
        if self.updates.is_done:
            self.updates = None
            for hook in ("before_optimizer_step", "after_step"):
                run.plugins.unsubscribe(self, hook)

    @hookimpl
    def log_scalars(self, run: Run, scalars: Mapping[str, float], step: int) -> None:
        """Warn once of a loss that is NaN or infinite: the host has read it."""
        loss = scalars.get("train/loss", 0.0)
        if math.isfinite(loss) or self.has_warned or "nan-guard" in run.plugins.names():
            return
        self.has_warned = True
        logger.warning(
            Problem(
                f"the mean loss since the last log point is {loss}. If weights became NaN, they stay so: training goes "
                "on in vain, and the exported model has them.",
                code="not-finite",
                place=f"step {step}",
                remedy="The plugin nan-guard ends a run at the first such step, and names its samples.",
            )
        )

    def compare_built(self, run: Run, model: nn.Module, optimizer: Any) -> None:
        """Compare the parameters as the optimizer was built, and log differences. They are accepted later."""
        self.names = {id(parameter): name for name, parameter in model.named_parameters()}
        self.built = list(model.parameters())
        missing = missing_parameters(model, optimizer)
        orphans = orphaned_parameters(model, optimizer)
        self.accepted = {id(parameter): parameter for parameter in (*missing.values(), *orphans)}
        author = format_plugins(self.others(run, "build_optimizer"))
        if missing:
            logger.warning(
                Problem(
                    f"{author} left trained parameters out of the optimizer in build_optimizer, so it will "
                    f"not change them: {by_module(missing)}.",
                    code="parameters-left-out",
                    remedy=(
                        "If that is intended, set requires_grad to False on them, which also saves their gradients."
                    ),
                )
            )
        if orphans:
            logger.warning(
                Problem(
                    f"{author} put parameters into the optimizer that the model does not have, of the shapes "
                    f"{', '.join(str(tuple(parameter.shape)) for parameter in orphans[:LISTED])}. No "
                    "checkpoint will hold them: register them in the model in before_prepare.",
                    code="foreign-parameters",
                )
            )

    def compare(self, run: Run, hook: str, model: nn.Module, optimizer: Any) -> None:
        """Compare the parameters after a hook.

        Raises:
            PluginError: They differ by more than ``accepted``. Names the plugins that implement the hook.
        """
        missing = []
        for name, weight in missing_parameters(model, optimizer).items():
            if id(weight) not in self.accepted:
                missing.append(name)
        orphans = [weight for weight in orphaned_parameters(model, optimizer) if id(weight) not in self.accepted]
        if not missing and not orphans:
            return
        problems = ""
        if missing:
            problems += f" Not in the optimizer, so they would never train: {by_module(missing)}."
        if orphans:
            names = by_module(self.names.get(id(weight), "an unknown parameter") for weight in orphans)
            problems += f" In the optimizer, but no longer in the model: {names}."
        raise PluginError(
            f"{format_plugins(self.others(run, hook))} changed the model's parameters in {hook}, after the optimizer "
            f"was built.{problems} Change parameters in before_prepare, or change the optimizer's param_groups along "
            "with them. An optimizer that holds other tensors, such as flat shards, needs a method model_parameters() "
            "that returns the parameters that it steps.",
            code="parameters-replaced",
            place=run.recipe.where,
        )

    def others(self, run: Run, hook: str) -> list[str]:
        """The other plugins that implement a hook, in call order; those that only fill in for others if there is no
        other. For ``prepare``: the strategy, if it overrides this method."""
        if hook == "prepare":
            overrides = type(run.strategy).prepare is not Strategy.prepare
            return [run.strategy.name] if overrides else []
        plugins = [plugin for plugin, _ in run.plugins.each(hook) if plugin.name != self.name]
        first_choice = [plugin.name for plugin in plugins if hook not in plugin.fallback_hooks]
        return first_choice or [plugin.name for plugin in plugins]


def format_plugins(plugins: list[str]) -> str:
    """``plugin 'a'``, ``one of the plugins 'a', 'b'``, or without plugins, ``Accelerate``."""
    if not plugins:
        return "Accelerate"
    if len(plugins) == 1:
        return f"plugin {plugins[0]!r}"
    return f"one of the plugins {', '.join(map(repr, plugins))}"
