"""Pins each process to its own CPU cores, sets its thread count and waiting mode, and flushes denormal numbers to zero.

    plugins:
      - cpu-affinity: {denormals: false}

The processes of a machine divide its cores evenly, with one thread for each core, or as many as a container's quota
permits. In a run of one process, ``OMP_NUM_THREADS`` of the environment sets the threads, unless ``count`` does.
Launchers such as torchrun set the variable for several processes, so the plugin does not follow it there, and logs
that.

Some processors compute with numbers below 1e-38 a hundred times slower. OpenMP's threads spin while they wait, and
sleep if other programs use half a core or more at the start. ``wait: passive`` is for machines whose load comes later.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any, Literal

from fastloop import Plugin, Problem, Recommendation, SpeedupEstimate, hookimpl, option
from fastloop_plugins.toolkit import ForeignLoad, cores, counted, processors

if TYPE_CHECKING:
    from fastloop import Machine, Recipe, Run, StepProfile


WINDOW = 0.2
"""Seconds for which ``wait: auto`` measures other programs. The system counts processor time in steps of 0.01 s."""
BUSY = 0.5
"""Cores that other programs use from which waiting threads should sleep."""
LONG_STEP = 0.1
"""Seconds of a step from which sleeping threads are faster on a busy machine. Steps of 25 ms took twice as long with
them."""


class CpuAffinity(Plugin):
    """Pins processes to cores, sets their thread count, and lets waiting threads sleep on a busy machine."""

    name = "cpu-affinity"
    numerics = "reassociated"

    count: int | None = option(
        "Threads of a process; null: OMP_NUM_THREADS in a run of one process, or one for each of its cores.",
        default=None,
        ge=1,
    )
    pin: bool = option("Pin each process to its own cores (Linux).", default=True)
    wait: Literal["auto", "passive", "active"] | None = option(
        "Waiting threads sleep (passive) or spin (active); auto: sleep if other programs are busy; null: as "
        "OpenMP chooses.",
        default="auto",
    )
    denormals: bool = option("Compute with numbers below 1e-38 instead of flushing them to zero.", default=False)

    before: dict[str, Any]  # threads and processors of the process before the run

    @classmethod
    def recommend(cls, recipe: Recipe, machine: Machine) -> Recommendation | None:
        """On a CPU, for a pretrained model: its steps are long enough that waking a thread costs little."""
        if machine.device != "cpu" or not recipe.model.get("name"):
            return None
        return Recommendation(why="if other programs are busy, waiting threads sleep, and training slows down less")

    @classmethod
    def estimate_speedup(cls, profile: StepProfile, recipe: Recipe) -> SpeedupEstimate | None:
        share = max(1, round(profile.cores - profile.foreign_cores) // profile.world_size)
        spins = profile.threads > 1 and os.environ.get("OMP_WAIT_POLICY", "").lower() != "passive"
        if spins and profile.foreign_cores >= BUSY and profile.seconds >= LONG_STEP:
            return SpeedupEstimate(
                seconds=profile.seconds / 2,
                why=f"Other programs use {profile.foreign_cores:.1f} of {profile.cores} cores, and threads that wait "
                "for each other spin.",
            )
        if cls.name in recipe.plugins or profile.device != "cpu" or profile.threads >= share:
            return None
        if profile.world_size == 1 and threads_of_user() is not None:  # the plugin would not add threads
            return None
        return SpeedupEstimate(
            seconds=profile.computing * (1 - profile.threads / share),
            why=f"A process computes with {profile.threads} threads, and its share of the idle cores is {share}.",
        )

    @hookimpl
    def environment(self) -> dict[str, str]:
        if self.wait != "auto":
            return {"OMP_WAIT_POLICY": self.wait} if self.wait else {}
        if "OMP_WAIT_POLICY" in os.environ:
            return {}
        load = ForeignLoad()
        time.sleep(WINDOW)
        return {"OMP_WAIT_POLICY": "passive"} if load.cores() >= BUSY else {}

    @hookimpl
    def before_fit(self, run: Run) -> None:
        import torch

        pinned = processors()
        local = int(os.environ.get("LOCAL_RANK", "0"))
        size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        share = pinned[local * len(pinned) // size : (local + 1) * len(pinned) // size] or pinned
        self.before: dict[str, Any] = {"threads": torch.get_num_threads(), "processors": pinned}
        if self.pin and size > 1:
            pin(share)
        # fewer threads than cores in a control group with a quota
        quota = max(1, len(share) * cores() // len(pinned))
        self._set_threads(quota, size)
        if not self.denormals and not torch.set_flush_denormal(True):
            self.log.warning(Problem("this processor cannot flush denormal numbers to zero.", code="no-effect"))
        threads = torch.get_num_threads()
        shown = counted(threads, "thread")
        self.log.info("%s on cores %s", shown, ", ".join(map(str, share)))

    def _set_threads(self, quota: int, size: int) -> None:
        """Set the number of threads: that of ``count``, of the user's environment, or one for each core.

        Args:
            quota: Cores of this process.
            size: Processes on this machine.
        """
        import torch

        of_user = threads_of_user()
        if self.count is not None or of_user is None:
            torch.set_num_threads(self.count or quota)
        elif size == 1:
            torch.set_num_threads(min(of_user, quota))
            self.log.info("OMP_NUM_THREADS sets the number of threads (plugins.cpu-affinity.count: another one)")
            return
        else:
            torch.set_num_threads(quota)
        if of_user is not None and of_user != torch.get_num_threads():
            reason = "count sets" if self.count is not None else "a launcher may have set it, and the plugin sets"
            self.log.info("OMP_NUM_THREADS=%d has no effect: %s %d threads", of_user, reason, torch.get_num_threads())

    @hookimpl
    def write_summary(self, summary: dict[str, Any]) -> None:
        import torch

        if hasattr(self, "before"):
            summary["threads"] = torch.get_num_threads()

    @hookimpl
    def teardown(self) -> None:
        import torch

        if not hasattr(self, "before"):
            return
        torch.set_num_threads(self.before["threads"])
        torch.set_flush_denormal(False)
        pin(self.before["processors"])


def threads_of_user() -> int | None:
    """The number of threads in ``OMP_NUM_THREADS``, of which the first counts: 4 of ``4,2``. None: it has none."""
    first = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(first) if first.isdecimal() and int(first) > 0 else None


def pin(processors: list[int]) -> None:
    """Pin this process to processors, if the platform supports it."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, processors)
