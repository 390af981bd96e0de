"""Reads the page headers of Parquet files directly, and the statistics that crash the process if pyarrow reads them.

Source: parquet.thrift of Apache Parquet, and the specification of Thrift's compact protocol.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

INT32, INT64, BINARY, LIST, SET, STRUCT = 5, 6, 8, 9, 10, 12
"""Types of Thrift's compact protocol."""
DEPTH = 16
"""Levels of nested structs and lists at most: Parquet's own metadata has fewer than ten."""


class ThriftReader:
    """Reads a struct field by field.

    Attributes:
        at: The position of the next byte in the data.

    Raises:
        IndexError: The struct does not end within the data.
        OSError: It is malformed.
    """

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def fields(self) -> Iterator[tuple[int, int]]:
        """Yield number and type of each field of a struct. The caller reads the value."""
        number = 0
        while kind := self._byte():
            number = number + (kind >> 4) if kind >> 4 else self.read_integer()
            yield number, kind & 15

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
        head = self._byte()
        return (head >> 4 if head >> 4 < 15 else self._varint()), head & 15

    def read_integer(self) -> int:
        number = self._varint()
        return number >> 1 ^ -(number & 1)

    def skip(self, kind: int, depth: int = 0, in_list: bool = False) -> None:
        """Skip a value. A boolean outside a list has no bytes: its type is its value."""
        if depth > DEPTH:
            raise OSError("its metadata is nested too deeply")
        if kind in (1, 2):
            self.at += in_list
        elif kind in (4, INT32, INT64):
            self._varint()
        elif kind in (3, 7):
            self.at += 1 if kind == 3 else 8
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
        number = shift = 0
        while (byte := self._byte()) >> 7:
            number |= (byte & 127) << shift
            if (shift := shift + 7) > 63:
                raise OSError("its metadata has a number of more than 64 bits")
        return number | byte << shift

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

    size = stored = -1

    def read(self) -> None:
        """Read the header from its first byte."""
        for field, kind in self.fields():
            if field == 2 and kind == INT32:
                self.size = self.read_integer()
            elif field == 3 and kind == INT32:
                self.stored = self.read_integer()
            else:
                self.skip(kind)


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
