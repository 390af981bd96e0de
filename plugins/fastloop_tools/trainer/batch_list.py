"""A list of batches that a user gives to ``Trainer`` in place of a loader."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from torch import Tensor
from torch.utils._pytree import tree_flatten
from torch.utils.data import Dataset

from fastloop.errors import UsageError

log = logging.getLogger("fastloop")


class BatchList(Dataset[Any]):
    """The samples of a list of batches, in order.

    Args:
        batches: Batches of tensors. All tensors of a batch have as many rows as it has samples.
        name: Name of the argument, for messages: ``train_loader``.

    Attributes:
        batch_size: Samples of each batch. The last one may have fewer.

    Raises:
        UsageError: The batches differ in size, or one of them cannot be divided into samples.
    """

    def __init__(self, batches: Sequence[Any], name: str) -> None:
        self.batches = batches
        sizes = []
        for number, batch in enumerate(batches):
            rows = _rows(batch)
            if rows is None:
                raise UsageError(
                    f"found a list of batches, and the tensors of batch {number} have no common number of rows.",
                    code="wrong-dataset",
                    place=name,
                    remedy="Give a list of samples and batch_size=, or a DataLoader.",
                )
            sizes.append(rows)
        self.batch_size = sizes[0]
        self.size = sum(sizes)
        if any(size != self.batch_size for size in sizes[:-1]) or sizes[-1] > self.batch_size:
            different = next(size for size in sizes if size != self.batch_size)
            raise UsageError(
                code="wrong-dataset",
                place=name,
                found=f"a list of batches with {self.batch_size} and {different} samples",
                expected="one size, and at most as many samples in the last batch",
                remedy="Give a list of samples and batch_size=, or a DataLoader.",
            )
        log.info(
            "%s: a list of %d batches of %d samples. For a list of samples, give batch_size=",
            name,
            len(batches),
            self.batch_size,
        )

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        # with batches of 20, sample 45 is row 5 of batch 2
        number, row = divmod(index, self.batch_size)
        return _take_row(self.batches[number], row)


def kind_of_elements(element: Any) -> Literal["samples", "batches", "unclear"]:
    """Whether a list or an iterable that begins with ``element`` holds samples or batches.

    In a batch, all tensors have the same number of rows. The inputs and the target of a sample seldom do. For example:

    * inputs (8,), target 2: samples;
    * inputs (8,), target (1,): samples;
    * inputs (20, 8), targets (20,): batches;
    * inputs (8,), targets (8,): an autoencoder's sample, or a batch of 8 numbers.
    """
    rows = _rows(element)
    leaves, _ = tree_flatten(_plain(element))
    if rows is None or len(leaves) < 2:
        return "samples"
    is_matrix = any(leaf.dim() > 1 for leaf in leaves)
    return "batches" if is_matrix and rows > 1 else "unclear"


def _rows(batch: Any) -> int | None:
    """The number of rows that all tensors have; None: they differ, or there is another value."""
    leaves, _ = tree_flatten(_plain(batch))
    if not leaves or not all(isinstance(leaf, Tensor) and leaf.dim() for leaf in leaves):
        return None
    sizes = {len(leaf) for leaf in leaves}
    return sizes.pop() if len(sizes) == 1 else None


def _plain(batch: Any) -> Any:
    """A mapping of any class as a dict, which ``tree_flatten`` knows."""
    return dict(batch) if isinstance(batch, Mapping) else batch


def _take_row(batch: Any, row: int) -> Any:
    if isinstance(batch, Tensor):
        return batch[row]
    if isinstance(batch, Mapping):
        return {name: _take_row(value, row) for name, value in batch.items()}
    return tuple(_take_row(value, row) for value in batch)
