"""Commands of tests that end with all of their processes after a time limit."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from fastloop.testing.time_limits import OutOfTime, run_limited


def run(
    command: Sequence[str | Path], timeout: float, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end. Its output is text; it may fail.

    After ``timeout`` seconds, its whole process group is killed, and the test fails with the output so far and, of
    Python processes, the stacks of their threads.
    """
    try:
        return run_limited(command, timeout, cwd, env)
    except OutOfTime as error:
        words = " ".join(map(str, command))
        pytest.fail(
            f"{words[:500]}\ntook more than {timeout:g} seconds and was killed.\n"
            f"{error.output[-10_000:]}{error.errors[-10_000:]}"
        )
