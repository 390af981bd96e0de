"""The plugin ``lr-scheduler`` with schedules of torch, of transformers and of a file, against a plain loop."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from interrupted_runs import Case, check_interrupted
from recipe_runs import LR, assert_same, make_run, torch_loop, trained
from torch.optim import AdamW, lr_scheduler
from training_runs import execute
from transformers import get_scheduler

from fastloop import CheckpointError, RecipeError, UsageError
from fastloop.recipe import make_recipe
from fastloop.testing import expect_problem, tiny_data
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


@pytest.mark.parametrize("schedule", ["CosineAnnealingLR", "OneCycleLR"])
def test_a_schedule_of_torch_does_not_resume_with_another_length(schedule):
    execute(make_run("output=cut", plugins=[{"lr-scheduler": {"schedule": schedule}}]))
    with pytest.raises(CheckpointError, match=rf"scheduler\..* = {STEPS}, .* 40"):
        make_run("output=cut", "train.epochs=5", plugins=[{"lr-scheduler": {"schedule": schedule}}], resume=Path("cut"))


def test_a_schedule_of_a_given_length_resumes_in_a_longer_run():
    options = {"schedule": "CosineAnnealingLR", "arguments": {"T_max": STEPS}}
    execute(make_run("output=cut", plugins=[{"lr-scheduler": options}]))
    longer = make_run("output=cut", "train.epochs=5", plugins=[{"lr-scheduler": options}], resume=Path("cut"))
    assert execute(longer)["steps"] == 40


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
