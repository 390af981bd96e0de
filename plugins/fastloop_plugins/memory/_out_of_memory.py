"""Out-of-memory errors: recognize one, free what it left behind, and write down what the memory held."""

from __future__ import annotations

import gc
import traceback
from typing import TYPE_CHECKING

from fastloop.recipe import secrets

if TYPE_CHECKING:
    from fastloop import Run


def is_out_of_memory(error: Exception) -> bool:
    """Whether an allocation failed: on a device, or on the host, which has no exception of its own."""
    import torch

    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)


def post_mortem(run: Run, error: Exception, where: str) -> None:
    """What the memory holds, for people, in ``out_of_memory/`` of the run folder."""
    import psutil
    import torch

    folder = run.folder / "out_of_memory"
    folder.mkdir(exist_ok=True)
    name = f"step-{run.state.step + 1}-rank-{run.rank}"
    held = "\n".join(f"{key}: {value}" for key, value in psutil.Process().memory_info()._asdict().items())
    if run.device.type == "cuda":
        held = torch.cuda.memory_summary(run.device)
        torch.cuda.memory._dump_snapshot(str(folder / f"{name}.pickle"))  # type: ignore[no-untyped-call]
    stack = "".join(traceback.format_tb(error.__traceback__))
    (folder / f"{name}.txt").write_text(secrets.hide(f"{where}, step {run.state.step + 1}: {error}\n\n{held}\n\n{stack}"))


def let_go(error: Exception) -> None:
    """Free what failed: its frames hold their tensors."""
    traceback.clear_frames(error.__traceback__)
    gc.collect()
