"""Causal attention over a sequence whose tokens are divided over processes."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

NAME = "fastloop_context"
"""The attention implementation, for transformers."""
BLOCK = 1024
"""Queries that share a mask of (queries, keys) booleans: 32 MiB for 32,768 keys."""


class SequenceSlices:
    """The part of each sequence that this process computes, and the state of the current batch.

    A sequence is cut into twice as many slices as there are processes. A process has one from the front and the one at
    the same place from the back, so that all have as many keys to attend to.

    Args:
        group: The process group of the sequence; None: the default group.

    Attributes:
        documents: Index of the document of each token, (B, T); None: a row is one document.
    """

    def __init__(self, size: int, rank: int, group: Any) -> None:
        self.size = size
        self.rank = rank
        self.group = group
        self.places = (rank, 2 * size - 1 - rank)
        self.documents: Tensor | None = None

    def take(self, tensor: Tensor) -> Tensor:
        """This process's columns of (B, T), where T is a multiple of twice the processes: (B, T / processes)."""
        slices = tensor.chunk(2 * self.size, 1)
        return torch.cat([slices[place] for place in self.places], 1)

    def gather(self, tensor: Tensor) -> Tensor:
        """The whole sequence of (B, heads, T / processes, D), in order: (B, heads, T, D)."""
        first_halves = []
        second_halves = []
        for part in _Gather.apply(tensor.contiguous(), self):  # type: ignore[no-untyped-call]
            first, second = part.chunk(2, 2)
            first_halves.append(first)
            second_halves.append(second)
        # the parts of processes 0 and 1 have the slices 0 and 3, 1 and 2
        return torch.cat([*first_halves, *reversed(second_halves)], 2)


class _Gather(torch.autograd.Function):
    """Gathers the tensors of all processes. The gradient of each is summed over the processes."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, slices: SequenceSlices) -> Any:
        ctx.slices = slices
        parts = [torch.empty_like(tensor) for _ in range(slices.size)]
        torch.distributed.all_gather(parts, tensor, group=slices.group)
        return tuple(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        total = torch.stack(gradients)
        torch.distributed.all_reduce(total, group=ctx.slices.group)  # gloo has no reduce-scatter
        return total[ctx.slices.rank], None


def attention(
    slices: SequenceSlices,
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """Has the form of a transformers attention function. The queries are this process's, and so are the keys and values
    before they are gathered.

    Args:
        query: (B, heads, T / processes, D).
        key: (B, key-value heads, T / processes, D).
        value: (B, key-value heads, T / processes, D).
        attention_mask: None: padding is on the right.

    Returns:
        (B, T / processes, heads, D).
    """
    key = slices.gather(key)
    value = slices.gather(value)
    length = key.shape[2] // (2 * slices.size)
    parts = []
    for place, part in zip(slices.places, query.chunk(2, 2), strict=True):
        for number, block in enumerate(torch.split(part, BLOCK, 2)):
            first = place * length + number * BLOCK
            attend = partial(
                _attend, first=first, owners=slices.documents, window=sliding_window, dropout=dropout, scaling=scaling
            )
            # backward makes the mask again: the masks of all blocks and layers would need more memory than all else
            parts.append(checkpoint(attend, block, key, value, use_reentrant=False))
    return torch.cat(parts, 2).transpose(1, 2).contiguous(), None


def _attend(
    block: Tensor,
    key: Tensor,
    value: Tensor,
    first: int,
    owners: Tensor | None,
    window: int | None,
    dropout: float,
    scaling: float | None,
) -> Tensor:
    """The attention of consecutive queries, (B, heads, queries, D), of which the first is the token ``first``."""
    last = first + block.shape[2]
    positions = torch.arange(last, device=key.device)
    row = positions[first:, None]
    column = positions[None]
    allowed = column <= row
    if window is not None:
        allowed &= column > row - window
    if owners is not None:
        allowed = (allowed & (owners[:, first:last, None] == owners[:, None, :last]))[:, None]
    return torch.nn.functional.scaled_dot_product_attention(
        block, key[:, :, :last], value[:, :, :last], allowed, dropout, scale=scaling, enable_gqa=True
    )


def mask(*arguments: Any, **unused: Any) -> None:
    """The mask function of transformers: ``attention`` makes its own masks."""
