"""The default plugin ``speed-check``.

Modules:
    plugins/fastloop_plugins/observe/_machine_speed.py
    plugins/fastloop_plugins/observe/speed_check.py
"""

from __future__ import annotations

import csv
import logging
import random
from pathlib import Path

import pytest
import torch
from text_helpers import TINY
from torch import nn
from training_runs import execute

from fastloop.lifecycle import build
from fastloop.plugins.resolve import resolve
from fastloop.recipe import make_recipe
from fastloop.run import Run
from fastloop.speedup_estimates import StepProfile
from fastloop.testing import find_problems
from fastloop_plugins.observe import _machine_speed, speed_check
from fastloop_plugins.observe.speed_check import SpeedCheck, depth, estimates, multiplications


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A recipe of 30 steps whose texts differ much in length."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(speed_check, "LEFT", 0.0)
    draw = random.Random(0)
    with Path("train.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["text", "label"])
        rows.writerows((" ".join(["word"] * draw.choice([3, 4, 5, 120])), ("bad", "good")[i % 2]) for i in range(240))

    def make(*plugins: object, units: int = 16, layers: int = 1, **train: object):
        train = {"epochs": 1, "batch_size": 8, "device": "cpu", "evaluate_every": None, "save_every": None} | train
        sizes = {"dim": units, "hidden_dim": 2 * units, "n_layers": layers, "max_position_embeddings": 128}
        model = {"config": TINY | sizes, "tokenizer": {"kind": "word"}}
        data = {
            "files": {"train": "train.csv"},
            "text": "text",
            "label": "label",
            "max_length": 128,
            "validation_fraction": 0.0,
        }
        return make_recipe({"model": model, "data": data, "train": train, "plugins": list(plugins), "output": "run"})

    return make


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.getMessage().startswith("speed-check")]


def fit(recipe) -> Run:
    run = build(resolve(recipe))
    execute(run)
    return run


@pytest.mark.slow
def test_padding_is_named_once_with_the_plugin_that_removes_it(recipe, caplog):
    fit(recipe(units=192, layers=4, max_steps=28))
    (line,) = lines(caplog)
    assert "% of the computed tokens are padding" in line
    assert "`--with packing`, estimated " in line
    assert "`fastloop profile`" in line


@pytest.mark.slow
def test_nothing_is_named_that_the_recipe_lists_or_turned_off(recipe, caplog):
    fit(recipe({"packing": False}, max_steps=28))
    assert not [line for line in lines(caplog) if "packing" in line]


@pytest.mark.slow
def test_a_run_with_too_few_steps_or_too_little_left_is_not_examined(recipe, caplog, monkeypatch):
    fit(recipe(max_steps=24))
    monkeypatch.setattr(speed_check, "LEFT", 1e6)
    fit(recipe(max_steps=28))
    assert not lines(caplog)


def test_slow_saves_are_named_only_if_enough_of_the_run_is_left(recipe, caplog, monkeypatch):
    monkeypatch.setattr(speed_check, "SAVING", 0.0)
    monkeypatch.setattr(speed_check, "WORTH", 1.0)
    fit(recipe(max_steps=4, save_every=2))
    assert len(find_problems(caplog, "slow-saves --with async-save")) == 1
    caplog.clear()
    monkeypatch.setattr(speed_check, "LEFT", 1e6)
    fit(recipe(max_steps=4, save_every=2))
    assert not find_problems(caplog, "slow-saves")


@pytest.mark.slow
def test_training_is_the_same_with_it(recipe):
    losses = []
    for plugins in ((), ({"speed-check": False},)):
        run = fit(recipe(*plugins, max_steps=28))
        losses.append([parameter.detach().clone() for parameter in run.model.parameters()])
    assert all(torch.equal(first, second) for first, second in zip(*losses, strict=True))


@pytest.mark.slow
def test_its_hook_is_not_called_after_the_window(recipe):
    run = build(resolve(recipe(max_steps=30)))
    execute(run)
    check = next(plugin for plugin in run.plugins if isinstance(plugin, SpeedCheck))
    assert check.steps == speed_check.WARM_UP + speed_check.STEPS + 1
    assert check.rows == 8 * speed_check.STEPS
    assert depth(run.model) == 1


@pytest.mark.parametrize(
    ("figures", "expected"),
    [
        ({"padded": 1000.0, "real": 400.0, "longest": 1000.0, "regions": {"loss": 1.0}}, {"packing": 0.6}),
        (  # attention is called 500 times, for 0.4 ms each
            {"padded": 1000.0, "real": 400.0, "regions": {"loss": 1.0}, "attention_calls": 500.0},
            {"packing": 0.4},
        ),
        ({"page_faults": 300_000.0, "fault_seconds": 1e-6}, {"allocator": 0.3}),
        ({"operations": {"aten::mm": 0.8}, "peaks": {"fp32": 1e11, "bf16": 4e11}}, {"amp": 0.6}),
    ],
)
def test_estimates_are_those_of_plugins_that_could_run(recipe, figures, expected):
    found = {
        name: estimate.seconds
        for name, estimate in estimates(StepProfile(device="cpu", seconds=1.0, **figures), recipe())
    }
    assert {name: found.get(name) for name in expected} == pytest.approx(expected)
    assert "length-bucketing" not in found, "it changes which samples a step trains on"


def test_weights_of_linear_layers_are_multiplied_three_times():
    model = nn.Sequential(nn.Embedding(100, 4), nn.Linear(4, 8, bias=False), nn.Linear(8, 2, bias=False))
    assert multiplications(model) == 6 * (32 + 16)
    model[1].weight.requires_grad_(False)
    assert multiplications(model) == 4 * 32 + 6 * 16


@pytest.mark.slow
def test_the_line_is_a_warning_of_the_fastloop_log(recipe, caplog):
    fit(recipe(units=192, layers=4, max_steps=28))
    assert [record.levelno for record in caplog.records if record.getMessage().startswith("speed-check")] == [
        logging.WARNING
    ]


class FakeEvent:
    """An event of a device on which every call takes 2 ms."""

    calls = 0
    waits: list[FakeEvent] = []

    def __init__(self, device: torch.device, enable_timing: bool) -> None:
        assert (device.type, enable_timing) == ("cuda", True)

    def record(self) -> None:
        self.at = FakeEvent.calls

    def synchronize(self) -> None:
        FakeEvent.waits.append(self)

    def elapsed_time(self, end: FakeEvent) -> float:
        return 2.0 * (end.at - self.at)


def test_a_device_is_timed_by_events_around_several_calls(monkeypatch):
    monkeypatch.setattr(torch, "Event", FakeEvent)

    def call() -> None:
        FakeEvent.calls += 1

    seconds = _machine_speed.seconds_of(call, torch.device("cuda"))
    assert seconds == pytest.approx(0.002)
    assert FakeEvent.calls == _machine_speed.CALLS > 1
    assert len(FakeEvent.waits) == 1, "the host waits once for all calls"


def test_a_dtype_without_memory_has_no_peak(monkeypatch):
    def seconds_of(function, device):
        raise torch.OutOfMemoryError("no memory")

    assert _machine_speed.peaks(torch.device("cpu"), ("fp32",), 64)["fp32"] > 0
    monkeypatch.setattr(_machine_speed, "seconds_of", seconds_of)
    assert _machine_speed.peaks(torch.device("cpu"), ("fp32",), 64) == {}
