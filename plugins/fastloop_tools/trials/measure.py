"""Runs measurements in processes of their own, and watches the load of other processes meanwhile."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from fastloop.cli import launch
from fastloop.runtime.platform_support import KILL, explain_kill, kills
from fastloop_tools.trials.server import ForkedProcess, ForkServer, ServerEnded, Servers
from fastloop_tools.trials.worker import Spec

PATIENCE = 5.0
"""Seconds that a process gets to exit after a signal."""
LOUD = 0.05
"""Share of the machine that other processes may use without a message."""
Process = subprocess.Popen[bytes] | ForkedProcess


class BackgroundLoad:
    """The share of all cores that other processes used between construction and ``read``."""

    def __init__(self) -> None:
        self.since, self.busy, self.own = time.monotonic(), _busy(), _own()

    def read(self, forked: float = 0.0) -> float:
        """Share of all cores, 0 to 1. This process's ended children are not counted.

        Args:
            forked: Processor time of measured processes that are not children of this process.
        """
        seconds = (time.monotonic() - self.since) * (os.cpu_count() or 1)
        return min(1.0, max(0.0, (_busy() - self.busy - (_own() - self.own) - forked) / seconds))


def _busy() -> float:
    """CPU seconds that the machine's cores were busy."""
    import psutil

    times = psutil.cpu_times()
    return float(sum(getattr(times, name, 0.0) for name in ("user", "nice", "system", "irq", "softirq", "steal")))


def _own() -> float:
    return sum(os.times()[:4])


def foreign_load(seconds: float = 1.0) -> float:
    """The share of the machine that other processes use now, measured for ``seconds``."""
    background = BackgroundLoad()
    time.sleep(seconds)
    return background.read()


def run_worker(
    spec: Spec,
    length: Mapping[str, Any],
    environment: Mapping[str, str],
    timeout: float | None,
    nproc: int = 1,
    servers: Servers | None = None,
) -> dict[str, Any]:
    """Run one training in ``nproc`` new processes; returns the result of the first.

    Args:
        servers: Fork the process from one of these; several processes are always fresh ones. None: start fresh
            processes.

    On failure, the result has ``error`` with a message and ``kind``: ``usage``, ``run``, ``crash``, ``killed`` or
    ``timeout``.
    """
    if servers is None or nproc > 1:
        return _run(spec, length, environment, timeout, nproc, None)
    needed: dict[str, str] = {}
    while True:
        try:
            server = servers.get(environment, needed)
            found = _run(spec, length, {**environment, **needed}, timeout, 1, server)
        except ServerEnded as error:
            return {"error": f"{error}.", "kind": "killed", "process_seconds": 0.0, "foreign_load": 0.0}
        if "needs" not in found:
            return found
        needed |= found["needs"]


def _run(
    spec: Spec,
    length: Mapping[str, Any],
    environment: Mapping[str, str],
    timeout: float | None,
    nproc: int,
    server: ForkServer | None,
) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="fastloop-bench-") as folder:
        source = Path(folder) / "spec.json"
        source.write_text(json.dumps({**dataclasses.asdict(spec), "length": dict(length)}), encoding="utf-8")
        background, started, before = BackgroundLoad(), time.monotonic(), kills()
        ranks = [Path(folder) / str(rank) for rank in range(nproc)]
        processes: list[Process] = []
        try:
            for member, place in zip(launch.local_group(nproc), ranks, strict=True):
                place.mkdir()
                (place / "stderr.txt").touch()
                if server is not None:
                    processes.append(server.start(environment, source, place))
                else:
                    processes.append(_start({**environment, **member}, source, place))
            found = _wait(processes, ranks, timeout)
        finally:
            for process in processes:
                _end(process)
        # prefer the root cause to a lost connection
        failed = sorted((one for one in found if one and "error" in one), key=lambda one: one["kind"] == "lost")
        result = failed[0] if failed else found[0]
        if result is None:
            result = {"error": f"took more than {timeout:g} seconds and was ended.", "kind": "timeout"}
        forked = sum(process.seconds for process in processes if isinstance(process, ForkedProcess))
        if result.get("kind") == "killed" and kills() > before:
            result["error"] += f". {explain_kill(before)}"
        return result | {"process_seconds": time.monotonic() - started, "foreign_load": background.read(forked)}


def _start(environment: Mapping[str, str], source: Path, place: Path) -> subprocess.Popen[bytes]:
    """Start a fresh process that runs the specification in ``source``. Its result and its errors are written into
    ``place``."""
    with (place / "stderr.txt").open("w") as stderr:
        return subprocess.Popen(
            [sys.executable, "-m", "fastloop_tools.trials.worker", str(source), str(place / "result.json")],
            env={**environment, launch.LAUNCHER: f"{os.getpid()} "},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            start_new_session=True,  # Ctrl-C reaches only this process, which ends the whole group
        )


def _wait(processes: list[Process], places: list[Path], timeout: float | None) -> list[dict[str, Any] | None]:
    """Wait until all processes have ended, or shortly after one has failed; returns their results, None for a running
    one."""
    deadline = time.monotonic() + timeout if timeout is not None else math.inf
    while True:
        results = [_result(process, place) for process, place in zip(processes, places, strict=True)]
        if None not in results or time.monotonic() > deadline:
            return results
        if any(result and "error" in result for result in results):
            deadline = min(deadline, time.monotonic() + PATIENCE)
        time.sleep(0.02)


def _result(process: Process, place: Path) -> dict[str, Any] | None:
    """A process's result, or the way that it ended; None while it runs."""
    if process.poll() is None:
        return None
    if (place / "result.json").exists():
        result: dict[str, Any] = json.loads((place / "result.json").read_text(encoding="utf-8"))
        return result
    lines = (place / "stderr.txt").read_text(errors="replace").strip().splitlines()
    code = process.returncode or 0
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    return {
        "error": f"the process {how}: {lines[-1] if lines else 'no output'}",
        "kind": "killed",
        "stderr": lines[-40:],
    }


def _end(process: Process) -> None:
    """End a process with all that it started: asked first, then killed."""
    for number in (signal.SIGTERM, KILL):
        if process.poll() is None:
            with suppress(ProcessLookupError):
                launch.signal_group(process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                process.wait(PATIENCE)
