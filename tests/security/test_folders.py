"""Run folders from others: through their links, devices and guessed names, fastloop writes and reads no other files."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from inference_runs import write_recipe

from fastloop import Plugin, UsageError, hookimpl
from fastloop.cli import main
from fastloop.runtime import files
from fastloop.testing import assert_problem, expect_problem

SECRET = "the victim's own text\n"
RESUME = ("train", "recipe.yaml", "--resume")
EVALUATE, EXPORT, REPORT = ("evaluate", "run"), ("export", "run", "--to", "safetensors"), ("report", "run")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, monkeypatch_module: pytest.MonkeyPatch) -> Path:
    """A folder with a recipe, its files, and a run that was stopped after a checkpoint and then completed."""
    folder = tmp_path_factory.mktemp("trained")
    write_recipe(
        folder, train={"max_steps": 4, "save_every": 2, "batch_size": 8, "lr": 1e-2, "device": "cpu"}, output="run"
    )
    monkeypatch_module.chdir(folder)
    monkeypatch_module.setattr("sys.argv", ["fastloop", "train", "recipe.yaml", "--without", "progress"])
    with pytest.raises(SystemExit) as done:
        main()
    assert not done.value.code
    return folder


@pytest.fixture(scope="module")
def monkeypatch_module():
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.fixture
def victim(trained: Path, tmp_path: Path) -> Path:
    """The user's folder beside the stranger's run. The current folder has a copy of the run."""
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    folder = tmp_path / "victim"
    folder.mkdir()
    (folder / "text").write_text(SECRET)
    return folder


def state(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): path.read_text() if path.is_file() else "folder" for path in folder.rglob("*")
    }


def link(place: str, target: str = "text") -> Callable[[Path], None]:
    """Plant a link to a file or folder of the victim in the place of a file or folder of the run."""

    def plant(victim: Path) -> None:
        path = Path("run", place)
        if path.is_dir():
            shutil.rmtree(path)
        path.unlink(missing_ok=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(os.path.relpath(victim / target, path.parent.resolve()))

    return plant


def link_to_link(victim: Path) -> None:
    link("other.txt")(victim)
    Path("run/log.txt").unlink()
    Path("run/log.txt").symlink_to("other.txt")


def special(place: str, make: Callable[[Path], Any]) -> Callable[[Path], None]:
    """Plant a pipe or device in the place of a file of the run."""

    def plant(victim: Path) -> None:
        Path("run", place).unlink(missing_ok=True)
        make(Path("run", place))

    return plant


# attack -> (what the stranger plants, the place that the error names, the commands)
ATTACKS: dict[str, tuple[Callable[[Path], None], str, tuple[tuple[str, ...], ...]]] = {
    "the lock is a link": (link(".lock"), ".lock", (RESUME,)),
    "the lock is a link to a missing file": (link(".lock", "new"), ".lock", (RESUME,)),
    "the log is a link": (link("log.txt"), "log.txt", (RESUME, EVALUATE, EXPORT, REPORT)),
    "the log is a link to a missing file": (link("log.txt", "new"), "log.txt", (RESUME,)),
    "the log is a link to a link": (link_to_link, "", (RESUME,)),
    "the metrics are a link": (link("metrics.jsonl"), "metrics.jsonl", (RESUME,)),
    "the summary is a link": (link("summary.json"), "summary.json", (RESUME,)),
    "the recipe is a link": (link("recipe.yaml"), "recipe.yaml", (RESUME,)),
    "an unfinished summary is a link": (link(".summary.json.0.partial"), ".summary.json.0.partial", (RESUME,)),
    "an unfinished recipe is a link": (link(".recipe.yaml.0.partial"), ".recipe.yaml.0.partial", (RESUME,)),
    "the exported model is a link": (link("model", "."), "model", (RESUME, EXPORT)),
    "a file of the exported model is a link": (
        link("model/config.json"), "model/config.json", (RESUME, EVALUATE, EXPORT)),
    "the checkpoints are a link": (link("checkpoints", "."), "checkpoints", (RESUME,)),
    "an unfinished checkpoint is a link": (
        link("checkpoints/.step-00000006.partial", "."), ".step-00000006.partial", (RESUME,)),
    "the evaluations are a link": (link("evaluation", "."), "evaluation", (EVALUATE, REPORT)),
    "an evaluation is a link": (link("evaluation/test.json", "new"), "evaluation/test.json", (EVALUATE,)),
    "the export is a link": (link("model-safetensors", "."), "model-safetensors", (EXPORT,)),
    "an unfinished export is a link": (
        link(".model-safetensors.partial", "."), ".model-safetensors.partial", (EXPORT,)),
    "a plugin's file is a link": (link("bad_batches.jsonl"), "bad_batches.jsonl", (RESUME,)),
    "a plugin's folder is a link": (link("tensorboard", "."), "tensorboard", (RESUME,)),
    "a file in a plugin's folder is a link": (link("watchdog/rank-0.txt"), "watchdog/rank-0.txt", (RESUME,)),
    "the upload's folder is a link": (link(".upload", "."), ".upload", (RESUME,)),
    "the log is a pipe": (special("log.txt", os.mkfifo), "log.txt", (RESUME, EVALUATE)),
    "the metrics are a device": (
        special("metrics.jsonl", lambda path: os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, 3))),
        "metrics.jsonl", (RESUME,)),
}  # fmt: skip


@pytest.mark.parametrize(("plant", "place", "commands"), ATTACKS.values(), ids=ATTACKS.keys())
def test_a_strangers_run_folder_writes_nowhere_else(plant, place, commands, victim, cli):
    """a link, pipe or device in a run folder from others: refused before the command begins"""
    try:
        plant(victim)
    except PermissionError:
        pytest.skip("only root makes devices")
    before, summary = state(victim), Path("run/summary.json").lstat()
    for command in commands:
        code, out, err = cli(*command, *(["train.max_steps=6"] if command == RESUME else []))
        assert code == 2, out + err
        (line,) = [line for line in err.splitlines() if line.startswith("error: ")]
        assert line.startswith("error: run/")
        assert place in line
        assert re.search(r"\[(unsafe-link|not-a-file|not-a-folder|link-in-folder)\]$", line), line
        assert state(victim) == before
        assert SECRET.strip() not in out + err
        assert os.path.samestat(Path("run/summary.json").lstat(), summary), "the command began"


def test_a_new_run_does_not_follow_the_lock_of_a_folder(victim, cli):
    """a link as the lock of a run folder that a new run would move: refused, nothing written"""
    link(".lock")(victim)
    before = state(victim)
    code, _, err = cli("train", "recipe.yaml")
    assert (code, err.count("\n")) == (2, 1)
    assert_problem(err, "unsafe-link run/.lock")
    assert state(victim) == before


# folder of a command's results -> (a link that others put there, the command)
FOLDERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "the parts of predictions": ("out.csv.parts", ("predict", "run", "a text", "--out", "out.csv")),
    "a part of predictions": ("out.csv.parts/unfinished", ("predict", "run", "a text", "--out", "out.csv")),
    "the joined predictions": ("out.csv.parts/joined", ("predict", "run", "a text", "--out", "out.csv")),
    "the results of a sweep": ("runs/sweep.json", ("sweep", "recipe.yaml", "train.lr=1,2", "output=runs", "--resume")),
    "a run of a sweep": ("runs/lr-1", ("sweep", "recipe.yaml", "train.lr=1,2", "output=runs", "--resume")),
    "the results of a search": (
        "runs/sweep.json",
        ("sweep", "recipe.yaml", "train.lr=1..2", "--trials", "20", "output=runs"),
    ),
    "the database of a search": (
        "runs/study.db",
        ("sweep", "recipe.yaml", "train.lr=1..2", "--trials", "20", "output=runs"),
    ),
    "the trace of a profile": ("runs/rank0.trace.json", ("profile", "recipe.yaml", "--output", "runs")),
    "a file of a new package": ("runs/pyproject.toml", ("new", "plugin", "other", "--folder", "runs")),
}


@pytest.mark.parametrize(("place", "command"), FOLDERS.values(), ids=FOLDERS.keys())
@pytest.mark.parametrize("target", ["text", "new", "."], ids=["a file", "a missing file", "a folder"])
def test_a_strangers_results_are_no_place_to_write(place, command, target, victim, cli):
    """a link where a command writes its results: refused"""
    if place == "runs/lr-1":
        Path("runs").mkdir()
        Path("runs/sweep.json").write_text("{}")
    link(f"../{place}", target)(victim)
    before = state(victim)
    code, out, err = cli(*command)
    assert (code, err.count("\n")) == (2, 1), out + err
    assert place.partition("/")[0] in err
    assert state(victim) == before


@pytest.mark.parametrize("place", ["sample-audit", "sample-audit/rank-1.jsonl"])
def test_a_run_that_resumes_elsewhere_copies_nothing_through_links(place, tiny_run, tmp_path):
    """a link among the records of a run that is resumed in another folder: refused, nothing read"""
    tiny_run(["sample-audit"], epochs=1, output=tmp_path / "run")
    (tmp_path / "victim").mkdir()
    (tmp_path / "victim/rank-0.jsonl").write_text(SECRET)
    (tmp_path / "victim/text").write_text(SECRET)
    link(place, "." if place == "sample-audit" else "text")(tmp_path / "victim")
    with expect_problem(f"unsafe-link {place}", UsageError):
        tiny_run(["sample-audit"], output=tmp_path / "other", resume=tmp_path / "run")
    assert not list(tmp_path.glob("other/sample-audit/*"))


@pytest.mark.parametrize(
    "place", ["log.txt", "metrics.jsonl", "bad_batches.jsonl", "watchdog/rank-0.txt", "sample-audit/rank-0.jsonl"]
)
def test_a_link_that_is_planted_later_is_not_followed(place, tiny_run, tmp_path):
    """a link that appears after the check, at the name of a growing file: refused"""

    class Stranger(Plugin):
        name = "stranger"

        @hookimpl(tryfirst=True)
        def before_fit(self, run):
            for folder in ("watchdog", "sample-audit"):
                (run.folder / folder).mkdir(exist_ok=True)
            (run.folder / place).symlink_to(tmp_path / "victim")

    plugins = [Stranger(), "log", "watchdog", "sample-audit"]
    data = None
    if place == "bad_batches.jsonl":
        import torch

        plugins.append("nan-guard")
        data = [(torch.full((8,), torch.nan), 0)] * 32
    with expect_problem(f"unsafe-link {place}", UsageError):
        tiny_run(plugins, data=data, output=tmp_path / "run")
    assert not (tmp_path / "victim").exists()


@pytest.mark.parametrize("name", ["recipe.yaml", "summary.json"])
def test_no_name_of_an_unfinished_file_can_be_guessed(name, monkeypatch):
    """links at names of unfinished files: not followed"""
    Path("victim").write_text(SECRET)
    for rank in range(4):
        Path(f".{name}.{rank}.partial").symlink_to("victim")
    used = []
    replace = Path.replace
    monkeypatch.setattr(Path, "replace", lambda path, target: (used.append(path.name), replace(path, target))[1])
    files.write(Path(name), "first")
    files.write(Path(name), "second")
    assert Path("victim").read_text() == SECRET
    assert Path(name).read_text() == "second"
    assert len({*used}) == 2


def test_a_failed_write_leaves_no_file():
    """a file that cannot be replaced: an error, and no unfinished file"""
    Path("target/inside").mkdir(parents=True)
    with pytest.raises(OSError):
        files.write(Path("target"), "text")
    assert [path.name for path in Path().iterdir()] == ["target"]


def test_links_that_stay_inside_and_a_linked_run_folder_work(trained, tmp_path, cli):
    """control: a run folder that is itself a link, with links of the user's inside it, resumes, and is evaluated and
    exported"""
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    Path("run").rename("disk")
    Path("run").symlink_to("disk")
    Path("run/latest").symlink_to("checkpoints/step-00000004")
    Path("run/weights").symlink_to(tmp_path / "disk/model/model.safetensors")
    code, out, err = cli(*RESUME, "train.max_steps=6", "--without", "progress")
    assert code == 0, out + err
    assert "run/checkpoints/step-00000004 " in out
    for command in (EVALUATE, EXPORT, REPORT):
        code, out, err = cli(*command)
        assert code == 0, out + err
    assert Path("run").is_symlink()
    assert json.loads(Path("disk/summary.json").read_text())["steps"] == 6
    assert {"evaluation", "model-safetensors"} <= {path.name for path in Path("disk").iterdir()}
    assert not list(Path("disk").glob(".*.partial"))
