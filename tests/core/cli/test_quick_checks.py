"""`fastloop train --fast-dev-run` and `--overfit N`.

Modules:
    core/fastloop/cli/quick_checks.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import forked
import pytest
import yaml
from log_lines import find_lines

from fastloop.testing import assert_problem
from fastloop.testing.tasks import VECTORS

PUBLISHES = """
from pathlib import Path
from fastloop import Plugin, hookimpl

class Mine(Plugin):
    name = "mine"
    publishes = True

    @hookimpl
    def before_fit(self):
        Path("sent").touch()
"""
DESCRIBES = """
import logging
from fastloop import Plugin, hookimpl

class Describes(Plugin):
    name = "describes"

    @hookimpl
    def before_fit(self):
        logging.getLogger("fastloop").info("data: 64 rows")
        logging.getLogger("fastloop").warning("data: 3 rows are empty")
"""
TRAIN = {"batch_size": 8, "lr": 1e-2, "device": "cpu"}


@pytest.fixture(autouse=True)
def _recipe():
    plugins = [*VECTORS["plugins"], "checkpoint-best", "early-stopping", "lr-scheduler"]
    Path("r.yaml").write_text(yaml.safe_dump({**VECTORS, "train": TRAIN, "plugins": plugins, "output": "out"}))


def train(*arguments: str) -> Any:
    return forked.run("-m", "fastloop", "train", "r.yaml", "--without", "progress", *arguments)


def test_a_fast_dev_run_trains_evaluates_saves_resumes_and_leaves_nothing():
    Path("out").mkdir()
    Path("describes.py").write_text(DESCRIBES)
    before = sorted(Path().rglob("*"))
    done = train("--with", "./describes.py", "--fast-dev-run")
    assert done.returncode == 0, done.stdout + done.stderr
    assert find_lines(done.stdout, "out.fast-dev-run/checkpoints/step-00000001 1")
    assert find_lines(done.stdout, "fast-dev-run: 2 1 validation")
    lines = done.stdout.splitlines()
    assert (lines.count("data: 64 rows"), lines.count("warning: data: 3 rows are empty")) == (1, 1)
    assert len(set(lines)) == len(lines)
    assert "stopped at step" not in done.stdout
    assert [path for path in sorted(Path().rglob("*")) if path not in before and "__pycache__" not in path.parts] == []


def test_a_fast_dev_run_of_a_recipe_that_fails_exits_1_and_leaves_nothing():
    done = train("--fast-dev-run", "data.module=missing_module:data")
    assert done.returncode != 0
    assert not Path("out.fast-dev-run").exists()


@pytest.mark.parametrize(
    "check", [("--fast-dev-run",), ("--overfit", "8", "train.max_steps=2")], ids=["fast-dev-run", "overfit"]
)
def test_a_plugin_that_publishes_is_left_out(check):
    Path("mine.py").write_text(PUBLISHES)
    done = train("--with", "./mine.py", *check)
    assert "2 steps" in done.stdout
    assert not Path("sent").exists()


@pytest.mark.slow
def test_overfit_reports_whether_the_loss_falls_to_near_zero():
    done = train("--overfit", "8")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "overfit: the loss fell to near zero" in done.stdout.splitlines()[-1]
    assert "stopped at step" not in done.stdout
    summary = json.loads(Path("out.overfit/summary.json").read_text())
    assert summary["samples"] == 8 * summary["steps"]
    assert summary["validation"] is None
    done = train("--overfit", "8", "train.lr=1e-7", "train.max_steps=5")
    assert done.returncode == 1
    assert "overfit: the loss did not fall to near zero" in done.stdout.splitlines()[-1]
    assert not Path("out").exists()


def test_checks_that_exclude_each_other_are_refused():
    assert_problem(train("--overfit", "8", "--fast-dev-run").stderr, "exclusive-options --overfit --fast-dev-run")
    assert_problem(train("--overfit", "8", "--nproc", "2").stderr, "several-processes --overfit: --nproc")
