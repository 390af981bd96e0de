"""Arrays that are mapped from a file, and when the system reads their parts from the disk."""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


class RandomReads:
    """Reads parts of a mapped array in random order.

    By default, the system reads megabytes around each page that is not in memory. That is fast for an array that is
    read from its start to its end, and reads nearly everything in vain for rows in random order. This class has the
    system read only the pages that the process needs, and begin with those of later rows while it uses earlier ones.
    It changes no value.

    Args:
        array: An array of one dimension in ``mapping``.
        mapping: The memory that it is in; see ``mapping_of``.
    """

    def __init__(self, array: NDArray[Any], mapping: mmap.mmap) -> None:
        self.mapping, self.item = mapping, array.strides[0]
        self.first = _address(array) - _address(np.frombuffer(mapping, np.uint8))
        self.end = self.first + len(array) * self.item
        mapping.madvise(mmap.MADV_RANDOM)

    def start(self, starts: NDArray[np.int64], ends: NDArray[np.int64]) -> None:
        """Have the system begin to read parts, which starts and ends of elements give, without waiting for it."""
        first = self.first + starts * self.item
        first -= first % mmap.PAGESIZE  # advice is for whole pages
        last = np.minimum(self.first + ends * self.item, self.end)
        for start, size in zip(first.tolist(), (last - first).tolist(), strict=True):
            if size > 0:
                self.mapping.madvise(mmap.MADV_WILLNEED, start, size)


def mapping_of(array: NDArray[Any]) -> mmap.mmap | None:
    """The mapping that an array is in. None: it is in memory, or the platform accepts no advice."""
    owner: Any = array
    while isinstance(owner, np.ndarray):
        owner = owner.base
    return owner if isinstance(owner, mmap.mmap) and hasattr(owner, "madvise") else None


def _address(array: NDArray[Any]) -> int:
    address: int = array.__array_interface__["data"][0]
    return address
