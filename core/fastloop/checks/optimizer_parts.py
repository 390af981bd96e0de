"""Checks that the loop can step the optimizer, and that a checkpoint can hold the settings of optimizer and scheduler.

Both would otherwise end the run later: at the first step, or at the first checkpoint.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from fastloop.checkpoint import pack
from fastloop.checkpoint.settings_record import without_parameters
from fastloop.errors import UsageError
from fastloop.optimizers.several import Optimizers
from fastloop.plugins.plugin import Plugin, hookimpl

if TYPE_CHECKING:
    from fastloop.run import Run

OPTIMIZER_REMEDY = "Remove this key from the optimizer's parameter groups, or give it a value that can be saved."
SCHEDULER_REMEDY = "Torch keeps the attributes of a callable object in the state of LambdaLR: give it a function."


@hookimpl(trylast=True)
def check_run(run: Run) -> None:
    """Refuse an optimizer or a scheduler with which the run could not continue.

    Raises:
        UsageError: The optimizer computes the loss itself, and no plugin steps it. Or a setting cannot be saved.
    """
    where = run.recipe.where
    core_steps = not _has_own_train_step(run)
    for optimizer in _optimizers(run.optimizer):
        if core_steps and _needs_closure(optimizer):
            raise UsageError(
                f"{type(optimizer).__name__}.step needs a function that computes the loss again, and fastloop computes "
                "the loss of a step once.",
                code="unsupported-optimizer",
                place=f"{where}: train.optimizer",
                remedy="Use another, or write a plugin whose train_step gives the optimizer such a function.",
            )
    for group in run.optimizer.param_groups:
        _check_can_be_saved(without_parameters(group), "optimizer", where, OPTIMIZER_REMEDY)
    if run.scheduler is not None:
        _check_can_be_saved(run.scheduler.state_dict(), "scheduler", where, SCHEDULER_REMEDY)


def _has_own_train_step(run: Run) -> bool:
    """Whether a plugin implements ``train_step``, which may give the optimizer a closure. A wrapper leaves the step to
    the core."""
    for implementation in run.plugins.manager.hook.train_step.get_hookimpls():
        if isinstance(implementation.plugin, Plugin) and not implementation.wrapper:
            return True
    return False


def _optimizers(optimizer: Any) -> list[Any]:
    """The optimizer without the wrapper that scales losses, or those of a dict."""
    inner = getattr(optimizer, "optimizer", optimizer)
    if isinstance(inner, Optimizers):
        return list(inner.members.values())
    return [inner]


def _needs_closure(optimizer: Any) -> bool:
    """Whether ``step`` has an argument without a default, as that of ``LBFGS``."""
    step = type(optimizer).step  # a scheduler replaces that of the object
    for parameter in list(inspect.signature(step).parameters.values())[1:]:  # without self
        is_variadic = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if parameter.default is parameter.empty and not is_variadic:
            return True
    return False


def _check_can_be_saved(state: Any, name: str, where: str, remedy: str) -> None:
    """Raise an error if a checkpoint cannot hold a state.

    Args:
        name: The part of the run that has it, for messages.
        remedy: That of the error.
    """
    try:
        pack(state, {}, name)
    except TypeError as error:
        raise UsageError(
            str(error),
            code="invalid-state",
            place=f"{where}: no checkpoint can hold the state of the {name}",
            remedy=remedy,
        ) from error
