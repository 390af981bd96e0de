"""Workers of the commands: processes that measure on request.

A worker is a process that trains one arm (``worker.py``). It is started and warmed up once. Each window is then
requested separately, so that rounds interleave without a new start. If a worker fails or does not respond in time, this
is recorded, and the others continue.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from _suite import FOLDER, Budget, Failure, Late, Records
from _windows import PROBES

START_SECONDS = 300.0
"""Seconds that a worker may take to start, build its arm and warm up."""
LEAST_SECONDS = 30.0
"""Seconds that must be left for a worker to start."""
MEASURED_SHARE = 0.3
"""Share of the budget that is left to the measurements when workers warm up: a slow one does not cost the others
theirs."""
WINDOW_SECONDS = 120.0
"""Seconds that a window may take."""
EXTRA_SECONDS = {"profile": 5.0, "validate": 5.0}
"""Seconds of a command beside its window: writing a trace of 20 steps, and evaluating without a window."""
HELD_ON_CPU = 4
"""Workers that are held at once on a CPU."""


class Worker:
    """A process of ``worker.py``.

    Args:
        spec: The work; see ``worker.py``.
        environment: Further environment variables.
        warmups: Number of warm-up epochs.
    """

    def __init__(
        self, name: str, spec: Mapping[str, Any], folder: Path, environment: Mapping[str, str], warmups: int = 1
    ) -> None:
        self.name = name
        self.spec = spec
        self.environment = environment
        self.warmups = warmups
        self.parent = folder
        self.starts = 0
        self.window_seconds = 0.0  # of its last window
        self.start()

    def start(self) -> None:
        """Start the process, in an empty folder."""
        self.starts += 1
        name = self.name if self.starts == 1 else f"{self.name}-{self.starts}"
        self.folder = self.parent / name
        self.log = self.parent / f"{name}.log"
        self.folder.mkdir(parents=True)
        self.started = time.monotonic()
        read, write = os.pipe()
        command = [
            sys.executable,
            str(FOLDER / "worker.py"),
            "--reply",
            str(write),
            json.dumps({**self.spec, "folder": str(self.folder)}),
        ]
        paths = {"PYTHONPATH": os.pathsep.join(filter(None, [str(FOLDER.parent), os.environ.get("PYTHONPATH")]))}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **paths, **self.environment},
                pass_fds=[write],
                start_new_session=True,
                bufsize=0,
            )
        os.close(write)
        self.replies = read
        self.unread = b""

    def warm_up(self, records: Records, budget: Budget, kept: float) -> bool:
        """Wait until it is warm, and record that or its failure.

        Args:
            kept: Seconds of the budget that are left to the measurements. A worker that is not warm by then is ended.
        """
        end = time.monotonic() + min(START_SECONDS, budget.left() - kept)
        replies = []
        try:
            for _ in range(self.warmups):
                replies.append(self.ask("warmup", end - time.monotonic()))
        except Failure as error:
            records.failure(self.name, "warm-up", error, self.log, budget, kept)
            self.stop()
            return False
        self.window_seconds = replies[-1]["seconds"]
        seconds = time.monotonic() - self.started
        compiling = sum(reply["compile_seconds"] for reply in replies)
        note = f"{seconds:.0f} s, of which compilation {compiling:.0f}"
        plugins = replies[0]["plugins"]
        records.add("warmup", note, name=self.name, seconds=seconds, compile_seconds=compiling, plugins=plugins)
        return True

    def ask(self, command: str, timeout: float) -> dict[str, Any]:
        """Send a command, and wait for the reply.

        Raises:
            Failure: The worker ended, or did not reply within ``timeout`` seconds.
        """
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(f"{command}\n".encode())
        except BrokenPipeError:
            raise Failure(f"ended before {command!r}\n{self.output()}") from None
        end = time.monotonic() + timeout
        with selectors.DefaultSelector() as selector:
            selector.register(self.replies, selectors.EVENT_READ)
            while b"\n" not in self.unread:
                if selector.select(timeout=0.5):
                    part = os.read(self.replies, 1 << 16)
                    self.unread += part
                elif self.process.poll() is not None:
                    part = b""
                else:
                    part = b"waiting"
                if not part:
                    raise Failure(f"{self.output()}\nended in {command!r} with {self.process.wait()}")
                if time.monotonic() > end:
                    raise Late(f"{self.output()}\nno reply to {command!r} within {timeout:.0f} s")
        line, _, self.unread = self.unread.partition(b"\n")
        reply: dict[str, Any] = json.loads(line)
        return reply

    def output(self) -> str:
        """The last lines of its output."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-25:])

    def stop(self) -> None:
        """End the process and all its children."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        if self.process.stdin is not None:
            self.process.stdin.close()


@contextmanager
def workers(
    specs: Mapping[str, tuple[Mapping[str, Any], Mapping[str, str], int]],
    folder: Path,
    records: Records,
    budget: Budget,
    parallel: int,
) -> Iterator[dict[str, Worker]]:
    """Start workers and warm them up, a few at a time; returns them by name. Failed ones are recorded and omitted. All
    are ended at exit.

    Args:
        specs: Name -> the worker's specification, its environment, and its number of warm-up epochs.
        parallel: How many start at once.
    """
    ready: dict[str, Worker] = {}
    started: list[Worker] = []
    kept = MEASURED_SHARE * budget.left()

    def start(name: str) -> None:
        spec, environment, warmups = specs[name]
        if not budget.fits(LEAST_SECONDS):
            records.skip(name, "start", LEAST_SECONDS, budget)
            return
        worker = Worker(name, spec, folder, environment, warmups)
        started.append(worker)
        if worker.warm_up(records, budget, kept):
            ready[name] = worker

    pool = ThreadPoolExecutor(parallel)
    try:
        list(pool.map(start, sorted(specs, key=lambda name: -specs[name][2])))  # the slowest first
        yield {name: ready[name] for name in specs if name in ready}
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for worker in started:
            worker.stop()


def measure(
    workers: dict[str, Worker],
    name: str,
    command: str,
    records: Records,
    budget: Budget,
    kept: float = 0.0,
    **fields: Any,
) -> None:
    """Request one window from a worker and record it. It is skipped if it does not fit the budget. A worker that fails
    is ended and removed, but one that fails in a probe is started again, so that it can be timed.

    Args:
        kept: Seconds of the budget that are reserved for later parts.
    """
    if name not in workers:
        return
    worker = workers[name]
    needed = worker.window_seconds + EXTRA_SECONDS.get(command, 1.0)
    if not budget.fits(needed + kept):
        records.skip(name, command, needed + kept, budget, command=command, **fields)
        return
    try:
        reply = worker.ask(command, min(WINDOW_SECONDS, max(budget.left(), 1.0)))
    except Failure as error:
        records.failure(name, command, error, worker.log, budget)
        worker.stop()
        if command in PROBES and budget.fits(kept + LEAST_SECONDS):
            worker.start()
            if worker.warm_up(records, budget, kept):
                return
        workers.pop(name)
        return
    if command == "measure":
        worker.window_seconds = reply["seconds"]
    reply.pop("plugins", None)
    records.add(command, describe(command, reply), name=name, **fields, **reply)


def describe(command: str, reply: Mapping[str, Any]) -> str:
    """A window in a few words."""
    if command == "measure":
        note = f"{reply['samples_per_second']:.1f} samples/s"
        if reply["compile_seconds"]:
            note += f", compiled {reply['compile_seconds']:.1f} s"
        return note
    if command == "syncs":
        return f"{reply.get('syncs_per_step')} a step"
    if command == "profile":
        if reply.get("busy") is None:
            return "no kernels were recorded"
        attention = ", ".join(name[:60] for name in reply["attention"])
        return f"{reply['kernels_per_step']:.0f} kernels a step, busy {reply['busy']:.0%}, attention: {attention}"
    return f"loss {reply['validation_loss']:.4f}"


def probe(workers: dict[str, Worker], names: Iterable[str], records: Records, budget: Budget, kept: float) -> None:
    """Count the waits for the device and record the kernels of workers, before they are timed."""
    for name in names:
        for command in ("syncs", "profile"):
            measure(workers, name, command, records, budget, kept)


def held_at_once(memory_bytes: int | None, worker_bytes: float, at_most: int) -> int:
    """How many workers are held at once: as many as the memory of the device has room for, one at least.

    Args:
        memory_bytes: Memory of the device; None without one.
        worker_bytes: Memory that a worker needs.
        at_most: The number on a device that has room for more.
    """
    if memory_bytes is None:
        return min(at_most, HELD_ON_CPU)
    return max(1, min(at_most, int(memory_bytes / worker_bytes)))


def chunks(names: Iterable[str], size: int) -> Iterator[list[str]]:
    """The names, ``size`` at a time."""
    listed = list(names)
    for first in range(0, len(listed), size):
        yield listed[first : first + size]
