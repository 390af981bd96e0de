"""The packages under examples/ and one of ``fastloop new plugin``: built, installed, listed, trained with and tested.

They are idle when they are not named."""

from __future__ import annotations

import contextlib
import json
import shutil
import sqlite3
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from long_form import LONG
from package_helpers import ROOT, CleanVenv, ForkingPython, build_wheels

pytestmark = pytest.mark.slow

NAMES = (
    "curriculum",
    "digits-gan",
    "drawn-shapes",
    "energy-use",
    "layer-freezing",
    "local-sgd",
    "mixup",
    "sentence-similarity",
    "sqlite-log",
    "step-variants",
    "vllm-server",
)
PLUGINS = {
    "curriculum": ("curriculum",),
    "digits-gan": ("gan",),
    "drawn-shapes": ("drawn-shapes",),
    "energy-use": ("energy-use",),
    "layer-freezing": ("layer-freezing",),
    "local-sgd": ("local-sgd",),
    "mixup": ("mixup",),
    "sentence-similarity": ("sentence-similarity",),
    "sqlite-log": ("sqlite-log",),
    "step-variants": ("muon", "sam"),
    "vllm-server": ("vllm-server",),
}
PACKAGES = ("fastloop-grpo",)
"""Packages of the project that the examples need."""


NEW = {"night-watch": "plugin", "ticket-pairs": "task"}
"""Package that ``fastloop new`` creates -> its kind."""
CONFORMING = ("curriculum", "local-sgd", *NEW)
"""Packages whose conformance suites run in the short form, too: two plugins, a strategy and a task. A suite takes four
seconds of a processor."""


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory, fastloop_wheel: Path) -> tuple[CleanVenv, Path]:
    """A venv with all packages, and a folder with a copy of their projects; the wheels are beside it."""
    folder = tmp_path_factory.mktemp("examples")
    projects = shutil.copytree(
        ROOT / "examples", folder / "projects", ignore=shutil.ignore_patterns("__pycache__", "runs", ".*", "*.ipynb")
    )
    assert {path.name for path in projects.iterdir() if path.is_dir()} == set(NAMES)
    venv = CleanVenv(folder / "venv", fastloop_wheel)
    for name, kind in NEW.items():
        done = venv.run("-m", "fastloop", "new", kind, name, "--author", "Ada Lovelace", cwd=projects)
        assert done.returncode == 0, done.stderr
    packages = [shutil.copytree(ROOT / "packages" / name, folder / name) for name in PACKAGES]
    venv.install(*build_wheels(folder, *packages, *(projects / name for name in (*NAMES, *NEW))))
    return venv, projects


@pytest.fixture(scope="module")
def forking(shelf: tuple[CleanVenv, Path]) -> Iterator[ForkingPython]:
    """The venv, for trainings that need no new Python."""
    with ForkingPython(shelf[0].python, shelf[0].environment()) as venv:
        yield venv


def train(venv: CleanVenv | ForkingPython, folder: Path, recipe: str, *overrides: str) -> dict:
    """Train a recipe in a folder with the command line; returns the summary."""
    python = ("-m", "fastloop") if isinstance(venv, CleanVenv) else ()
    done = venv.run(*python, "train", recipe, "output=run", "train.device=cpu", *overrides, cwd=folder)
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "run" / "summary.json").read_text())


def test_they_are_listed_with_distribution_and_version_and_not_imported(shelf, tmp_path):
    venv, _ = shelf
    done = venv.run("-X", "importtime", "-m", "fastloop", "plugins", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = {row["name"]: row for row in json.loads(done.stdout)}
    plugins = [plugin for name in NAMES for plugin in PLUGINS[name]]
    found = {name: [rows[name][key] for key in ("distribution", "version", "slot", "numerics")] for name in plugins}
    assert found == {
        "curriculum": ["curriculum", "0.1.0", None, "changes-training"],
        "drawn-shapes": ["drawn-shapes", "0.1.0", "task", "bitwise"],
        "energy-use": ["energy-use", "0.1.0", None, "bitwise"],
        "layer-freezing": ["layer-freezing", "0.1.0", None, "changes-training"],
        "local-sgd": ["local-sgd", "0.1.0", "strategy", "changes-training"],
        "mixup": ["mixup", "0.1.0", None, "changes-training"],
        "sentence-similarity": ["sentence-similarity", "0.1.0", "task", "bitwise"],
        "sqlite-log": ["sqlite-log", "0.1.0", None, "bitwise"],
        "gan": ["digits-gan", "0.1.0", None, "changes-training"],
        "muon": ["step-variants", "0.1.0", None, "changes-training"],
        "sam": ["step-variants", "0.1.0", None, "changes-training"],
        "vllm-server": ["vllm-server", "0.1.0", None, "changes-training"],
    }
    assert all(rows[name]["summary"] for name in plugins)
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}
    assert "fastloop" in imported
    assert not imported & {"torch", "fastloop_plugins", *(name.replace("-", "_") for name in NAMES)}


@pytest.mark.parametrize("name", NEW)
def test_a_new_package_is_linted_built_and_trained_with(shelf, forking, name):
    project, module = shelf[1] / name, name.replace("-", "_")
    for command in (["check"], ["format", "--check", "--diff"]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *command, "--no-cache", "."],
            cwd=project,
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, done.stdout
    with zipfile.ZipFile(project.parents[1] / f"{module}-0.1.0-py3-none-any.whl") as files:
        assert {name for name in files.namelist() if "dist-info" not in name} == {f"{module}/__init__.py"}
        assert f"{module}-0.1.0.dist-info/licenses/LICENSE" in files.namelist()
    summary = train(forking, project, "recipe.yaml")
    if NEW[name] == "plugin":
        assert summary["steps"] == 40
        assert summary[name]["step"] in range(5, 41, 5)
    else:  # four rows in a batch have a loss of log(4) = 1.39 at first
        assert summary["validation"]["loss"] < 3
        done = forking.run("predict", "run", "pairs.csv", "--out", "vectors.jsonl", cwd=project)
        assert done.returncode == 0, done.stderr
        assert len((project / "vectors.jsonl").read_text().splitlines()) == 16


def test_the_speedup_leaves_fewer_weights_to_train(shelf, forking):
    _, projects = shelf
    summary = train(forking, projects / "layer-freezing", "recipe.yaml", "train.epochs=4")
    assert "layer-freezing" in summary["plugins"]
    found = summary["layer-freezing"]
    assert (found["layers"], found["frozen"]) == (6, 3)
    first, *_, last = found["parameters_with_gradients"]
    assert last < 0.7 * first


def test_example_observer_logs_duration(shelf, forking):
    _, projects = shelf
    summary = train(forking, projects / "energy-use", "recipe.yaml")
    assert "energy-use" in summary["plugins"]
    assert 0 < summary["energy-use"]["cpu_seconds"] < 300
    assert "energy-use: " in (projects / "energy-use/run/log.txt").read_text()


def test_the_task_learns(shelf, forking):
    _, projects = shelf
    summary = train(forking, projects / "drawn-shapes", "recipe.yaml")
    assert "drawn-shapes" in summary["plugins"]
    assert summary["test"]["accuracy"] > 0.9


def test_a_gan_trains_two_networks(shelf, forking):
    _, projects = shelf
    summary = train(forking, projects / "digits-gan", "recipe.yaml", "train.epochs=2")
    assert "gan" in summary["plugins"]
    assert summary["steps"] == 2 * 24


def test_two_passes_and_two_optimizers_learn(shelf, forking):
    _, projects = shelf
    summary = train(forking, projects / "step-variants", "recipe.yaml")
    assert {"sam", "muon"} <= {*summary["plugins"]}
    assert summary["test"]["accuracy"] > 0.85


def test_a_collator_mixes_training_samples_only(shelf, forking):
    _, projects = shelf
    summary = train(forking, projects / "mixup", "recipe.yaml", "train.epochs=10")
    assert "mixup" in summary["plugins"]
    assert summary["test"]["accuracy"] > 0.7


def test_a_logger_writes_a_database(shelf, forking):
    _, projects = shelf
    summary = train(forking, projects / "sqlite-log", "recipe.yaml", "train.log_every=1")
    with contextlib.closing(sqlite3.connect(projects / "sqlite-log/runs.sqlite")) as database:
        ((count,),) = database.execute("SELECT COUNT(*) FROM scalars WHERE name = 'train/loss'")
    assert count == summary["steps"]


def test_a_strategy_joins_two_processes(shelf):
    venv, projects = shelf
    summary = train(venv, projects / "local-sgd", "recipe.yaml", "--nproc", "2")
    assert (summary["world_size"], "local-sgd" in summary["plugins"]) == (2, True)
    assert summary["test"]["accuracy"] > 0.85


def test_plugin_files_of_the_newer_examples_are_short(shelf):
    files = [
        file
        for name in ("curriculum", "digits-gan", "local-sgd", "mixup", "sqlite-log", "step-variants")
        for file in (shelf[1] / name).glob("src/*/*.py")
    ]
    assert len(files) >= 7
    assert {file.name: lines for file in files if (lines := len(file.read_text().splitlines())) > 70} == {}


def test_a_run_that_does_not_name_them_is_the_same_to_the_bit_as_without_them(forking, clean_venv, tmp_path):
    runs = []
    for name, venv in (("with", forking), ("without", clean_venv)):
        folder = tmp_path / name
        folder.mkdir()
        summary = train(
            venv, folder, "quickstart", "data.arguments={train: 320, validation: 40, test: 40}", "train.epochs=1"
        )
        points = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
        losses = [point["loss"] for point in points if "loss" in point]
        assert losses
        weights = (folder / "run/model/model.safetensors").read_bytes()
        runs.append((losses, weights, summary["plugins"], summary["validation"], summary["test"]))
    assert runs[0] == runs[1]


def test_their_own_tests_pass(shelf):
    venv, projects = shelf
    suites = [f"{name}/tests" for name in (*NAMES, *NEW)]
    files = [f"test_{name.replace('-', '_')}" for name in CONFORMING]
    selected = [] if LONG else ["-k", " or ".join(["not Conformance", *files])]
    options = ["-q", "-W", "error", "-p", "no:cacheprovider", *selected]
    done = venv.run("-m", "pytest", *options, *suites, cwd=projects)
    assert done.returncode == 0, done.stdout
