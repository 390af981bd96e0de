"""Stands for CUDA graphs on a CPU: records the operations of a step, and repeats them on the same tensors.

As in a CUDA graph, numbers of Python are part of the recording, tensors are read and written where they are, and Python
does not run again. A recording computes nothing: weights and random states are afterwards as they were before, and its
results are NaN until the first replay. Operations that read a number from the device are refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from emulated_device import READS, SHAPES, shape_from_values
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class OperationRecorder:
    """Has the methods of ``CudaRecorder``."""

    def __init__(self, device: torch.device) -> None:
        self.recordings: list[Recording] = []

    def compute(self, step: Callable[[], None]) -> None:
        """Compute a step."""
        step()

    def record(self, step: Callable[[], None]) -> Callable[[], None]:
        """Record a step. Returns the function that computes it."""
        recording = Recording()
        random_state = torch.get_rng_state()
        with recording:
            step()
        recording.undo()
        torch.set_rng_state(random_state)
        self.recordings.append(recording)
        return recording.replay


class Recording(TorchDispatchMode):
    """The operations inside a ``with`` block."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, Any, Any, list[tuple[int, Tensor]]]] = []
        self.before: dict[int, tuple[Any, Any]] = {}  # address of a storage -> it, and its bytes before the first write
        self.new: set[int] = set()  # addresses of the storages that the operations have made

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if READS in func.tags or (SHAPES in func.tags and shape_from_values(func, args)):
            raise RuntimeError(f"{func}: operation not permitted when stream is capturing")
        given = set()
        for tensor in tensors_of((args, kwargs)):
            given.add(tensor.untyped_storage().data_ptr())
        for tensor in written(func, args, kwargs):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self.new:
                self.before.setdefault(storage.data_ptr(), (storage, storage.clone()))
        result = func(*args, **kwargs)
        made = []
        for place, leaf in enumerate(tree_leaves(result)):
            if isinstance(leaf, Tensor) and leaf.untyped_storage().data_ptr() not in given:
                made.append((place, leaf))
                self.new.add(leaf.untyped_storage().data_ptr())
        self.operations.append((func, args, kwargs, made))
        return result

    @torch.no_grad()
    def undo(self) -> None:
        """Take back what the operations have written."""
        for storage, content in self.before.values():
            storage.copy_(content)
        for _, _, _, made in self.operations:
            for _, tensor in made:
                if tensor.is_floating_point():
                    tensor.detach().fill_(torch.nan)

    @torch.no_grad()
    def replay(self) -> None:
        """Repeat the operations."""
        for func, args, kwargs, made in self.operations:
            results = tree_leaves(func(*args, **kwargs))
            for place, tensor in made:
                tensor.detach().copy_(results[place])


def tensors_of(value: Any) -> list[Tensor]:
    """The tensors in nested arguments."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def written(func: Any, args: Any, kwargs: dict[str, Any]) -> list[Tensor]:
    """The arguments that an operation changes in place."""
    changed: list[Tensor] = []
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        changed += tensors_of(value)
    return changed
