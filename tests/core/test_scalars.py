"""``run.log`` and ``log_scalars``: what plugins log, how it is reduced, and what loggers receive.

Modules:
    core/fastloop/scalars.py
    core/fastloop/splits.py
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from fastloop import Plugin, PluginError, hookimpl
from fastloop.testing import VECTORS, expect_problem, start, tiny_data, train

KEYS = ("loss", "grad_norm", "lr", "samples_per_second", "tokens_per_second", "memory_bytes")
"""Names of the core in ``metrics.jsonl``."""
CORE = {f"train/{key}" for key in KEYS}


class Logger(Plugin):
    """A third-party logger."""

    name = "logger"

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[int, dict[str, float]]] = []

    @hookimpl
    def log_scalars(self, scalars: Mapping[str, float], step: int) -> None:
        self.lines.append((step, dict(scalars)))


class Logs(Plugin):
    """Calls ``log(run)`` in one hook."""

    name = "logs"

    def __init__(self, log: Callable[[Any], None], hook: str = "after_step") -> None:
        super().__init__()
        self.log, self.hook = log, hook

    @hookimpl
    def before_fit(self, run: Any) -> None:
        self.call("before_fit", run)

    @hookimpl
    def after_step(self, run: Any) -> None:
        self.call("after_step", run)

    @hookimpl
    def compute_loss(self, run: Any) -> None:
        self.call("compute_loss", run)

    @hookimpl
    def after_fit(self, run: Any) -> None:
        self.call("after_fit", run)

    def call(self, hook: str, run: Any) -> None:
        if hook == self.hook:
            self.log(run)


def logged(run: Any) -> None:
    step = run.state.step
    run.log("own/mean", step)
    run.log("own/sum", torch.tensor(step), reduce="sum")
    run.log("own/max", -float(step), reduce="max")
    run.log("own/main", torch.tensor(step, dtype=torch.float64), reduce="main")


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_logger_receives_the_values_of_the_core_of_plugins_and_of_evaluations(tiny_run):
    logger = Logger()
    result = tiny_run([Logs(logged), logger], log_every=4, epochs=1, test_loader=tiny_data(8))
    assert [step for step, _ in logger.lines] == [4, 8, 9, 9, 9]
    for step, scalars in logger.lines[:2]:
        assert scalars.keys() == CORE | {"own/mean", "own/sum", "own/max", "own/main"}
        assert next(iter(scalars)) == "train/loss"
        assert scalars["train/loss"] == pytest.approx(sum(result.losses[step - 4 : step]) / 4, rel=1e-12)
        assert scalars["own/mean"] == scalars["own/main"] == step - 1.5
        assert scalars["own/sum"] == 4 * step - 6
        assert scalars["own/max"] == 3 - step
    assert logger.lines[2][1] == {"validation/loss": result.summary["validation"]["loss"]}
    assert logger.lines[3][1] == {"test/loss": result.summary["test"]["loss"]}
    assert logger.lines[4][1] == {"own/mean": 9.0, "own/sum": 9.0, "own/max": -9.0, "own/main": 9.0}, (
        "the rest, at the end"
    )


def test_metrics_jsonl_has_the_values_of_plugins_under_their_names(tiny_run):
    result = tiny_run([Logs(logged)], log_every=9, epochs=1)
    point, evaluation = lines(result.trainer.run.folder)
    assert list(point) == ["step", "epoch", *KEYS, "own/mean", "own/sum", "own/max", "own/main"]
    assert evaluation == {"step": 9, "epoch": 1, "split": "validation"} | result.summary["validation"]


def test_a_value_that_is_no_number_stays_one_for_loggers_and_is_null_in_the_json(tiny_run):
    logger = Logger()

    def log(run: Any) -> None:
        run.log("own/nan", math.nan if run.state.step == 2 else 1.0, reduce="max")

    folder = tiny_run([Logs(log), logger], log_every=3, epochs=1).trainer.run.folder
    assert math.isnan(logger.lines[0][1]["own/nan"])
    assert [line["own/nan"] for line in lines(folder) if "split" not in line] == [None, 1.0, 1.0]


def test_values_of_evaluations_and_of_trying_the_metrics_are_ignored(tiny_run):
    logger = Logger()

    def log(run: Any) -> None:
        run.log("own/calls", 1, reduce="sum")

    tiny_run([Logs(log, "compute_loss"), logger], log_every=9, evaluate_every=2, epochs=1, micro_batch_size=4)
    assert [scalars["own/calls"] for _, scalars in logger.lines if "own/calls" in scalars] == [17]


@pytest.mark.parametrize("hook", ["before_fit", "after_fit"])
def test_values_of_other_hooks_arrive_with_the_next_log_point_or_at_the_end(tiny_run, hook):
    logger = Logger()
    tiny_run([Logs(lambda run: run.log("own/once", 3), hook), logger], log_every=9, epochs=1)
    assert [step for step, scalars in logger.lines if scalars.get("own/once") == 3] == [9]


@pytest.mark.parametrize(
    ("log", "message"),
    [
        (
            lambda run: (run.log("own", 1), run.log("own", 1, reduce="sum")),
            "reduction-differs run.log('own' reduce='sum' 'mean'",
        ),
        (lambda run: run.log("own", 1, reduce="men"), "unknown-choice run.log('own' 'men' 'mean'"),
        (
            lambda run: run.log("own", torch.ones(2)),
            "wrong-type 2 torch.float32",
        ),
        (lambda run: run.log("own", torch.tensor(1j)), "wrong-type torch.complex64"),
        (lambda run: run.log("own", "1"), "wrong-type '1'"),
        (lambda run: run.log("train/loss", 1), "reserved-name 'train/loss'"),
        (lambda run: run.log("step", 1), "reserved-name 'step'"),
        (lambda run: run.log("validation/own", 1), "reserved-name validation/"),
    ],
)
@pytest.mark.parametrize("plugins", [[], [{"log": False}]], ids=["received", "not received"])
def test_a_wrong_call_is_refused(tiny_run, plugins, log, message):
    with expect_problem(message, PluginError):
        tiny_run([Logs(log), *plugins], epochs=1)


def test_a_resumed_run_continues_the_values_of_the_interval(tiny_run):
    whole, first, rest = Logger(), Logger(), Logger()
    tiny_run([Logs(logged), whole], log_every=6, epochs=2, output="whole")
    tiny_run([Logs(logged), first], log_every=6, epochs=2, max_steps=8, save_every=4, output="run")
    tiny_run([Logs(logged), rest], log_every=6, epochs=2, resume=True, output="run")
    points = [[point for point in logger.lines if "train/loss" in point[1]] for logger in (whole, first, rest)]
    assert [[step for step, _ in found] for found in points] == [[6, 12, 18], [6], [12, 18]]
    for (_, expected), (_, found) in zip(points[0][1:], points[2], strict=True):
        for name in ("train/loss", "train/grad_norm", "own/mean", "own/sum", "own/max", "own/main"):
            assert found[name] == expected[name], name


# -- several processes -------------------------------------------------------------------------------------------------


class Ranks(Plugin):
    """Logs values that depend on the process."""

    name = "ranks"
    numerics = "bitwise"

    def __init__(self, only: int | None = None) -> None:
        super().__init__()
        self.only = only

    @hookimpl
    def after_step(self, run: Any) -> None:
        for reduce in ("mean", "sum", "max", "main"):
            run.log(f"ranks/{reduce}", 10 * run.rank + run.state.step, reduce=reduce)
        if run.is_main:
            run.log("ranks/here", 1, reduce="main")
        if self.only == run.rank:
            run.log("ranks/only", 1)


def on_processes(max_steps: int, resume: str | None, only: int | None = None) -> list[tuple[int, dict[str, float]]]:
    settings = {"epochs": 2, "batch_size": 8, "log_every": 4, "save_every": 2, "max_steps": max_steps, "device": "cpu"}
    plugins = [{"module": {"loss": "cross_entropy"}}, "ddp", {"progress": False}]
    logger = Logger()
    train(
        {**VECTORS, "train": settings, "plugins": plugins, "output": "run"},
        Ranks(only),
        logger,
        resume=resume and Path(resume),
    )
    return logger.lines


@pytest.mark.slow
def test_values_are_reduced_over_processes_and_steps_also_after_a_resume(processes, tmp_path):
    main, other = (process.result for process in processes(2, on_processes, 4, None, folder=tmp_path))
    assert other == [], "log_scalars fires on the main process"
    expected = {"ranks/mean": 7.5, "ranks/sum": 60, "ranks/max": 14, "ranks/main": 2.5, "ranks/here": 1}
    assert {name: value for name, value in main[0][1].items() if name.startswith("ranks/")} == expected
    main, _ = (process.result for process in processes(2, on_processes, 6, "run", folder=tmp_path))
    assert [step for step, scalars in main if "ranks/mean" in scalars] == [6], "the rest, at the end"
    (last,) = (scalars for _, scalars in main if "ranks/mean" in scalars)
    assert last == {"ranks/mean": 10.5, "ranks/sum": 42, "ranks/max": 16, "ranks/main": 5.5, "ranks/here": 1}
    main, _ = (process.result for process in processes(2, on_processes, 8, "run", folder=tmp_path))
    (point,) = (scalars for _, scalars in main if "train/loss" in scalars)
    assert {name: point[name] for name in expected} == {
        "ranks/mean": 11.5,
        "ranks/sum": 92,
        "ranks/max": 18,
        "ranks/main": 6.5,
        "ranks/here": 1,
    }


@pytest.mark.slow
def test_names_that_differ_between_processes_are_an_error_on_all(tmp_path):
    ended = start(2, on_processes, 4, None, 1, folder=tmp_path)
    for process in ended:
        assert process.code == 1
        assert re.search(r"PluginError: run\.log\('ranks/only'\): .* 0 of 2 ", process.output)
