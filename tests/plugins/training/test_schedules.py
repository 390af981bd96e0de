"""The plugin ``lr-scheduler`` with schedules of torch, of transformers and of a file, against a plain loop.

Modules:
    core/fastloop/checkpoint/learning_rates.py
    plugins/fastloop_plugins/training/_schedules.py
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from interrupted_runs import Case, check_interrupted
from recipe_runs import LR, assert_same, make_run, torch_loop, trained
from torch import nn
from torch.optim import AdamW, lr_scheduler
from training_runs import execute
from transformers import get_scheduler

from fastloop import CheckpointError, Plugin, RecipeError, Run, UsageError, hookimpl
from fastloop.recipe import make_recipe
from fastloop.testing import assert_problem, expect_problem, find_problems, tiny_data
from fastloop_plugins.training._schedules import find_schedule

STEPS = 16

CASES: dict[str, tuple[dict[str, Any], Any]] = {
    "StepLR": ({"schedule": "StepLR", "arguments": {"step_size": 4}}, lambda opt: lr_scheduler.StepLR(opt, 4)),
    "MultiStepLR": (
        {"schedule": "MultiStepLR", "arguments": {"milestones": [3, 9]}},
        lambda opt: lr_scheduler.MultiStepLR(opt, [3, 9]),
    ),
    "OneCycleLR": ({"schedule": "OneCycleLR"}, lambda opt: lr_scheduler.OneCycleLR(opt, LR, total_steps=STEPS)),
    "CosineAnnealingLR": ({"schedule": "CosineAnnealingLR"}, lambda opt: lr_scheduler.CosineAnnealingLR(opt, STEPS)),
    "PolynomialLR": ({"schedule": "PolynomialLR"}, lambda opt: lr_scheduler.PolynomialLR(opt, STEPS)),
    "PolynomialLR of 4 steps": (
        {"schedule": "PolynomialLR", "arguments": {"total_iters": 4}},
        lambda opt: lr_scheduler.PolynomialLR(opt, 4),
    ),
    "warm restarts": (
        {"schedule": "CosineAnnealingWarmRestarts", "arguments": {"T_0": 5, "eta_min": 1e-3}},
        lambda opt: lr_scheduler.CosineAnnealingWarmRestarts(opt, 5, eta_min=1e-3),
    ),
    "polynomial": (
        {"schedule": "polynomial", "warmup": 0.25, "arguments": {"power": 2.0}},
        lambda opt: get_scheduler("polynomial", opt, 4, STEPS, {"power": 2.0}),
    ),
    "inverse_sqrt": ({"schedule": "inverse_sqrt", "warmup": 3}, lambda opt: get_scheduler("inverse_sqrt", opt, 3)),
    "warmup_stable_decay": (
        {"schedule": "warmup_stable_decay", "warmup": 2, "arguments": {"num_decay_steps": 5}},
        lambda opt: get_scheduler("warmup_stable_decay", opt, 2, STEPS, {"num_decay_steps": 5}),
    ),
    "file": (
        {"schedule": "code.py:halves", "arguments": {"every": 3}},
        lambda opt: lr_scheduler.StepLR(opt, 3, gamma=0.5),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_weights_equal_those_of_a_plain_loop(case):
    options, make = CASES[case]
    theirs = torch_loop(lambda model: AdamW(model.parameters(), lr=LR, weight_decay=0.0), scheduler=make)
    assert_same(trained(plugins=[{"lr-scheduler": options}]), theirs)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_resumed_run_has_the_weights_of_a_whole_one(case):
    check_interrupted(Case(plugins=[{"lr-scheduler": CASES[case][0]}]), "Ctrl-C", 5)


@pytest.mark.parametrize("schedule", ["CosineAnnealingLR", "OneCycleLR", "PolynomialLR"])
def test_a_schedule_of_torch_does_not_resume_with_another_length(schedule):
    execute(make_run("output=cut", plugins=[{"lr-scheduler": {"schedule": schedule}}]))
    with pytest.raises(CheckpointError, match=rf"scheduler\..* = {STEPS}, .* 40"):
        make_run("output=cut", "train.epochs=5", plugins=[{"lr-scheduler": {"schedule": schedule}}], resume=Path("cut"))


def test_a_schedule_of_a_given_length_resumes_in_a_longer_run():
    options = {"schedule": "CosineAnnealingLR", "arguments": {"T_max": STEPS}}
    execute(make_run("output=cut", plugins=[{"lr-scheduler": options}]))
    longer = make_run("output=cut", "train.epochs=5", plugins=[{"lr-scheduler": options}], resume=Path("cut"))
    assert execute(longer)["steps"] == 40


class Rates(Plugin):
    """Records the learning rate of each step."""

    name = "rates"

    def __init__(self) -> None:
        super().__init__()
        self.used: list[float] = []

    @hookimpl
    def before_optimizer_step(self, run: Run) -> None:
        self.used.append(run.optimizer.param_groups[0]["lr"])


class StopsAfter(Plugin):
    """Ends its run after a step."""

    name = "stops-after"

    def __init__(self, step: int) -> None:
        super().__init__()
        self.step = step

    @hookimpl
    def after_step(self, run: Run) -> None:
        if run.state.step == self.step:
            run.state.request_stop("enough")


class BuildsSchedule(Plugin):
    """Builds a schedule whose length is in its code, and not in its state.

    Args:
        kind: ``LambdaLR``; ``class``: a class of its own that computes rates from the step; ``chained``: one that
            computes each rate from the one before it; ``dict``: as ``class``, for one of several optimizers;
            ``sequence``: two of ``LambdaLR``, one after the other.
    """

    name = "builds-schedule"

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    @hookimpl
    def build_optimizer(self, model: nn.Module) -> Any:
        optimizer = AdamW(model.parameters(), lr=LR)
        return {"all": optimizer} if self.kind == "dict" else optimizer

    @hookimpl
    def build_scheduler(self, run: Run, optimizer: Any) -> Any:
        total = run.total_steps
        assert total is not None

        class Linear(lr_scheduler.LRScheduler):
            def get_lr(self) -> list[float]:
                return [base * (1 - self.last_epoch / total) for base in self.base_lrs]

        class Chained(lr_scheduler.LRScheduler):
            def get_lr(self) -> list[float]:
                decay = 1 if self.last_epoch == 0 else 0.01 ** (1 / total)
                return [group["lr"] * decay for group in self.optimizer.param_groups]

        if self.kind == "LambdaLR":
            return lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / total)
        if self.kind == "sequence":
            first = lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / total)
            second = lr_scheduler.LambdaLR(optimizer, lambda step: 1 - (step + 4) / total)
            return lr_scheduler.SequentialLR(optimizer, [first, second], milestones=[4])
        if self.kind == "dict":
            return {"all": Linear(optimizer["all"])}
        return Chained(optimizer) if self.kind == "chained" else Linear(optimizer)


@pytest.mark.parametrize("kind", ["LambdaLR", "class", "dict", "sequence"])
def test_an_own_schedule_resumes_with_the_rates_of_another_length(kind, caplog):
    execute(make_run("output=cut", save_every=CUT, objects=[BuildsSchedule(kind), StopsAfter(CUT)], epochs=2))
    rates = Rates()
    execute(make_run("output=cut", resume=Path("cut"), objects=[BuildsSchedule(kind), rates], epochs=3))
    assert rates.used == pytest.approx([LR * (1 - step / 24) for step in range(CUT, 24)], rel=1e-12)
    assert not find_problems(caplog, "schedule-continues")


def test_an_own_schedule_that_continues_from_the_old_rate_is_mentioned(caplog):
    execute(make_run("output=cut", save_every=CUT, objects=[BuildsSchedule("chained"), StopsAfter(CUT)], epochs=2))
    same = make_run(
        "output=cut", resume=Path("cut"), objects=[BuildsSchedule("chained"), StopsAfter(CUT + 1)], epochs=2
    )
    execute(same)
    assert not find_problems(caplog, "schedule-continues")
    longer = make_run("output=cut", resume=Path("cut"), objects=[BuildsSchedule("chained")], epochs=3)
    execute(longer)
    assert_problem(caplog, "schedule-continues Chained last_epoch")


CUT = 10
"""Steps of the run that is resumed with another length."""
OF_LENGTH: dict[str, tuple[dict[str, Any], Any]] = {
    "linear": ({"schedule": "linear"}, lambda opt, steps: get_scheduler("linear", opt, 0, steps)),
    "warm-up": ({"warmup": 0.5}, lambda opt, steps: get_scheduler("linear", opt, math.ceil(steps / 2), steps)),
    "cosine": ({"schedule": "cosine"}, lambda opt, steps: get_scheduler("cosine", opt, 0, steps)),
    "polynomial": ({"schedule": "polynomial"}, lambda opt, steps: get_scheduler("polynomial", opt, 0, steps)),
}
"""Options whose rates depend on the steps of the run -> the same schedule of a plain loop, by optimizer and steps."""


@pytest.mark.parametrize("schedule", OF_LENGTH)
@pytest.mark.parametrize(
    ("before", "now", "steps"),
    [({"epochs": 2}, {"epochs": 3}, 24), ({"epochs": 5}, {"epochs": 5, "max_steps": 12}, 12)],
    ids=["longer", "shorter"],
)
def test_a_resumed_run_of_another_length_has_the_rates_of_that_length(schedule, before, now, steps, caplog):
    options, make = OF_LENGTH[schedule]
    plugins = [{"lr-scheduler": options}]
    execute(make_run("output=cut", plugins=plugins, save_every=CUT, objects=[StopsAfter(CUT)], **before))
    rates = Rates()
    resumed = make_run("output=cut", plugins=plugins, resume=Path("cut"), objects=[rates], **now)
    with caplog.at_level("INFO"):
        execute(resumed)
    assert f"the run has {steps} steps, and had {before['epochs'] * 8}" in caplog.text
    optimizer = AdamW([nn.Parameter(torch.zeros(1))], lr=LR)
    plain = make(optimizer, steps)
    expected = []
    for _ in range(steps):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        plain.step()
    assert rates.used == pytest.approx(expected[CUT:], rel=1e-12)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": "cosin"}, "unknown-schedule 'cosin' 'cosine'"),
        (
            {"schedule": "StepLR", "arguments": {"step": 4}},
            "unknown-argument arguments.step step_size StepLR(optimizer",
        ),
        ({"schedule": "StepLR"}, "call-failed plugins.lr-scheduler StepLR step_size"),
        ({"schedule": "ReduceLROnPlateau"}, "unsupported-schedule ReduceLROnPlateau"),
        (
            {"schedule": "StepLR", "warmup": 3, "arguments": {"step_size": 4}},
            "unknown-option StepLR",
        ),
        (
            {"schedule": "StepLR", "min_ratio": 0.1, "arguments": {"step_size": 4}},
            "unknown-option min_ratio",
        ),
        (
            {"schedule": "linear", "arguments": {"power": 2}},
            "unknown-option min_ratio 'power'",
        ),
        ({"schedule": "constant", "min_ratio": 0.1}, "unknown-option min_ratio constant"),
        ({"schedule": "code.py:number"}, "wrong-type code.py:number"),
        (
            {"schedule": "code.py:returns_nothing", "arguments": {"lr": 1}},
            "wrong-result returns_nothing NoneType LRSch",
        ),
        ({"schedule": "code.py:nothing"}, "unknown-name lr-scheduler.schedule code.py 'nothing'"),
    ],
)
def test_errors_name_the_key(options, message):
    with expect_problem(message, RecipeError):
        make_run(plugins=[{"lr-scheduler": options}])


def test_data_of_unknown_length_needs_max_steps(tiny_run):
    from torch.utils.data import IterableDataset

    class Endless(IterableDataset):
        def __iter__(self):
            yield from tiny_data()

    with expect_problem("no-length train.max_steps", UsageError):
        tiny_run([{"lr-scheduler": {"schedule": "OneCycleLR"}}], data=Endless())
    run = tiny_run(
        [{"lr-scheduler": {"schedule": "StepLR", "arguments": {"step_size": 2, "gamma": 0.5}}}],
        data=Endless(),
        max_steps=4,
    )
    assert run.recorder.lrs == [1e-2, 5e-3, 5e-3, 2.5e-3]


def test_a_schedule_of_torch_is_used_without_an_import_of_those_of_transformers(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers.optimization", None)
    recipe = make_recipe({})
    assert find_schedule("ExponentialLR", {"gamma": 0.9}, recipe) is lr_scheduler.ExponentialLR
    with pytest.raises(ImportError):
        find_schedule("cosine_with_min_lr", {}, recipe)
