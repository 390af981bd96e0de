"""The learning rates of a run that resumes with another length."""

from __future__ import annotations

import logging
import warnings
from bisect import bisect_right
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler, SequentialLR

from fastloop.problem import Problem

log = logging.getLogger("fastloop")


def set_rates_of_length(scheduler: Any, where: str) -> None:
    """Set the learning rates of the optimizer to those of a restored scheduler at its step, in a run of another length.

    A resume calls it after it has loaded the state of the scheduler.

    A checkpoint has the rates of the schedule that saved it, and the next step would use them. A schedule that computes
    a rate from the step alone, such as ``LambdaLR``, has another rate now. One that changes the rate before it, such as
    ``ExponentialLR``, continues from there. For a class that is not torch's, this is a warning, because its rates may
    depend on the length.

    Args:
        scheduler: A scheduler of torch, or ``Schedulers``, which has one for each optimizer.
        where: The recipe, for messages.
    """
    for member in getattr(scheduler, "members", {}).values():
        set_rates_of_length(member, where)
    if not isinstance(scheduler, LRScheduler):
        return
    rates = rates_of_step(scheduler)
    if rates is not None:
        for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
            set_rate(group, rate)
        scheduler._last_lr = rates
    elif not type(scheduler).__module__.startswith("torch."):
        log.warning(
            Problem(
                f"{type(scheduler).__name__} computes each learning rate from the one before it. The run has another "
                f"length than that of the checkpoint, and continues from its learning rate, "
                f"{float(scheduler.get_last_lr()[0]):g}.",
                code="schedule-continues",
                place=where,
                remedy="Compute rates from self.last_epoch and self.base_lrs, or start a new run.",
            )
        )


def rates_of_step(scheduler: LRScheduler) -> list[Any] | None:
    """The learning rates of a schedule at its step; None if they depend on the rates before. A sequence of schedules
    has those of the one that it is at.

    It computes the rates twice, from the current rates and from other ones. A schedule that computes them from the step
    alone gives the same rates both times; ``ExponentialLR``, which multiplies the current rate, gives others.
    """
    if isinstance(scheduler, SequentialLR):
        # with milestones [4, 8], the second schedule has the steps 4 to 7
        place = bisect_right(scheduler._milestones, scheduler.last_epoch)
        return rates_of_step(scheduler._schedulers[place])
    groups = scheduler.optimizer.param_groups
    before = [rate_of(group) for group in groups]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # get_lr is meant to be called by step
            rates = scheduler.get_lr()
            for group, rate in zip(groups, before, strict=True):
                other_rate = 2 * rate + 1  # differs from every rate that is not negative
                set_rate(group, other_rate)
            rates_from_others = scheduler.get_lr()
    except (NotImplementedError, ValueError):  # a schedule of schedules, or one that has ended
        return None
    finally:
        for group, rate in zip(groups, before, strict=True):
            set_rate(group, rate)
    rates = [float(rate) for rate in rates]
    if rates != [float(rate) for rate in rates_from_others]:
        return None
    return rates


def rate_of(group: Mapping[str, Any]) -> float:
    """The learning rate of a parameter group."""
    return float(group["lr"])


def set_rate(group: dict[str, Any], rate: float) -> None:
    """Set the learning rate of a parameter group, in place for an optimizer whose steps are recorded."""
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate
