"""Reads and collates batches in worker processes.

    plugins:
      - dataloader-workers: {num_workers: 4}

Batches and random numbers are the same for any number of workers from 1. ``auto`` uses all but one of the process's CPU
cores, and at most 8; on CUDA, it leaves token ids in memory to the thread of ``device-prefetch``. ``/dev/shm`` needs
room for ``num_workers`` x ``prefetch_factor`` batches of each process; Docker gives it 64 MiB (``--shm-size``).

Workers have a copy of the dataset, as it is when they start. If a hook changes it between epochs, as a curriculum
does, set ``persistent_workers: false``.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Literal

from pydantic import NonNegativeInt

from fastloop import Plugin, Recommendation, SpeedupEstimate, hookimpl, option
from fastloop.problem import counted
from fastloop.runtime import platform_support

if TYPE_CHECKING:
    from fastloop.recipe import Recipe
    from fastloop.runtime.hardware import Machine
    from fastloop.speedup_estimates import StepProfile


class DataLoaderWorkers(Plugin):
    """Reads batches in worker processes. Sets their number and how far they read ahead."""

    name = "dataloader-workers"
    numerics = "bitwise"
    for_inference = True

    num_workers: NonNegativeInt | Literal["auto"] = option(
        "Worker processes for each training process.", default="auto"
    )
    persistent_workers: bool = option("Keep the workers between epochs.", default=True)
    prefetch_factor: int = option("Batches that each worker reads ahead.", default=2, ge=1)
    timeout: float = option(
        "Seconds to wait for a batch before the run ends with an error; 0: no limit.", default=600.0, ge=0
    )
    multiprocessing_context: Literal["fork", "spawn", "forkserver"] | None = option(
        "How workers start; null: the platform's default.", default=None
    )

    choice: str  # how many workers ``num_workers: auto`` gives, for the log

    @classmethod
    def recommend(cls, recipe: Recipe, machine: Machine) -> Recommendation | None:
        """For training beside a device that leaves processors free.

        On CUDA not for a task that declares ``deterministic``: a thread of ``device-prefetch`` reads its samples.
        """
        from fastloop_plugins._task_traits import recipe_traits

        if machine.device == "cpu" or recipe.inference is not None:  # workers may start after the last batch
            return None
        if machine.device == "cuda" and "deterministic" in recipe_traits(recipe):
            return None
        return Recommendation(why="workers prepare batches while the device computes", options={"num_workers": 2})

    @classmethod
    def estimate_speedup(cls, profile: StepProfile, recipe: Recipe) -> SpeedupEstimate | None:
        """The next batch is read during the computation: a step takes as long as the slowest of workers, computation
        and all cores."""
        waiting = max((rank.get("data", 0.0) for rank in profile.ranks), default=profile.region("data"))
        cores = max(1, profile.cores // profile.world_size)
        computing = max(profile.seconds - waiting, 1e-6)
        workers = min(-(-1.25 * waiting // computing), cores) if waiting else 0
        listed = recipe.plugins.get(cls.name) or {}
        if workers < 1 or listed.get("num_workers") in range(int(workers), 10**6):
            return None
        busy = computing * (min(profile.threads, cores) if profile.device == "cpu" else 1) + profile.reading
        return SpeedupEstimate(
            seconds=profile.seconds - max(computing, waiting / workers, busy / cores),
            why=f"A step waits {waiting / profile.seconds:.0%} of its time for batches; "
            f"{counted(int(workers), 'worker')} can read them while the model computes.",
            options={"num_workers": int(workers)},
        )

    @hookimpl
    def configure(self) -> dict[str, Any]:
        workers = self._auto() if self.num_workers == "auto" else self.num_workers
        if not workers:
            return {"num_workers": 0}
        from fastloop_plugins.data._watched_loader import WatchedLoader

        # the options have the names of settings
        return {**self.option_values(), "num_workers": workers, "loader_class": WatchedLoader}

    def _auto(self) -> int:
        processors = platform_support.cores()
        share = processors // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        workers = max(0, min(share - 1, 8))
        self.choice = f"auto is {workers} (of {processors} processors)"
        return workers

    @hookimpl
    def check_run(self) -> None:
        if self.num_workers == "auto":
            self.log.info("%s", self.choice)
