"""Writes checkpoints in a background thread while training continues.

    plugins:
      - async-save

A save copies weights and optimizer state to host memory, and a thread writes the copy. If a write fails,
``train.on_save_error`` decides at the end of the current step.

The copy takes as much host memory as the checkpoint has bytes, page-locked on an accelerator, for the rest of the run.
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
    import torch
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
        self.copies = HostCopies()

    @hookimpl
    def write_checkpoint(
        self, run: Run, folder: Path, model: dict[str, Tensor], state: dict[str, Any]
    ) -> Future[None] | None:
        from torch.distributed.tensor import DTensor

        from fastloop.checkpoint import resume

        sharded = any(isinstance(tensor, DTensor) for tensor in model.values())
        if not (sharded or run.is_main):
            return None  # only the main process writes
        if sharded and self.group is None:
            self.group = run.processes.new_host_group()
        copies, event = snapshot(model, state, self.copies)
        written: Future[None] = Future()

        def write() -> None:
            try:
                if event is not None:
                    event.synchronize()
                resume.write(run, folder, *copies, self.group)
                written.set_result(None)
            except BaseException as error:
                if isinstance(error, SaveError) and not run.is_main:
                    written.set_result(None)  # the main process has the same error; report it once
                else:
                    written.set_exception(error)

        # a run that is killed does not wait for it
        threading.Thread(target=write, name="async-save", daemon=True).start()
        return written


class HostCopies:
    """Copies of tensors in host memory. A later copy with the same name, shape and dtype takes the memory of the
    earlier one."""

    def __init__(self) -> None:
        self.buffers: dict[str, Tensor] = {}

    def copy(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copy tensors to the host. The host does not wait for the device: the numbers are complete when its current
        stream is.

        No later operation changes a number before it is copied: all of them follow the copies on that stream.
        """
        import torch
        from torch.distributed.tensor import DTensor

        copies, buffers = {}, {}
        for name, tensor in tensors.items():
            tensor = tensor.detach()
            if isinstance(tensor, DTensor):
                copies[name] = tensor.to("cpu", copy=True)
                continue
            buffer = self.buffers.get(name)
            if buffer is None or (buffer.shape, buffer.dtype) != (tensor.shape, tensor.dtype):
                pin = tensor.device.type != "cpu" and torch.accelerator.is_available()
                buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pin)
            copies[name] = buffers[name] = buffer.copy_(tensor, non_blocking=True)
        self.buffers = buffers
        return copies


def snapshot(
    model: Mapping[str, Tensor], state: Mapping[str, Any], copies: HostCopies
) -> tuple[tuple[dict[str, Tensor], dict[str, Any]], torch.Event | None]:
    """Copy both to the host, so that later steps do not change them.

    Returns:
        The copies, and the event after which they are complete; None: they are.

    Raises:
        TypeError: ``state`` contains a value that cannot be saved.
    """
    import torch

    from fastloop import checkpoint

    tensors: dict[str, Tensor] = {}
    packed = checkpoint.pack(state, tensors, "state")
    found = copies.copy({f"model.{name}": tensor for name, tensor in model.items()} | tensors)
    event = torch.accelerator.current_stream().record_event() if torch.accelerator.is_available() else None
    weights = {name: found[f"model.{name}"] for name in model}
    return (weights, checkpoint.unpack(packed, {name: found[name] for name in tensors})), event
