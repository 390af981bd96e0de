"""Starts a measured process and waits for it, with an eye on what else the machine does meanwhile."""

from __future__ import annotations

import dataclasses
import json
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

from fastloop import launch
from fastloop.bench.worker import Spec

PATIENCE = 5.0
"""Seconds that a process gets to end by itself."""
LOUD = 0.05
"""Share of the machine that others may use before it is said."""


class Bystanders:
    """How much of all cores others kept busy, between its making and ``read``."""

    def __init__(self) -> None:
        self.since, self.busy, self.own = time.monotonic(), _busy(), _own()

    def read(self) -> float:
        """Share of all cores, 0 to 1. Ended children count as one's own."""
        seconds = (time.monotonic() - self.since) * (os.cpu_count() or 1)
        return min(1.0, max(0.0, (_busy() - self.busy - (_own() - self.own)) / seconds))


def _busy() -> float:
    """Seconds for which all cores of the machine were not idle."""
    import psutil

    times = psutil.cpu_times()
    return float(sum(getattr(times, name, 0.0) for name in ("user", "nice", "system", "irq", "softirq", "steal")))


def _own() -> float:
    return sum(os.times()[:4])


def foreign_load(seconds: float = 1.0) -> float:
    """What others use now."""
    bystanders = Bystanders()
    time.sleep(seconds)
    return bystanders.read()


def run_worker(spec: Spec, length: Mapping[str, Any], environment: Mapping[str, str], timeout: float | None) -> dict[str, Any]:
    """Measure in a fresh process; returns the worker's result.

    An ``error`` in it says what went wrong; ``kind`` is ``usage``, ``run``, ``crash``, ``killed`` or ``timeout``.
    """
    with tempfile.TemporaryDirectory(prefix="fastloop-bench-") as folder:
        source, target, complaints = (Path(folder) / name for name in ("spec.json", "result.json", "stderr.txt"))
        source.write_text(json.dumps({**dataclasses.asdict(spec), "length": dict(length)}), encoding="utf-8")
        bystanders, started = Bystanders(), time.monotonic()
        with complaints.open("w") as stderr:
            process = subprocess.Popen(
                [sys.executable, "-m", "fastloop.bench.worker", str(source), str(target)],
                env={**environment, launch.LAUNCHER: f"{os.getpid()} "},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                start_new_session=True,  # Ctrl-C comes here, and all of its processes are ended from here
            )
            try:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(timeout)
            finally:
                late = process.poll() is None
                _end(process)
        if target.exists() and not late:
            result: dict[str, Any] = json.loads(target.read_text(encoding="utf-8"))
        elif late:
            result = {"error": f"took more than {timeout:g} seconds and was ended.", "kind": "timeout"}
        else:
            lines = complaints.read_text(errors="replace").strip().splitlines()
            code = process.returncode
            how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            result = {"error": f"the process {how}: {lines[-1] if lines else 'it said nothing'}", "kind": "killed", "stderr": lines[-40:]}
        return result | {"process_seconds": time.monotonic() - started, "foreign_load": bystanders.read()}


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process with all that it started: asked first, then killed."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                process.wait(PATIENCE)
