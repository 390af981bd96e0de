"""A random order of samples that reads a dataset in blocks, for disks that are slow to read single samples.

An order of the whole dataset reads a page of the disk for each sample. In this order, a process reads each page once an
epoch, together with the pages around it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from numpy.typing import NDArray

MIXED_BLOCKS = 16
"""Blocks whose samples are shuffled together. With a single one, a batch would hold neighbors of the dataset, such as
rows of one class in a sorted file."""


def draw_block_order(size: int, block: int, generator: torch.Generator) -> NDArray[Any]:
    """All ids below ``size`` in a random order, (size,), of 4 bytes each, or 8 in a dataset of 2 billion samples.

    Blocks of ``block`` consecutive ids come in random order. The ids of each ``MIXED_BLOCKS`` of them are shuffled.

    For 10 ids in blocks of 2 and two mixed blocks: the blocks [3 0 4 1 2] have the ids [6 7 0 1 | 8 9 2 3 | 4 5]. They
    are shuffled between the bars: [7 0 6 1 | 2 9 8 3 | 5 4].
    """
    block = min(block, size)
    order: NDArray[Any] = np.empty(size, np.int32 if size < 2**31 else np.int64)
    blocks = torch.randperm(math.ceil(size / block), generator=generator).numpy()
    inside = np.arange(block)
    start = 0
    for first in range(0, len(blocks), MIXED_BLOCKS):
        firsts = blocks[first : first + MIXED_BLOCKS] * block
        ids = (firsts[:, None] + inside).ravel()
        ids = ids[ids < size]  # the last block of the dataset may be shorter
        shuffled = ids[torch.randperm(len(ids), generator=generator).numpy()]
        order[start : start + len(ids)] = shuffled
        start += len(ids)
    return order


class BlockAnnouncer:
    """Announces the blocks of samples that are read in the order of ``draw_block_order``, each once.

    Args:
        announce: The function of ``DatasetProtocol.read_at_random``.
        size: Samples of the dataset.
        block: Samples of a block.
    """

    def __init__(self, announce: Callable[[Sequence[int]], None], size: int, block: int) -> None:
        self.announce = announce
        self.size = size
        self.block = block
        # micro-batches draw from the blocks that are mixed now, and some already from those after them
        self.newest = deque[int](maxlen=2 * MIXED_BLOCKS)

    def __call__(self, ids: Sequence[int]) -> None:
        """Announce the blocks of a micro-batch."""
        for number in sorted({index // self.block for index in ids}):
            if number not in self.newest:
                self.newest.append(number)
                first = number * self.block
                self.announce(range(first, min(first + self.block, self.size)))
