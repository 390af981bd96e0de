"""Out-of-memory errors: recognize one, free its tensors, and write a report of the memory's contents."""

from __future__ import annotations

import gc
import traceback
from typing import TYPE_CHECKING

from fastloop.runtime import files

if TYPE_CHECKING:
    from fastloop import Run


def is_out_of_memory(error: Exception) -> bool:
    """Whether an allocation failed on a device or on the host. The host has no exception type of its own."""
    import torch

    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)


def write_memory_report(run: Run, error: Exception, where: str, step: int) -> None:
    """Write the contents of the memory to ``out_of_memory/`` in the run folder, for users to read.

    Args:
        where: The split.
        step: The step that failed, or the one before the evaluation that failed.
    """
    import psutil
    import torch

    folder = run.folder / "out_of_memory"
    folder.mkdir(exist_ok=True)
    name = f"step-{step}-rank-{run.rank}"
    contents = "\n".join(f"{key}: {value}" for key, value in psutil.Process().memory_info()._asdict().items())
    if run.device.type == "cuda":
        contents = torch.cuda.memory_summary(run.device)
        torch.cuda.memory._dump_snapshot(str(folder / f"{name}.pickle"))  # type: ignore[no-untyped-call]
    stack = "".join(traceback.format_tb(error.__traceback__))
    files.write(folder / f"{name}.txt", f"{where}, step {step}: {error}\n\n{contents}\n\n{stack}")


def free_tensors(error: Exception) -> None:
    """Free the tensors of a failed step, which the frames of its traceback hold."""
    traceback.clear_frames(error.__traceback__)
    gc.collect()
