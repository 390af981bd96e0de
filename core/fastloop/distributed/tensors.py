"""Convert between full and sharded tensors, and tensors to bytes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor


def gather_full(tensor: Tensor) -> Tensor:
    """The full tensor. If it is a ``DTensor``, every process must call this."""
    full: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full


def as_bytes(tensor: Tensor) -> Tensor:
    """The elements of a tensor as bytes, in row-major order: 1-dim, uint8, on its device. NumPy has no bfloat16, and as
    bytes, NaN equals NaN. It shares the memory of a contiguous tensor."""
    return tensor.detach().resolve_conj().reshape(-1).contiguous().view(torch.uint8)


def in_memory_order(tensor: Tensor) -> Tensor:
    """The tensor with its dimensions in the order of their strides. If its elements lie side by side in memory, it is
    contiguous then, and can be flattened without a copy.

    A weight of shape (8, 4, 3, 3) in channels-last has the strides (36, 1, 12, 4). In the order of its strides, it has
    the shape (8, 3, 3, 4).
    """
    if tensor.is_contiguous():
        return tensor
    return tensor.permute(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))


def elements_at(tensor: Tensor, places: Tensor) -> Tensor:
    """The elements at some places of the flattened tensor, in row-major order, without a copy of all: (places,).

    Args:
        places: (places,) int64, on the device of the tensor.
    """
    if tensor.is_contiguous():
        return tensor.view(-1)[places]
    return tensor[torch.unravel_index(places, tensor.shape)]


def total_norm(tensors: Iterable[Tensor]) -> Tensor:
    """The 2-norm of tensors as if they were one vector: 0-dim, on the first one's device. They may be sparse.

    If some are ``DTensor``, every process must call this; they may be sharded over different meshes.
    """
    groups: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        mesh = tensor.device_mesh if isinstance(tensor, DTensor) else None
        groups.setdefault(mesh, []).append(tensor.coalesce().values() if tensor.is_sparse else tensor)
    norms = [gather_full(torch.nn.utils.get_total_norm(group)) for group in groups.values()]
    return norms[0] if len(norms) == 1 else torch.nn.utils.get_total_norm(norms)


def shard_like(value: Any, target: Any) -> Any:
    """Shard a full tensor like ``target``, without communication. Returns other values unchanged."""
    if (
        not isinstance(target, DTensor)
        or not isinstance(value, Tensor)
        or isinstance(value, DTensor)
        or value.shape != target.shape
    ):
        return value
    return distribute_tensor(value.to(target.device), target.device_mesh, target.placements, src_data_rank=None)
