"""Commands that start processes of their own, and that end with all of them after a time limit."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from fastloop.testing.starting import abort_in_turn, without_module_list

LAST_OUTPUT = 10.0
"""Seconds to wait for the output of a killed command. A process that left its group may hold the pipe open."""


def run(
    command: Sequence[str | Path], timeout: float, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end. Its output is text; it may fail.

    After ``timeout`` seconds, its whole process group is killed, and the test fails with the output so far and, of
    Python processes, the stacks of their threads. ``subprocess.run`` would kill the command alone, and leave running
    what it has started.
    """
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    variables = {**(os.environ if env is None else env), "PYTHONFAULTHANDLER": "1"}
    process = subprocess.Popen(command, cwd=cwd, env=variables, text=True, start_new_session=True, **pipes)
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        abort_in_turn(process.pid)
        kill_group(process)
        out, err = _rest(process)
        err = without_module_list(err)
        words = " ".join(map(str, command))
        pytest.fail(
            f"{words[:500]}\ntook more than {timeout:g} seconds and was killed.\n{out[-10_000:]}{err[-10_000:]}"
        )
    except BaseException:  # the test was interrupted
        kill_group(process)
        process.wait()
        raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def kill_group(process: subprocess.Popen[str]) -> None:
    """Kill a process that leads a group, with its group."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _rest(process: subprocess.Popen[str]) -> tuple[str, str]:
    """All output of a killed process."""
    try:
        return process.communicate(timeout=LAST_OUTPUT)
    except subprocess.TimeoutExpired as late:
        parts = (part or b"" for part in (late.stdout, late.stderr))
        out, err = (part.decode(errors="replace") if isinstance(part, bytes) else part for part in parts)
        return out, err
