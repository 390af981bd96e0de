"""Schedules for ``lr-scheduler``: fastloop's own, and those of torch, transformers, a file or a package."""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from fastloop import Problem, RecipeError, UsageError
from fastloop.errors import did_you_mean
from fastloop.problem import clause

if TYPE_CHECKING:
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

    from fastloop import Run
    from fastloop.recipe import Recipe

logger = logging.getLogger("fastloop")

BUILT_IN: Mapping[str, Callable[[float], float]] = {
    "linear": lambda progress: 1 - progress,
    "cosine": lambda progress: (1 + math.cos(math.pi * progress)) / 2,
    "constant": lambda progress: 1.0,
}
"""Built-in schedule -> the share of the peak after a share of the steps that follow the warm-up, both 0 to 1."""
LENGTHS = ("total_steps", "T_max", "num_training_steps")
"""Parameters that mean the run's optimizer steps."""
LENGTH_OF_POLYNOMIAL = "total_iters"
"""That of ``PolynomialLR``. In other schedules of torch, the parameter means the steps of a warm-up."""
INSTEAD = {"total_steps": "epochs", "num_training_steps": "num_stable_steps"}
"""Parameter -> another one that determines it."""
BY_METRIC = ("ReduceLROnPlateau", "reduce_lr_on_plateau", "greedy")
"""Schedules that step by a metric. The loop steps a schedule once an optimizer step."""


def find_schedule(name: str, arguments: Mapping[str, Any], recipe: Recipe) -> Callable[..., LRScheduler]:
    """The class or function that makes a schedule, called as ``(optimizer, **arguments)``.

    Raises:
        RecipeError: It does not exist, steps by a metric, or has no such argument.
    """
    from fastloop.recipe.references import check_arguments, import_object

    where = f"{recipe.where}: plugins.lr-scheduler"
    if name in BY_METRIC:
        raise RecipeError(
            f"{name} steps by a metric, and fastloop steps schedules by optimizer steps.",
            code="unsupported-schedule",
            place=f"{where}.schedule",
            remedy="Use another.",
        )
    factory: Callable[..., LRScheduler]
    if ":" in name:
        factory = import_object(name, recipe, "plugins.lr-scheduler.schedule")
        if not callable(factory):
            raise RecipeError(
                f"{name} is of type {type(factory).__name__}, expected a class or function.",
                code="wrong-type",
                place=f"{where}.schedule",
            )
    else:
        factory = _find_in_libraries(name, f"{where}.schedule")
    check_arguments(factory, name, arguments, f"{where}.arguments")
    return factory


def _find_in_libraries(name: str, place: str) -> Callable[..., LRScheduler]:
    """A schedule of torch or transformers.

    Args:
        place: The recipe and the key, for messages.

    Raises:
        RecipeError: Neither has one of this name.
    """
    from torch.optim import lr_scheduler

    known: dict[str, Any] = {}
    for key, value in vars(lr_scheduler).items():
        if isinstance(value, type) and issubclass(value, lr_scheduler.LRScheduler):
            known[key] = value
    if name not in known:
        # only here: it imports peft, if that is installed, which takes a second
        from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION

        known |= {str(kind.value): function for kind, function in TYPE_TO_SCHEDULER_FUNCTION.items()}
    factory: Callable[..., LRScheduler] | None = known.get(name)
    if factory is None:
        hint = did_you_mean(name, [*BUILT_IN, *(other for other in known if other not in BY_METRIC)])
        raise RecipeError(
            f"neither torch nor transformers has {name!r}.{hint} Another one is file.py:name.",
            code="unknown-schedule",
            place=place,
        )
    return factory


def make_schedule(
    name: str,
    factory: Callable[..., LRScheduler],
    run: Run,
    optimizer: Optimizer,
    warmup: int | float,
    arguments: Mapping[str, Any],
) -> LRScheduler:
    """Make a schedule. Parameters of ``LENGTHS``, ``max_lr`` and ``num_warmup_steps`` that the recipe leaves out come
    from the run.

    Raises:
        UsageError: The run has no known end, or the schedule does not take the arguments.
    """
    from torch.optim.lr_scheduler import LRScheduler, PolynomialLR

    where = f"{run.recipe.where}: plugins.lr-scheduler"
    given = dict(arguments)
    taken = inspect.signature(factory).parameters
    lengths = [key for key in LENGTHS if key in taken and key not in given and INSTEAD.get(key) not in given]
    if factory is PolynomialLR and LENGTH_OF_POLYNOMIAL not in given:
        lengths.append(LENGTH_OF_POLYNOMIAL)
    if run.total_steps is None and (lengths or isinstance(warmup, float)):
        raise UsageError(
            "the data has no known length, so the run has no known end.",
            code="no-length",
            place=where,
            remedy="Set train.max_steps.",
        )
    given |= dict.fromkeys(lengths, run.total_steps)
    if "max_lr" in taken:
        given.setdefault("max_lr", [group["lr"] for group in optimizer.param_groups])
    if "num_warmup_steps" in taken:
        given.setdefault("num_warmup_steps", warmup_steps(warmup, run.total_steps, run.recipe.where))
    elif warmup:
        raise RecipeError(
            f"{name} has no warm-up of its own.",
            code="unknown-option",
            place=f"{where}.warmup",
            remedy="Remove it, or use linear, cosine or constant.",
        )
    try:
        schedule = factory(optimizer, **given)
    except (TypeError, ValueError) as error:
        raise RecipeError(
            f"{name} was called with {given}: {clause(error)}.", code="call-failed", place=where
        ) from error
    if not isinstance(schedule, LRScheduler):
        raise RecipeError(
            f"{name} returned a {type(schedule).__name__}, expected a torch LRScheduler.",
            code="wrong-result",
            place=f"{where}.schedule",
        )
    return schedule


def warmup_steps(warmup: int | float, total: int | None, where: str) -> int | float:
    """The number of warm-up steps: a float below 1 is a share of the run's steps. Warn if the run ends before them."""
    if isinstance(warmup, float) and warmup < 1:
        return math.ceil(warmup * (total or 0))
    if total is not None and warmup >= total:
        logger.warning(
            Problem(
                f"found {warmup:g} steps, and the run has {total}: the learning rate does not reach its peak.",
                code="too-few-steps",
                place=f"{where}: plugins.lr-scheduler.warmup",
                remedy="Use fewer steps, or a share of the run such as 0.1.",
            )
        )
    return warmup
