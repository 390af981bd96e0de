"""Log points: on an accelerator, each is logged one log point later than on the CPU, with the same numbers.

Modules:
    core/fastloop/log_points.py
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from emulated_steps import CHECK, COPY, EXPECTED_WARNINGS, recipe, train_emulated, waiting
from training_runs import execute
from transformers import TrainerCallback

from fastloop import Plugin, PluginCrash, hookimpl
from fastloop.distributed.processes import Processes
from fastloop.lifecycle import build
from fastloop.log_points import LogPoint
from fastloop.plugins import resolve as registry
from fastloop.run import Run
from fastloop.scalars import Scalars
from fastloop.testing import TEXTS, assert_problem, expect_problem

pytestmark = EXPECTED_WARNINGS


class Lines(Plugin):
    """Keeps what loggers receive, and where in the run they do."""

    name = "lines"

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[str, int, dict[str, float]]] = []
        self.events: list[str] = []
        self.losses: list[Any] = []

    @hookimpl
    def after_step(self, run: Run, loss: torch.Tensor) -> None:
        self.events.append(f"step {run.state.step}")
        self.losses.append(loss)

    @hookimpl
    def log_scalars(self, scalars: Mapping[str, float], step: int) -> None:
        kind = next(iter(scalars)).partition("/")[0]
        self.lines.append((kind, step, dict(scalars)))
        self.events.append(f"log {kind} {step}")

    @hookimpl
    def after_epoch(self) -> None:
        self.events.append("epoch")

    @hookimpl
    def before_evaluate(self) -> None:
        self.events.append("evaluate")

    @hookimpl
    def save_state(self) -> None:
        self.events.append("save")


SAME = ("train/loss", "train/grad_norm", "train/lr", "validation/loss")
"""Logged values that do not measure the machine."""
STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def test_lines_of_an_accelerator_are_those_of_the_cpu_and_come_one_log_point_later():
    task = {**TEXTS, "model": {**TEXTS["model"], "config": TEXTS["model"]["config"] | STILL}}
    settings = {"log_every": 2, "evaluate_every": 3, "save_every": 3, "epochs": 2}
    schedule = ({"lr-scheduler": {"warmup": 3}},)
    there, here = Lines(), Lines()
    train_emulated(task, schedule, objects=(there,), **settings)
    written = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    execute(build(registry.resolve(recipe(task, schedule, **settings), objects=[here])))
    assert [line[:2] for line in there.lines] == [line[:2] for line in here.lines], "no line is lost, or changes places"
    for (_, step, scalars), (_, _, expected) in zip(there.lines, here.lines, strict=True):
        assert list(scalars) == list(expected)
        for name in SAME:
            if name in expected:
                assert scalars[name] == pytest.approx(expected[name], rel=1e-4), (step, name)
    first_epoch = there.events[: there.events.index("epoch") + 1]
    assert first_epoch == [
        "step 1", "step 2", "step 3", "log train 2", "evaluate", "log validation 3", "save",
        "step 4", "step 5", "log train 4", "epoch",
    ]  # fmt: skip
    assert here.events[:3] == ["step 1", "step 2", "log train 2"]
    assert there.events.index("log train 6") < there.events.index("log train 8") < there.events.index("log train 10")
    training = [(line["step"], line["epoch"]) for line in written if "split" not in line]
    assert training == [(2, 1), (4, 1), (6, 2), (8, 2), (10, 2)], "the step and the epoch of each line"


class CallbackLines(TrainerCallback):
    """A callback of transformers: the state when ``on_log`` is called with the values of a log point. It stops the run
    at the second one."""

    lines: list[tuple[int, float | None, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if "learning_rate" in logs:
            self.lines.append((state.global_step, state.epoch, logs["learning_rate"]))
            control.should_training_stop = len(self.lines) == 2


def test_a_plugin_that_waits_for_scalars_receives_them_in_their_step():
    plugins = (
        {"transformers-callbacks": {"callbacks": [f"{__name__}:CallbackLines"]}},
        {"lr-scheduler": {"warmup": 4}},
    )
    settings = {"log_every": 2, "evaluate_every": None, "epochs": 2}
    CallbackLines.lines = []
    device, summary = train_emulated(TEXTS, plugins, **settings)
    there, CallbackLines.lines = CallbackLines.lines, []
    execute(build(registry.resolve(recipe(TEXTS, plugins, **settings))))
    assert there == CallbackLines.lines
    assert [step for step, _, _ in there] == [2, 4]
    assert summary["steps"] == 4, "the callback stopped the run in its step"
    assert [step for step, waits in waiting(device).items() if COPY in waits] == [2, 4]


class Fails(Plugin):
    """Fails after a step."""

    name = "fails"

    @hookimpl
    def before_step(self, run: Run) -> None:
        if run.state.step == 3:
            raise RuntimeError("broken")


def test_a_failed_run_logs_the_pending_log_point_first():
    lines = Lines()
    with expect_problem("plugin-crashed broken", PluginCrash):
        train_emulated(TEXTS, objects=(lines, Fails()), log_every=2)
    assert [line[:2] for line in lines.lines] == [("train", 2)]
    assert lines.lines[0][2]["train/loss"] == pytest.approx(sum(map(float, lines.losses[:2])) / 2)


def test_a_problem_with_the_pending_log_point_does_not_hide_the_error_of_a_run(caplog):
    class Refuses(Plugin):
        name = "refuses"

        @hookimpl
        def log_scalars(self) -> None:
            raise RuntimeError("full")

    with expect_problem("plugin-crashed broken", PluginCrash):
        train_emulated(TEXTS, objects=(Refuses(), Fails()), log_every=2)
    assert_problem(caplog, "values-not-logged 2")


@pytest.mark.slow
def test_values_of_plugins_are_read_with_the_losses_of_a_log_point():
    class Logs(Plugin):
        """Logs a value on the device, and changes it in place afterwards."""

        name = "logs"
        received: list[dict[str, float]] = []

        @hookimpl
        def after_step(self, run: Run, loss: torch.Tensor) -> None:
            value = loss * 0 + run.state.step
            run.log("logs/steps", value)
            run.log("logs/last", value, reduce="max")
            run.log("logs/integer", value.long(), reduce="sum")
            value.zero_()

        @hookimpl
        def log_scalars(self, scalars: Mapping[str, float]) -> None:
            self.received.append({name: value for name, value in scalars.items() if name.startswith("logs/")})

    device, _ = train_emulated(TEXTS, objects=(Logs(),), log_every=2, evaluate_every=None, max_grad_norm=1.0)
    assert waiting(device) == {1: [CHECK]}
    assert Logs.received[:2] == [
        {"logs/steps": mean, "logs/last": mean + 0.5, "logs/integer": 2 * mean} for mean in (1.5, 3.5)
    ]


def test_a_process_whose_run_failed_logs_what_needs_no_other_process(caplog):
    scalars = Scalars(enabled=True)
    scalars.values = {"train/loss": [torch.tensor(1.0), torch.tensor(3.0)], "train/lr": [0.5]}
    for name, reduce in [("own/here", "main"), ("own/mean", "mean"), ("own/sum", "sum")]:
        scalars.add(name, 2.0, reduce, torch.device("cpu"))
    point = LogPoint(10, scalars.take(), {"train/memory_bytes": 7.0})
    expected = {"train/loss": 2.0, "train/lr": 0.5, "train/memory_bytes": 7.0, "own/here": 2.0}
    assert list(point.read_alone().items()) == list(expected.items())
    assert "own/mean, own/sum" in caplog.text
    everything = expected | {"own/mean": 2.0, "own/sum": 2.0}
    assert point.read(Processes()) == everything
    assert scalars.values == {}, "they belong to the log point"
