"""Reads Parquet files in batches of bounded size. The sizes that a file claims are checked against its pages first.

A page of a few bytes may hold one long value that each of millions of rows repeats, and its header may claim any size.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow
from pyarrow import parquet

from fastloop.problem import counted
from fastloop_plugins.rows.file import BLOCK, Block, File
from fastloop_plugins.rows.limits import check_total, size_of
from fastloop_plugins.rows.lines import open_binary
from fastloop_plugins.rows.options import Read
from fastloop_plugins.rows.table import check_names

TRUE = 1
FALSE = 2
BYTE = 3
INT16 = 4
INT32 = 5
INT64 = 6
DOUBLE = 7
BINARY = 8
LIST = 9
SET = 10
STRUCT = 12
"""These numbers are the types of Thrift's compact protocol."""
DEPTH = 16
"""Levels of nested structs and lists at most: Parquet's own metadata has fewer than ten."""
AT_ONCE = 2**28
"""Bytes to decode at once at most, unless one row has more."""
HEADER = 2**14
"""Bytes in which the header of a page is expected to end; else in ``LONG_HEADER``."""
LONG_HEADER = 2**20
TAIL = 2**16
"""Bytes to read at the end of a file. pyarrow reads as many, which are then in the cache of a remote file."""
STRUCT_SIZE = 768
"""Bytes of memory that pyarrow takes for an item of a list in a footer at most: 717 for a column of a row group, which
has 3 bytes in the file if it is empty."""
FOOTER_LENGTH = 8
"""Bytes behind the footer: its length in 4 bytes, and PAR1."""
COVERED = 2**24
"""Bytes of a local file that its checksum covers at most. A stream may have thousands of files, and each start of a run
reads as much of each."""
PIECE = 2**16
"""Bytes of a piece that the checksum covers without a gap."""
SEAM = b"PAR1PAR1"
"""The end of a Parquet file, and the beginning of another one behind it."""


@dataclass
class BoundedParquet:
    """An open Parquet file.

    Args:
        source: An open file of pyarrow, or of fsspec.
        path: Its name in messages.

    Raises:
        OSError: The footer is malformed.
        RecipeError: The footer takes more memory than the file may.
    """

    source: Any
    path: str
    how: Read

    def __post_init__(self) -> None:
        self.size = size_of(self.source)
        check_footer_size(self.source, self.size, self.path, self.how)
        self.source.seek(0)
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

    def checksum(self) -> int:
        """A checksum of the file's bytes: of a large file, of the footer and of evenly spaced pieces; of a remote file,
        of the footer alone."""
        content_end = self.size - FOOTER_LENGTH
        self.source.seek(content_end)
        footer_size = int.from_bytes(self.source.read(4), "little")
        checksum = self._extend_checksum(0, content_end - footer_size, footer_size)
        if not isinstance(self.source, pyarrow.NativeFile):
            return checksum
        # a file of 3 times ``COVERED``: every third piece
        pieces = -(-self.size // PIECE)
        step = -(-pieces * PIECE // COVERED)
        for number in range(0, pieces, step):
            checksum = self._extend_checksum(checksum, number * PIECE, PIECE)
        return checksum

    def _extend_checksum(self, checksum: int, start: int, size: int) -> int:
        """The checksum of some bytes and of the next ones, from ``start`` on."""
        self.source.seek(start)
        return zlib.crc32(self.source.read(size), checksum)

    def check_seam(self) -> None:
        """Check that the file is not two Parquet files end to end.

        Its footer is that of the second one, and would address pages of the first one. Only an index of pages may be
        between the pages and the footer.

        Raises:
            OSError: The end of a file and the beginning of another one are in between.
        """
        start = 0  # the end of the last page
        for group in range(self.metadata.num_row_groups):
            row_group = self.metadata.row_group(group)
            for number in range(row_group.num_columns):
                column = row_group.column(number)
                start = max(start, first_page(column) + column.total_compressed_size)
        before = b""
        while start < self.size:
            self.source.seek(start)
            chunk: bytes = self.source.read(2**20)
            if not chunk:
                return
            if SEAM in before + chunk:
                raise OSError("another Parquet file is joined to it")
            before = chunk[1 - len(SEAM) :]
            start += len(chunk)

    def batches(self, columns: Sequence[str], groups: Sequence[int] | None = None, rows: int = 2**16) -> Iterator[Any]:
        """Yield batches of at most ``rows`` rows of some row groups, or of all.

        Raises:
            RecipeError: The columns have more bytes than the file's limit.
            OSError: A page is damaged, or larger than the file says.
        """
        if groups is None:
            groups = range(self.metadata.num_row_groups)
        total = 0
        for group in groups:
            largest_row = max(self._largest_pages(group, columns), 1)
            left = self.metadata.row_group(group).num_rows
            size = max(1, min(rows, AT_ONCE // largest_row))
            for batch in self.file.iter_batches(size, row_groups=[group], columns=list(columns)):
                decoded = [_without_dictionary(array) for array in batch.columns]
                batch = pyarrow.RecordBatch.from_arrays(decoded, batch.schema.names)
                total += batch.nbytes
                left -= batch.num_rows
                check_total(self.path, self.size, total, self.how)
                yield batch
            if left:
                raise OSError(f"row group {group} has {counted(left, 'row')} less than it claims")

    def _largest_pages(self, group: int, columns: Sequence[str]) -> int:
        """The sum of the sizes of each column's largest page: no row has more bytes."""
        row_group = self.metadata.row_group(group)
        largest = 0
        total = 0
        for number in range(row_group.num_columns):
            column = row_group.column(number)
            if _is_part_of(column.path_in_schema, columns):
                total += column.total_uncompressed_size
                check_total(self.path, self.size, total, self.how)
                largest += max(self._page_sizes(column), default=0)
        return largest

    def _page_sizes(self, column: Any) -> Iterator[int]:
        """Yield the size of each page of a column of a row group. Those of a remote file are not read twice to know
        it."""
        if not isinstance(self.source, pyarrow.NativeFile):
            return
        start = first_page(column)
        end = min(start + column.total_compressed_size, self.size)
        while start < end:
            header = self._read_page_header(start)
            if header is None:
                raise OSError(f"the header of a page of column {column.path_in_schema} does not end")
            if not 0 <= header.size <= column.total_uncompressed_size or header.stored < 0:
                raise OSError(
                    f"a page of column {column.path_in_schema} claims {header.size} bytes, and its column "
                    f"{column.total_uncompressed_size}"
                )
            yield header.size
            start += header.at + header.stored

    def _read_page_header(self, start: int) -> PageHeader | None:
        """The header that begins at a byte of the file; None: it is longer than ``LONG_HEADER``."""
        for length in (HEADER, LONG_HEADER):
            self.source.seek(start)
            header = PageHeader(self.source.read(length))
            try:
                header.read()
            except IndexError:
                continue
            return header
        return None


def first_page(column: Any) -> int:
    """The first byte of the pages of a column of a row group: its dictionary, if there is one, is before the data."""
    dictionary: int | None = column.dictionary_page_offset
    data: int = column.data_page_offset
    return data if not dictionary else min(dictionary, data)


def _is_part_of(path: str, columns: Sequence[str]) -> bool:
    """Whether a leaf, such as ``messages.list.element.role``, is one of the columns, or is nested in one."""
    return any(f"{path}.".startswith(f"{column}.") for column in columns)


def _without_dictionary(array: Any) -> Any:
    """The values of an array, each in full where the array has places in a dictionary."""
    return array.dictionary_decode() if hasattr(array, "dictionary_decode") else array


class Parquet(File):
    """Rows of a Parquet file. A block starts at a row group."""

    row = "a row of the table"
    group = "a row group of the file"
    lists = True
    has_groups = True

    def __init__(self, path: str, how: Read, columns: Mapping[str, str], skip_unreadable: bool = False) -> None:
        super().__init__(path, how, columns, skip_unreadable)
        self.content = BoundedParquet(open_binary(path), path, how)
        self.schema = self.content.file.schema_arrow
        check_names(path, self.content.names)
        self.names = dict.fromkeys(self.content.names)

    def facts(self) -> list[str]:
        """See ``File``. Two rows that change places leave all sizes as they are, so the bytes are read."""
        return [f"{self.content.size} {self.content.checksum()}"]

    def first_names(self) -> list[str]:
        return list(self.names)

    def close(self) -> None:
        self.content.close()

    def blocks(self, columns: Sequence[str], start: int = 0, size: int = BLOCK, skip: int = 0) -> Iterator[Block]:
        """See ``File``. Without columns, only the metadata is read."""
        wanted = [name for name in columns if name in self.names]
        if start == 0:
            self.content.check_seam()
        # row groups of 4, 4 and 4 rows with skip=6: none of the first, the last 2 of the second, all of the third
        for number in range(start, self.content.metadata.num_row_groups):
            rows = self.content.metadata.row_group(number).num_rows
            if skip >= rows:
                skip -= rows
            elif not wanted:
                yield Block(number, rows - skip, {})
                skip = 0
            else:
                for batch in self.content.batches(wanted, [number], size):
                    if batch.num_rows > skip:
                        part = batch.slice(skip)
                        yield Block(number, part.num_rows, {name: part.column(name) for name in wanted})
                    skip = max(skip - batch.num_rows, 0)


# -- metadata: parquet.thrift of Apache Parquet, in the compact protocol of Thrift -------------------------------------


class ThriftReader:
    """Reads a struct field by field.

    Attributes:
        at: The position of the next byte in the data.

    Raises:
        IndexError: The struct does not end within the data.
        OSError: It is malformed.
    """

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0

    def fields(self) -> Iterator[tuple[int, int]]:
        """Yield number and type of each field of a struct. The caller reads the value.

        The byte 0x25 before a value is a step of 2 from the last field's number, and the type 5. With a step of 0, the
        number follows in full. A byte 0 ends the struct.
        """
        number = 0
        while True:
            head = self._byte()
            if head == 0:
                return
            step = head >> 4
            number = number + step if step else self.read_integer()
            yield number, head & 15

    def structs(self, number: int) -> Iterator[None]:
        """Yield for each struct in field ``number`` of a struct, also in a list. The caller reads the fields of
        each."""
        for field, kind in self.fields():
            if field == number and kind == STRUCT:
                yield
            elif field == number and kind == LIST:
                size, inner = self.read_list_header()
                for _ in range(size):
                    if inner == STRUCT:
                        yield
                    else:
                        self.skip(inner, in_list=True)
            else:
                self.skip(kind)

    def read_list_header(self) -> tuple[int, int]:
        """The number of items, and their type."""
        head = self._byte()  # 0x3c: 3 items of the type 12. 0xfc: the number of items follows
        size = head >> 4
        if size == 15:
            size = self._varint()
        if size > len(self.data) - self.at:  # each item has a byte or more
            raise IndexError("the list does not end within the data")
        return size, head & 15

    def read_integer(self) -> int:
        """A number with a sign: 0, 1, 2, 3, ... in the file are 0, -1, 1, -2, ..."""
        number = self._varint()
        return (number >> 1) ^ -(number & 1)

    def skip(self, kind: int, depth: int = 0, in_list: bool = False) -> None:
        """Skip a value. A boolean outside a list has no bytes: its type is its value."""
        if depth > DEPTH:
            raise OSError("its metadata is nested too deeply")
        if kind in (TRUE, FALSE):
            self.at += 1 if in_list else 0
        elif kind == BYTE:
            self.at += 1
        elif kind in (INT16, INT32, INT64):
            self._varint()
        elif kind == DOUBLE:
            self.at += 8
        elif kind == BINARY:
            length = self._varint()
            self.at += length
        elif kind in (LIST, SET):
            size, inner = self.read_list_header()
            for _ in range(size):
                self.skip(inner, depth + 1, in_list=True)
        elif kind == STRUCT:
            for _, inner in self.fields():
                self.skip(inner, depth + 1)
        else:
            raise OSError(f"its metadata has a value of the unknown type {kind}")

    def _varint(self) -> int:
        """A number in groups of 7 bits, the lowest ones first: 0xac 0x02 is 0x2c + (0x02 << 7) = 300."""
        number = 0
        shift = 0
        while True:
            byte = self._byte()
            number |= (byte & 127) << shift
            if byte < 128:  # the highest bit of the last one is 0
                return number
            shift += 7
            if shift > 63:
                raise OSError("its metadata has a number of more than 64 bits")

    def _byte(self) -> int:
        self.at += 1
        return self.data[self.at - 1]


class PageHeader(ThriftReader):
    """The header of a page.

    Attributes:
        size: Bytes of the page, decompressed.
        stored: Its bytes in the file.
        at: Bytes of the header.
    """

    size: int = -1
    stored: int = -1

    def read(self) -> None:
        """Read the header from its first byte."""
        for field, kind in self.fields():
            if field == 2 and kind == INT32:
                self.size = self.read_integer()
            elif field == 3 and kind == INT32:
                self.stored = self.read_integer()
            else:
                self.skip(kind)


class FooterLists(ThriftReader):
    """Reads a footer, and refuses one whose lists take more memory than the file may.

    Args:
        data: The footer.
        path: The name of the file in messages.
        size: Its bytes.
    """

    def __init__(self, data: bytes, path: str, size: int, how: Read) -> None:
        super().__init__(data)
        self.path = path
        self.size = size
        self.how = how
        self.items = 0

    def read_list_header(self) -> tuple[int, int]:
        size, kind = super().read_list_header()
        if kind == STRUCT:
            self.items += size
            check_total(self.path, self.size, self.items * STRUCT_SIZE, self.how)
        return size, kind


def check_footer_size(source: Any, size: int, path: str, how: Read) -> None:
    """Check the memory of a footer before pyarrow reads it: a footer of 3 MB with empty columns takes 700 MB.

    Raises:
        RecipeError: It takes more memory than the file may.
        OSError: The footer is malformed.
    """
    # a file ends with the footer, its length in 4 bytes, and PAR1
    start = max(size - TAIL, 0)
    source.seek(start)
    tail = source.read(size - start)
    length = int.from_bytes(tail[-8:-4], "little")
    if tail[-4:] != b"PAR1" or length > size - 8:
        return  # pyarrow refuses the file
    if length + 8 > len(tail):
        source.seek(size - 8 - length)
        tail = source.read(length + 8)
    footer = FooterLists(tail[len(tail) - 8 - length : -8], path, size, how)
    try:
        footer.skip(STRUCT)
    except IndexError:
        raise OSError("its footer is malformed") from None


def check_footer(source: Any, size: int, schema: Any) -> None:
    """Check the size statistics of each column in each row group.

    pyarrow raises an exception for wrong ones in a function that may not raise, which aborts the process.

    Args:
        source: A file that pyarrow has opened as Parquet.
        size: Its bytes.
        schema: Its ``ParquetSchema``.

    Raises:
        OSError: The statistics do not fit the column, or the footer is malformed.
    """
    source.seek(size - 8)
    length = int.from_bytes(source.read(4), "little")
    source.seek(size - 8 - length)
    reader = ThriftReader(source.read(length))
    try:
        for _row_group in reader.structs(4):
            for number, _chunk in enumerate(reader.structs(1)):
                for _metadata in reader.structs(3):
                    for _statistics in reader.structs(16):
                        _check_statistics(reader, schema.column(number))
    except IndexError:
        raise OSError("its footer is malformed") from None


def _check_statistics(reader: ThriftReader, column: Any) -> None:
    """Check ``SizeStatistics``: bytes of texts, and a histogram each of repetition and definition levels."""
    levels = {2: column.max_repetition_level + 1, 3: column.max_definition_level + 1}
    for field, kind in reader.fields():
        if field == 1 and kind == INT64 and column.physical_type != "BYTE_ARRAY":
            raise OSError(
                f"its footer counts bytes of texts for column {column.path}, whose type is {column.physical_type}"
            )
        if field in levels and kind == LIST:
            items, inner = reader.read_list_header()
            if items not in (0, levels[field]):
                raise OSError(
                    f"its footer has a histogram of {items} levels for column {column.path}, expected {levels[field]}"
                )
            for _ in range(items):
                reader.skip(inner, in_list=True)
        else:
            reader.skip(kind)
