"""Defines what a reader of a file format is: one class for rows in memory, streamed rows, and rows to predict."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, ClassVar

from fastloop.errors import RecipeError
from fastloop_plugins.rows.features import class_names_of_schema
from fastloop_plugins.rows.options import Read

BLOCK = 1024
"""Rows of a block: some hundred KB of text. With more rows alive, the garbage collector costs a third of reading."""


class BadRow(ValueError):
    """A row that cannot be read. The message does not name the row.

    Args:
        place: Where it is in its file, such as ``line 3``.

    Attributes:
        before: Rows before it, counted from the position where ``File.blocks`` began.
    """

    before = 0

    def __init__(self, problem: str, place: str) -> None:
        super().__init__(problem)
        self.place = place


def at_row(error: Exception, before: int) -> Exception:
    """An error of a reader, with the number of rows before it."""
    if isinstance(error, BadRow):
        error.before = before
    return error


@dataclass(frozen=True)
class ColumnName:
    """The name that a column of the ``data`` section has in a file, such as ``ColumnName("review", "sources[1].text")``
    for the column ``text``: ``data.sources[1].text`` is ``review``.

    Attributes:
        in_file: The name.
        option: The option of ``data`` that gives it, for messages.
    """

    in_file: str
    option: str


@dataclass
class Block:
    """Consecutive rows of a file, by column.

    Attributes:
        start: The position where a reader can begin with these rows: an offset in bytes, or the number of a Parquet row
            group, which may have several blocks.
        rows: Their number.
        columns: Name -> list, or column of pyarrow. A column that the file lacks is missing.
        lines: The first line of each row, in a format of lines, counted from the position where reading began; None:
            messages name rows by their number.
    """

    start: int
    rows: int
    columns: Mapping[str, Any]
    lines: Sequence[int] | None = None

    def tuples(self, names: Sequence[str], skip: int = 0) -> Iterator[tuple[Any, ...]]:
        """Yield the columns of each row, without the first ``skip`` rows; None for a column that is not there."""
        rows: Iterator[tuple[Any, ...]] = iter([()] * self.rows)
        if names:
            columns = self.lists(names)
            rows = zip(*(columns[name] for name in names), strict=True)
        return islice(rows, skip, None) if skip else rows

    def lists(self, names: Sequence[str]) -> dict[str, Sequence[Any]]:
        """The values of some columns; None for each row in a column that is not there."""
        columns = dict[str, Sequence[Any]]()
        for name in names:
            columns[name] = python_values(self.columns.get(name, [None] * self.rows))
        return columns


def python_values(values: Any) -> Sequence[Any]:
    """The values of a column from a reader: a list, or an array of pyarrow.

    A time of day in nanoseconds stays a scalar of pyarrow: ``datetime.time`` has microseconds.
    """
    if not hasattr(values, "to_pylist"):
        return values  # type: ignore[no-any-return]
    if str(values.type) == "time64[ns]":
        return [scalar if scalar.is_valid else None for scalar in values]
    return values.to_pylist()  # type: ignore[no-any-return]


class File(ABC):
    """An open file of one format.

    Args:
        path: A path, or a URL of fsspec.
        columns: Column that must be there -> the option of ``data`` that names it.
        skip_unreadable: Skip rows that cannot be read, and count them.

    Attributes:
        row: A row of the format, for the table in docs/data.md.
        group: A row group of a stream, for that table.
        lists: Whether a cell can be a list, such as words or messages.
        untyped: Whether every cell is text.
        has_groups: Whether the format has row groups. All blocks of one begin at its number.
        predicts: Whether the rows are those of a file to predict. Each line of a .txt file is a row then, and nothing
            is checked at the end of the file, but by ``check_whole``.
        reads_from_start: Whether the file can only be read from its beginning. It is one row group then.
        not_streamed: Why the file cannot be streamed, and what to do; empty if it can be.
        names: The columns that the file has, as far as they are known.
        schema: Its schema in pyarrow; None: the format has none.
        notes: Findings, for the log.
        unreadable: Number of skipped rows.
    """

    row: ClassVar[str] = ""
    group: ClassVar[str] = ""
    lists: ClassVar[bool] = False
    untyped: ClassVar[bool] = False
    has_groups: ClassVar[bool] = False
    reads_from_start = False
    predicts = False
    not_streamed = ""
    schema: Any = None

    def __init__(self, path: str, how: Read, columns: Mapping[str, str], skip_unreadable: bool = False) -> None:
        self.path = path
        self.how = how
        self.wanted = dict(columns)
        self.skip_unreadable = skip_unreadable
        self.names: dict[str, None] = {}
        self.notes: list[str] = []
        self.unreadable = 0

    @abstractmethod
    def blocks(self, columns: Sequence[str], start: int = 0, size: int = BLOCK, skip: int = 0) -> Iterator[Block]:
        """Yield the rows from a position on. Those before a row that cannot be read come before the error.

        Args:
            columns: Columns to read. A format that counts rows without reading them does so if there are none.
            start: Where a block begins.
            size: Rows of a block at most.
            skip: Rows to skip at the start. Their blocks may be missing.

        Raises:
            BadRow: A row cannot be read.
            RecipeError: The file is no table, lacks a column, or is too large.
            OSError: It cannot be read.
        """

    def in_blocks(
        self,
        items: Iterable[tuple[int, Any]],
        read: Callable[[Any], Any],
        make: Callable[[int, list[Any]], Block],
        size: int,
        skip: int,
    ) -> Iterator[Block]:
        """Put rows into blocks. Those before a row that cannot be read come before the error.

        Args:
            items: The position of each row, and the argument of ``read`` for it, such as its line.
            read: Returns a row. It is not called for rows to skip.
            make: Returns a block, given the position of its first row and its rows.
        """
        start = 0
        rows: list[Any] = []
        count = 0
        try:
            for position, item in items:
                if count >= skip:
                    try:
                        row = read(item)
                    except BadRow:
                        if not self.skip_unreadable:
                            raise
                        self.unreadable += 1
                        continue
                    if not rows and not self.reads_from_start:
                        start = position
                    rows.append(row)
                count += 1
                if len(rows) == size:
                    yield make(start, rows)
                    rows = []
        except (BadRow, RecipeError) as error:
            if rows:
                yield make(start, rows)
            raise at_row(error, count) from None
        if rows:
            yield make(start, rows)

    def check_whole(self) -> None:  # noqa: B027  # most formats have no such rows
        """Raise an error for a file to predict whose rows are wrong in a way that only the whole file shows. ``blocks``
        finds it when the rows before have been predicted.

        Raises:
            BadRow: The first of these rows.
        """

    @abstractmethod
    def facts(self) -> list[str]:
        """Facts that change with the rows. Call it when ``blocks`` has read the file to its end."""

    def first_names(self) -> list[str]:
        """The columns of the first row."""
        next(self.blocks((), size=1), None)
        return list(self.names)

    def class_names(self, columns: Iterable[str]) -> dict[str, list[str]]:
        """Column -> the names of its numbers, for each column of which ``schema`` has them.

        Raises:
            ValueError: They are malformed.
        """
        return {} if self.schema is None else class_names_of_schema(self.schema, columns)

    @abstractmethod
    def close(self) -> None:
        """Close the file."""

    def __enter__(self) -> File:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
