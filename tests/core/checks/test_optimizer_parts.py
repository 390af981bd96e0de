"""Optimizers and schedulers with which a run could not continue are refused before it begins.

Modules:
    core/fastloop/checks/optimizer_parts.py
"""

from __future__ import annotations

from collections.abc import Generator
from functools import partial
from typing import Any

import pytest
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR, LambdaLR, MultiStepLR, OneCycleLR, StepLR

from fastloop import Batch, Plugin, Run, UsageError, hookimpl
from fastloop.testing import expect_problem, find_problems


class WarmUp:
    """A learning rate that grows.

    Args:
        kept: An attribute, which torch saves with the state of ``LambdaLR``.
    """

    def __init__(self, kept: Any) -> None:
        self.kept = kept

    def __call__(self, step: int) -> float:
        return min(1.0, (step + 1) / 8)


class NamesGroup(Plugin):
    """Builds an optimizer with a setting of its own."""

    name = "names-group"

    def __init__(self, kept: Any) -> None:
        super().__init__()
        self.kept = kept

    @hookimpl
    def build_optimizer(self, model: nn.Module) -> Optimizer:
        return AdamW([{"params": list(model.parameters()), "kept": self.kept}], lr=1e-2)


class StepsWithClosure(Plugin):
    """Gives the optimizer a function that computes the loss again, as ``LBFGS`` needs it.

    Attributes:
        losses: That of each call of the function.
    """

    name = "steps-with-closure"

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []

    @hookimpl
    def train_step(self, run: Run, batches: list[Batch]) -> Tensor:
        first: list[Tensor] = []

        def closure() -> Tensor:
            run.optimizer.zero_grad()
            loss = run.accumulate_gradients(batches)
            first.append(loss)
            return loss

        run.optimizer.step(closure)
        run.count_update(None)
        self.losses += [loss.item() for loss in first]
        return first[0]


class WatchesSteps(Plugin):
    """Wraps ``train_step``, and leaves the step to the core."""

    name = "watches-steps"

    @hookimpl(wrapper=True)
    def train_step(self) -> Generator[None, Any, Any]:
        return (yield)


def test_an_optimizer_that_needs_a_closure_runs_with_a_plugin_that_gives_one(tiny_run):
    plugin = StepsWithClosure()
    result = tiny_run([plugin], optimizer="LBFGS", epochs=1)
    assert result.summary["status"] == "completed"
    assert len(plugin.losses) > result.summary["steps"], "LBFGS computes the loss of a step several times"
    assert plugin.losses[-1] < plugin.losses[0]


def test_a_wrapper_of_the_core_step_gives_no_closure(tiny_run):
    with expect_problem("unsupported-optimizer train.optimizer LBFGS.step", UsageError):
        tiny_run([WatchesSteps()], optimizer="LBFGS", epochs=1)


def test_an_optimizer_that_needs_a_closure_is_refused(tiny_run):
    with expect_problem("unsupported-optimizer train.optimizer LBFGS.step", UsageError):
        tiny_run(optimizer="LBFGS", epochs=1)


@pytest.mark.parametrize("kept", [print, 3])
def test_a_scheduler_that_no_checkpoint_can_hold_is_refused(tiny_run, kept):
    options: dict[str, Any] = {"scheduler": partial(LambdaLR, lr_lambda=WarmUp(kept)), "epochs": 1}
    if kept == 3:
        assert tiny_run(**options).summary["status"] == "completed"
        return
    with expect_problem("invalid-state scheduler.lr_lambdas.0.kept LambdaLR", UsageError):
        tiny_run(**options)


def test_a_one_cycle_that_ends_before_the_run_is_refused(tiny_run):
    """Two epochs of nine steps."""
    with expect_problem("unsupported-schedule total_steps=17 at least 18", UsageError):
        tiny_run(scheduler=partial(OneCycleLR, max_lr=0.1, total_steps=17))
    assert tiny_run(scheduler=partial(OneCycleLR, max_lr=0.1, total_steps=18)).summary["steps"] == 18


SCHEDULES: dict[str, tuple[Any, str]] = {
    "cosine of epochs": (partial(CosineAnnealingLR, T_max=4), "T_max=4"),
    "cosine of steps": (partial(CosineAnnealingLR, T_max=36), ""),
    "milestones of epochs": (partial(MultiStepLR, milestones=[2, 3]), "milestones=[2, 3]"),
    "milestones of steps": (partial(MultiStepLR, milestones=[2, 18]), ""),
    "each epoch a half": (partial(StepLR, step_size=1, gamma=0.5), "step_size=1"),
    "each second epoch a half": (partial(StepLR, step_size=18, gamma=0.5), ""),
    "a slow decay": (partial(ExponentialLR, gamma=0.99), ""),
    "a fast decay": (partial(ExponentialLR, gamma=0.5), "gamma=0.5"),
}
"""Name -> a scheduler for four epochs of nine steps, and the setting that seems to count epochs."""


@pytest.mark.parametrize("case", SCHEDULES)
def test_a_schedule_that_seems_to_count_epochs_is_one_warning(tiny_run, caplog, case):
    scheduler, setting = SCHEDULES[case]
    tiny_run(scheduler=scheduler, epochs=4)
    problems = find_problems(caplog, "schedule-counts-epochs 36 steps")
    assert len(problems) == bool(setting)
    assert all(setting in str(problem) for problem in problems)


@pytest.mark.parametrize("kept", [print, 3])
def test_an_optimizer_that_no_checkpoint_can_hold_is_refused(tiny_run, kept):
    if kept == 3:
        assert tiny_run([NamesGroup(kept)], epochs=1).summary["status"] == "completed"
        return
    with expect_problem("invalid-state optimizer.kept parameter groups", UsageError) as caught:
        tiny_run([NamesGroup(kept)], epochs=1)
    assert "LambdaLR" not in str(caught.value)
