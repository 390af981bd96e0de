"""Ends a run that has stopped moving, and says which process holds it up and where that one stands.

    plugins:
      - watchdog: {timeout: 600}

A process moves when it begins or ends a step, a micro-step or a batch of an evaluation. When one has not moved for ``timeout`` seconds,
every process writes the stacks of its threads to ``watchdog/rank-R.txt`` of the run folder and ends with exit code 1, and the error names
the one that is behind the others. At half of that time a warning does. Processes read each other's places from files beside the stacks,
so machines must share the run folder. Nothing else looks at a process that hangs inside of native code: torch waits 30 minutes for it.

Take a ``timeout`` above what the longest save, the first batch and a compilation take.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
import threading
from collections.abc import Generator
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Annotated, Any

from fastloop import Plugin, hookimpl, option
from fastloop_plugins.guards._heartbeats import RankHeartbeats

if TYPE_CHECKING:
    from fastloop import Run

logger = logging.getLogger("fastloop")


class Watchdog(Plugin):
    """A thread that looks whether training moves."""

    name = "watchdog"
    numerics = "bitwise"
    description = "ends a run that has stopped moving"

    @dataclass(kw_only=True)
    class Config:
        """Options."""

        timeout: Annotated[float, option("Seconds without a move before the run ends.", gt=0)] = 600.0

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.over = threading.Event()
        self.thread: threading.Thread | None = None

    @hookimpl
    def before_fit(self, run: Run) -> None:
        folder = run.folder / "watchdog"
        folder.mkdir(exist_ok=True)
        self.stacks: IO[str] = (folder / f"rank-{run.rank}.txt").open("w")
        self.places = RankHeartbeats(folder, run.rank, run.world_size, self.config.timeout)
        self.places.move("before the first step")
        self.places.tell(run.state.step)
        self.over.clear()
        self.arm()  # the thread may never come to run
        self.thread = threading.Thread(target=self.watch, args=(run,), name="watchdog", daemon=True)
        self.thread.start()

    @hookimpl
    def before_step(self) -> None:
        self.places.move("exchanging the step's sizes")

    @hookimpl(wrapper=True)
    def compute_loss(self) -> Generator[None, Any, Any]:
        if self.thread is None:  # a plugin tries the model while the run is built
            return (yield)
        self.places.move("computing the loss")
        output = yield
        self.places.move("after the loss: backward, or the next batch of an evaluation")
        return output

    @hookimpl
    def after_backward(self) -> None:
        self.places.move("in the optimizer's step")

    @hookimpl
    def after_step(self) -> None:
        self.places.move("between steps: reading data, evaluating or saving")

    @hookimpl
    def before_evaluate(self) -> None:
        self.places.move("beginning an evaluation")

    @hookimpl
    def after_evaluate(self) -> None:
        self.places.move("after an evaluation: reading data or saving")

    @hookimpl
    def write_summary(self, run: Run) -> None:
        if self.thread is not None and self.thread is not threading.current_thread():
            self.over.set()
            self.thread.join()
            self.thread = None
            self.stacks.close()
            faulthandler.cancel_dump_traceback_later()

    @property
    def every(self) -> float:
        """Seconds between two looks."""
        return float(min(self.config.timeout / 8, 5.0))

    def arm(self) -> None:
        """Where native code holds the interpreter and no Python thread can run, a thread of faulthandler ends the process."""
        assert sys.__stderr__ is not None
        faulthandler.dump_traceback_later(self.config.timeout + self.every, exit=True, file=sys.__stderr__)

    def watch(self, run: Run) -> None:
        """The thread."""
        timeout, warned = self.config.timeout, False
        while not self.over.wait(self.every):
            self.arm()
            stood = self.places.stood()
            self.places.tell(run.state.step)
            if stood > timeout:
                faulthandler.dump_traceback(file=self.stacks, all_threads=True)
                self.over.wait(2 * self.every)  # the others come to the same within this time
                self.end(run, f"{self.places.verdict()} Stacks of all threads: {self.places.folder}/rank-*.txt.")
            if stood < timeout / 2:
                warned = False
            elif not warned:
                warned = True
                logger.warning("watchdog: %s", self.places.verdict())

    @staticmethod
    def end(run: Run, reason: str) -> None:
        """End the process, which cannot be asked to."""
        from fastloop.checkpoint import folder

        print(f"error: {reason}", file=sys.stderr, flush=True)
        with suppress(Exception):
            folder.summarize(run, "failed", reason)
        os._exit(1)
