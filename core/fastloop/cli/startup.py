"""The start of a command: the machine before torch is imported, the garbage collector during imports, and the run."""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from fastloop.distributed.ranks import world_size
from fastloop.plugins.installed import entry_points
from fastloop.plugins.plugin import Plugin
from fastloop.plugins.resolve import ResolvedRecipe, check_requirements
from fastloop.runtime.hardware import Machine

if TYPE_CHECKING:
    from fastloop.run import Run

GC_THRESHOLD = 50_000
"""New objects between two garbage collections while libraries are imported."""


@contextmanager
def reduced_gc() -> Iterator[None]:
    """Collect garbage less often while torch is imported and a run is built. This saves an eighth of the startup time.

    Then freeze the objects: later collections ignore them, and workers do not copy their pages."""
    original = gc.get_threshold()
    reduced = (GC_THRESHOLD, *original[1:])
    gc.set_threshold(*reduced)
    try:
        yield
        gc.freeze()
    finally:
        if gc.get_threshold() == reduced:  # otherwise a plugin has set it
            gc.set_threshold(*original)


@contextmanager
def start_run(resolved: ResolvedRecipe, extra: Sequence[Plugin] = (), resume: Path | None = None) -> Iterator[Run]:
    """``open_run`` for a command: check the requirements on this machine, and build the run with ``reduced_gc``."""
    with ExitStack() as stack:
        with reduced_gc():
            check_requirements(resolved)
            from fastloop.lifecycle import open_run  # only here: it imports torch, and errors of the recipe come before

            run = stack.enter_context(open_run(resolved, extra, resume))
        yield run


ACCELERATORS = ("nvidiactl", "dxg", "kfd", "accel", "dri/renderD128", "davinci0", "hpu")
"""Entries of /dev of which a Linux machine with an accelerator has one: CUDA, WSL, ROCm, XPU and others."""


def cpu_machine(device: str) -> Machine | None:
    """This machine, without torch and without a name, if it trains on the CPU; None: torch is imported anyway, or only
    torch knows.

    A process that restarts itself for its environment decides with it, so that torch is imported only once.

    Args:
        device: ``train.device`` of the recipe.
    """
    devices, processor = Path("/dev"), Path("/proc/cpuinfo")
    if "torch" in sys.modules or not processor.exists():
        return None
    if device != "cpu" and (entry_points("torch.backends") or any((devices / name).exists() for name in ACCELERATORS)):
        return None
    flags = next((line for line in processor.read_text().splitlines() if line.startswith("flags")), "").split()
    fast = ("bf16",) if {"avx512_bf16", "amx_tile"} & {*flags} else ()
    return Machine("cpu", "", ("fp32", "bf16"), fast, world_size())


def started_from(path: Path) -> Path:
    """The recipe that a run was started with, given the ``recipe.yaml`` of its folder, whose paths may be relative to
    that recipe.

    Any other recipe, or one whose start is unknown: ``path``.
    """
    found = None
    if path.name == "recipe.yaml":
        try:
            found = json.loads((path.parent / "summary.json").read_text(encoding="utf-8")).get("recipe")
        except (OSError, ValueError, AttributeError):
            return path
    return Path(found) if isinstance(found, str) and Path(found).is_file() else path
