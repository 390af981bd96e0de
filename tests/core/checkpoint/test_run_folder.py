"""The run folder: an earlier run is moved aside, and nothing else ever is.

Modules:
    core/fastloop/checkpoint/run_folder.py
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fastloop import RecipeError
from fastloop.testing import expect_problem


def test_an_earlier_run_is_moved_aside_whole(tiny_run):
    for seed in (1, 2, 3):
        tiny_run(epochs=1, seed=seed, output="runs/x")
    seeds = {path.name: (path / "recipe.yaml").read_text() for path in Path("runs").iterdir()}
    assert {name: next(seed for seed in "123" if f"seed: {seed}\n" in text) for name, text in seeds.items()} == {
        "x.1": "1",
        "x.2": "2",
        "x": "3",
    }
    assert all(
        json.loads((Path("runs") / name / "summary.json").read_text())["status"] == "completed" for name in seeds
    )


@pytest.mark.parametrize("output", ["precious", "."])
def test_a_folder_that_holds_other_files_is_refused_and_left_alone(tiny_run, output):
    Path("precious").mkdir()
    Path("precious/thesis.tex").write_text("years of work")
    before = sorted(Path().rglob("*"))
    with expect_problem("folder-not-empty", RecipeError):
        tiny_run(epochs=1, output=output)
    assert sorted(Path().rglob("*")) == before


def test_an_empty_folder_is_taken(tiny_run):
    Path("empty").mkdir()
    tiny_run(epochs=1, output="empty")
    assert Path("empty/summary.json").is_file()
    assert not Path("empty.1").exists()


def test_an_output_below_a_file_is_refused(tiny_run):
    Path("file").write_text("")
    with expect_problem("folder-not-writable file/run", RecipeError):
        tiny_run(epochs=1, output="file/run")
