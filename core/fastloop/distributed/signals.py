"""Signals that stop a run, and their exit codes. Does not import torch."""

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

from fastloop.problem import Problem
from fastloop.runtime.platform_support import existing_signals
from fastloop.state import INTERRUPTED

log = logging.getLogger("fastloop")

SIGNALS = existing_signals("SIGINT", "SIGTERM", "SIGUSR1", "SIGHUP")
"""Signals that make a run save and stop: Ctrl-C; schedulers, containers and init systems; SLURM's warning
(``--signal=USR1@120``); a terminal that was closed or has lost its connection. ``nohup`` ignores the last."""
STOP_TIMEOUT = 600.0
"""Seconds after a signal in which a run must save and stop."""
EXIT_INTERRUPTED = 130
"""The exit code after Ctrl-C: a user ended the run."""
EXIT_STOPPED = 75
"""The exit code after any other signal: ``EX_TEMPFAIL`` of sysexits.h. A scheduler may start the command again with
--resume. The launcher (``cli/launch.py``) and the commands that train several runs compare the codes of their
processes with both."""


def exit_code(name: str) -> int:
    """The exit code after the signal ``name``."""
    return EXIT_INTERRUPTED if name == "SIGINT" else EXIT_STOPPED


class StoppedAtOnce(SystemExit):
    """A signal that ends the process at once."""

    def __init__(self, signum: int) -> None:
        self.name = signal.Signals(signum).name
        super().__init__(exit_code(self.name))

    def __str__(self) -> str:
        return f"{self.name}, at once"


def stop_now(signum: int, frame: Any) -> NoReturn:
    """Handle a signal when there is nothing to save.

    Raises:
        KeyboardInterrupt: For SIGINT.
        StoppedAtOnce: For the others.
    """
    raise KeyboardInterrupt if signum == signal.SIGINT else StoppedAtOnce(signum)


@contextmanager
def on_signals(handler: Callable[[int, Any], Any], also_ignored: bool = False) -> Iterator[None]:
    """Handle ``SIGNALS`` by ``handler`` inside the block.

    It does nothing outside the main thread: Python handles signals there only.

    Args:
        also_ignored: Whether to handle signals that the process ignores, too. Shells make background jobs ignore
            Ctrl-C, which a training respects; a command that only measures should end with the script around it. One
            that ``nohup`` has started still ignores the loss of its terminal.
    """
    handled = SIGNALS if threading.current_thread() is threading.main_thread() else ()
    previous: dict[signal.Signals, Any] = {}
    for number in handled:
        is_ignored = signal.getsignal(number) is signal.SIG_IGN
        if is_ignored and (not also_ignored or number.name == "SIGHUP"):
            continue
        previous[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for number, before in previous.items():
            signal.signal(number, before)


class StopSignals:
    """The stop signal that this process received, and the thread that enforces the timeout.

    Attributes:
        name: The first stop signal; None: no signal yet. ``Run._sync_requests`` handles it.
        finishing: Whether training is over. Then a signal does not stop the test and the export.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self.finishing = False
        self._logged: threading.Event | None = None

    def record(self, name: str) -> None:
        """Record the signal ``name``."""
        self.name = name

    def wait_until_logged(self) -> None:
        """Wait at most a second until the thread has logged the signal."""
        if self._logged is not None:
            self._logged.wait(1)

    @contextmanager
    def handling(self, rank: int, world_size: int) -> Iterator[None]:
        """Inside the block, a signal makes the run save at the step's end and stop. The same signal again stops it at
        once.

        After training, the first signal has no effect, because there is nothing to save.
        """
        first: dict[int, float] = {}
        left = threading.Event()
        launched = world_size > 1 or "LOCAL_RANK" in os.environ

        def handle(signum: int, frame: Any) -> None:
            if signum in first and launched and perf_counter() - first[signum] < 1:
                return  # a launcher forwards a signal that every process has already received
            if signum in first:
                stop_now(signum, frame)
            first[signum] = perf_counter()
            if self.name is None:
                self._logged = logged = threading.Event()
                self.record(signal.Signals(signum).name)
                # a handler must not print or wait for a lock
                _thread.start_new_thread(self._log_and_enforce_timeout, (rank, logged, left))

        with on_signals(handle):
            try:
                yield
            finally:
                left.set()

    def _log_and_enforce_timeout(self, rank: int, logged: threading.Event, left: threading.Event) -> None:
        """Log the signal, and end the process if it does not stop in time. Runs in a thread."""
        action = (
            "training is over, what is left of the run is finished"
            if self.finishing
            else "saving at the end of this step"
        )
        log.warning(Problem(f"{INTERRUPTED} by {self.name}: {action} (once more to stop at once).", code="interrupted"))
        logged.set()
        if not left.wait(STOP_TIMEOUT) and not self.finishing:
            print(
                f"error: process {rank} did not stop within {STOP_TIMEOUT:g} seconds: ended.",
                file=sys.stderr,
                flush=True,
            )
            os._exit(EXIT_STOPPED)
