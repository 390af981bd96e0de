"""Reads and collates batches in worker processes, so that the device does not wait for data.

    plugins:
      - dataloader-workers: {num_workers: 4}

Batches are the same with any number of workers. ``auto`` leaves one processor of this process's share to training, and takes at most 8.
Random numbers drawn by a dataset are seeded for each batch, so they too are the same for any number of workers from 1 on.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import NonNegativeInt

from fastloop import DataLoaderDraft, Plugin, SpeedupEstimate, hookimpl, option
from fastloop.distributed import launch

if TYPE_CHECKING:
    from fastloop.estimates import StepProfile
    from fastloop.recipe import Recipe

logger = logging.getLogger("fastloop")


class DataLoaderWorkers(Plugin):
    """Worker processes and how far they read ahead."""

    name = "dataloader-workers"
    numerics = "bitwise"
    description = "reads batches in worker processes"

    @dataclass(kw_only=True)
    class Config:
        """Options."""

        num_workers: Annotated[NonNegativeInt | Literal["auto"], option("Worker processes for each training process.")] = "auto"
        persistent_workers: Annotated[bool, option("Keep the workers between epochs.")] = True
        prefetch_factor: Annotated[int, option("Batches that each worker reads ahead.", ge=1)] = 2
        timeout: Annotated[float, option("Seconds to wait for a batch before the run ends with an error; 0: for ever.", ge=0)] = 600.0
        multiprocessing_context: Annotated[
            Literal["fork", "spawn", "forkserver"] | None, option("How workers start; null: the platform's way.")
        ] = None

    @classmethod
    def estimate_speedup(cls, seen: StepProfile, recipe: Recipe) -> SpeedupEstimate | None:
        """Batches are read beside the computing: as long as the workers need, or all processors for both."""
        waiting = max((rank.get("data", 0.0) for rank in seen.ranks), default=seen.region("data"))
        cores = max(1, seen.cores // seen.world_size)
        computing = max(seen.seconds - waiting, 1e-6)
        workers = min(-(-1.25 * waiting // computing), cores) if waiting else 0
        listed = recipe.plugins.get(cls.name) or {}
        if workers < 1 or listed.get("num_workers") in range(int(workers), 10**6):
            return None
        busy = computing * (min(seen.threads, cores) if seen.device == "cpu" else 1) + seen.reading
        return SpeedupEstimate(
            seconds=seen.seconds - max(computing, waiting / workers, busy / cores),
            why=f"A step waits {waiting / seen.seconds:.0%} of its time for batches, which {int(workers)} workers make meanwhile.",
            options={"num_workers": int(workers)},
        )

    @hookimpl
    def configure_dataloader(self, draft: DataLoaderDraft) -> None:
        config: Any = self.config
        workers: int = self._auto() if config.num_workers == "auto" else config.num_workers
        draft.num_workers = workers
        if workers:
            draft.persistent_workers = config.persistent_workers
            draft.prefetch_factor = config.prefetch_factor
            draft.timeout = config.timeout
            draft.multiprocessing_context = config.multiprocessing_context

    def _auto(self) -> int:
        processors = launch.cores()
        share = processors // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self.found = f"auto is {max(0, min(share - 1, 8))} (of {processors} processors)"
        return max(0, min(share - 1, 8))

    @hookimpl
    def check_run(self) -> None:
        if self.config.num_workers == "auto":
            logger.info("dataloader-workers: %s", self.found)
