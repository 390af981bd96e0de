"""Runs measurements in processes of their own, and watches the load of other processes meanwhile."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from fastloop.cli import launch
from fastloop.errors import FastloopError, UsageError
from fastloop.runtime.platform_support import KILL, explain_kill, kills
from fastloop_tools.trials.measuring_process import Spec

PATIENCE = 5.0
"""Seconds that a process gets to exit after a signal."""
LOUD = 0.05
"""Share of the machine that other processes may use without a message."""


class BackgroundLoad:
    """The share of all cores that other processes used between construction and ``read``."""

    def __init__(self) -> None:
        self.since = time.monotonic()
        self.busy = _busy()
        self.own = sum(os.times()[:4])

    def read(self) -> float:
        """Share of all cores, 0 to 1. This process's ended children are not counted."""
        cores = os.cpu_count() or 1
        available = (time.monotonic() - self.since) * cores
        busy = _busy() - self.busy
        own = sum(os.times()[:4]) - self.own
        return min(1.0, max(0.0, (busy - own) / available))


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


def run_process(
    spec: Spec, length: Mapping[str, Any], environment: Mapping[str, str], timeout: float | None
) -> dict[str, Any]:
    """Run one training in a new process, and return its result.

    On failure, the result has ``error`` with a message and ``kind``: ``usage``, ``run``, ``crash``, ``killed`` or
    ``timeout``.

    Args:
        length: The recipe's own ``epochs`` and ``max_steps``.
        environment: The environment variables of the process.
        timeout: Seconds that the training may take; None: no limit.
    """
    background = BackgroundLoad()
    started = time.monotonic()
    before = kills()
    with tempfile.TemporaryDirectory(prefix="fastloop-bench-") as folder:
        source, target, errors = (Path(folder, name) for name in ("spec.json", "result.json", "stderr.txt"))
        source.write_text(json.dumps({**dataclasses.asdict(spec), "length": dict(length)}), encoding="utf-8")
        with errors.open("w") as stderr:
            process = subprocess.Popen(
                [*launch.module_command("fastloop_tools.trials.measuring_process"), str(source), str(target)],
                env={**environment, launch.LAUNCHER: f"{os.getpid()} "},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                start_new_session=True,  # Ctrl-C reaches only this process, which ends the whole group
            )
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            result = {"error": f"took more than {timeout:g} seconds and was ended.", "kind": "timeout"}
        else:
            if target.exists():
                result = json.loads(target.read_text(encoding="utf-8"))
            else:
                lines = errors.read_text(errors="replace").strip().splitlines() or ["no output"]
                how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
                why = f". {explain_kill(before)}" if kills() > before else ""
                result = {"error": f"the process {how}: {lines[-1]}{why}", "kind": "killed"}
        finally:
            _end(process)
    return result | {"process_seconds": time.monotonic() - started, "foreign_load": background.read()}


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process with all that it started: asked first, then killed."""
    for number in (signal.SIGTERM, KILL):
        if process.poll() is None:
            with suppress(ProcessLookupError):
                launch.signal_group(process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                process.wait(PATIENCE)


def failed_measurement(text: str, result: Mapping[str, Any]) -> FastloopError:
    """The error for a measurement that failed, with the code of the error in its process.

    Args:
        text: The sentence around ``result["error"]``.
        result: The result of ``run_process``.
    """
    kind = UsageError if result["kind"] == "usage" else FastloopError
    if "problem" in result:
        return kind(text, code=result["problem"]["code"])
    return kind(text, code="measurement-failed")
