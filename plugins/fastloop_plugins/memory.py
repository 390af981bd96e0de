"""Sets the memory allocator up for training: memory that a step has freed is kept for the next one.

    plugins:
      - memory

On Linux (glibc) large tensors are mapped anew at every step and given back to the system when they are freed, so that each of their pages
is zeroed and faulted in again; here freed memory stays with the process. On CUDA, segments of the allocator grow instead of being cut up
when lengths vary. The summary's ``memory`` counts page faults a step, and the CUDA allocator's retries.
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from fastloop import Plugin, hookimpl, option

if TYPE_CHECKING:
    from fastloop import Run
    from fastloop.recipe import Recipe

logger = logging.getLogger("fastloop")

TRIM_THRESHOLD, TOP_PAD, MMAP_MAX = -1, -2, -4
"""Numbers of mallopt(3)."""


class Memory(Plugin):
    """mallopt on a CPU, expandable segments on CUDA."""

    name = "memory"
    parity = "exact"
    configures = "keeps freed memory for the next step"

    @dataclass(kw_only=True)
    class Config:
        """Options."""

        top_pad: Annotated[int, option("MiB by which the heap grows at once (Linux).", ge=0, le=2047)] = 64

    @hookimpl
    def check_recipe(self, recipe: Recipe) -> None:
        """Before torch asks for any memory."""
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
        self.set_up = False
        if platform.libc_ver()[0] == "glibc":
            mallopt = ctypes.CDLL(None).mallopt
            nothing_mapped, nothing_given_back = mallopt(MMAP_MAX, 0), mallopt(TRIM_THRESHOLD, 2**31 - 1)
            self.set_up = bool(nothing_mapped and nothing_given_back and mallopt(TOP_PAD, self.config.top_pad * 2**20))

    @hookimpl
    def before_fit(self, run: Run) -> None:
        if run.device.type == "cpu" and not self.set_up:
            logger.warning("memory: this system's allocator is not glibc's: it stays as it is")
        self.before, self.step = faults(), run.state.step

    @hookimpl
    def write_summary(self, run: Run, summary: dict[str, Any]) -> None:
        import torch

        if not hasattr(self, "before"):
            return
        steps = max(run.state.step - self.step, 1)
        summary["memory"] = {"page_faults_a_step": (faults() - self.before) / steps}
        if run.device.type == "cuda":
            found = torch.cuda.memory_stats(run.device)
            summary["memory"] |= {
                "allocator_retries": found["num_alloc_retries"],
                "reserved_bytes": found["reserved_bytes.all.peak"],
                "allocated_bytes": found["allocated_bytes.all.peak"],
            }


def faults() -> int:
    """Pages that this process was given so far."""
    try:
        import resource
    except ImportError:  # not on this system
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
