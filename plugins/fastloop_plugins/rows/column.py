"""Columns of values that may exceed memory: blocks of them in an anonymous temporary file."""

from __future__ import annotations

import os
import pickle
import tempfile
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from threading import local
from typing import IO, TYPE_CHECKING, Any
from weakref import ref

import numpy as np

from fastloop_plugins._mapped import take, temporary_folder, unwritable_rows
from fastloop_plugins.rows.file import BLOCK

if TYPE_CHECKING:
    from numpy.typing import NDArray

IN_MEMORY = 2**24
"""Bytes of all columns together that stay in memory: small data is never written to a disk."""
StoredBlock = list[Any] | tuple[int, int]
"""A block of a store: its values, or the offset and the size of its bytes."""
CURRENT = local()
"""The store of the columns that are alive in a thread."""


class Store:
    """Blocks of values: in memory, or, if they are large, in a file without a name, which goes with its columns.

    The file is in the folder of ``token-cache`` or that of temporary files. A process that is forked reads the store of
    its parent, and writes to a store of its own: both would append to one file.
    """

    def __init__(self) -> None:
        self.process = os.getpid()
        self.folder = temporary_folder()
        self._size = 0
        self._held = bytearray()  # the whole content, as long as there is no file
        self._file: IO[bytes] | None = None

    def __del__(self) -> None:
        if self._file is not None:
            self._file.close()

    def write(self, values: list[Any]) -> StoredBlock:
        """Write a block. Returns the argument of ``read``."""
        try:
            data = pickle.dumps(values, pickle.HIGHEST_PROTOCOL)
        except Exception:  # an object of `data.module` that cannot be pickled stays in memory
            return list(values)
        try:
            self._append(data)
        except OSError as error:
            raise unwritable_rows(error, self.folder) from None
        offset = self._size
        self._size += len(data)
        return offset, len(data)

    def read(self, block: StoredBlock) -> list[Any]:
        """A block. Only this process has written to the file; data workers and threads may read it at the same time."""
        if isinstance(block, list):
            return block
        offset, size = block
        if self._file is None:
            values: list[Any] = pickle.loads(self._held[offset : offset + size])
        else:
            values = pickle.loads(_read_at(self._file, offset, size))
        return values

    def _append(self, data: bytes) -> None:
        """Write bytes at the end."""
        if self._file is None and self._size + len(data) <= IN_MEMORY:
            self._held += data
            return
        if self._file is None:
            self._file = tempfile.TemporaryFile(dir=self.folder)  # noqa: SIM115
            self._file.write(self._held)
            self._held = bytearray()
        self._file.seek(0, os.SEEK_END)
        self._file.write(data)
        self._file.flush()  # for readers that use no buffer


def _read_at(file: IO[bytes], offset: int, size: int) -> bytes:
    """Bytes of a file. Where processes can be forked, its position is not used: they would share it."""
    if hasattr(os, "pread"):
        return os.pread(file.fileno(), size, offset)
    file.seek(offset)
    return file.read(size)


def current_store() -> Store:
    """The store of this thread's columns: one file, however many columns there are."""
    store: Store | None = getattr(CURRENT, "store", lambda: None)()
    if store is None or store.process != os.getpid():
        store = Store()
        CURRENT.store = ref(store)
    return store


class Column(Sequence[Any]):
    """Values of any type, one for each row. Reading them in order is fast, and needs the memory of a block.

    Pickled blocks return exactly the values that a source has, so that a message can show them. They take a tenth of
    the time of Arrow arrays, which are converted to and from text.
    """

    def __init__(self, values: Iterable[Any] = ()) -> None:
        self.blocks = list[tuple[Store, StoredBlock]]()
        # the first row of each block, and the number of rows: blocks of 3 and 2 give 0 3 5
        self.starts = array("q", [0])
        self.ids: NDArray[np.int64] | None = None  # the rows of ``at``
        self.last: tuple[int, list[Any]] = (-1, [])
        iterator = iter(values)
        while block := list(islice(iterator, BLOCK)):
            self.append_block(block)

    def append_block(self, values: list[Any]) -> None:
        """Add values at the end."""
        store = current_store()
        self.blocks.append((store, store.write(values)))
        self.starts.append(self.starts[-1] + len(values))

    def at(self, ids: NDArray[np.int64]) -> Column:
        """The rows at these places of the blocks, as a view."""
        column = Column()
        column.blocks = self.blocks
        column.starts = self.starts
        column.ids = ids
        return column

    def __len__(self) -> int:
        return self.starts[-1] if self.ids is None else len(self.ids)

    def __iter__(self) -> Iterator[Any]:
        if self.ids is None:
            for number in range(len(self.blocks)):
                yield from self._block(number)
            return
        for first in range(0, len(self.ids), BLOCK):
            ids = self.ids[first : first + BLOCK]
            numbers = np.searchsorted(self.starts, ids, side="right") - 1
            for row, number in zip(ids.tolist(), numbers.tolist(), strict=True):
                yield self._block(number)[row - self.starts[number]]

    def __getitem__(self, index: Any) -> Any:
        rows = range(len(self))[index]
        if isinstance(rows, range):
            return [self[row] for row in rows]
        row = rows if self.ids is None else int(self.ids[rows])
        number = bisect_right(self.starts, row) - 1
        return self._block(number)[row - self.starts[number]]

    def __reduce__(self) -> Any:
        return Column, (list(self),)  # a data worker that is started, and not forked, gets the values

    def _block(self, number: int) -> list[Any]:
        if self.last[0] != number:
            store, block = self.blocks[number]
            self.last = number, store.read(block)
        return self.last[1]


def keep_rows(columns: Mapping[str, Column], ids: NDArray[np.int64]) -> dict[str, Column]:
    """The rows with these ids of several columns, as views that share the places of the rows."""
    places = dict[int, "NDArray[np.int64]"]()  # by the places of the column before
    views = {}
    for name, column in columns.items():
        before = id(column.ids)
        if before not in places:
            places[before] = ids if column.ids is None else take(column.ids, ids)
        views[name] = column.at(places[before])
    return views


class Tuples(Sequence[tuple[Any, ...]]):
    """The rows of several columns."""

    def __init__(self, columns: Iterable[Sequence[Any]]) -> None:
        self.columns = list(columns)

    def __len__(self) -> int:
        return len(self.columns[0])

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        return zip(*self.columns, strict=True)

    def __getitem__(self, index: Any) -> Any:
        values = [column[index] for column in self.columns]
        if isinstance(index, slice):
            return list(zip(*values, strict=True))
        return tuple(values)


class Rest(Sequence[Any]):
    """Rows from a number on. The rows themselves are not copied."""

    def __init__(self, rows: Sequence[Any], start: int) -> None:
        self.rows = rows
        self.start = start

    def __len__(self) -> int:
        return max(len(self.rows) - self.start, 0)

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self.rows), self.start, None)

    def __getitem__(self, index: Any) -> Any:
        numbers = range(self.start, len(self.rows))[index]
        if isinstance(numbers, range):
            return [self.rows[number] for number in numbers]
        return self.rows[numbers]


def in_blocks(columns: Sequence[Iterable[Any]]) -> Iterator[tuple[int, list[list[Any]]]]:
    """Yield the first row and the values of each block of some columns; at least one block, which may be empty."""
    iterators = [iter(values) for values in columns]
    start = 0
    while True:
        block = [list(islice(values, BLOCK)) for values in iterators]
        if start == 0 or block[0]:
            yield start, block
        start += len(block[0])
        if len(block[0]) < BLOCK:
            return
