"""Token ids in memory, and how they become padded batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor


HASHED, PIECE = 2**24, 2**14
"""How many token ids a fingerprint is made of at most, about, and in pieces of how many."""


class Sequences:
    """A map-style dataset of token ids, kept in one array: reading a sample is a slice, and workers share the memory.

    Args:
        ids: Token ids of all samples, end to end. Mapped from a file, only what is read is in memory.
        lengths: Tokens of every sample.
        labels: A label for every sample, where there are any.

    Attributes:
        lengths: Tokens of every sample, for what groups or packs them.
    """

    def __init__(self, ids: NDArray[np.int32], lengths: NDArray[np.int64], labels: NDArray[np.int64] | None = None) -> None:
        self.ids, self.lengths, self.ends = ids, lengths, np.cumsum(lengths)
        self.labels = labels

    def __len__(self) -> int:
        return len(self.ends)

    def fingerprint(self) -> str:
        """A hash of lengths, labels and token ids; of many ids, of pieces evenly spread."""
        import hashlib

        found = hashlib.blake2b(self.lengths.tobytes(), digest_size=8)
        if self.labels is not None:
            found.update(self.labels.tobytes())
        for start in range(0, len(self.ids), PIECE * -(-len(self.ids) // HASHED or 1)):
            found.update(self.ids[start : start + PIECE].tobytes())
        return found.hexdigest()

    def __getitem__(self, index: int) -> dict[str, Any]:
        end = self.ends[index]
        sample: dict[str, Any] = {"input_ids": self.ids[end - self.lengths[index] : end]}
        if self.labels is not None:
            sample["label"] = int(self.labels[index])
        return sample


def padded(rows: Sequence[NDArray[Any]], width: int, fill: int) -> Tensor:
    """Rows of ids as one int64 tensor, filled up on the right."""
    import torch

    filled = np.full((len(rows), width), fill, dtype=np.int64)
    for line, row in zip(filled, rows, strict=True):
        line[: len(row)] = row
    return torch.from_numpy(filled)


class Width:
    """How wide to make a batch: its longest row, up to the next multiple, never more than ``max_length``.

    Args:
        always: Make every batch ``max_length`` wide.
    """

    def __init__(self, max_length: int, multiple: int | None, always: bool) -> None:
        self.max_length, self.multiple, self.always = max_length, multiple or 1, always

    def __call__(self, rows: Sequence[NDArray[Any]]) -> int:
        if self.always:
            return self.max_length
        longest = max(max(len(row) for row in rows), 1)
        return min(-(-longest // self.multiple) * self.multiple, self.max_length)


@dataclass(kw_only=True)
class Ragged:
    """A batch before its layout: sequences of unequal length, which a task's collator pads and ``packing`` puts end to end.

    A collator offers it as a method ``ragged(samples) -> Ragged``.

    Attributes:
        columns: Name -> one array for each sequence, and the value that fills what a shorter array leaves. ``input_ids`` is always there
            and gives the lengths; no array of another column is longer.
        fixed: Name -> a tensor without tokens, such as labels of shape (sequences,).
        loss_weight: As in ``Batch``.
        tokens: As in ``Batch``.
    """

    columns: Mapping[str, tuple[Sequence[NDArray[Any]], int]]
    fixed: dict[str, Tensor] = field(default_factory=dict)
    loss_weight: int
    tokens: int
