"""End the process group of a script in order, before Python ends.

A script that calls ``Trainer.fit`` under a launcher ends as any script does, while gloo's threads live. Such a thread
drops the tensors of a collective operation after the operation has ended, and needs the GIL for that. If Python ends
while the thread waits for the GIL, Python ends the thread, and C++ then aborts the process: "terminate called without
an active exception", exit code -6 (https://github.com/pytorch/pytorch/issues/190489). Commands end by
``cli.ending.leave`` instead.
"""

from __future__ import annotations

import atexit
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

TASKS = Path("/proc/self/task")
"""Has a folder for each thread of this process, on Linux."""
WORKER = "pt_gloo_runloop"
"""Name of the threads in which gloo computes."""
PAUSE = 0.02
"""Seconds without the GIL. A thread that waits for the GIL wakes up every 5 ms (``sys.getswitchinterval``)."""
LIMIT = 5.0
"""Seconds after which Python ends although a thread is still busy."""


@dataclass(frozen=True)
class Activity:
    """How often the system has switched away from a thread, and whether it now waits for something else."""

    switches: int
    sleeps: bool


class GroupAtExit:
    """Ends the process group when Python ends.

    Attributes:
        group: The default group, if fastloop made it.
        is_idle: Whether the newest run has ended on every process, so that no process waits for another.
    """

    def __init__(self) -> None:
        self.group: torch.distributed.ProcessGroup | None = None
        self.is_idle = False

    def begin(self, is_made: bool) -> None:
        """A run with several processes begins.

        Args:
            is_made: Whether the run has made the default group.
        """
        if is_made:
            self.group = torch.distributed.group.WORLD
        self.is_idle = False
        atexit.unregister(self.end)
        atexit.register(self.end)

    def end(self) -> None:
        """Destroy the group if fastloop made it and no process waits in it, and wait until gloo's threads are idle."""
        group = self.group
        self.group = None
        if self.is_idle and group is not None and group is torch.distributed.group.WORLD:
            torch.distributed.destroy_process_group()
        del group  # gloo's threads end with the last reference
        wait_for_workers()


group_at_exit = GroupAtExit()


def wait_for_workers() -> None:
    """Release the GIL until no thread of gloo has run in the meantime. Only Linux shows that; on other systems, release
    it once."""
    deadline = time.monotonic() + LIMIT
    before: dict[str, Activity] | None = None
    while time.monotonic() < deadline:
        now = worker_activities()
        if now == before and all(worker.sleeps for worker in now.values()):
            return
        before = now
        time.sleep(PAUSE)


def worker_activities() -> dict[str, Activity]:
    """Thread id -> activity, of gloo's threads. Empty if the process is at its limit of open files."""
    activities: dict[str, Activity] = {}
    try:
        tasks = [*TASKS.glob("*")]
    except OSError:
        return activities
    for task in tasks:
        with suppress(OSError):  # it has ended
            if (task / "comm").read_text().strip() == WORKER:
                activities[task.name] = _read_activity(task / "status")
    return activities


def _read_activity(status: Path) -> Activity:
    """Read lines such as ``State:\tS (sleeping)`` and ``voluntary_ctxt_switches:\t42``."""
    values = {}
    for line in status.read_text().splitlines():
        name, _, value = line.partition(":")
        values[name] = value.strip()
    switches = int(values["voluntary_ctxt_switches"]) + int(values["nonvoluntary_ctxt_switches"])
    return Activity(switches, values["State"].startswith("S"))
