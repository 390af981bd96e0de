"""When a run evaluates, saves and stops: by steps and epochs, and by requests, for data of known and unknown length.

Modules:
    core/fastloop/schedule.py
    core/fastloop/state.py
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from torch.utils.data import Dataset, IterableDataset

from fastloop import Plugin, Trainer, hookimpl
from fastloop.errors import DataError
from fastloop.recipe import Train
from fastloop.testing import expect_problem, find_problems, tiny_data, tiny_model

SAMPLES = 40
STEPS_PER_EPOCH = 5


class Stream(IterableDataset):
    """The tiny samples, as often as the data can be read."""

    def __init__(self, passes: int | None = None) -> None:
        self.left = passes

    def __iter__(self) -> Iterator[Any]:
        if self.left == 0:
            return
        if self.left is not None:
            self.left -= 1
        data = tiny_data(SAMPLES)
        for index in range(SAMPLES):
            yield data[index]


class Sized(Stream):
    """A stream that states its length."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length = length

    def __len__(self) -> int:
        return self.length


def train(data: Any, **arguments: Any) -> dict[str, Any]:
    usual = {"loss": nn.functional.cross_entropy, "batch_size": 8, "output": "run", "save_every": None}
    return Trainer(tiny_model(), data, **{**usual, **arguments}).fit()


@pytest.mark.parametrize("data", [Stream, lambda: tiny_data(SAMPLES)], ids=["stream", "map-style"])
@pytest.mark.parametrize(
    ("length", "steps"),
    [
        ({"max_steps": 17}, 17),
        ({"max_steps": 3}, 3),
        ({"epochs": 2}, 2 * STEPS_PER_EPOCH),
        ({"epochs": 2, "max_steps": 7}, 7),
        ({"epochs": 2, "max_steps": 17}, 2 * STEPS_PER_EPOCH),
    ],
)
def test_a_run_has_as_many_steps_as_its_recipe_says(caplog, data, length, steps):
    summary = train(data(), **length)
    assert (summary["steps"], summary["status"]) == (steps, "completed")
    is_cut = "epochs" in length and steps < length.get("max_steps", 0)
    assert bool(find_problems(caplog, "too-few-steps train.epochs train.max_steps")) == is_cut, "the epochs end first"


class Events(Plugin):
    """Keeps the step of each evaluation and each save."""

    name = "events"

    def __init__(self) -> None:
        super().__init__()
        self.evaluated: list[int] = []
        self.saved: list[int] = []

    @hookimpl
    def before_evaluate(self, run: Any) -> None:
        self.evaluated.append(run.state.step)

    @hookimpl
    def save_state(self, run: Any) -> None:
        self.saved.append(run.state.step)


@pytest.mark.parametrize(
    ("stream", "length", "every", "evaluated", "saved"),
    [
        (False, {"epochs": 2}, "epoch", [5, 10], [5, 10]),
        (False, {"epochs": 2}, 4, [4, 8, 10], [4, 8, 10]),
        (False, {"epochs": 2}, 5, [5, 10], [5, 10, 10]),
        (False, {"epochs": 2}, None, [10], []),
        (False, {"max_steps": 7}, "epoch", [5, 7], [5, 7]),
        (False, {"max_steps": 7}, 3, [3, 6, 7], [3, 6, 7]),
        (False, {"max_steps": 7}, 7, [7], [7]),
        (False, {"max_steps": 10}, 4, [4, 8, 10], [4, 8, 10]),
        (True, {"epochs": 2}, "epoch", [5, 10], [5, 10]),
        (True, {"epochs": 2}, 4, [4, 8, 10], [4, 8, 10]),
        (True, {"max_steps": 7}, "epoch", [5, 7], [5, 7]),
        (True, {"max_steps": 10}, 4, [4, 8, 10], [4, 8, 10]),
    ],
)
def test_a_run_evaluates_and_saves_in_periods_at_epochs_and_at_its_end(stream, length, every, evaluated, saved):
    events = Events()
    data = Stream() if stream else tiny_data(SAMPLES)
    train(data, eval_loader=tiny_data(8), plugins=[events], evaluate_every=every, save_every=every, **length)
    assert events.evaluated == evaluated, "the final weights are evaluated once"
    assert events.saved == saved, "with every = 5, the end of the run saves again, with the metrics of the epoch"


def test_a_schedule_ends_with_the_steps_of_a_stream():
    trainer = Trainer(
        tiny_model(),
        Stream(),
        loss=nn.functional.cross_entropy,
        batch_size=8,
        max_steps=20,
        output="run",
        plugins=["lr-scheduler"],
    )
    trainer.fit()
    assert trainer.run.optimizer.param_groups[0]["lr"] == 0.0


@pytest.mark.parametrize("length", [{"max_steps": 17}, {"epochs": 2}], ids=str)
def test_data_that_can_be_read_once_is_an_error_in_the_second_epoch(length):
    with expect_problem("empty-split train 1", DataError):
        train(Stream(passes=1), **length)
    summary = json.loads(Path("run/summary.json").read_text())
    assert (summary["steps"], summary["status"]) == (STEPS_PER_EPOCH, "failed")


def test_without_both_a_recipe_has_three_epochs():
    assert Train().epochs == 3
    assert Train(max_steps=100).epochs is None


@pytest.mark.parametrize("schedule", ["linear", "cosine", "constant", "constant_with_warmup"])
def test_a_warm_up_longer_than_the_run_is_a_warning(caplog, schedule):
    caplog.set_level(logging.WARNING, logger="fastloop")
    train(tiny_data(SAMPLES), max_steps=4, plugins=[{"lr-scheduler": {"schedule": schedule, "warmup": 4}}])
    assert "plugins.lr-scheduler.warmup" in caplog.text
    caplog.clear()
    train(tiny_data(SAMPLES), max_steps=4, plugins=[{"lr-scheduler": {"schedule": schedule, "warmup": 3}}])
    assert caplog.text == ""


def test_a_stream_that_states_its_length_has_a_schedule(caplog):
    caplog.set_level(logging.WARNING, logger="fastloop")
    trainer = Trainer(
        tiny_model(),
        Sized(SAMPLES),
        loss=nn.functional.cross_entropy,
        batch_size=8,
        epochs=2,
        output="run",
        plugins=["lr-scheduler"],
    )
    trainer.fit()
    assert trainer.run.total_steps == 2 * STEPS_PER_EPOCH
    assert trainer.run.optimizer.param_groups[0]["lr"] == 0.0
    assert caplog.text == ""


@pytest.mark.parametrize("length", [SAMPLES - 8, SAMPLES + 8])
def test_a_stream_that_states_a_wrong_length_is_read_to_its_end(caplog, length):
    summary = train(Sized(length), epochs=2)
    assert (summary["steps"], summary["samples"]) == (2 * STEPS_PER_EPOCH, 2 * SAMPLES)
    assert caplog.text.count(f"length of {length}") == 1


def test_a_dataset_that_grows_between_epochs_is_one_warning(caplog):
    class Grows(Plugin):
        name = "grows"

        @hookimpl
        def before_epoch(self, run: Any) -> None:
            data.size = SAMPLES + 8 * run.state.epoch

    class Growing(Dataset[Any]):
        size = SAMPLES

        def __len__(self) -> int:
            return self.size

        def __getitem__(self, index: int) -> Any:
            return tiny_data(SAMPLES)[index % SAMPLES]

    data = Growing()
    summary = train(data, epochs=3, plugins=[Grows()])
    assert summary["samples"] == 3 * SAMPLES
    assert caplog.text.count(f"had {SAMPLES} when the run was built") == 1


def test_plugins_steer_by_requests(tiny_run):
    class Steers(Plugin):
        name = "steers"

        @hookimpl
        def before_fit(self, run: Any) -> None:
            run.state.request_evaluate()

        @hookimpl
        def after_step(self, run: Any) -> None:
            if run.state.step == 2:
                run.state.request_evaluate()
                run.state.request_save()
            if run.state.step == 4:
                run.state.request_stop("enough")
                run.state.request_stop("more than enough")

    events = Events()
    result = tiny_run([Steers(), events], evaluate_every=None, save_every=None)
    assert result.summary["status"] == "stopped"
    assert result.summary["reason"] == "enough"
    assert result.summary["steps"] == 4
    assert events.evaluated == [0, 2, 4], "before training and at step 2 as requested, and at the end"
    assert events.saved == [2], "save_every: null saves when asked only"
