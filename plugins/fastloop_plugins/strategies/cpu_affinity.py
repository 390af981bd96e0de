"""Pins each process to its own CPU cores, sets its thread count and how threads wait, and flushes denormal numbers to zero.

    plugins:
      - cpu-affinity: {denormals: false}

The processes of a machine (``fastloop train --nproc``, torchrun) divide its cores evenly. Each process is pinned to its share and computes
with one thread for each core. A single process uses all cores that it may run on. Numbers below 1e-38 become zero, since some processors
compute with them a hundred times slower. The plugin restores all settings at the end of the run.

Threads that wait for each other sleep (``wait: passive``). OpenMP's own default keeps them spinning, which is faster for models whose steps
take a few milliseconds. But if another program uses a core, a spinning thread takes the time that the thread it waits for needs. With one
of two cores busy, MiniLM trained 4 times as fast with sleeping threads. `fastloop train` sets the variable before torch starts.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from fastloop import Plugin, Recommendation, SpeedupEstimate, hookimpl, option
from fastloop.runtime import platform_support

if TYPE_CHECKING:
    from fastloop import Run
    from fastloop.estimates import StepProfile
    from fastloop.recipe import Recipe
    from fastloop.runtime.hardware import Machine

logger = logging.getLogger("fastloop")


class CpuAffinity(Plugin):
    """Sets threads, pinning and the handling of denormals."""

    name = "cpu-affinity"
    numerics = "reassociated"
    description = "pins processes to cores, sets their thread count, and lets waiting threads sleep"

    @dataclass(kw_only=True)
    class Config:
        """Options."""

        count: Annotated[int | None, option("Threads of a process; null: one for each of its cores.", ge=1)] = None
        pin: Annotated[bool, option("Pin each process to its own cores (Linux).")] = True
        wait: Annotated[
            Literal["passive", "active"] | None,
            option("How threads wait for each other: asleep (passive), spinning (active), or null: as OpenMP chooses."),
        ] = "passive"
        denormals: Annotated[bool, option("Compute with numbers below 1e-38 instead of flushing them to zero.")] = False

    @classmethod
    def recommend(cls, recipe: Recipe, machine: Machine) -> Recommendation | None:
        """On a CPU, for a pretrained model: its steps are long enough that waking a thread costs little."""
        if machine.device != "cpu" or not recipe.model.get("name"):
            return None
        return Recommendation(why="waiting threads sleep, so another program on the machine slows training less")

    @classmethod
    def estimate_speedup(cls, profile: StepProfile, recipe: Recipe) -> SpeedupEstimate | None:
        share = max(1, profile.cores // profile.world_size)
        if cls.name in recipe.plugins or profile.device != "cpu" or profile.threads >= share:
            return None
        return SpeedupEstimate(
            seconds=profile.computing * (1 - profile.threads / share),
            why=f"A process computes with {profile.threads} threads, and its share of the cores is {share}.",
        )

    @hookimpl
    def environment(self) -> dict[str, str]:
        return {"OMP_WAIT_POLICY": self.config.wait} if self.config.wait else {}

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
            logger.warning("cpu-affinity: this processor cannot flush denormal numbers to zero")
        logger.info("cpu-affinity: %d threads on cores %s", torch.get_num_threads(), ", ".join(map(str, share)))

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
        platform_support.use_processors(self.before["processors"])
