"""The plugin ``lr-scheduler``: the learning rate at every step, against the formula.

Modules:
    plugins/fastloop_plugins/training/lr_scheduler.py
"""

from __future__ import annotations

import math

import pytest
from torch.utils.data import IterableDataset

from fastloop import UsageError
from fastloop.testing import expect_problem, tiny_data

STEPS, LR = 18, 1e-2  # tiny_run: two epochs of nine steps


def expected(schedule: str, step: int, warmup: int, minimum: float) -> float:
    """The rate after ``step`` optimizer steps."""
    if step < warmup:
        return LR * step / warmup
    progress = (step - warmup) / (STEPS - warmup)
    shape = {"linear": 1 - progress, "cosine": (1 + math.cos(math.pi * progress)) / 2, "constant": 1.0}[schedule]
    return LR * (1.0 if schedule == "constant" else minimum + (1 - minimum) * shape)


@pytest.mark.parametrize("schedule", ["linear", "cosine", "constant"])
@pytest.mark.parametrize(("warmup", "warmup_steps", "minimum"), [(0, 0, 0.0), (5, 5, 0.1), (0.25, 5, 0.0)])
def test_the_rate_follows_the_formula_at_every_step(tiny_run, schedule, warmup, warmup_steps, minimum):
    options = {"schedule": schedule, "warmup": warmup}
    if schedule != "constant":
        options["min_ratio"] = minimum
    result = tiny_run([{"lr-scheduler": options}])
    assert result.recorder.lrs == pytest.approx(
        [expected(schedule, step, warmup_steps, minimum) for step in range(1, STEPS + 1)]
    )


def test_it_steps_once_an_optimizer_step_however_many_micro_steps(tiny_run):
    whole, split = tiny_run(["lr-scheduler"]), tiny_run(["lr-scheduler"], micro_batch_size=2)
    assert whole.recorder.lrs == split.recorder.lrs
    assert len(split.recorder.lrs) == STEPS


def test_max_steps_is_the_end_of_the_schedule(tiny_run):
    result = tiny_run(["lr-scheduler"], max_steps=5)
    assert result.recorder.lrs == pytest.approx([LR * (1 - step / 5) for step in range(1, 6)])


class Endless(IterableDataset):
    def __iter__(self):
        yield from tiny_data()


def test_data_of_unknown_length_needs_max_steps(tiny_run):
    with expect_problem("no-length 'lr-scheduler' train.max_steps", UsageError):
        tiny_run(["lr-scheduler"], data=Endless())
    assert len(tiny_run(["lr-scheduler"], data=Endless(), max_steps=4).recorder.lrs) == 4
    assert tiny_run([{"lr-scheduler": {"schedule": "constant", "warmup": 2}}], data=Endless(), epochs=1).recorder.lrs[
        :3
    ] == [
        LR / 2,
        LR,
        LR,
    ]
