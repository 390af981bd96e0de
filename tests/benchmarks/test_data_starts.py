"""The memory of a process and its children, as ``benchmarks/data.py starts`` samples it."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the benchmark reads files of Linux")
MIB = 2**20
SIZE = 64 * MIB
PARENT = f"""
import os, time
pages = b"x" * {SIZE}
print("allocated", flush=True)
input()
if os.fork() == 0:
    time.sleep(600)
print("forked", flush=True)
input()
"""


@pytest.fixture
def parent() -> Iterator[subprocess.Popen[str]]:
    """A process that allocates memory, and forks a child when it reads a line."""
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", PARENT], text=True, start_new_session=True, **pipes) as process:
        read_line(process)
        try:
            yield process
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def read_line(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    assert process.stdout.readline()


def let_fork(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()
    read_line(process)


def test_pages_that_processes_share_count_once(suite_modules, parent):
    starts = importlib.import_module("_data_starts")
    alone = starts.anonymous_bytes(parent.pid)
    let_fork(parent)
    both = starts.anonymous_bytes(parent.pid)
    assert alone > SIZE
    assert alone <= both < alone + SIZE / 4


def test_a_sample_in_which_a_process_is_forked_does_not_count(suite_modules, parent, monkeypatch):
    starts = importlib.import_module("_data_starts")
    read = starts.proportional_bytes

    def fork_after(process: int) -> int:
        size: int = read(process)
        let_fork(parent)
        return size

    monkeypatch.setattr(starts, "proportional_bytes", fork_after)
    assert starts.anonymous_bytes(parent.pid) is None
