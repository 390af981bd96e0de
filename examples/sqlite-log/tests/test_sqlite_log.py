"""Tests of sqlite-log: the values of completed, failed and resumed runs, and fastloop's conformance tests."""

import json
import sqlite3
from pathlib import Path

import pytest
from fastloop import Plugin, PluginCrash, hookimpl
from fastloop.testing import VECTORS, Conformance, train

from sqlite_log import SQLiteLog


class FailsAt(Plugin):
    """Raises an error after a step."""

    name = "fails"

    def __init__(self, step: int):
        super().__init__()
        self.step = step

    @hookimpl
    def after_step(self, run):
        if run.state.step == self.step:
            raise RuntimeError("on purpose")


def read(database: Path, sql: str) -> list[tuple]:
    connection = sqlite3.connect(database)
    try:
        return connection.execute(sql).fetchall()
    finally:
        connection.close()


def recipe(folder: Path, **settings) -> dict:
    settings = {"batch_size": 8, "lr": 1e-2, "epochs": 1, "log_every": 1, "device": "cpu", **settings}
    return VECTORS | {"plugins": [*VECTORS["plugins"], "sqlite-log"], "train": settings, "output": str(folder / "run")}


def test_the_table_has_the_values_of_the_log(tmp_path):
    train(recipe(tmp_path))
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    expected = [(line["step"], line["loss"]) for line in lines if "split" not in line]
    assert len(expected) == 5
    assert (
        read(tmp_path / "runs.sqlite", "SELECT step, value FROM scalars WHERE name = 'train/loss' ORDER BY step")
        == expected
    )
    names = {name for (name,) in read(tmp_path / "runs.sqlite", "SELECT DISTINCT name FROM scalars")}
    assert {"train/loss", "train/lr", "validation/loss", "validation/accuracy"} < names


def test_runs_share_a_database(tmp_path):
    for _ in range(2):
        train(recipe(tmp_path, max_steps=2))
    assert read(tmp_path / "runs.sqlite", "SELECT id, folder FROM runs") == [
        (1, str(tmp_path / "run")),
        (2, str(tmp_path / "run")),
    ]
    assert read(
        tmp_path / "runs.sqlite", "SELECT run, COUNT(*) FROM scalars WHERE name = 'train/loss' GROUP BY run"
    ) == [(1, 2), (2, 2)]


def test_a_failed_run_can_be_read_and_resumed_under_its_id(tmp_path):
    plugin = SQLiteLog()
    with pytest.raises(PluginCrash, match="on purpose"):
        train(recipe(tmp_path, save_every=2) | {"plugins": VECTORS["plugins"]}, plugin, FailsAt(4))
    with pytest.raises(sqlite3.ProgrammingError, match="closed"):
        plugin.database.execute("SELECT 1")
    losses = "SELECT run, step FROM scalars WHERE name = 'train/loss' ORDER BY step"
    assert read(tmp_path / "runs.sqlite", losses) == [(1, 1), (1, 2), (1, 3)]
    train(recipe(tmp_path, save_every=2), resume=tmp_path / "run")
    assert read(tmp_path / "runs.sqlite", losses) == [(1, step) for step in range(1, 6)]
    assert read(tmp_path / "runs.sqlite", "SELECT COUNT(*) FROM runs") == [(1,)]


class TestConformance(Conformance):
    plugin = "sqlite-log"
    slow = ("processes[fsdp]", "processes[deepspeed]")
