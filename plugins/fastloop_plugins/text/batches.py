"""Batches of token ids, before and after padding."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from fastloop import Batch

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

LENGTHS = "sequence_lengths"
"""Input of a packed batch whose task reads all hidden states: the tokens of each sequence, (sequences,) int64."""


@dataclass(kw_only=True)
class Ragged:
    """A batch before padding: sequences of different lengths. A task's collator pads them, and ``packing`` puts them
    end to end.

    A collator may provide it through a method ``ragged(samples) -> Ragged``.

    Attributes:
        columns: Name -> one array for each sequence, and the value that fills the missing elements of shorter arrays.
            ``input_ids`` is always present and defines the lengths; arrays of other columns are not longer.
        fixed: Name -> a tensor without a token dimension, such as labels of shape (sequences,).
        loss_weight: As in ``Batch``.
        tokens: As in ``Batch``.
        reads_all: Whether the task reads the hidden states of all tokens, and not only of each sequence's first one.
            A batch then has ``sequence_lengths`` if it is packed: see ``text.forward_passes``.
    """

    columns: Mapping[str, tuple[Sequence[NDArray[Any]], int]]
    fixed: dict[str, Tensor] = field(default_factory=dict)
    loss_weight: float
    tokens: int
    reads_all: bool = False


def padded(rows: Sequence[NDArray[Any]], width: int, fill: int, left: bool = False) -> Tensor:
    """Rows of ids as one int64 tensor, padded on the right or on the left."""
    import torch

    filled = np.full((len(rows), width), fill, dtype=np.int64)
    for line, row in zip(filled, rows, strict=True):
        start = width - len(row) if left else 0
        line[start : start + len(row)] = row
    return torch.from_numpy(filled)


class Width:
    """The width of a batch: its longest row, rounded up to the multiple, and at most ``max_length``.

    Longest rows of 5, 9 and 10 tokens with ``max_length`` 10 and a multiple of 8 are padded to 8, 10 and 10.

    Args:
        always: Make every batch ``max_length`` wide.

    Attributes:
        left: Whether padding is on the left. ``check_padding`` sets it, when the collators are built.
    """

    left = False

    def __init__(self, max_length: int, multiple: int | None, always: bool) -> None:
        self.max_length = max_length
        self.multiple = multiple or 1
        self.always = always

    def __call__(self, rows: Sequence[NDArray[Any]]) -> int:
        if self.always:
            return self.max_length
        longest = max(max(len(row) for row in rows), 1)
        return min(-(-longest // self.multiple) * self.multiple, self.max_length)


def mask(rows: Sequence[NDArray[Any]], width: int, left: bool = False) -> Tensor:
    """1 for real tokens of padded rows, and 0 for padding: (rows, width) int64."""
    return padded([np.ones(len(row), dtype=np.int64) for row in rows], width, 0, left)


class PaddedCollator:
    """Pads the batches that ``ragged`` builds. The mask is 1 for real tokens; a batch without padding has no mask.

    Args:
        ragged: Builds a batch of samples before padding. A plugin that packs calls it, too.
        width: The width of batches.
        masked: Whether a batch with padding has a mask: causal attention needs none for padding on the right.
    """

    deterministic = True

    def __init__(self, ragged: Callable[[list[dict[str, Any]]], Ragged], width: Width, masked: bool = True) -> None:
        self.ragged = ragged
        self.width = width
        self.masked = masked

    def __call__(self, samples: list[dict[str, Any]]) -> Batch:
        batch = self.ragged(samples)
        rows = batch.columns["input_ids"][0]
        width = self.width(rows)
        left = self.width.left
        inputs: dict[str, Tensor] = {}
        for name, (column, fill) in batch.columns.items():
            inputs[name] = padded(column, width, fill, left)
        inputs |= batch.fixed
        if self.masked and min(map(len, rows)) < width:
            inputs["attention_mask"] = mask(rows, width, left)
        return Batch(inputs, loss_weight=batch.loss_weight, tokens=batch.tokens)
