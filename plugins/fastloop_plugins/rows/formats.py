"""The formats of streamed files: how a file is divided into row groups, and how the rows of one are read.

Each format has ``scan``, which passes over a file once and yields the key and rows of its row groups, and ``read``,
which yields rows of one group. The key is the group's number in a Parquet file, and the offset in bytes of its first
row in a file of lines.

A compressed file cannot be read from the middle. It is one row group, and reading from one of its rows decompresses all
rows before.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BufferedReader
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol, cast

from fastloop.errors import RecipeError
from fastloop_plugins.rows.csv import SAMPLE, rows_of_lines
from fastloop_plugins.rows.files import Read, format_of, missing_column
from fastloop_plugins.rows.limits import Expanded, lines_of, size_of
from fastloop_plugins.rows.paths import URL

if TYPE_CHECKING:
    from fastloop_plugins.rows.parquet import BoundedParquet

LINES = 1024
"""Rows of a row group of a file of lines, which has none of its own."""
BATCH = 256
"""Rows that are decoded at once: a row group may be larger than memory."""

Row = tuple[Any, ...]
Scanned = Iterator[tuple[int, int, list[Any]]]
"""Key, rows and labels of each part of a row group. Parts of the same group follow each other."""


class Format(Protocol):
    """A format of streamed files.

    Attributes:
        shares_file: Whether the readers of several lanes use one open file at the same time, so that closing it would
            hurt another lane.
    """

    shares_file: bool

    def open(self, path: str) -> Any:
        """Open a file for ``read``."""
        ...

    def scan(self, path: str, columns: Mapping[str, str], label: str | None, facts: list[str]) -> Scanned:
        """Pass over a file.

        Args:
            columns: Column -> the option of ``data`` that names it.
            label: The column whose values to yield; None: none.
            facts: Receives facts that change with the rows.

        Raises:
            RecipeError: The file lacks a column, or a row cannot be read.
        """
        ...

    def read(
        self, file: Callable[[], Any], path: str, key: int, rows: int, skip: int, columns: Sequence[str]
    ) -> Iterator[Row]:
        """Yield the columns of each row of a row group, without its first ``skip`` rows. ``file`` returns the open
        file."""
        ...


class BadRow(ValueError):
    """A row that cannot be read. The message does not say where it is."""


def json_object(content: str | bytes) -> dict[str, Any]:
    """The object that is the content of a row.

    Raises:
        BadRow: It is none.
    """
    try:
        found: Any = json.loads(content)
    except UnicodeDecodeError as error:
        raise BadRow(f"not UTF-8 ({error.reason})") from None
    except (ValueError, RecursionError) as error:
        raise BadRow(f"not valid JSON: {error}") from None
    if not isinstance(found, dict):
        raise BadRow(f"found {type(found).__name__}, expected an object with a key for each column")
    return found


def open_file(path: str) -> BinaryIO:
    """Open a file at a path or a URL of fsspec."""
    if not URL.match(path):
        return Path(path).open("rb")
    import fsspec  # type: ignore[import-untyped]

    return cast("BinaryIO", fsspec.open(path, "rb").open())


def batch_rows(batch: Any, columns: Sequence[str]) -> Iterator[Row]:
    """Yield the columns of each row of a batch of pyarrow; None for a column that is not there."""
    there = batch.schema.names
    return zip(
        *(batch.column(name).to_pylist() if name in there else [None] * batch.num_rows for name in columns), strict=True
    )


@dataclass(frozen=True)
class Parquet:
    """Row groups of a Parquet file."""

    how: Read
    shares_file = True

    def open(self, path: str) -> BoundedParquet:
        """See ``Format``."""
        import pyarrow  # type: ignore[import-untyped]

        from fastloop_plugins.rows.parquet import BoundedParquet

        return BoundedParquet(open_file(path) if URL.match(path) else pyarrow.OSFile(path), path, self.how)

    def scan(self, path: str, columns: Mapping[str, str], label: str | None, facts: list[str]) -> Scanned:
        """See ``Format``. Reads the metadata, and the column of labels."""
        with self.open(path) as file:
            for name, key in columns.items():
                if name not in file.names:
                    raise missing_column(path, key, name, file.names)
            for number in range(file.metadata.num_row_groups):
                group, values = file.metadata.row_group(number), []
                facts.append(f"{group.num_rows} {group.total_byte_size}")
                if label is not None:
                    batches = file.batches([label], [number])
                    values = [value for batch in batches for value in batch.column(0).to_pylist()]
                if group.num_rows:
                    yield number, group.num_rows, values

    def read(
        self, file: Callable[[], Any], path: str, key: int, rows: int, skip: int, columns: Sequence[str]
    ) -> Iterator[Row]:
        """See ``Format``."""
        for batch in file().batches(columns, [key], BATCH):
            yield from batch_rows(batch.slice(skip), columns)
            skip = max(skip - batch.num_rows, 0)


class LineFile:
    """An open file of lines, which may be compressed. Its lines are iterated from ``offset`` on, which then follows the
    last one."""

    def __init__(self, path: str, how: Read) -> None:
        codec = format_of(Path(path))[1]
        self.path, self.how = path, how
        self.raw: Any = open_file(path)
        self.is_whole = codec is not None
        # fsspec reads whole lines
        self.stream: Any = self.raw if isinstance(self.raw, BufferedReader) else BufferedReader(self.raw, 2**16)
        if codec is not None:
            import pyarrow

            size = size_of(self.raw)
            self.stream = BufferedReader(Expanded(pyarrow.CompressedInputStream(self.raw, codec), path, size, how))
        self.head, self.offset, self.number, self.checksum = b"", 0, 0, 0

    def seek(self, offset: int) -> LineFile:
        """Iterate from this offset on. A compressed file must be at it already."""
        if not self.is_whole:
            self.stream.seek(offset)
        self.offset = offset
        return self

    def __iter__(self) -> Iterator[bytes]:
        for line in lines_of(self.stream.readline, self.path, self.how, self.number + 1):
            self.offset += len(line)
            self.number += 1
            self.checksum = zlib.crc32(line, self.checksum)
            yield line

    def __enter__(self) -> LineFile:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self.stream.close()
        self.raw.close()


@dataclass(frozen=True)
class Lines:
    """JSON objects, one a line."""

    how: Read
    shares_file = False

    def open(self, path: str) -> LineFile:
        """See ``Format``."""
        return LineFile(path, self.how)

    def records(self, path: str, file: LineFile, columns: Mapping[str, str]) -> Iterator[Any]:
        """The rows from the position of a file on, before they are decoded."""
        return (line for line in file if not line.isspace())

    def decode(self, record: Any) -> Mapping[str, Any]:
        """Column -> value, of one of ``records``."""
        return json_object(record)

    def scan(self, path: str, columns: Mapping[str, str], label: str | None, facts: list[str]) -> Scanned:
        """See ``Format``. Reads all lines, and decodes them if there is a label."""
        with self.open(path) as file:
            start, rows, values, first = 0, 0, list[Any](), True
            for record in self.records(path, file, columns):
                if first or label is not None:
                    try:
                        row = self.decode(record)
                    except BadRow as error:
                        raise RecipeError(f"{path}, line {file.number}: {error}.") from None
                    for name, key in columns.items() if first else ():
                        if name not in row:
                            raise missing_column(path, key, name, row)
                    if label is not None:
                        values.append(row.get(label))
                rows, first = rows + 1, False
                if rows == LINES:
                    yield start, rows, values
                    start, rows, values = 0 if file.is_whole else file.offset, 0, []
            facts.append(f"{file.offset} {file.checksum}")
            if rows:
                yield start, rows, values

    def read(
        self, file: Callable[[], Any], path: str, key: int, rows: int, skip: int, columns: Sequence[str]
    ) -> Iterator[Row]:
        """See ``Format``."""
        names = dict.fromkeys(columns, "text")
        if file().is_whole:
            with self.open(path) as own:  # lanes have different positions in it
                for record in islice(self.records(path, own, names), skip, rows):
                    yield self._values(record, columns)
            return
        while rows:  # other row groups may move the file's position between two batches
            lines = file().seek(key)
            found = list(islice(self.records(path, lines, names), min(rows, BATCH)))
            if not found:
                return
            key, rows = lines.offset, rows - len(found)
            for record in found[skip:]:
                yield self._values(record, columns)
            skip = max(skip - len(found), 0)

    def _values(self, record: Any, columns: Sequence[str]) -> Row:
        row = self.decode(record)
        return tuple(row.get(name) for name in columns)


class Delimited(Lines):
    """Rows of a csv or tsv file with a header line. All cells are text."""

    def open(self, path: str) -> LineFile:
        """See ``Format``. Reads the start of the file, which shows the delimiter and the header."""
        with LineFile(path, self.how) as file:
            head = file.stream.read(SAMPLE)
        file = LineFile(path, self.how)
        file.head = head
        return file

    def records(self, path: str, file: LineFile, columns: Mapping[str, str]) -> Iterator[Any]:
        """See ``Lines``."""
        begun = file.offset > 0
        return rows_of_lines(
            Path(path), file.head.decode("utf-8-sig", "ignore"), self._decoded(file), columns, begun, self.how
        )

    def _decoded(self, file: LineFile) -> Iterator[str]:
        for line in file:
            try:
                yield line.decode("utf-8-sig" if file.offset == len(line) else "utf-8")
            except UnicodeDecodeError as error:
                raise RecipeError(
                    f"{file.path}, line {file.number}: not UTF-8 ({error.reason}). Streamed files are UTF-8. "
                    "Convert it: "
                    "iconv -f latin1 -t utf-8 (with its real encoding)."
                ) from None

    def decode(self, record: Any) -> Mapping[str, Any]:
        """See ``Lines``."""
        return cast("Mapping[str, Any]", record)


LINE_FORMATS: dict[str, Callable[[Read], Format]] = {".jsonl": Lines, ".csv": Delimited, ".tsv": Delimited}
"""Suffix -> format of a file of lines, which may be compressed."""
