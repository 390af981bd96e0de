"""Writes checkpoints in a background thread while training continues.

    plugins:
      - async-save

A save copies weights and optimizer state to host memory, and a thread writes the copy. If a write fails,
``train.on_save_error`` decides at the end of the current step.

The copy takes as much host memory as the checkpoint has bytes, page-locked on an accelerator, for the rest of the run.
If that is more than half of the free memory, the run logs it, and writes before training continues.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from fastloop import Plugin, Problem, Recommendation, hookimpl
from fastloop.errors import SaveError
from fastloop.problem import clause
from fastloop_plugins._listed_strategy import gathers_weights

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.distributed import ProcessGroup

    from fastloop import Run
    from fastloop.recipe import Recipe
    from fastloop.runtime.hardware import Machine


SHARE = 0.5
"""Largest share of the free host memory that the copies of a checkpoint may take. Batches and the page cache need some,
too."""


class AsyncSave(Plugin):
    """Writes checkpoints in the background."""

    name = "async-save"
    numerics = "bitwise"

    @classmethod
    def recommend(cls, recipe: Recipe, machine: Machine) -> Recommendation | None:
        """For training on CUDA, where a step needs little of the host's time and memory. Not for sharded models, which
        are large."""
        if machine.device != "cuda" or recipe.inference is not None or gathers_weights(recipe):
            return None
        return Recommendation(why="checkpoints are written while training continues")

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.group: ProcessGroup | None = None  # of the threads: their messages must not mix with those of training
        self.copies = HostCopies()
        self.is_too_large = False

    @hookimpl
    def write_checkpoint(
        self, run: Run, folder: Path, model: dict[str, Tensor], state: dict[str, Any]
    ) -> Future[None] | None:
        from torch.distributed.tensor import DTensor

        from fastloop.checkpoint import saving

        sharded = any(isinstance(tensor, DTensor) for tensor in model.values())
        if not (sharded or run.is_main):
            return None  # only the main process writes
        if sharded and self.group is None:
            self.group = run.processes.new_host_group()
        try:
            copies, event = snapshot(model, state, self.copies)
        except MemoryError as error:
            if not self.is_too_large:
                self.log.warning(
                    Problem(
                        f"{clause(error)}: checkpoints are written before training continues.", code="out-of-memory"
                    )
                )
            self.is_too_large = True
            return None
        written: Future[None] = Future()

        def write() -> None:
            try:
                if event is not None:
                    event.synchronize()
                saving.write(run, folder, *copies, self.group)
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

        Raises:
            MemoryError: The copies would take too much of the free memory. Not for shards, of which every process must
                copy its own.
        """
        import torch
        from torch.distributed.tensor import DTensor

        if not any(isinstance(tensor, DTensor) for tensor in tensors.values()):
            self._check_memory(tensors)
        copies = {}
        buffers = {}
        for name, tensor in tensors.items():
            tensor = tensor.detach()
            if isinstance(tensor, DTensor):
                copies[name] = tensor.to("cpu", copy=True)
                continue
            buffer = self._find_buffer(name, tensor)
            if buffer is None:
                pin = tensor.device.type != "cpu" and torch.accelerator.is_available()
                buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pin)
            copies[name] = buffers[name] = buffer.copy_(tensor, non_blocking=True)
        self.buffers = buffers
        return copies

    def _find_buffer(self, name: str, tensor: Tensor) -> Tensor | None:
        """The memory of an earlier copy, if it fits."""
        buffer = self.buffers.get(name)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            return None
        return buffer

    def _check_memory(self, tensors: Mapping[str, Tensor]) -> None:
        size = sum(tensor.nbytes for name, tensor in tensors.items() if self._find_buffer(name, tensor) is None)
        free = psutil.virtual_memory().available
        if size > SHARE * free:
            raise MemoryError(
                f"a copy of a checkpoint takes {size / 2**20:,.0f} MiB of host memory, and {free / 2**20:,.0f} MiB are "
                "free"
            )


def snapshot(
    model: Mapping[str, Tensor], state: Mapping[str, Any], copies: HostCopies
) -> tuple[tuple[dict[str, Tensor], dict[str, Any]], torch.Event | None]:
    """Copy both to the host, so that later steps do not change them.

    Returns:
        The copies, and the event after which they are complete; None: they are.

    Raises:
        MemoryError: The copies would take too much of the free memory.
        TypeError: ``state`` contains a value that cannot be saved.
    """
    import torch

    from fastloop import checkpoint

    tensors: dict[str, Tensor] = {}
    packed = checkpoint.pack(state, tensors, "state")
    copied = copies.copy({f"model.{name}": tensor for name, tensor in model.items()} | tensors)
    event = torch.accelerator.current_stream().record_event() if torch.accelerator.is_available() else None
    weights = {name: copied[f"model.{name}"] for name in model}
    return (weights, checkpoint.unpack(packed, {name: copied[name] for name in tensors})), event
