"""Arrays that are mapped from a file: when the system reads their parts, and those with a number for each row of data.

Data may have more rows than memory has room for numbers, so an array of them is in a temporary file if it is large.
"""

from __future__ import annotations

import math
import mmap
import tempfile
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from fastloop.errors import FastloopError, RecipeError
from fastloop.runtime.files import full_disk
from fastloop_plugins import _cache

if TYPE_CHECKING:
    from numpy.typing import DTypeLike, NDArray

    from fastloop_plugins._cache import Flat

IN_MEMORY = 2**22
"""Bytes of an array that stays in memory."""
MOST_AHEAD = 2**17
"""Bytes of one piece of advice to read ahead, a multiple of a page. Linux ignores the bytes beyond the limit of a disk,
which is this or more."""
AT_ONCE = 2**18
"""Rows, or token ids, to compute with at once. A result for all rows would take the memory of an array of numbers."""


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
        array = stored(array)
        self.mapping = mapping
        self.item = array.strides[0]
        self.first = _address(array) - _address(np.frombuffer(mapping, np.uint8))
        self.end = self.first + len(array) * self.item
        mapping.madvise(mmap.MADV_RANDOM)

    def start(self, starts: NDArray[np.int64], ends: NDArray[np.int64]) -> None:
        """Have the system begin to read parts, which starts and ends of elements give, without waiting for it."""
        first = self.first + starts * self.item
        first -= first % mmap.PAGESIZE  # advice is for whole pages
        last = np.minimum(self.first + ends * self.item, self.end)
        for start, end in join_parts(first.tolist(), last.tolist()):
            for at in range(start, end, MOST_AHEAD):
                self.mapping.madvise(mmap.MADV_WILLNEED, at, min(end - at, MOST_AHEAD))


def join_parts(starts: Iterable[int], ends: Iterable[int]) -> list[tuple[int, int]]:
    """Parts of a file, in which neighbors are one part.

    For starts [0, 100, 200, 900] and ends [110, 200, 240, 950]: [(0, 240), (900, 950)].
    """
    parts: list[tuple[int, int]] = []
    for start, end in zip(starts, ends, strict=True):
        if parts and parts[-1][0] <= start <= parts[-1][1]:
            start = parts[-1][0]
            end = max(end, parts.pop()[1])
        parts.append((start, end))
    return parts


NARROW = (np.dtype(np.uint16), np.dtype(np.int16))
"""Types of token ids that take 2 bytes. Some tasks have negative ones: a token without a loss."""


class NarrowIds:
    """Token ids that take 2 bytes each, and are read as int32: a part of them is an array of int32.

    So tasks need not know how their ids are stored.
    """

    dtype = np.dtype(np.int32)

    def __init__(self, stored: NDArray[Any]) -> None:
        self.stored = stored
        self.shape = stored.shape

    def __len__(self) -> int:
        return len(self.stored)

    def __getitem__(self, part: Any) -> NDArray[np.int32]:
        return self.stored[part].astype(np.int32)  # type: ignore[no-any-return]

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[Any]:
        return self.stored.astype(self.dtype if dtype is None else dtype)

    def tolist(self) -> list[int]:
        """All ids."""
        return self.stored.tolist()  # type: ignore[no-any-return]


def stored(ids: Any) -> NDArray[Any]:
    """The array that ids are stored in."""
    return ids.stored if isinstance(ids, NarrowIds) else ids


def narrow_type(ids: NDArray[np.int32]) -> np.dtype[Any] | None:
    """The type of ``NARROW`` that holds all ids; None: none does."""
    low = high = 0
    for span in spans(len(ids)):
        low = min(low, int(ids[span].min()))
        high = max(high, int(ids[span].max()))
    for kind in NARROW:
        limits = np.iinfo(kind)
        if limits.min <= low and high <= limits.max:
            return kind
    return None


def mapping_of(array: NDArray[Any]) -> mmap.mmap | None:
    """The mapping that an array is in. None: it is in memory, or the platform accepts no advice."""
    owner: Any = stored(array)
    while isinstance(owner, np.ndarray):
        owner = owner.base
    return owner if isinstance(owner, mmap.mmap) and hasattr(owner, "madvise") else None


def _address(array: NDArray[Any]) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


# -- arrays with a number for each row -------------------------------------------------------------------------------

OTHER_TEMPORARY_FOLDER = "Free its disk, or set TMPDIR to another folder."
"""The remedy for a full disk of temporary files."""


def temporary_folder() -> str:
    """The folder of temporary files with rows and their numbers: that of ``token-cache``, or the system's."""
    tokens = _cache.TOKENS.get()
    return tempfile.gettempdir() if tokens is None else str(tokens.path)


def zeros(shape: int | tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
    """An array of zeros: in memory, or, if it is large, mapped from a temporary file without a name.

    The system writes pages of such a file to the disk when memory is short, and the file goes with the array.

    Raises:
        RecipeError: The file cannot be written.
    """
    size = math.prod((shape,) if isinstance(shape, int) else shape) * np.dtype(dtype).itemsize
    if size <= IN_MEMORY:
        return np.zeros(shape, dtype)
    with _writing(), _temporary_file() as file:
        file.truncate(size)
        return np.asarray(np.memmap(file, dtype, "r+", shape=shape))


class GrowingArray:
    """Collects numbers that come in parts. Many of them are put into a temporary file.

    Args:
        width: Numbers of a row; None: the array has one dimension.
    """

    def __init__(self, dtype: DTypeLike, width: int | None = None) -> None:
        self.dtype = np.dtype(dtype)
        self.width = width
        self._parts: list[NDArray[Any]] = []
        self._held = 0  # bytes of these parts
        self._file: IO[bytes] | None = None

    def __del__(self) -> None:
        if self._file is not None:
            self._file.close()

    def extend(self, values: Any) -> None:
        """Add numbers at the end."""
        part = np.asarray(values, self.dtype)
        self._parts.append(part)
        self._held += part.nbytes
        if self._held > IN_MEMORY:
            self._write()

    def finish(self) -> NDArray[Any]:
        """All numbers."""
        shape = (-1,) if self.width is None else (-1, self.width)
        if self._file is None:
            parts = [part.reshape(shape) for part in self._parts]
            return np.concatenate(parts) if parts else np.empty((0, *shape[1:]), self.dtype)
        with self._file as file:
            self._write()
            return np.asarray(np.memmap(file, self.dtype, "r+")).reshape(shape)

    def _write(self) -> None:
        with _writing():
            if self._file is None:
                self._file = _temporary_file()
            for part in self._parts:
                self._file.write(np.ascontiguousarray(part).data)
            self._file.flush()
        self._parts.clear()
        self._held = 0


def spans(total: int) -> Iterator[slice]:
    """Yield the parts of an array of ``total`` rows that are computed at once."""
    for start in range(0, total, AT_ONCE):
        yield slice(start, min(start + AT_ONCE, total))


def row_spans(ends: NDArray[np.int64]) -> Iterator[tuple[slice, slice]]:
    """Yield the rows that are computed at once, and the place of their ids.

    For rows that end at ``[3, 5, 9]``, and 5 ids at once, it yields the rows 0 to 1 with the ids 0 to 4, and then the
    row 2 with the ids 5 to 8.

    Args:
        ends: The end of each row among the ids, which are end to end.
    """
    first = begin = 0
    while first < len(ends):
        stop = max(int(np.searchsorted(ends, begin + AT_ONCE, side="right")), first + 1)
        end = int(ends[stop - 1])
        yield slice(first, stop), slice(begin, end)
        first = stop
        begin = end


def take(values: NDArray[Any], ids: NDArray[Any]) -> NDArray[Any]:
    """``values[ids]`` along the first dimension."""
    taken = zeros((len(ids), *values.shape[1:]), values.dtype)
    for span in spans(len(ids)):
        taken[span] = values[ids[span]]
    return taken


def flatnonzero(mask: NDArray[np.bool_]) -> NDArray[np.int64]:
    """The places at which a mask is true."""
    places = GrowingArray(np.int64)
    for span in spans(len(mask)):
        places.extend(span.start + np.flatnonzero(mask[span]))
    return places.finish()


def cumsum(values: NDArray[np.int64]) -> NDArray[np.int64]:
    """The cumulative sum."""
    return np.cumsum(values, out=zeros(len(values), np.int64))


def concatenate(parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """The parts end to end. A single part is not copied."""
    if len(parts) == 1:
        return parts[0]
    joined = zeros((sum(map(len, parts)), *parts[0].shape[1:]), np.result_type(*parts))
    start = 0
    for part in parts:
        joined[start : start + len(part)] = part
        start += len(part)
    return joined


def convert(values: NDArray[Any], dtype: DTypeLike) -> NDArray[Any]:
    """The values in another type. They are not copied if they have it."""
    if values.dtype == dtype:
        return values
    converted = zeros(values.shape, dtype)
    converted[...] = values
    return converted


def flat(rows: Iterable[Sequence[int]]) -> Flat:
    """Put rows of ids end to end."""
    ids = GrowingArray(np.int32)
    lengths = GrowingArray(np.int64)
    block = array("i")
    sizes = array("q")
    for row in rows:
        block.extend(row)
        sizes.append(len(row))
        if len(block) > AT_ONCE or len(sizes) > AT_ONCE:
            ids.extend(block)
            lengths.extend(sizes)
            # new ones: the parts are views of the old ones
            block = array("i")
            sizes = array("q")
    ids.extend(block)
    lengths.extend(sizes)
    return ids.finish(), lengths.finish()


def _temporary_file() -> IO[bytes]:
    return tempfile.TemporaryFile(dir=temporary_folder())


def unwritable_rows(error: OSError, folder: str) -> FastloopError:
    """The error for rows that cannot be written to a temporary file in ``folder``: a full disk, or a folder that takes
    no file."""
    full = full_disk(error, Path(folder), OTHER_TEMPORARY_FOLDER)
    if full is not None:
        return full
    return RecipeError(
        f"rows cannot be written to a temporary file in {folder}: {error.strerror}.",
        code="file-not-writable",
        place="data",
        remedy=OTHER_TEMPORARY_FOLDER,
    )


@contextmanager
def _writing() -> Iterator[None]:
    """Explain an error of writing a temporary file.

    Raises:
        FastloopError: In place of an ``OSError``; see ``unwritable_rows``.
    """
    try:
        yield
    except OSError as error:
        raise unwritable_rows(error, temporary_folder()) from None
