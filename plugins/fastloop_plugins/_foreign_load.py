"""The processor time that other programs use."""

from __future__ import annotations

import os
from time import perf_counter

import psutil


class ForeignLoad:
    """Measures the cores that other programs keep busy, from its construction on. Does not import torch.

    The processes of a run, their data workers and their launcher's other processes do not count as other programs.
    """

    def __init__(self) -> None:
        self._started = perf_counter()
        self._busy = _busy_seconds()
        self._own = _own_seconds()

    def cores(self) -> float:
        """Cores that other programs kept busy on average, at least 0. A hypervisor that takes a core counts as such a
        program."""
        own = _own_seconds()
        used = sum(seconds - self._own.get(process, 0.0) for process, seconds in own.items())
        return max(0.0, (_busy_seconds() - self._busy - used) / (perf_counter() - self._started))


def _busy_seconds() -> float:
    """Seconds for which the cores of this machine have computed, over all cores."""
    times = psutil.cpu_times()._asdict()
    return float(sum(times.get(kind, 0.0) for kind in ("user", "nice", "system", "irq", "softirq", "steal")))


def _own_seconds() -> dict[int, float]:
    """Process -> seconds that it computed, for the processes of this run on this machine."""
    process = psutil.Process()
    if int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > 1:
        process = process.parent() or process
    seconds = {}
    for member in [process, *process.children(recursive=True)]:
        try:
            times = member.cpu_times()
        except psutil.Error:  # it ended
            continue
        seconds[member.pid] = times.user + times.system
    return seconds
