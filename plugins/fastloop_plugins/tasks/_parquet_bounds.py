"""Reads Parquet files in batches of bounded size. The sizes that a file claims are checked against its pages first.

A page of a few bytes may hold one long value that each of millions of rows repeats, and its header may claim any size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow  # type: ignore[import-untyped]
from pyarrow import parquet

from fastloop_plugins.tasks._bounds import check_total, size_of

if TYPE_CHECKING:
    from fastloop_plugins.tasks._text_files import Read

AT_ONCE = 2**28
"""Bytes to decode at once at most, unless one row has more."""
HEADER = 2**14
"""Bytes in which the header of a page is expected to end; else in ``LONG_HEADER``."""
LONG_HEADER = 2**20


@dataclass
class BoundedParquet:
    """An open Parquet file.

    Args:
        source: An open file of pyarrow, or of fsspec.
        path: Its name in messages.
    """

    source: Any
    path: str
    how: Read

    def __post_init__(self) -> None:
        self.size = size_of(self.source)
        self.file = parquet.ParquetFile(self.source, buffer_size=2**20, pre_buffer=False, page_checksum_verification=True)
        self.names: list[str] = self.file.schema_arrow.names
        self.metadata = self.file.metadata

    def __enter__(self) -> BoundedParquet:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self.file.close(force=True)

    def batches(self, columns: Sequence[str], groups: Sequence[int] | None = None, rows: int = 2**16) -> Iterator[Any]:
        """Yield batches of at most ``rows`` rows of some row groups, or of all.

        Raises:
            RecipeError: The columns have more bytes than the file's limit.
            OSError: A page is damaged, or larger than the file says.
        """
        total = 0
        for group in range(self.metadata.num_row_groups) if groups is None else groups:
            largest, left = self._largest_pages(group, columns), self.metadata.row_group(group).num_rows
            for batch in self.file.iter_batches(max(1, min(rows, AT_ONCE // max(largest, 1))), row_groups=[group], columns=list(columns)):
                plain = [array.dictionary_decode() if hasattr(array, "dictionary_decode") else array for array in batch.columns]
                batch = pyarrow.RecordBatch.from_arrays(plain, batch.schema.names)
                total, left = total + batch.nbytes, left - batch.num_rows
                check_total(self.path, self.size, total, self.how)
                yield batch
            if left:
                raise OSError(f"row group {group} has {left} rows less than it claims")

    def _largest_pages(self, group: int, columns: Sequence[str]) -> int:
        """The sum of the sizes of each column's largest page: no row has more bytes."""
        found, largest, total = self.metadata.row_group(group), 0, 0
        for number in range(found.num_columns):
            column = found.column(number)
            if any(f"{column.path_in_schema}.".startswith(f"{name}.") for name in columns):
                total += column.total_uncompressed_size
                check_total(self.path, self.size, total, self.how)
                largest += max((page for page in self._pages(column)), default=0)
        return largest

    def _pages(self, column: Any) -> Iterator[int]:
        """The size of each page of a column of a row group. Those of a remote file are not read twice to know it."""
        if not isinstance(self.source, pyarrow.NativeFile):
            return
        start = min(column.dictionary_page_offset or column.data_page_offset, column.data_page_offset)
        end = min(start + column.total_compressed_size, self.size)
        while start < end:
            self.source.seek(start)
            header = Header(self.source.read(HEADER))
            try:
                header.read()
            except IndexError:
                self.source.seek(start)
                header = Header(self.source.read(LONG_HEADER))
                header.read()
            if not 0 <= header.size <= column.total_uncompressed_size or header.stored < 0:
                raise OSError(
                    f"a page of column {column.path_in_schema} claims {header.size} bytes, and its column {column.total_uncompressed_size}"
                )
            yield header.size
            start += header.at + header.stored


class Header:
    """The header of a page: a struct in Thrift's compact protocol.

    Attributes:
        size: Bytes of the page, decompressed.
        stored: Its bytes in the file.
        at: Bytes of the header.
    """

    def __init__(self, data: bytes) -> None:
        self.data, self.at, self.size, self.stored = data, 0, -1, -1

    def read(self) -> None:
        """Read it.

        Raises:
            IndexError: It does not end within the data.
            OSError: It is malformed.
        """
        for field, kind in self._fields():
            if field in (2, 3) and kind == 5:
                number = self._varint()
                number = number >> 1 ^ -(number & 1)
                self.size, self.stored = (number, self.stored) if field == 2 else (self.size, number)
            else:
                self._skip(kind, 0)

    def _fields(self) -> Iterator[tuple[int, int]]:
        """Number and type of each field of a struct. The caller reads the value."""
        number = 0
        while kind := self._byte():
            if kind >> 4:
                number += kind >> 4
            else:
                number = self._varint() >> 1
            yield number, kind & 15

    def _skip(self, kind: int, depth: int) -> None:
        if kind in (4, 5, 6):
            self._varint()
        elif kind in (3, 7):
            self.at += 1 if kind == 3 else 8
        elif kind == 8:
            length = self._varint()
            self.at += length
        elif kind == 12 and depth < 8:
            for _, inner in self._fields():
                self._skip(inner, depth + 1)
        elif kind not in (1, 2):
            raise OSError("the header of a page is malformed")

    def _varint(self) -> int:
        number = shift = 0
        while (byte := self._byte()) >> 7:
            number |= (byte & 127) << shift
            shift += 7
        return number | byte << shift

    def _byte(self) -> int:
        self.at += 1
        return self.data[self.at - 1]
