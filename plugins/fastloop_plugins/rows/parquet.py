"""Reads Parquet files in batches of bounded size. The sizes that a file claims are checked against its pages first.

A page of a few bytes may hold one long value that each of millions of rows repeats, and its header may claim any size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow  # type: ignore[import-untyped]
from pyarrow import parquet

from fastloop_plugins.rows.file import BLOCK, Block, File
from fastloop_plugins.rows.limits import check_total, size_of
from fastloop_plugins.rows.lines import open_binary
from fastloop_plugins.rows.options import Read
from fastloop_plugins.rows.table import check_names
from fastloop_plugins.rows.thrift import PageHeader, check_footer

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

    Raises:
        OSError: The footer is malformed.
    """

    source: Any
    path: str
    how: Read

    def __post_init__(self) -> None:
        self.size = size_of(self.source)
        self.file = parquet.ParquetFile(
            self.source, buffer_size=2**20, pre_buffer=False, page_checksum_verification=True
        )
        self.names: list[str] = self.file.schema_arrow.names
        self.metadata = self.file.metadata
        check_footer(self.source, self.size, self.metadata.schema)

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
            for batch in self.file.iter_batches(
                max(1, min(rows, AT_ONCE // max(largest, 1))), row_groups=[group], columns=list(columns)
            ):
                plain = [
                    array.dictionary_decode() if hasattr(array, "dictionary_decode") else array
                    for array in batch.columns
                ]
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
            header = PageHeader(self.source.read(HEADER))
            try:
                header.read()
            except IndexError:
                self.source.seek(start)
                header = PageHeader(self.source.read(LONG_HEADER))
                try:
                    header.read()
                except IndexError:
                    raise OSError(f"the header of a page of column {column.path_in_schema} does not end") from None
            if not 0 <= header.size <= column.total_uncompressed_size or header.stored < 0:
                raise OSError(
                    f"a page of column {column.path_in_schema} claims {header.size} bytes, and its column "
                    f"{column.total_uncompressed_size}"
                )
            yield header.size
            start += header.at + header.stored


class Parquet(File):
    """Rows of a Parquet file. A block starts at a row group."""

    has_groups = True

    def __init__(self, path: str, how: Read, columns: Mapping[str, str], skip_unreadable: bool = False) -> None:
        super().__init__(path, how, columns, skip_unreadable)
        self.content = BoundedParquet(open_binary(path), path, how)
        check_names(path, self.content.names)
        self.names = dict.fromkeys(self.content.names)

    def facts(self) -> list[str]:
        groups = map(self.content.metadata.row_group, range(self.content.metadata.num_row_groups))
        return [f"{group.num_rows} {group.total_byte_size}" for group in groups]

    def first_names(self) -> list[str]:
        return list(self.names)

    def close(self) -> None:
        self.content.close()

    def blocks(self, columns: Sequence[str], start: int = 0, size: int = BLOCK, skip: int = 0) -> Iterator[Block]:
        """See ``File``. Without columns, only the metadata is read."""
        there = [name for name in columns if name in self.names]
        for number in range(start, self.content.metadata.num_row_groups):
            rows = self.content.metadata.row_group(number).num_rows
            if skip >= rows or not there:
                if rows > skip:
                    yield Block(number, rows - skip, {})
                skip = max(skip - rows, 0)
                continue
            for batch in self.content.batches(there, [number], size):
                if batch.num_rows > skip:
                    part = batch.slice(skip)
                    yield Block(number, part.num_rows, {name: part.column(name) for name in there})
                skip = max(skip - batch.num_rows, 0)
