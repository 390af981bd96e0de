"""The optimizer and the scheduler that a user gives to ``Trainer``: objects, or functions that make them."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from fastloop import Problem, Run, UsageError
from fastloop.checks.hook_results import REMEDIES

if TYPE_CHECKING:
    from fastloop.recipe import Train

log = logging.getLogger("fastloop")

MakeOptimizer = Callable[..., Optimizer]
MakeScheduler = Callable[[Optimizer], LRScheduler]

REPLACED = ("lr", "weight_decay", "decay_biases_and_norms", "layer_lr_decay", "parameter_groups")
"""Keys of ``train`` that set the optimizer of a recipe. They have no effect on one that the user builds."""
FUNCTION = "optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3)"
SCHEDULER_FUNCTION = "scheduler=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)"


class UserOptimizer:
    """The user's optimizer and scheduler.

    Args:
        model: The model given to ``Trainer``.
        optimizer: An optimizer, or a function of the model; a class, or a ``functools.partial`` of one, gets the
            trained parameters. None: that of the recipe.
        scheduler: A scheduler of ``optimizer``, or a function of the optimizer. None: that of the plugins.
        train: The given keys of ``train``.

    Raises:
        UsageError: An argument has another type, ``train`` has a key that the optimizer replaces, or the scheduler is
            of another optimizer.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | MakeOptimizer | None,
        scheduler: LRScheduler | MakeScheduler | None,
        train: Mapping[str, Any],
    ) -> None:
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.known = {id(parameter): weakref.ref(parameter) for parameter in model.parameters()}
        if optimizer is not None and not isinstance(optimizer, Optimizer) and not callable(optimizer):
            raise UsageError(
                code="wrong-type",
                place="optimizer",
                found=f"a {type(optimizer).__name__}",
                expected=f"a name, an optimizer, or a function: {FUNCTION}",
            )
        keys = [key for key in REPLACED if key in train]
        if optimizer is not None and keys:
            raise UsageError(
                f"{keys[0]}={train[keys[0]]!r} would have no effect: the optimizer has settings of its own.",
                code="option-without-effect",
                remedy="Set it there.",
            )
        if isinstance(scheduler, LRScheduler):
            if getattr(scheduler, "optimizer", None) is not optimizer:
                raise UsageError(
                    "it is built for another optimizer than optimizer=.",
                    code="other-optimizer",
                    place="scheduler",
                    remedy=f"Pass the optimizer that it schedules, too, or pass a function: {SCHEDULER_FUNCTION}.",
                )
            _check_scheduler(scheduler)
        elif scheduler is not None and (not callable(scheduler) or isinstance(scheduler, type)):
            raise UsageError(
                code="wrong-type",
                place="scheduler",
                found=repr(scheduler),
                expected=f"a scheduler, or a function: {SCHEDULER_FUNCTION}",
            )

    def build(self, run: Run, model: nn.Module) -> Optimizer | None:
        """The optimizer of a model that plugins have changed in ``before_prepare``. Writes its settings into the run's
        recipe.

        Raises:
            UsageError: The function returned no optimizer, or the optimizer does not hold the model's parameters.
        """
        user_optimizer = self.optimizer
        if user_optimizer is None:
            return None
        if isinstance(user_optimizer, Optimizer):
            self._check_parameters(user_optimizer, run, model)
            optimizer = user_optimizer
        elif isinstance(getattr(user_optimizer, "func", user_optimizer), type):
            optimizer = user_optimizer([parameter for parameter in model.parameters() if parameter.requires_grad])
        else:
            optimizer = user_optimizer(model)
        if not isinstance(optimizer, Optimizer):
            raise UsageError(
                f"the function returned a {type(optimizer).__name__}.",
                code="wrong-result",
                place="optimizer",
                expected="a torch.optim.Optimizer",
            )
        if run.settings.optimizer:
            names = ", ".join(f"{name}={value!r}" for name, value in run.settings.optimizer.items())
            log.warning(
                Problem(
                    f"plugins set its arguments {names}, which has no effect: build the optimizer with them.",
                    code="option-without-effect",
                    place="optimizer",
                )
            )
        _record(run.recipe.train, optimizer)
        return optimizer

    def build_scheduler(self, optimizer: Optimizer) -> LRScheduler | None:
        """The scheduler of the run's optimizer.

        Raises:
            UsageError: The function returned no scheduler, or one that cannot be stepped after each optimizer step.
        """
        user_scheduler = self.scheduler
        if user_scheduler is None or isinstance(user_scheduler, LRScheduler):
            return user_scheduler
        scheduler = user_scheduler(optimizer)
        _check_scheduler(scheduler)
        return scheduler

    def _check_parameters(self, optimizer: Optimizer, run: Run, model: nn.Module) -> None:
        """Check that an optimizer that was built before the run still holds the model's parameters."""
        held = set[int]()
        for group in optimizer.param_groups:
            held.update(map(id, group["params"]))
        current = {id(parameter) for parameter in model.parameters()}
        replaced = [key for key in held - current if key in self.known]
        added = [
            name
            for name, parameter in model.named_parameters()
            if parameter.requires_grad and id(parameter) not in held and not self._is_known(parameter)
        ]
        if not held & current and not replaced:
            raise UsageError(
                "it holds no parameter of the model.",
                code="other-optimizer",
                place="optimizer",
                remedy="Build it from model.parameters() of the model given to Trainer.",
            )
        if not replaced and not added:
            return
        plugins = ", ".join(plugin.name for plugin, _ in run.plugins.each("before_prepare")) or "none"
        if replaced:
            problem = f"replaced {len(replaced)} of the parameters that it holds"
        else:
            problem = f"added parameters, such as {added[0]!r}"
        raise UsageError(
            f"it was built before plugins changed the model, and they {problem} (in before_prepare: {plugins}).",
            code="other-optimizer",
            place="optimizer",
            remedy=f"Pass a function instead, which is called with the changed model: {FUNCTION}.",
        )

    def _is_known(self, parameter: nn.Parameter) -> bool:
        """Whether the model had the parameter when ``Trainer`` was made."""
        known = self.known.get(id(parameter))
        return known is not None and known() is parameter


def _check_scheduler(scheduler: Any) -> None:
    if not isinstance(scheduler, LRScheduler):
        raise UsageError(
            f"the function returned a {type(scheduler).__name__}.",
            code="wrong-result",
            place="scheduler",
            expected="a torch LRScheduler",
        )
    if isinstance(scheduler, ReduceLROnPlateau):
        raise UsageError(
            f"ReduceLROnPlateau steps by a metric. {REMEDIES['build_scheduler']}",
            code="unsupported-schedule",
            place="scheduler",
        )


def _record(train: Train, optimizer: Optimizer) -> None:
    """Write an optimizer's class and default arguments into ``train``, for the run folder and for the check of a
    resumed run."""
    cls = type(optimizer)
    defaults = dict(optimizer.defaults)
    name = cls.__name__ if getattr(torch.optim, cls.__name__, None) is cls else f"{cls.__module__}:{cls.__qualname__}"
    train.lr = float(defaults.pop("lr", train.lr))
    train.weight_decay = float(defaults.pop("weight_decay", 0.0))
    settings: dict[str, Any] = {"name": name}
    for key, value in defaults.items():
        if isinstance(value, tuple):
            value = list(value)
        if isinstance(value, bool | int | float | str | list):
            settings[key] = value
    train.optimizer = settings
