"""Writes checkpoints in a background thread while training continues.

    plugins:
      - async-save

A save copies the weights and the optimizer state to host memory, and a thread writes the copy. The files are the same as without the
plugin, and as safe; the next step waits only for the copy. Each save waits for the previous one, and the end of the run waits for the last
one. If a write fails, fastloop reports it at the end of the current step, and ``train.on_save_error`` decides what happens. The copy needs
as much host memory as the checkpoint has bytes. Sharded weights (``fsdp``) are written by all processes together, in the foreground.
"""

from __future__ import annotations

import logging
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastloop import Plugin, hookimpl

if TYPE_CHECKING:
    from torch import Tensor

    from fastloop import Run

logger = logging.getLogger("fastloop")


class AsyncSave(Plugin):
    """Writes checkpoints in the background."""

    name = "async-save"
    numerics = "bitwise"
    description = "writes checkpoints in the background"

    @hookimpl
    def write_checkpoint(self, run: Run, folder: Path, model: dict[str, Tensor], state: dict[str, Any]) -> Future[None] | None:
        from torch.distributed.tensor import DTensor

        from fastloop import checkpoint
        from fastloop.checkpoint import resume

        if any(isinstance(tensor, DTensor) for tensor in model.values()):
            logger.info("async-save: the weights are sharded, so checkpoints are written in the foreground")
            return None
        if not run.is_main:
            return None  # only the main process writes
        copies = checkpoint.snapshot(model, state)
        written: Future[None] = Future()

        def write() -> None:
            try:
                resume.write(run, folder, *copies)
                written.set_result(None)
            except BaseException as error:
                written.set_exception(error)

        threading.Thread(target=write, name="async-save", daemon=True).start()  # a run that is killed does not wait for it
        return written
