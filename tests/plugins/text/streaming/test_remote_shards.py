"""``data.streaming`` of files on a server: data larger than the disk, and requests that fail.

Modules:
    plugins/fastloop_plugins/rows/remote.py
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import yaml
from fault_runs import mounted, record, steps
from file_server import FileServer, file_server
from package_helpers import ForkingPython
from streaming_helpers import KILL, MODEL, NAMES, classify, ids_by_step, loader, write_lines, write_parquet
from text_helpers import rows

from fastloop.errors import DataError, RecipeError
from fastloop.testing import expect_problem
from fastloop_plugins.rows import remote

pytest.importorskip("aiohttp")

SHARDS = 3
GROUPS = 32
"""Row groups of a shard."""
GROUP = 256
"""Rows of a row group."""
LENGTH = 1000
"""Characters of a text. No compression makes them fewer: a row group has 0.25 MB, and all data 24 MB."""
DISK = 4_000_000
"""Bytes of the disk that the run has."""
REPEATED = "The request is repeated in"
FAIL = """
import os
from urllib.request import urlopen
from fastloop import Plugin, hookimpl

class Fail(Plugin):
    name = "fail"

    @hookimpl
    def after_step(self, run):
        if run.state.step == int(os.environ.get("FAIL_AT", "-1")):
            urlopen(os.environ["FAIL_URL"]).close()
"""
"""A plugin that has the server refuse the next requests, at the step FAIL_AT."""


def write_large_shards(folder: Path) -> list[str]:
    """Parquet files of long texts; returns their names."""
    folder.mkdir()
    draw = np.random.default_rng(0)
    letters = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz234567", np.uint8)
    names = []
    for shard in range(SHARDS):
        table = []
        for number in range(GROUPS * GROUP):
            long = draw.choice(letters, LENGTH).tobytes().decode()
            table.append({"text": f"a {('dull', 'fine')[number % 2]} film {long}", "label": NAMES[number % 2]})
        names.append(f"shard-{shard}.parquet")
        write_parquet(str(folder / names[-1]), table, group=GROUP)
    return names


def write_recipe(train_files: list[str]) -> None:
    """``recipe.yaml`` in the current folder, and the plugins of this file."""
    Path("kill.py").write_text(KILL)
    Path("fail.py").write_text(FAIL)
    files = {"train": train_files, "validation": write_lines("validation.jsonl", rows(24, NAMES))}
    section = {"files": files, "label": "label", "streaming": True, "max_length": 16, "shuffle_buffer": 400, "lanes": 4}
    recipe = {
        "model": MODEL,
        "data": section,
        "train": {"max_steps": 200, "batch_size": 16, "lr": 1e-3, "device": "cpu", "save_every": 40, "log_every": 10},
        "plugins": [
            "./kill.py:Kill", "./fail.py:Fail", "sample-audit", {"dataloader-workers": {"num_workers": 2}},
            {"progress": False},
        ],
        "output": "run",
    }  # fmt: skip
    Path("recipe.yaml").write_text(yaml.safe_dump(recipe))


@pytest.fixture
def small_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A disk that is smaller than the data. The current folder and temporary files are on it."""
    options = ("-t", "tmpfs", "-o", f"size={DISK}", "none")
    # a short path: data workers have sockets in the folder of temporary files
    with TemporaryDirectory() as name, mounted(Path(name), *options) as folder:
        monkeypatch.chdir(folder)
        monkeypatch.setenv("TMPDIR", str(folder))
        yield folder
        monkeypatch.chdir(tmp_path)


@pytest.mark.slow
def test_data_larger_than_the_disk_trains_resumes_and_survives_a_server_that_fails(small_disk, tmp_path):
    names = write_large_shards(tmp_path / "files")
    size = sum((tmp_path / "files" / name).stat().st_size for name in names)
    assert size > 6 * DISK
    with file_server(tmp_path / "files") as server, ForkingPython(sys.executable, os.environ) as python:
        write_recipe([f"{server.url}/{name}" for name in names])
        whole = python.run("train", "recipe.yaml", "output=whole", cwd=small_disk)
        assert whole.returncode == 0, whole.stderr
        assert f"streamed from {SHARDS * GROUPS} row groups in {SHARDS} files" in whole.stdout + whole.stderr
        assert REPEATED not in whole.stdout + whole.stderr
        assert python.run("train", "recipe.yaml", cwd=small_disk, KILL_AT="107").returncode == -9
        assert steps()[-1] == 80
        failing = {"FAIL_AT": "100", "FAIL_URL": f"{server.url}/fail/2"}
        resumed = python.run("train", "recipe.yaml", "--resume", cwd=small_disk, **failing)
        assert resumed.returncode == 0, resumed.stderr
        assert server.failed == 2
    lines = [line for line in (resumed.stdout + resumed.stderr).splitlines() if REPEATED in line]
    assert len(lines) == 2
    for line in lines:
        assert f"{server.url}/shard-" in line
        assert f"the server answered 503 Service Unavailable. {REPEATED}" in line
    assert record() == record("whole")


@pytest.fixture
def server() -> Iterator[FileServer]:
    """A server of two files with 100 rows."""
    folder = Path("files")
    folder.mkdir()
    table = rows(100, NAMES)
    write_parquet(str(folder / "a.parquet"), table[:60])
    write_lines(str(folder / "b.jsonl"), table[60:])
    with file_server(folder) as state:
        yield state


def urls(server: FileServer) -> list[str]:
    return [f"{server.url}/a.parquet", f"{server.url}/b.jsonl"]


@pytest.fixture
def no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Failed requests are repeated at once."""
    monkeypatch.setattr(remote, "WAITS", (0.0, 0.0))


def test_requests_that_fail_twice_are_repeated_and_logged(server, no_waits, caplog):
    expected = ids_by_step(classify(["files/a.parquet", "files/b.jsonl"]))
    server.failures = 2
    run = classify(urls(server))
    server.failures = 2
    assert ids_by_step(run) == expected
    assert server.failed == 4
    repeated = [record.getMessage() for record in caplog.records if REPEATED in record.getMessage()]
    assert len(repeated) == 4
    assert "The request is repeated in 0 s (2 of 2)." in repeated[1]


REFUSED: dict[str, tuple[int, str, int]] = {
    "down": (503, "unreachable-url a.parquet 503 repetitions", 2),
    "forbidden": (403, "unreachable-url a.parquet 403 Forbidden", 0),
    "gone": (404, "file-missing a.parquet", 0),
}
"""Status of each answer -> the error, and the number of repetitions."""


@pytest.mark.parametrize("case", REFUSED)
def test_a_server_that_refuses_is_an_error_before_data_is_read(case, server, no_waits, caplog):
    server.status, expected, repetitions = REFUSED[case]
    server.down = True
    with expect_problem(expected, RecipeError):
        classify(urls(server))
    assert caplog.text.count(REPEATED) == repetitions
    assert server.sent == 0


def test_nothing_listens_at_the_address(no_waits):
    with expect_problem("unreachable-url a.parquet repetitions", RecipeError):
        classify("http://127.0.0.1:9/a.parquet")


def test_a_server_that_stops_in_training_is_an_error_with_the_file(server, no_waits):
    run = classify(urls(server))
    server.down = True
    with expect_problem("unreachable-url 503 Service Unavailable", DataError):
        list(loader(run).batches())


def raise_from(cause: BaseException | None) -> Any:
    raise FileNotFoundError("http://server/a") from cause


@pytest.mark.parametrize(
    ("cause", "temporary"),
    [(None, False), (TimeoutError("slow"), True), (ConnectionResetError("reset"), True), (ValueError("url"), False)],
    ids=lambda value: type(value).__name__,
)
def test_the_first_cause_decides_whether_a_request_is_repeated(cause, temporary, no_waits):
    with pytest.raises(OSError) as caught:
        remote.repeat_request("http://server/a", partial(raise_from, cause))
    assert isinstance(caught.value, remote.RemoteError) == temporary
