"""Commands with a time limit: ``tests/helpers/limited.py``.

Modules:
    core/fastloop/testing/time_limits.py
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from pathlib import Path

import limited
import pytest

HANGS = """
import os, sys, time
print("it began", flush=True)
child = os.fork()
if child == 0:
    time.sleep(300)
    os._exit(0)
with open("pid", "w") as file:
    file.write(str(child))
time.sleep(300)
"""
"""A command whose child holds its pipes open."""


def is_running(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="the processes are read from /proc")
def test_a_command_that_hangs_ends_with_its_children_and_shows_its_output():
    with pytest.raises(pytest.fail.Exception, match="it began") as failure:
        limited.run([sys.executable, "-c", HANGS], timeout=2)
    assert "Fatal Python error: Aborted" in str(failure.value)  # from here on, faulthandler's stacks
    assert "line 10 in <module>" in str(failure.value)
    child = int(Path("pid").read_text())
    deadline = time.monotonic() + 10
    while is_running(child):
        assert time.monotonic() < deadline, "the child of the command still runs"
        time.sleep(0.01)


def test_a_command_that_ends_gives_its_code_and_output():
    code = "import os, sys; print(os.environ['OWN']); sys.exit(3)"
    done = limited.run([sys.executable, "-c", code], timeout=60, env=os.environ | {"OWN": "own"})
    assert (done.returncode, done.stdout, done.stderr) == (3, "own\n", "")
