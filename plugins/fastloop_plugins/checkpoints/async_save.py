"""Writes checkpoints while training goes on.

    plugins:
      - async-save

A save copies the weights and the optimizer's state to the host's memory, and a thread writes the copy: the same files as without the
plugin, as safely, and the step after waits for the copy alone. A save waits for the one before it, and the run's end for the last one. What
cannot be written is said at the end of the step in which that turns out, and ``train.on_save_error`` decides. The copy needs as much of the
host's memory as the checkpoint has bytes. Weights in shards (``fsdp``), which processes write together, are written at once.
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
    """Checkpoints are written in the background."""

    name = "async-save"
    numerics = "bitwise"
    description = "writes checkpoints in the background"

    @hookimpl
    def write_checkpoint(self, run: Run, folder: Path, model: dict[str, Tensor], state: dict[str, Any]) -> Future[None] | None:
        from torch.distributed.tensor import DTensor

        from fastloop import checkpoint
        from fastloop.checkpoint import resume

        if any(isinstance(tensor, DTensor) for tensor in model.values()):
            logger.info("async-save: the weights are in shards, so checkpoints are written at once")
            return None
        if not run.is_main:
            return None  # it writes nothing
        copies = checkpoint.snapshot(model, state)
        written: Future[None] = Future()

        def write() -> None:
            try:
                resume.write(run, folder, *copies)
                written.set_result(None)
            except BaseException as error:
                written.set_exception(error)

        threading.Thread(target=write, name="async-save", daemon=True).start()  # a run that ends at once does not wait for it
        return written
