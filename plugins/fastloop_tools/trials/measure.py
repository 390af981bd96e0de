"""Runs measurements in processes of their own, and watches the load of other processes meanwhile."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from fastloop.cli import launch
from fastloop.runtime.platform_support import KILL, explain_kill, kills

PATIENCE = 5.0
"""Seconds that a process gets to exit after a signal."""
LOUD = 0.05
"""Share of the machine that other processes may use without a message."""


class Process(Protocol):
    """A started process. ``poll`` returns its exit code, -n after signal n, and None while it runs."""

    pid: int

    def poll(self) -> int | None: ...


Start = Callable[[Mapping[str, str], Path, Path], Process]
"""Starts a process with environment variables, which runs a specification. Its result and its errors are written into
a folder."""


class BackgroundLoad:
    """The share of all cores that other processes used between construction and ``read``."""

    def __init__(self) -> None:
        self.since, self.busy, self.own = time.monotonic(), _busy(), sum(os.times()[:4])

    def read(self) -> float:
        """Share of all cores, 0 to 1. This process's ended children are not counted."""
        seconds = (time.monotonic() - self.since) * (os.cpu_count() or 1)
        return min(1.0, max(0.0, (_busy() - self.busy - (sum(os.times()[:4]) - self.own)) / seconds))


def _busy() -> float:
    """CPU seconds that the machine's cores were busy."""
    import psutil

    times = psutil.cpu_times()
    return float(sum(getattr(times, name, 0.0) for name in ("user", "nice", "system", "irq", "softirq", "steal")))


def foreign_load(seconds: float = 1.0) -> float:
    """The share of the machine that other processes use now, measured for ``seconds``."""
    background = BackgroundLoad()
    time.sleep(seconds)
    return background.read()


def start_fresh(environment: Mapping[str, str], source: Path, place: Path) -> subprocess.Popen[bytes]:
    """Start a process that imports all that it needs itself; see ``Start``."""
    with (place / "stderr.txt").open("w") as stderr:
        return subprocess.Popen(
            [sys.executable, "-m", "fastloop_tools.trials.worker", str(source), str(place / "result.json")],
            env={**environment, launch.LAUNCHER: f"{os.getpid()} "},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            start_new_session=True,  # Ctrl-C reaches only this process, which ends the whole group
        )


def run_processes(
    folder: str, environment: Mapping[str, str], timeout: float | None, nproc: int = 1, start: Start = start_fresh
) -> dict[str, Any]:
    """Run one training in ``nproc`` new processes; returns the result of the first.

    On failure, the result has ``error`` with a message and ``kind``: ``usage``, ``run``, ``crash``, ``killed`` or
    ``timeout``.

    Args:
        folder: It holds ``spec.json``; see ``run_specification``. Each process writes into a folder of its own in it.
    """
    background, started, before = BackgroundLoad(), time.monotonic(), kills()
    processes: list[tuple[Process, Path]] = []
    try:
        for rank, member in enumerate(launch.local_group(nproc)):
            place = Path(folder) / str(rank)
            place.mkdir()
            processes.append((start({**environment, **member}, Path(folder) / "spec.json", place), place))
        found = _wait(processes, timeout)
    finally:
        for process, _ in processes:
            _end(process)
    # prefer the root cause to a lost connection
    failed = sorted((one for one in found if one and "error" in one), key=lambda one: one["kind"] == "lost")
    result = failed[0] if failed else found[0]
    if result is None:
        result = {"error": f"took more than {timeout:g} seconds and was ended.", "kind": "timeout"}
    if result.get("kind") == "killed" and kills() > before:
        result["error"] += f". {explain_kill(before)}"
    return result | {"process_seconds": time.monotonic() - started, "foreign_load": background.read()}


def _wait(processes: list[tuple[Process, Path]], timeout: float | None) -> list[dict[str, Any] | None]:
    """Wait until all processes have ended, or shortly after one has failed; returns their results, None for a running
    one."""
    deadline = time.monotonic() + timeout if timeout is not None else math.inf
    while True:
        results = [_result(process, place) for process, place in processes]
        if None not in results or time.monotonic() > deadline:
            return results
        if any(result and "error" in result for result in results):
            deadline = min(deadline, time.monotonic() + PATIENCE)
        time.sleep(0.02)


def _result(process: Process, place: Path) -> dict[str, Any] | None:
    """A process's result, or the way that it ended; None while it runs."""
    if (code := process.poll()) is None:
        return None
    if (place / "result.json").exists():
        result: dict[str, Any] = json.loads((place / "result.json").read_text(encoding="utf-8"))
        return result
    lines = (place / "stderr.txt").read_text(errors="replace").strip().splitlines()
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    error = f"the process {how}: {lines[-1] if lines else 'no output'}"
    return {"error": error, "kind": "killed", "stderr": lines[-40:]}


def _end(process: Process) -> None:
    """End a process with all that it started: asked first, then killed."""
    for number in (signal.SIGTERM, KILL):
        deadline = time.monotonic() + PATIENCE
        if process.poll() is None:
            with suppress(ProcessLookupError):
                launch.signal_group(process.pid, number)
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
