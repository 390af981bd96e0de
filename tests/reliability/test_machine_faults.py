"""A machine that stalls a process, whose clock jumps, or whose network file system loses a file handle."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import file_trace
import pytest
from saving_helpers import FASTLOOP, record, said, steps, together, until, write_recipe

pytestmark = pytest.mark.slow


@pytest.fixture
def shim(tmp_path: Path) -> Path:
    return file_trace.build(tmp_path, Path(file_trace.__file__).with_name("fault_shim.c"))


def test_stopped_process_continues():
    """a rank is stopped by SIGSTOP for longer than several heartbeats, and continued: the run warns, and ends with the same numbers"""
    write_recipe()
    watched = ["--with", "ddp", "--with", "watchdog", "plugins.watchdog.timeout=40"]
    assert [each.wait() for each in together("output=whole", *watched)] == [0, 0], said()
    processes = together("output=run", *watched, environment={"FAULT": "step 6 1 me('SIGSTOP')"})
    until(lambda: "has made no progress" in said())
    processes[1].send(signal.SIGCONT)
    assert [each.wait() for each in processes] == [0, 0], said()
    assert "process 1 of 2 has made no progress" in said()
    assert record() == record("whole")


def test_clock_that_jumps(shim):
    """the time of day jumps three times a second by hours ahead and back: the watchdog ends nothing, speeds are positive, and the numbers are the same"""  # noqa: E501
    write_recipe()
    for output, added in (("whole", {}), ("run", {"LD_PRELOAD": str(shim), "CLOCK_JUMPS": "7200"})):
        command = [sys.executable, *FASTLOOP, "recipe.yaml", f"output={output}", "--with", "watchdog", "plugins.watchdog.timeout=60"]
        done = subprocess.run(command, env=os.environ | added, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
        assert "has made no progress" not in done.stdout + done.stderr
    lines = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert all(line["samples_per_second"] > 0 for line in lines if "split" not in line)
    assert record() == record("whole")


STALE = [("create", 2), ("write", 3), ("fsync", 4), ("rename", 2), ("mkdir", 2), ("fsync", 11)]
"""A function of the shim, and the number of the call that fails, in the folder of checkpoints."""
DRIVER = """
import os
import sys
from saving_helpers import train

for call, number in {stale!r}:
    fault = {{"STALE_PATH": "checkpoints", "STALE_CALL": call, "STALE_NUMBER": str(number)}}
    code = train(f"output={{call}}-{{number}}", "--without", "checkpoint-best", environment=fault)
    if code:
        sys.exit(f"{{call}} {{number}}: exit code {{code}}: " + open("said.txt").read()[-2000:])
train("output=whole", "--without", "checkpoint-best")
"""


def test_stale_file_handle_during_a_save(shim, record_property):
    """a call of a save fails with ESTALE, as on a network file system: the save is logged as failed, training continues, and the next save succeeds"""  # noqa: E501
    write_recipe()
    Path("driver.py").write_text(DRIVER.format(stale=STALE))
    added = {"LD_PRELOAD": str(shim), "PYTHONPATH": str(Path(file_trace.__file__).parent), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "driver.py"], env=os.environ | added, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    whole = record("whole")
    for call, number in STALE:
        run = f"{call}-{number}"
        found = record(run)
        assert found["model"] == whole["model"], run
        assert found["metrics"] == whole["metrics"], run
        assert json.loads(Path(run, "summary.json").read_text())["save_errors"] == 1, run
        assert steps(run) == [27], run
    assert said().count("Stale file handle") >= len(STALE)
    record_property("faults", len(STALE))
