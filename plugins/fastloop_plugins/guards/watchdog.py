"""Ends a run that hangs, and names the process that blocks it and the place where that process is stuck.

    plugins:
      - watchdog: {timeout: 600}

If a process makes no progress for ``timeout`` seconds, every process writes the stacks of its threads to
``watchdog/rank-R.txt`` in the run folder and exits with code 1. Several machines must share the run folder. Set
``timeout`` above the duration of the longest save, the first batch and a compilation.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
from collections.abc import Generator
from contextlib import suppress
from typing import IO, TYPE_CHECKING, Any

from fastloop import Plugin, Problem, hookimpl, option
from fastloop.runtime.files import no_follow
from fastloop.runtime.step_folders import resume_remedy
from fastloop_plugins.guards._heartbeats import RankHeartbeats

if TYPE_CHECKING:
    from fastloop import Run


class Watchdog(Plugin):
    """Ends a run that hangs. A thread monitors the progress."""

    name = "watchdog"
    numerics = "bitwise"

    timeout: float = option("Seconds without progress before the run ends.", default=600.0, gt=0)

    stacks: IO[str]  # where stacks are written; from before_fit on
    heartbeats: RankHeartbeats  # from before_fit on

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.over = threading.Event()
        self.thread: threading.Thread | None = None

    @hookimpl
    def before_fit(self, run: Run) -> None:
        folder = run.folder / "watchdog"
        folder.mkdir(exist_ok=True)
        # teardown closes it
        self.stacks: IO[str] = open(folder / f"rank-{run.rank}.txt", "w", opener=no_follow)  # noqa: SIM115
        self.heartbeats = RankHeartbeats(folder, run.rank, run.world_size, self.timeout)
        self.heartbeats.move("before the first step")
        self.heartbeats.write(run.state.step)
        self.over.clear()
        self.arm()  # the thread may never get to run
        self.thread = threading.Thread(target=self.watch, args=(run,), name="watchdog", daemon=True)
        self.thread.start()

    @hookimpl
    def before_step(self) -> None:
        self.heartbeats.move("exchanging the step's sizes")

    @hookimpl(wrapper=True)
    def compute_loss(self) -> Generator[None, Any, Any]:
        if self.thread is None:  # plugins may try the model before training
            return (yield)
        self.heartbeats.move("computing the loss")
        output = yield
        self.heartbeats.move("after the loss: backward, or the next batch of an evaluation")
        return output

    @hookimpl
    def after_backward(self) -> None:
        self.heartbeats.move("in the optimizer's step")

    @hookimpl
    def after_step(self) -> None:
        self.heartbeats.move("between steps: reading data, evaluating or saving")

    @hookimpl
    def before_evaluate(self) -> None:
        self.heartbeats.move("beginning an evaluation")

    @hookimpl
    def after_evaluate(self) -> None:
        self.heartbeats.move("after an evaluation: reading data or saving")

    @hookimpl
    def teardown(self) -> None:
        if self.thread is not None:
            self.over.set()
            self.thread.join()
            self.thread = None
            self.stacks.close()
            faulthandler.cancel_dump_traceback_later()

    @property
    def every(self) -> float:
        """Seconds between two checks."""
        return float(min(self.timeout / 8, 5.0))

    def arm(self) -> None:
        """Restart faulthandler's timer, which ends the process even if native code holds the GIL and no Python thread
        can run."""
        assert sys.__stderr__ is not None
        faulthandler.dump_traceback_later(self.timeout + self.every, exit=True, file=sys.__stderr__)

    def watch(self, run: Run) -> None:
        """Check progress until ``over`` is set; the body of the thread."""
        has_warned = False
        while not self.over.wait(self.every):
            self.arm()
            idle = self.heartbeats.seconds_idle()
            self.heartbeats.write(run.state.step)
            if idle > self.timeout:
                faulthandler.dump_traceback(file=self.stacks, all_threads=True)
                self.over.wait(2 * self.every)  # the other processes reach their timeout within this time
                stacks = f"{self.heartbeats.folder}/rank-*.txt"
                problem = Problem(
                    f"{self.heartbeats.diagnose()} Stacks of all threads: {stacks}.",
                    code="no-progress",
                    remedy=resume_remedy(run.folder),
                )
                self.end(run, problem)
            if idle < self.timeout / 2:
                has_warned = False  # progress resumed: warn again the next time
            elif not has_warned:
                has_warned = True
                self.log.warning(Problem(self.heartbeats.diagnose(), code="no-progress"))

    @staticmethod
    def end(run: Run, problem: Problem) -> None:
        """End the process immediately: its main thread cannot react to a request."""
        from fastloop.checkpoint import run_summary
        from fastloop.cli.messages import print_error

        print_error(problem)
        sys.stderr.flush()
        with suppress(Exception):
            run_summary.summarize(run, "failed", str(problem))
        os._exit(1)
