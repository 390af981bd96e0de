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
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Generator
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Annotated, Any

from fastloop import Plugin, hookimpl, option

if TYPE_CHECKING:
    from fastloop import Run

logger = logging.getLogger("fastloop")


class Watchdog(Plugin):
    """A thread that looks whether training moves."""

    name = "watchdog"
    parity = "exact"
    configures = "ends a run that has stopped moving"

    @dataclass(kw_only=True)
    class Config:
        """Options."""

        timeout: Annotated[float, option("Seconds without a move before the run ends.", gt=0)] = 600.0

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.moves, self.where, self.since = 0, "", 0.0
        self.over = threading.Event()
        self.thread: threading.Thread | None = None
        self.stacks: IO[str] | None = None

    def move(self, where: str) -> None:
        """The process got somewhere."""
        self.moves, self.where, self.since = self.moves + 1, where, time.monotonic()

    @hookimpl
    def before_fit(self, run: Run) -> None:
        self.folder = run.folder / "watchdog"
        self.folder.mkdir(exist_ok=True)
        self.stacks = (self.folder / f"rank-{run.rank}.txt").open("w")
        self.move("before the first step")
        self.tell(run)
        self.over.clear()
        self.thread = threading.Thread(target=self.watch, args=(run,), name="watchdog", daemon=True)
        self.thread.start()

    @hookimpl
    def before_step(self) -> None:
        self.move("exchanging the step's sizes")

    @hookimpl(wrapper=True)
    def compute_loss(self) -> Generator[None, Any, Any]:
        self.move("computing the loss")
        output = yield
        self.move("after the loss: backward, or the next batch of an evaluation")
        return output

    @hookimpl
    def after_backward(self) -> None:
        self.move("in the optimizer's step")

    @hookimpl
    def after_step(self) -> None:
        self.move("between steps: reading data, evaluating or saving")

    @hookimpl
    def before_evaluate(self) -> None:
        self.move("beginning an evaluation")

    @hookimpl
    def after_evaluate(self) -> None:
        self.move("after an evaluation: reading data or saving")

    @hookimpl
    def write_summary(self, run: Run) -> None:
        if self.thread is not None and self.thread is not threading.current_thread():
            self.over.set()
            self.thread.join()
            self.thread = None
            faulthandler.cancel_dump_traceback_later()

    def watch(self, run: Run) -> None:
        """The thread. Where native code holds the interpreter and it cannot run, a thread of faulthandler ends the process."""
        assert self.stacks is not None
        assert sys.__stderr__ is not None
        timeout, warned = self.config.timeout, False
        every = min(timeout / 8, 5.0)
        while not self.over.wait(every):
            faulthandler.dump_traceback_later(timeout + every, exit=True, file=sys.__stderr__)
            stood = time.monotonic() - self.since
            self.tell(run)
            if stood > timeout:
                faulthandler.dump_traceback(file=self.stacks, all_threads=True)
                self.over.wait(2 * every)  # the others come to the same within this time
                reason = f"{self.verdict(run)} Stacks of all threads: {self.folder}/rank-*.txt."
                self.end(run, reason)
            if stood < timeout / 2:
                warned = False
            elif not warned:
                warned = True
                logger.warning("watchdog: %s", self.verdict(run))

    @staticmethod
    def end(run: Run, reason: str) -> None:
        """End the process, which cannot be asked to."""
        from fastloop import folder

        print(f"error: {reason}", file=sys.stderr, flush=True)
        with suppress(Exception):
            folder.summarise(run, "failed", reason)
        os._exit(1)

    def tell(self, run: Run) -> None:
        """Where this process stands, for the others."""
        now = time.time()
        place = {
            "moves": self.moves,
            "step": run.state.step,
            "where": self.where,
            "since": now - time.monotonic() + self.since,
            "told": now,
        }
        aside = self.folder / f".rank-{run.rank}.json"
        aside.write_text(json.dumps(place))
        aside.rename(self.folder / f"rank-{run.rank}.json")

    def verdict(self, run: Run) -> str:
        """Who holds up the run: a process that does not even tell its place, else the one that came least far."""
        places: dict[int, dict[str, Any]] = {}
        for rank in range(run.world_size):
            path = self.folder / f"rank-{rank}.json"
            if path.is_file():
                places[rank] = json.loads(path.read_text())
        now = time.time()
        silent = [rank for rank in range(run.world_size) if rank not in places or now - places[rank]["told"] > self.config.timeout / 2]
        least = min(place["moves"] for place in places.values())
        behind = [rank for rank, place in places.items() if place["moves"] == least]
        named = (silent or behind)[:8]
        lines = []
        for rank in named:
            place = places.get(rank, {"step": 0, "where": "not yet begun", "since": now})
            stopped = " It does not answer: it is stopped, gone, or inside native code." if rank in silent else ""
            lines.append(
                f"process {rank} of {run.world_size} has not moved for {now - place['since']:.0f} seconds: "
                f"at step {place['step'] + 1}, {place['where']}.{stopped}"
            )
        return " ".join(lines)
