"""A run that ends in any way after any step, and is resumed, has the numbers of one without a break.

Other models, optimizers, schedules and data are tested with the same check where their other tests are.

Modules:
    core/fastloop/checkpoint/frozen.py
"""

from __future__ import annotations

from typing import Any

import pytest
from interrupted_runs import ENDS, SAVED_ENDS, Case, check_interrupted

from fastloop import Plugin, hookimpl
from fastloop.run import Run
from fastloop.testing import VECTORS
from fastloop.testing.tasks import with_batch_norm

STEPS = {"the first step": 1, "within an epoch": 3, "the end of an epoch": 5, "the step before the last": 9}
"""Of 10: two epochs of five."""
QUICK = {("limit", 1), ("Ctrl-C", 3), ("SIGTERM", 5), ("error", 9)}
CASE = Case(VECTORS, [{"ema": {"decay": 0.9}}], {"micro_batch_size": 4, "evaluate_every": 4, "lr": 1e-2})
"""Dropout, micro-batches, an evaluation within an epoch, and a plugin with a state."""


def marks(end: str, step: int) -> list[pytest.MarkDecorator]:
    """The slow combinations: every end and every step are in a quick one, but a process of its own is slow."""
    return [] if (end, step) in QUICK else [pytest.mark.slow]


@pytest.mark.parametrize(
    ("end", "step"),
    [
        pytest.param(end, step, marks=marks(end, step), id=f"{end} after {place}")
        for end in ENDS
        for place, step in STEPS.items()
        if end in SAVED_ENDS or step > 2  # before, there is no checkpoint
    ],
)
def test_an_interrupted_run_equals_a_whole_one(end, step):
    check_interrupted(CASE, end, step)


class Freezes(Plugin):
    """Freezes the first layer, or the statistics of batch norm, in a hook, and unfreezes them after step 6."""

    name = "freezes"
    numerics = "changes-training"

    def __init__(self, part: str, hook: str) -> None:
        super().__init__()
        self.part = part
        self.hook = hook

    def set_trained(self, run: Run, trained: bool) -> None:
        model: Any = run.unwrap_model()
        if self.part == "statistics":
            model.norm.train(trained)
        else:
            model.first.requires_grad_(trained)

    @hookimpl
    def before_fit(self, run: Run) -> None:
        if self.hook == "before_fit":
            self.set_trained(run, False)

    @hookimpl
    def before_epoch(self, run: Run) -> None:
        if self.hook == "before_epoch":
            self.set_trained(run, False)

    @hookimpl
    def after_step(self, run: Run) -> None:
        if self.hook == "after_step" and run.state.step == 2:
            self.set_trained(run, False)
        if run.state.step == 6:
            self.set_trained(run, True)


@pytest.mark.parametrize("part", ["parameters", "statistics"])
@pytest.mark.parametrize("hook", ["before_fit", "before_epoch", "after_step"])
@pytest.mark.parametrize("step", [3, 5, 8])
def test_what_is_frozen_after_a_resume_is_what_was_frozen_before(part, hook, step):
    """Hooks of the first two kinds fire again, and ``after_step`` of steps 2 and 6 does not."""
    case = Case(with_batch_norm(VECTORS) or {}, train=CASE.train, objects=lambda: [Freezes(part, hook)])
    check_interrupted(case, "limit", step)
