"""A full disk while a command writes its result: one error that names the file, nothing half-written, and the same
command works with free space.

Modules:
    plugins/fastloop_plugins/observe/_trace_files.py
"""

from __future__ import annotations

import ast
import errno
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import inference_runs
import numpy as np
import pytest
import torch
from fault_runs import mounted, train, write_recipe

import fastloop
import fastloop_plugins
from fastloop.runtime.files import full_disk, naming, write
from fastloop_tools.inference.output import PredictionOutput

KEPT = 4096
"""Bytes that are free in the second part of each test: the result begins to be written there."""


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 6 MB."""
    with mounted(tmp_path / "disk", "-t", "tmpfs", "-o", "size=6m", "none") as folder:
        yield folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the recipe and the run of a text classifier."""
    folder = tmp_path_factory.mktemp("trained")
    inference_runs.train(inference_runs.write_recipe(folder))
    return folder


def fill(disk: Path, kept: int) -> None:
    """Fill a disk, except ``kept`` bytes."""
    with (disk / "filler").open("wb", buffering=0) as file:
        size = 2**16
        while size:
            try:
                file.write(bytes(size))
            except OSError:
                size //= 2
        file.truncate(file.tell() - kept)


COMMANDS: dict[str, tuple[list[str], str]] = {
    "predict jsonl": (["predict", "{run}", "{folder}/test.csv", "--out", "{disk}/p.jsonl"], "p.jsonl"),
    "predict csv": (["predict", "{run}", "{folder}/test.csv", "--out", "{disk}/p.csv"], "p.csv"),
    "predict parquet": (["predict", "{run}", "{folder}/test.csv", "--out", "{disk}/p.parquet"], "p.parquet"),
    "evaluate": (["evaluate", "{run}", "--split", "test", "--json", "{disk}/e.json"], "e.json"),
    "export": (["export", "{run}", "--out", "{disk}/model"], "model"),
    "report": (["report", "{run}", "--output", "{disk}/report.html"], "report.html"),
    "schema": (["schema", "--output", "{disk}/schema.json"], "schema.json"),
    "plan": (["plan", "{folder}/recipe.yaml", "--json", "{disk}/plan.json"], "plan.json"),
    "train": (["train", "{folder}/recipe.yaml", "output={disk}/run"], "run"),
    "train in new folders": (["train", "{folder}/recipe.yaml", "output={disk}/runs/today/run"], "runs/today/run"),
    "profile": (
        ["profile", "{folder}/recipe.yaml", "--steps", "2", "--seconds", "0", "--output", "{disk}/profile"],
        "profile/rank0.trace.json",
    ),
    "the plugin profile": (
        ["train", "{folder}/recipe.yaml", "output={disk}/run", "--with", "profile", "plugins.profile.wait=1"],
        "run/profile",
    ),
    "new plugin": (["new", "plugin", "my-plugin", "--folder", "{disk}/package"], "package"),
    "tokens": (
        ["prepare", "{folder}/recipe.yaml", "--with", "token-cache", "plugins.token-cache.folder={disk}/tokens"],
        "tokens",
    ),
}
"""Arguments, and the file or folder that they write on the disk."""
QUICK = ("predict parquet", "export", "report", "tokens", "train in new folders", "new plugin")
KEPT_FILES = {
    "predict jsonl": "*.parts/*",
    "predict csv": "*.parts/*",
    "predict parquet": "*.parts/*",
    "evaluate": "e.json",
    "tokens": "tokens/**/*",
    "the plugin profile": "run/**/*",
}
"""Command -> the files that it keeps after the error: to continue from, or a whole one of several results."""


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in COMMANDS]
)
def test_a_full_disk_is_named_and_the_command_works_later(name: str, disk: Path, trained: Path, cli: Any):
    """a full disk: the error names the file, and what is there before it is whole"""
    words, result = COMMANDS[name]
    arguments = [word.format(run=trained / "run", folder=trained, disk=disk) for word in words]
    for kept in (0, KEPT):
        fill(disk, kept)
        code, _, said = cli("--json", *arguments)
        [problem] = [line for line in map(json.loads, said.splitlines()) if line["level"] == "error"]
        assert code == 1
        assert problem["code"] == "disk-full"
        assert str(disk) in problem["place"]
        assert problem["remedy"]
        assert new_files(disk, KEPT_FILES.get(name)) == []
    (disk / "filler").unlink()
    assert cli(*arguments)[0] == 0
    assert (disk / result).exists()


def new_files(disk: Path, kept: str | None) -> list[str]:
    """The files on a disk beside those of ``fill``, and those that match a pattern."""
    expected = {disk / "filler", *(disk.glob(kept) if kept else ())}
    return sorted(str(path.relative_to(disk)) for path in disk.rglob("*") if path.is_file() and path not in expected)


@pytest.fixture
def disk_without_inodes(tmp_path: Path) -> Iterator[Path]:
    """A disk with free bytes, on which no file can be created. A folder on a usual full disk cannot be, either."""
    with mounted(tmp_path / "disk", "-t", "tmpfs", "-o", "size=6m,nr_inodes=20", "none") as folder:
        with suppress(OSError):
            for number in range(30):
                (folder / f"filler{number}").touch()
        yield folder


@pytest.mark.parametrize(
    "name",
    [name if name in ("train", "new plugin") else pytest.param(name, marks=pytest.mark.slow) for name in COMMANDS],
)
def test_a_disk_on_which_nothing_can_be_created_is_no_wrong_option(
    name: str, disk_without_inodes: Path, trained: Path, cli: Any
):
    """a disk without room for a new file or folder: exit code 1, as on any full disk"""
    words, _ = COMMANDS[name]
    arguments = [word.format(run=trained / "run", folder=trained, disk=disk_without_inodes) for word in words]
    code, _, said = cli("--json", *arguments)
    [problem] = [line for line in map(json.loads, said.splitlines()) if line["level"] == "error"]
    assert (code, problem["code"]) == (1, "disk-full")
    assert str(disk_without_inodes) in problem["place"]


BLAMES = re.compile(r"(file|folder)-not-writable")
"""Codes of errors that call a path wrong."""
RECOGNIZE = {"refuse_full_disk", "full_disk", "unwritable_rows"}
"""Functions that recognize a full disk."""


def test_each_error_about_a_path_that_cannot_be_written_asks_for_a_full_disk_first():
    """an error that calls a path wrong, whose exit code is 2: raised only where the disk is not full"""
    checked = 0
    careless = []
    for path in [
        *Path(fastloop.__file__).parents[1].rglob("*.py"),
        *Path(fastloop_plugins.__file__).parents[1].rglob("*.py"),
    ]:
        code = path.read_text(encoding="utf-8")
        if not BLAMES.search(code):  # most files: parsing all of them takes seconds
            continue
        for handler in ast.walk(ast.parse(code)):
            if not isinstance(handler, ast.ExceptHandler) or not any(
                isinstance(part, ast.Raise) for part in ast.walk(handler)
            ):
                continue
            text = ast.unparse(handler)
            if not BLAMES.search(text):
                continue
            checked += 1
            called = {part.id for part in ast.walk(handler) if isinstance(part, ast.Name)}
            called |= {part.attr for part in ast.walk(handler) if isinstance(part, ast.Attribute)}
            if not called & RECOGNIZE:
                careless.append(f"{path.name}, line {handler.lineno}")
    assert careless == []
    assert checked > 5


@pytest.mark.slow
def test_onnx_on_a_full_disk(disk: Path, trained: Path, cli: Any):
    """a full disk while an ONNX model is written: an error, and nothing half-written"""
    pytest.importorskip("onnxscript")
    fill(disk, KEPT)
    code, _, said = cli("export", str(trained / "run"), "--to", "onnx", "--out", str(disk / "onnx"))
    assert (code, "disk-full" in said) == (1, True)
    assert sorted(path.name for path in disk.iterdir()) == ["filler"]


def test_an_array_on_a_full_disk_ends_with_an_error_and_no_signal(disk: Path):
    """a full disk while parts of an array are joined: an error, and later the whole array"""
    output = PredictionOutput(disk / "p.npy", None)
    values = np.arange(2**16, dtype=np.float32)
    output.add({"output": list(torch.from_numpy(values))}, last=False)
    output.add({"output": list(torch.from_numpy(values + 1))}, last=True)
    fill(disk, KEPT)
    with pytest.raises(OSError) as caught:
        output.finish()
    error = full_disk(caught.value)
    assert error is not None
    assert error.problem.place == str(disk / "p.npy")
    (disk / "filler").unlink()
    output.finish()
    assert np.array_equal(np.load(disk / "p.npy"), np.concatenate([values, values + 1]))


def test_what_a_command_replaces_stays_on_a_full_disk(disk: Path):
    """a full disk while a file is replaced: the old one stays"""
    write(disk / "page.html", "old")
    fill(disk, 0)
    with pytest.raises(OSError) as caught:
        write(disk / "page.html", "new" * 10_000)
    assert caught.value.filename == str(disk / "page.html")
    assert (disk / "page.html").read_text() == "old"


def test_a_write_on_a_read_only_disk_names_its_file(tmp_path: Path):
    """a read-only disk, on which no unfinished file can be removed either: the error names the file to write"""
    with mounted(tmp_path / "disk", "-t", "tmpfs", "-o", "size=1m,ro", "none") as folder:
        with pytest.raises(OSError, match="Read-only") as caught:
            write(folder / "report.html", "text")
        assert caught.value.filename == str(folder / "report.html")


def test_errors_of_libraries_are_recognized():
    """errors of libraries about a full disk, without its number or of another class: recognized"""
    numbered = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    copied = shutil.Error([("a", "b", str(numbered))])
    text = RuntimeError("I/O error: No space left on device (os error 28)")
    wrapped = RuntimeError("the exporter failed")
    wrapped.__cause__ = numbered
    for error in (
        numbered,
        copied,
        text,
        OSError("400 requested and 0 written"),
        wrapped,
        OSError(errno.EFBIG, "File too large", "x"),
    ):
        assert full_disk(error) is not None, error
    for error in (OSError(errno.EACCES, "Permission denied", "x"), RuntimeError("no"), KeyError("x")):
        assert full_disk(error) is None, error
    with pytest.raises(OSError) as caught, naming(Path("a.csv")):
        raise OSError(errno.EACCES, "Permission denied", "other.csv")
    assert caught.value.filename == "other.csv"


LIMITED = """
import resource, signal, sys
from fastloop.cli import main
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
sys.argv = ["fastloop", *sys.argv[1:]]
main()
"""


@pytest.mark.slow
def test_a_run_under_a_limit_of_file_sizes_fails_and_resumes():
    """a limit of file sizes: exit code 1, and with --resume and without it the run ends as any other"""
    write_recipe()
    assert train("output=whole") == 0
    command = [sys.executable, "-c", LIMITED, "train", "recipe.yaml", "output=run"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert train("output=run", "--resume") == 0
    weights = [Path(folder, "model", "model.safetensors").read_bytes() for folder in ("whole", "run")]
    assert weights[0] == weights[1]
