"""Gives each process its own processors of a CPU, and treats denormal numbers as zero.

    plugins:
      - cpu-affinity: {denormals: false}

Several processes of a machine (``fastloop train --nproc``, torchrun) share its processors out in equal parts; each is pinned to its part
and computes with as many threads. One process takes all it may use. Numbers below 1e-38, which some processors compute a hundred times
slower, become zero. All is put back when the run ends.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from fastloop import Plugin, SpeedupEstimate, hookimpl, option
from fastloop.runtime import platform_support

if TYPE_CHECKING:
    from fastloop import Run
    from fastloop.estimates import StepProfile
    from fastloop.recipe import Recipe

logger = logging.getLogger("fastloop")


class CpuAffinity(Plugin):
    """Threads, pinning, denormals."""

    name = "cpu-affinity"
    numerics = "reassociated"
    description = "shares the processors out"

    @dataclass(kw_only=True)
    class Config:
        """Options."""

        count: Annotated[int | None, option("Threads of a process; null: one for each of its processors.", ge=1)] = None
        pin: Annotated[bool, option("Keep each process on its own processors (Linux).")] = True
        denormals: Annotated[bool, option("Compute with numbers below 1e-38 instead of taking them for zero.")] = False

    @classmethod
    def estimate_speedup(cls, seen: StepProfile, recipe: Recipe) -> SpeedupEstimate | None:
        share = max(1, seen.cores // seen.world_size)
        if cls.name in recipe.plugins or seen.device != "cpu" or seen.threads >= share:
            return None
        return SpeedupEstimate(
            seconds=seen.computing * (1 - seen.threads / share),
            why=f"A process computes with {seen.threads} threads, and its share of the processors is {share}.",
        )

    @hookimpl
    def before_fit(self, run: Run) -> None:
        import torch

        pinned = platform_support.processors()
        local, size = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        share = pinned[local * len(pinned) // size : (local + 1) * len(pinned) // size] or pinned
        self.before: dict[str, Any] = {"threads": torch.get_num_threads(), "processors": pinned}
        if self.config.pin and size > 1:
            platform_support.use_processors(share)
        torch.set_num_threads(self.config.count or len(share))
        if not self.config.denormals and not torch.set_flush_denormal(True):
            logger.warning("cpu-affinity: this processor cannot take denormal numbers for zero")
        logger.info("cpu-affinity: %d on processors %s", torch.get_num_threads(), ", ".join(map(str, share)))

    @hookimpl
    def write_summary(self, summary: dict[str, Any]) -> None:
        import torch

        if not hasattr(self, "before"):
            return
        summary["threads"] = torch.get_num_threads()
        torch.set_num_threads(self.before["threads"])
        torch.set_flush_denormal(False)
        platform_support.use_processors(self.before["processors"])
