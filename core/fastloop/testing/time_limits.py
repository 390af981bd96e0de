"""Commands with a time limit, which end with all processes that they have started."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from fastloop.cli import launch
from fastloop.runtime.platform_support import KILL

SECONDS_FOR_STACKS = 0.3
"""Seconds in which a process that hangs writes its stacks."""
LAST_OUTPUT = 10.0
"""Seconds to wait for the output of a killed command. A process that left its group may hold the pipe open."""


class OutOfTime(Exception):
    """A command did not end in time, and was killed.

    Attributes:
        output: Its text on stdout.
        errors: Its text on stderr. It ends with the stacks of its threads, if it is a Python process.
    """

    def __init__(self, limit: float, output: str, errors: str) -> None:
        super().__init__(f"the command did not end within {limit:g} seconds.")
        self.output = output
        self.errors = errors


def run_limited(
    command: Sequence[str | Path], limit: float, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, in a process group of its own. Its output is text; it may fail.

    ``subprocess.run`` would kill the command alone, and leave running what it has started.

    Args:
        limit: Time limit in seconds. Then the whole group is killed.
        env: Its environment variables; None: those of this process.

    Raises:
        OutOfTime: It did not end in time.
    """
    variables = {**(os.environ if env is None else env), "PYTHONFAULTHANDLER": "1"}
    process = subprocess.Popen(
        command,
        cwd=cwd,
        env=variables,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        abort_in_turn(process.pid)
        kill_group(process.pid)
        output, errors = _rest(process)
        raise OutOfTime(limit, output, without_module_list(errors)) from None
    except BaseException:  # this process was interrupted
        kill_group(process.pid)
        process.wait()
        raise
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


def kill_group(pid: int) -> None:
    """Kill a process that leads a group, with its group. It may have ended."""
    with suppress(ProcessLookupError, PermissionError):
        launch.signal_group(pid, KILL)


def abort_in_turn(pid: int) -> None:
    """End a process and its children by SIGABRT, at which faulthandler writes their stacks: one after another, because
    two that write at once would mix their lines."""
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        for each in (process, *process.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                each.send_signal(signal.SIGABRT)
                time.sleep(SECONDS_FOR_STACKS)


def without_module_list(output: str) -> str:
    """The output of a crash without the names of extension modules: thousands of letters behind each stack."""
    return re.sub(r"(?m)^Extension modules: .*\n?", "", output)


def _rest(process: subprocess.Popen[str]) -> tuple[str, str]:
    """All output of a killed process on stdout and stderr."""
    try:
        return process.communicate(timeout=LAST_OUTPUT)
    except subprocess.TimeoutExpired as late:
        return _as_text(late.stdout), _as_text(late.stderr)


def _as_text(output: str | bytes | None) -> str:
    """The output so far, which ``subprocess`` gives in bytes, also for a process whose output is text."""
    if isinstance(output, bytes):
        return output.decode(errors="replace")
    return output or ""
