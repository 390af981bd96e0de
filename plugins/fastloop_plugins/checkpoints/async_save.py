"""Writes checkpoints in a background thread while training continues.

    plugins:
      - async-save

A save copies the weights and the optimizer state to host memory, and a thread writes the copy. The files are the same as without the
plugin, and as safe; the next step waits only for the copy. Each save waits for the previous one, and the end of the run waits for the last
one. If a write fails, fastloop reports it at the end of the current step, and ``train.on_save_error`` decides what happens. The copy needs
as much host memory as the checkpoint has bytes. With sharded weights (``fsdp``, ``deepspeed``, ``tensor-parallel``), each process copies
and writes its own shards, so each needs the memory of its part.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastloop import Plugin, hookimpl
from fastloop.errors import SaveError

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

    from fastloop import Run


class AsyncSave(Plugin):
    """Writes checkpoints in the background."""

    name = "async-save"
    numerics = "bitwise"
    description = "writes checkpoints in the background"

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.group: ProcessGroup | None = None  # of the threads: their messages must not mix with those of training

    @hookimpl
    def write_checkpoint(self, run: Run, folder: Path, model: dict[str, Tensor], state: dict[str, Any]) -> Future[None] | None:
        import torch
        from torch.distributed.tensor import DTensor

        from fastloop.checkpoint import resume

        sharded = any(isinstance(tensor, DTensor) for tensor in model.values())
        if not (sharded or run.is_main):
            return None  # only the main process writes
        if sharded and self.group is None:
            self.group = torch.distributed.new_group(backend="gloo")
        copies = snapshot(model, state)
        written: Future[None] = Future()

        def write() -> None:
            try:
                resume.write(run, folder, *copies, self.group)
                written.set_result(None)
            except BaseException as error:
                if isinstance(error, SaveError) and not run.is_main:
                    written.set_result(None)  # the main process has the same error; report it once
                else:
                    written.set_exception(error)

        threading.Thread(target=write, name="async-save", daemon=True).start()  # a run that is killed does not wait for it
        return written


def snapshot(model: Mapping[str, Tensor], state: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Copy both to the CPU, so that later steps do not change them.

    Raises:
        TypeError: ``state`` contains a value that cannot be saved.
    """
    from fastloop import checkpoint

    tensors: dict[str, Tensor] = {}
    packed = checkpoint.pack(state, tensors, "state")
    copies = {name: tensor.to("cpu", copy=True) for name, tensor in tensors.items()}
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in model.items()}, checkpoint.unpack(packed, copies)
