"""Tensors that processes hold in shards."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor


def gather_full(tensor: Tensor) -> Tensor:
    """The full tensor. If it is a ``DTensor``, every process must call this."""
    if not isinstance(tensor, DTensor):
        return tensor
    full: Tensor = tensor.full_tensor()
    return full


def shard_like(value: Any, target: Any) -> Any:
    """A full tensor sharded as ``target`` is, without communication; anything else as it is."""
    if not isinstance(target, DTensor) or not isinstance(value, Tensor) or isinstance(value, DTensor) or value.shape != target.shape:
        return value
    return distribute_tensor(value.to(target.device), target.device_mesh, target.placements, src_data_rank=None)
