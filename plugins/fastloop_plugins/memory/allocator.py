"""Tunes the memory allocator for training: freed memory stays in the process, so steps do not page-fault.

    plugins:
      - allocator

On Linux, ``fastloop train`` restarts itself with tcmalloc if that is installed (Debian: libtcmalloc-minimal4), else
with glibc's malloc configured to keep freed memory. From Python, a warning shows what to set.

oneDNN keeps the kernels that it compiles for each number of tokens, in two caches of 1,024 kernels. Batches of many
lengths fill them: 30 numbers of tokens in three linear layers took 157 MiB. With the environment variables
``ONEDNN_PRIMITIVE_CACHE_CAPACITY=128`` and ``LRU_CACHE_CAPACITY=64``, they took 54 MiB. A kernel that a cache has
dropped is compiled again, in about 1 ms.

On CUDA, the plugin sets ``expandable_segments:True``. A user's own value and a backend other than ``native`` are kept.
"""

from __future__ import annotations

import ctypes.util
import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fastloop import Plugin, PluginError, Problem, Recommendation, SpeedupEstimate, hookimpl, option

if TYPE_CHECKING:
    from fastloop import Run
    from fastloop.recipe import Recipe
    from fastloop.runtime.hardware import Machine
    from fastloop.speedup_estimates import StepProfile


LIBRARIES = {"tcmalloc": ("tcmalloc_minimal", "tcmalloc"), "jemalloc": ("jemalloc",)}
"""Replacements for malloc -> names of their libraries."""
SETTINGS = {
    # otherwise it reports each allocation of a gigabyte on stderr
    "tcmalloc": {"TCMALLOC_LARGE_ALLOC_REPORT_THRESHOLD": str(2**40)},
    "jemalloc": {"MALLOC_CONF": "dirty_decay_ms:-1,muzzy_decay_ms:-1"},
}
TUNABLES = {"mmap_max": 0, "trim_threshold": 2**40, "top_pad": 2**26, "arena_max": 1, "tcache_count": 0, "mxfast": 0}
"""Tunables of glibc.malloc. Without the last two, remainders of aligned blocks prevent the merging of their neighbours.
A freed block is then too small for the next block of its size (glibc bug 14581, until 2.38)."""
CUDA_SETTINGS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Environment variables of CUDA's allocator. Torch 2.10 to 2.13 reads the first one that is set
(CUDAAllocatorConfig.h)."""
SEGMENTS = "expandable_segments"


class Allocator(Plugin):
    """Keeps freed memory in the process, for the next step.

    Sets tcmalloc or glibc's tunables on a CPU, and expandable segments on CUDA.
    """

    name = "allocator"
    numerics = "bitwise"

    allocator: Literal["auto", "glibc", "tcmalloc", "jemalloc"] = option(
        "Allocator of CPU memory; auto: tcmalloc if installed, else glibc.", default="auto"
    )

    before: int  # page faults of the process when training began
    step: int  # the step at which training began

    @classmethod
    def recommend(cls, recipe: Recipe, machine: Machine) -> Recommendation | None:
        """On Linux, for a CPU."""
        if machine.device != "cpu" or platform.system() != "Linux":
            return None
        return Recommendation(why="freed memory stays in the process for the next step")

    @classmethod
    def estimate_speedup(cls, profile: StepProfile, recipe: Recipe) -> SpeedupEstimate | None:
        if cls.name in recipe.plugins or profile.device != "cpu":
            return None
        return SpeedupEstimate(
            seconds=profile.page_faults * profile.fault_seconds,
            why=f"{profile.page_faults:,.0f} memory pages are returned to the system and faulted in again in "
            "each step.",
        )

    @hookimpl
    def environment(self, recipe: Recipe) -> dict[str, str]:
        if recipe.train.device != "cpu" and Path("/dev/nvidiactl").exists():
            return (
                {} if any(name in os.environ for name in CUDA_SETTINGS) else {"PYTORCH_ALLOC_CONF": f"{SEGMENTS}:True"}
            )
        if platform.libc_ver()[0] != "glibc":
            return {}
        wanted = "tcmalloc" if self.allocator == "auto" else self.allocator
        library = next(filter(None, map(ctypes.util.find_library, LIBRARIES.get(wanted, ()))), None)
        if library is not None:
            return {"LD_PRELOAD": library} | SETTINGS[wanted]
        if self.allocator == wanted and wanted != "glibc":
            raise PluginError(
                f"{wanted} is not installed.",
                code="not-installed",
                place=f"{recipe.where}: plugins.allocator.allocator",
                remedy="Install it, or use auto.",
            )
        return {"GLIBC_TUNABLES": ":".join(f"glibc.malloc.{name}={value}" for name, value in TUNABLES.items())}

    @hookimpl
    def before_prepare(self, run: Run) -> None:
        """Set expandable segments while the model is still on the CPU, before CUDA memory is reserved."""
        if run.device.type == "cuda":
            grow_segments()

    @hookimpl
    def before_fit(self, run: Run) -> None:
        if run.device.type == "cpu":
            wanted = self.environment(run.recipe)
            missing = [f"{name}={value}" for name, value in wanted.items() if name not in os.environ]
            if missing:
                self.log.warning(
                    Problem(
                        f"freed memory is returned to the system, since Python was started without "
                        f"{' '.join(missing)}.",
                        code="no-effect",
                    )
                )
            elif not wanted:
                self.log.warning(
                    Problem("this system's allocator is not glibc's: it stays as it is.", code="no-effect")
                )
        from fastloop.runtime.platform_support import page_faults

        self.before = page_faults()
        self.step = run.state.step

    @hookimpl
    def write_summary(self, run: Run, summary: dict[str, Any]) -> None:
        import torch

        from fastloop.runtime.platform_support import page_faults

        if not hasattr(self, "before"):
            return
        steps = max(run.state.step - self.step, 1)
        preloaded = os.environ.get("LD_PRELOAD", "")
        allocator = next((name for name in LIBRARIES if name in preloaded), platform.libc_ver()[0] or "the system's")
        summary["allocator"] = {"allocator": allocator, "page_faults_a_step": (page_faults() - self.before) / steps}
        if run.device.type == "cuda":
            statistics = torch.cuda.memory_stats(run.device)
            summary["allocator"] |= {
                "allocator_retries": statistics["num_alloc_retries"],
                "reserved_bytes": statistics["reserved_bytes.all.peak"],
                "allocated_bytes": statistics["allocated_bytes.all.peak"],
            }


def grow_segments() -> None:
    """Add ``expandable_segments:True`` to the settings of torch's allocator, for the lifetime of this process."""
    import torch

    current = next((os.environ[name] for name in CUDA_SETTINGS if name in os.environ), "")
    if SEGMENTS not in current and "backend:" not in current.replace("backend:native", ""):
        torch._C._accelerator_setAllocatorSettings(",".join(filter(None, [current, f"{SEGMENTS}:True"])))
