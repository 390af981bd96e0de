"""Makes one optimizer of the dict that ``build_optimizer`` returns, and one scheduler of a dict of schedulers."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import TYPE_CHECKING, Any

from accelerate.optimizer import AcceleratedOptimizer

from fastloop.errors import PluginError
from fastloop.optimizers.several import Optimizers
from fastloop.optimizers.several_schedulers import Schedulers
from fastloop.plugins.plugin import hookimpl

if TYPE_CHECKING:
    from fastloop.run import Run


@hookimpl(wrapper=True, tryfirst=True)  # around the wrappers of plugins, which change the members of a dict
def build_optimizer(run: Run) -> Generator[None, Any, Any]:
    """Make one optimizer of a dict.

    Raises:
        PluginError: See ``refuse_modes`` and ``Optimizers``.
    """
    optimizer = yield
    where = run.recipe.where
    is_dict = isinstance(optimizer, Mapping)
    if not any(plugin.switches_optimizer_modes for plugin in run.plugins):
        for member in optimizer.values() if is_dict else [optimizer]:
            refuse_modes(member, where)
    return Optimizers(optimizer, where) if is_dict else optimizer


def refuse_modes(optimizer: Any, where: str) -> None:
    """Raise an error for an optimizer that switches modes for training and evaluation, as those of the package
    ``schedulefree``.

    Args:
        where: The recipe, for messages.
    """
    while isinstance(optimizer, AcceleratedOptimizer):  # has train() and eval(), which call those of its optimizer
        optimizer = optimizer.optimizer
    if not (callable(getattr(optimizer, "train", None)) and callable(getattr(optimizer, "eval", None))):
        return
    name = type(optimizer).__name__
    raise PluginError(
        f"{name} has methods train() and eval(), which exchange the weights for training and those for evaluation. "
        "fastloop does not call them, so evaluations and exported models would have the weights for training.",
        code="unsupported-optimizer",
        place=where,
        remedy="Use another optimizer. For averages of the weights, list the plugin ema. A plugin that calls both "
        "methods declares switches_optimizer_modes = True.",
    )


@hookimpl(wrapper=True, tryfirst=True)
def build_scheduler(run: Run, optimizer: Any) -> Generator[None, Any, Any]:
    """Make one scheduler of a dict.

    Raises:
        PluginError: See ``Schedulers``.
    """
    scheduler = yield
    return Schedulers(optimizer, scheduler, run.recipe.where) if isinstance(scheduler, Mapping) else scheduler
