"""A run resumes with the settings and the data of its checkpoint, or is refused before weights are loaded.

Modules:
    core/fastloop/checks/resumed_run.py
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fastloop import CheckpointError, checkpoint
from fastloop.checkpoint import resume
from fastloop.testing import expect_problem, tiny_data


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The checkpoints whose weights were loaded."""
    paths: list[Path] = []
    load = resume.load

    def record(run, point):
        paths.append(point.checkpoint)
        load(run, point)

    monkeypatch.setattr(resume, "load", record)
    return paths


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": 7}, "resume-differs train.seed 123 7"),
        ({"lr": 0.5}, "resume-differs train.lr 0.01 0.5"),
        ({"batch_size": 4}, "resume-differs train.batch_size 8"),
        ({"drop_last": True}, "resume-differs train.drop_last False True"),
        ({"optimizer": "SGD"}, "resume-differs train.optimizer 'AdamW'"),
    ],
)
def test_other_settings_are_refused_before_weights_load_and_nothing_is_changed(tiny_run, loaded, changes, message):
    tiny_run([], epochs=1, seed=123, output="run")
    before = {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file()}
    with expect_problem(message, CheckpointError):
        tiny_run([], **{"epochs": 2, "seed": 123, "output": "run", "resume": True, **changes})
    assert {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file()} == before
    assert not loaded
    tiny_run([], epochs=2, seed=123, output="run", resume=True)
    assert len(loaded) == 1


def test_other_data_is_refused_before_weights_load(tiny_run, loaded):
    data = [tiny_data()[index] for index in range(24)]
    tiny_run([], data=data, max_steps=2, output="run")
    with expect_problem("data-changed 24 23", CheckpointError):
        tiny_run([], data=data[1:], max_steps=4, output="run", resume=True)
    assert not loaded


def test_a_checkpoint_without_fingerprints_resumes(tiny_run, caplog):
    """Early versions wrote none."""
    tiny_run([], max_steps=2, output="run")
    path, _ = checkpoint.find_newest(Path("run"))
    model, state = checkpoint.read(path)
    del state["data"]
    checkpoint.write(path, model, state)
    assert "data" not in json.loads((path / "state.json").read_text())
    assert tiny_run([], max_steps=4, output="run", resume=True).summary["steps"] == 4


@pytest.mark.parametrize(("before", "after", "message"), [(1, 0, "with a scheduler"), (0, 1, "without a scheduler")])
def test_an_added_or_removed_scheduler_is_refused_before_weights_load(tiny_run, loaded, before, after, message):
    tiny_run(["lr-scheduler"] * before, max_steps=2, output="run")
    with expect_problem(f"resume-differs {message}", CheckpointError):
        tiny_run(["lr-scheduler"] * after, max_steps=4, output="run", resume=True)
    assert not loaded
