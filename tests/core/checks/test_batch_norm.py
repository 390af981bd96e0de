"""Batch norm over a part of a step's samples changes what is trained: a warning names the cause.

Several processes: ``test_ddp_fsdp``.

Modules:
    core/fastloop/checks/batch_norm.py
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from strategy_runs import all_of
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from fastloop import Plugin, RecipeError, Trainer, hookimpl
from fastloop.testing import assert_problem, expect_problem, find_problems, tiny_data
from fastloop_plugins.memory.auto_micro_batch import AutoMicroBatch


def normed() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [str(problem) for problem in find_problems(caplog, "batch-dependent")]


def test_micro_batches_change_batch_norm_and_a_warning_names_the_cause(tiny_run, caplog):
    caplog.set_level(logging.WARNING, "fastloop")
    whole = tiny_run([], model=normed(), max_steps=3)
    assert warnings(caplog) == []
    parts = tiny_run([], model=normed(), max_steps=3, micro_batch_size=2)
    assert_problem(caplog, "batch-dependent train.micro_batch_size")
    assert parts.losses[1:] != pytest.approx(whole.losses[1:], rel=1e-3)


@pytest.mark.parametrize("kind", ["no batch norm", "frozen"])
def test_a_model_that_micro_batches_do_not_change_has_no_warning(tiny_run, caplog, kind):
    caplog.set_level(logging.WARNING, "fastloop")
    model: Any = normed() if kind == "frozen" else nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 3))
    model[1].eval()
    tiny_run([], model=model, max_steps=3, micro_batch_size=2)
    assert warnings(caplog) == []


class Halves(Plugin):
    """Divides each step into two micro-batches."""

    name = "halves"

    @hookimpl
    def configure(self) -> dict[str, Any]:
        return {"split_step": lambda dataset, ids, processes: [ids[: len(ids) // 2], ids[len(ids) // 2 :]]}


class FailsOnce(Plugin):
    """Runs out of memory in its third step."""

    name = "fails-once"
    failed = False

    @hookimpl(tryfirst=True)
    def compute_loss(self, run: Any) -> None:
        if run.state.step == 2 and not self.failed:
            self.failed = True
            raise torch.OutOfMemoryError("out of memory")


def test_the_warning_names_the_plugin_that_splits_steps(tiny_run, caplog):
    caplog.set_level(logging.WARNING, "fastloop")
    tiny_run([Halves()], model=normed(), max_steps=3)
    assert_problem(caplog, "batch-dependent micro-batch 'halves'")


@pytest.mark.slow
def test_micro_batches_that_are_halved_in_training_have_the_warning_too(tiny_run, caplog):
    caplog.set_level(logging.WARNING, "fastloop")
    tiny_run([AutoMicroBatch(snapshot=False), FailsOnce()], model=normed(), max_steps=3)
    assert_problem(caplog, "batch-dependent train.micro_batch_size")


# -- one sample alone --------------------------------------------------------------------------------------------------


def images() -> nn.Module:
    """Batch norm with several values of one sample."""
    torch.manual_seed(0)
    layers = nn.Conv1d(1, 4, 3), nn.BatchNorm1d(4), nn.Flatten(), nn.Linear(24, 3)
    return nn.Sequential(nn.Unflatten(1, (1, 8)), *layers)


@pytest.mark.parametrize(
    ("size", "train"),
    [
        (65, {}),
        (69, {"micro_batch_size": 4}),
        (64, {"micro_batch_size": 1}),
        (65, {"max_steps": 9}),
    ],
)
def test_a_sample_that_batch_norm_would_get_alone_is_refused_before_training(tiny_run, size, train):
    with expect_problem("single-sample", RecipeError):
        tiny_run([], model=normed(), data=tiny_data(size), **train)
    assert not Path("run0").exists()


def test_a_refusal_proposes_to_drop_the_last_step(tiny_run):
    with expect_problem("single-sample train.batch_size 65 1 train.drop_last", RecipeError):
        tiny_run([], model=normed(), data=tiny_data(65))
    dropped = tiny_run([], model=normed(), data=tiny_data(65), drop_last=True, epochs=2)
    assert len(dropped.losses) == 16
    assert (dropped.summary["samples"], dropped.summary["epochs"]) == (128, 2)


@pytest.mark.parametrize(
    ("model", "size", "train"),
    [
        (normed, 66, {}),
        (normed, 65, {"max_steps": 8}),
        (normed, 70, {"micro_batch_size": 4}),
        (images, 65, {}),
        (lambda: nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 3)), 65, {}),
    ],
)
def test_other_runs_are_not_refused(tiny_run, model, size, train):
    assert tiny_run([], model=model(), data=tiny_data(size), epochs=1, **train).summary["samples"] in (size, 64)


class Rows(IterableDataset[Any]):
    """The tiny samples, whose number is not known before."""

    def __iter__(self) -> Iterator[Any]:
        return iter(tiny_data(65))


def skip_most(samples: list[Any]) -> Any:
    """Leaves all samples out but the first."""
    return torch.utils.data.default_collate(samples[:1])


def of_stream(**settings: Any) -> dict[str, Any]:
    return Trainer(
        normed(), Rows(), loss=nn.functional.cross_entropy, batch_size=8, epochs=2, device="cpu", output="run",
        plugins=[{"progress": False}, {"log": False}], **settings,
    ).fit()  # fmt: skip


def test_a_sample_alone_in_a_stream_is_an_error_that_proposes_to_drop_the_last_step():
    with expect_problem("single-sample 9 train.drop_last", RecipeError):
        of_stream()
    summary = of_stream(drop_last=True)
    assert (summary["steps"], summary["samples"], summary["epochs"]) == (16, 128, 2)


def test_a_sample_that_a_collator_leaves_alone_is_explained():
    data = DataLoader(tiny_data(64), batch_size=8, collate_fn=skip_most)
    with expect_problem("single-sample", RecipeError):
        Trainer(
            normed(), data, loss=nn.functional.cross_entropy, epochs=1, device="cpu", output="run",
            plugins=[{"progress": False}, {"log": False}],
        ).fit()  # fmt: skip


def test_the_trial_changes_no_number(tiny_run, monkeypatch):
    tried = tiny_run([], model=images(), data=tiny_data(65), epochs=2)
    monkeypatch.setattr("fastloop.checks.batch_norm._has_lone_sample", lambda run: False)
    untried = tiny_run([], model=images(), data=tiny_data(65), epochs=2)
    assert tried.losses == untried.losses
    assert all(torch.equal(tried.weights[name], untried.weights[name]) for name in untried.weights)


@pytest.mark.slow
def test_a_process_that_repeats_a_sample_is_refused_unless_the_last_step_is_dropped(processes, tmp_path):
    """59 samples leave 3 for the last step: one micro-batch, and a sample that the second process repeats."""
    runs: list[dict[str, Any]] = []
    for strategy in ("ddp", {"fsdp": {"blocks": ["Linear"]}}):
        for drop_last in (False, True):
            name = f"{strategy}, {drop_last}"
            train = {"drop_last": drop_last, "epochs": 1}
            runs.append({"name": name, "plugins": [strategy], "model": "normed", "data": "uneven", "train": train})
    results = processes(2, all_of, runs, folder=tmp_path)[0].result
    for run in runs:
        result = results[run["name"]]
        if run["train"]["drop_last"]:
            assert len(result["losses"]) == 7
        else:
            assert "in micro-batches of 4 on 2 processes, leave 3 for an epoch's last step" in result["error"]
