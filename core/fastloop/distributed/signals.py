"""Signals that end a run, and the exit codes that follow. Nothing here imports torch."""

from __future__ import annotations

import _thread
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any, NoReturn

from fastloop.runtime.platform_support import existing_signals
from fastloop.state import INTERRUPTED

log = logging.getLogger("fastloop")

SIGNALS = existing_signals("SIGINT", "SIGTERM", "SIGUSR1")
"""Signals that ask a run to save and stop: Ctrl-C; schedulers, containers and init systems; SLURM's warning (``--signal=USR1@120``)."""
STOP_TIMEOUT = 600.0
"""Seconds that a run gets to save and stop."""
EXIT_INTERRUPTED = 130
"""The exit code after Ctrl-C: a user wanted the run to end."""
EXIT_STOPPED = 75
"""The exit code after any other of ``SIGNALS``: ``EX_TEMPFAIL`` of sysexits.h. A scheduler may start the command again with --resume."""


def exit_code(name: str) -> int:
    """The exit code of a run that the signal ``name`` ended."""
    return EXIT_INTERRUPTED if name == "SIGINT" else EXIT_STOPPED


class Stopped(SystemExit):
    """A signal that ends the process at once."""

    def __init__(self, signum: int) -> None:
        self.name = signal.Signals(signum).name
        super().__init__(exit_code(self.name))

    def __str__(self) -> str:
        return f"{self.name}, at once"


def stop_now(signum: int, frame: Any) -> NoReturn:
    """Handle a signal where there is nothing to save.

    Raises:
        KeyboardInterrupt: For SIGINT.
        Stopped: For the others.
    """
    raise KeyboardInterrupt if signum == signal.SIGINT else Stopped(signum)


@contextmanager
def on_signals(handler: Callable[[int, Any], Any]) -> Iterator[None]:
    """Inside, ``handler`` handles all of ``SIGNALS`` that are not ignored: a shell lets its background jobs ignore Ctrl-C."""
    previous = {number: signal.signal(number, handler) for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN}
    try:
        yield
    finally:
        for number, before in previous.items():
            signal.signal(number, before)


class StopSignals:
    """The signal that asked this process to stop, and the thread that enforces the timeout.

    Attributes:
        name: The first signal that came; None: there was none. ``Run.sync_requests`` acts on it.
        finishing: Whether training is over, so that a signal lets the rest of the run end.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self.finishing = False
        self._logged: threading.Event | None = None

    def record(self, name: str) -> None:
        """Record the signal ``name``, as if it came."""
        self.name = name

    def finish(self) -> None:
        """Training is over: from now on a signal lets the rest of the run end."""
        self.finishing = True

    def wait_until_logged(self) -> None:
        """Wait, a second at most, until the thread has logged the signal."""
        if self._logged is not None:
            self._logged.wait(1)

    @contextmanager
    def handled(self, rank: int, world_size: int) -> Iterator[None]:
        """Inside, Ctrl-C, SIGTERM and SIGUSR1 save at the step's end and stop; the same signal again stops at once.

        When training is over there is nothing left to save, so the first signal lets the test and the export end.
        """
        first: dict[int, float] = {}
        left = threading.Event()
        launched = world_size > 1 or "LOCAL_RANK" in os.environ

        def handle(signum: int, frame: Any) -> None:
            if signum in first and launched and perf_counter() - first[signum] < 1:
                return  # a launcher forwards a signal that a terminal or a scheduler sent to every process already
            if signum in first:
                stop_now(signum, frame)
            first[signum] = perf_counter()
            if self.name is None:
                self._logged = logged = threading.Event()
                self.record(signal.Signals(signum).name)
                _thread.start_new_thread(self._enforce_timeout, (rank, logged, left))  # a handler may neither print nor wait for a lock

        with on_signals(handle):
            try:
                yield
            finally:
                left.set()

    def _enforce_timeout(self, rank: int, logged: threading.Event, left: threading.Event) -> None:
        """In a thread: log the signal, and end the process if it does not stop in time."""
        action = "training is over, what is left of the run is finished" if self.finishing else "saving at the end of this step"
        log.warning("%s by %s: %s (once more to stop at once)", INTERRUPTED, self.name, action)
        logged.set()
        if not left.wait(STOP_TIMEOUT) and not self.finishing:
            print(f"error: process {rank} did not stop within {STOP_TIMEOUT:g} seconds: ended.", file=sys.stderr, flush=True)
            os._exit(EXIT_STOPPED)
