"""Checks that the loop can step the optimizer and the scheduler, and that a checkpoint can hold their settings.

All would otherwise end the run later: at the first step, at the first checkpoint, or at the end of a schedule. A
schedule that seems to count epochs is a warning.
"""

from __future__ import annotations

import inspect
import logging
from typing import TYPE_CHECKING, Any

from fastloop.checkpoint import pack
from fastloop.checkpoint.settings_record import without_parameters
from fastloop.errors import UsageError
from fastloop.optimizers.several import Optimizers
from fastloop.plugins.plugin import Plugin, hookimpl
from fastloop.problem import Problem

if TYPE_CHECKING:
    from fastloop.run import Run

log = logging.getLogger("fastloop")

VANISHING = 1e-8
"""The share of its learning rate that a schedule leaves at the end, below which the last steps change nothing: float32
resolves 6e-8 of a weight."""
OPTIMIZER_REMEDY = "Remove this key from the optimizer's parameter groups, or give it a value that can be saved."
SCHEDULER_REMEDY = "Torch keeps the attributes of a callable object in the state of LambdaLR: give it a function."


@hookimpl(trylast=True)
def check_run(run: Run) -> None:
    """Refuse an optimizer or a scheduler with which the run could not continue.

    Raises:
        UsageError: The optimizer computes the loss itself, and no plugin steps it. Or the scheduler ends before the
            run. Or a setting cannot be saved.
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
        _check_schedule(run)


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


def _check_schedule(run: Run) -> None:
    """Refuse a ``OneCycleLR`` that ends before the run, and warn of a schedule whose settings seem to count epochs."""
    from torch.optim.lr_scheduler import OneCycleLR

    scheduler = run.scheduler
    total = run.total_steps
    if total is None:
        return
    # a run that resumes restores the scheduler's count of steps later
    if isinstance(scheduler, OneCycleLR) and scheduler.total_steps < total:
        raise UsageError(
            code="unsupported-schedule",
            place=f"{run.recipe.where}: the scheduler",
            found=f"OneCycleLR with total_steps={scheduler.total_steps}",
            expected=f"at least {total}, because it is stepped after each optimizer step",
            remedy=f"Set total_steps={total}.",
        )
    setting = _setting_in_epochs(scheduler, total, run.recipe.train.epochs)
    if setting:
        log.warning(
            Problem(
                f"{type(scheduler).__name__} with {setting} is stepped after each of the {total} optimizer steps, and "
                "these settings seem to count epochs.",
                code="schedule-counts-epochs",
                place=run.recipe.where,
                remedy="Multiply them by the steps of an epoch, or leave the schedule to the plugin `lr-scheduler`.",
            )
        )


def _setting_in_epochs(scheduler: Any, total: int, epochs: int | None) -> str:
    """The setting of a schedule that seems to count epochs instead of steps, such as ``T_max=3``; empty: none.

    Args:
        total: Optimizer steps of the run.
    """
    from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR, MultiStepLR, StepLR

    most = epochs if epochs is not None and epochs < total else 0
    if isinstance(scheduler, CosineAnnealingLR) and scheduler.T_max <= most:
        return f"T_max={scheduler.T_max}"
    if isinstance(scheduler, MultiStepLR) and max(scheduler.milestones, default=total) <= most:
        return f"milestones={sorted(scheduler.milestones.elements())}"
    if isinstance(scheduler, StepLR) and _vanishes(scheduler.gamma, total // scheduler.step_size):
        return f"step_size={scheduler.step_size}, gamma={scheduler.gamma:g}"
    if isinstance(scheduler, ExponentialLR) and _vanishes(scheduler.gamma, total):
        return f"gamma={scheduler.gamma:g}"
    return ""


def _vanishes(gamma: float, times: int) -> bool:
    """Whether a learning rate that is multiplied so often becomes too small to change anything."""
    return 0 < gamma < 1 and gamma**times < VANISHING


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
