"""The rows of a split: their values by column on a disk, and for each row a hash and other numbers."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from fastloop_plugins._mapped import GrowingArray, take
from fastloop_plugins.rows.column import Column, Tuples, keep_rows

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Hashes = NDArray[np.uint64]
    """(rows, 2) 128 bits of each row."""


@dataclass
class Rows:
    """The rows of one split.

    Attributes:
        columns: Name -> values.
        hashes: (rows, 2) uint64, a hash of the values of each row.
        characters: (rows,) int32, those of the row's texts. Blank texts count as empty.
        labels: The label of each row, if the task has labels: 0..n-1, or as ``text.targets`` reads them.
        sources: The number of each row's source, with ``data.sources``.
        numbers: (rows,) int64, the number of each row among all rows of the split's tables, from 0; None: not kept.
    """

    columns: Mapping[str, Column]
    hashes: Hashes
    characters: NDArray[np.int32]
    labels: NDArray[Any] | None = None
    sources: NDArray[np.int64] | None = None
    numbers: NDArray[np.int64] | None = None

    @property
    def texts(self) -> Sequence[Any]:
        """Each row: the value of the only column, or a tuple of the values of several."""
        columns = list(self.columns.values())
        if len(columns) == 1:
            return columns[0]
        return Tuples(columns)

    def __len__(self) -> int:
        return len(self.hashes)

    def keep(self, ids: NDArray[np.int64]) -> Rows:
        """The rows with these ids."""
        return replace(
            self,
            columns=keep_rows(self.columns, ids),
            hashes=take(self.hashes, ids),
            characters=take(self.characters, ids),
            labels=None if self.labels is None else take(self.labels, ids),
            sources=None if self.sources is None else take(self.sources, ids),
            numbers=None if self.numbers is None else take(self.numbers, ids),
        )


@dataclass
class BlankTexts:
    """The blank texts of a column.

    Attributes:
        first: The first row with one, counted from 0.
    """

    count: int = 0
    first: int = 0


class RowsBuilder:
    """Collects the rows of a split, a block at a time.

    Attributes:
        count: Rows so far.
        blank: Column -> its blank texts.
    """

    def __init__(self) -> None:
        self.count = 0
        self.blank: dict[str, BlankTexts] = {}
        self._columns: dict[str, Column] = {}
        self._hashes = GrowingArray(np.uint64, 2)
        self._characters = GrowingArray(np.int32)

    def add(self, block: Mapping[str, list[Any]]) -> None:
        """Add rows, by column."""
        values = list(block.values())
        rows = values[0] if len(values) == 1 else list(zip(*values, strict=True))
        characters = np.zeros(len(rows), np.int32)
        for name, column in block.items():
            self._columns.setdefault(name, Column()).append_block(column)
            sizes = [len(text) if isinstance(text, str) and not text.isspace() else 0 for text in column]
            characters += np.array(sizes, np.int32)
            self._count_blank(name, sizes)
        self._hashes.extend(hash_rows(rows))
        self._characters.extend(characters)
        self.count += len(rows)

    def finish(self) -> Rows:
        """All rows."""
        return Rows(self._columns, self._hashes.finish(), self._characters.finish())

    def _count_blank(self, name: str, sizes: list[int]) -> None:
        blank = self.blank.setdefault(name, BlankTexts())
        count = sizes.count(0)
        if count and not blank.count:
            blank.first = self.count + sizes.index(0)
        blank.count += count


def hash_rows(rows: Iterable[Any]) -> Hashes:
    """(rows, 2) a hash of each row: a text, or values with a ``repr``."""
    digests = []
    for row in rows:
        content = row if isinstance(row, str) else repr(row)
        digests.append(hashlib.blake2b(content.encode("utf-8", "surrogatepass"), digest_size=16).digest())
    return np.frombuffer(b"".join(digests), np.uint64).reshape(-1, 2)
