"""Tables: rows of one source, stored by column."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from numbers import Real
from typing import TYPE_CHECKING, Any

import numpy as np

from fastloop.errors import RecipeError, did_you_mean
from fastloop_plugins._mapped import take, zeros
from fastloop_plugins.rows.column import Column, in_blocks, keep_rows
from fastloop_plugins.rows.features import class_names_of
from fastloop_plugins.rows.file import BLOCK, python_values

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass
class Table:
    """Rows from one source, stored by column.

    Attributes:
        where: The source, for messages.
        columns: The columns that were read.
        names: Names of all columns of the source; None: those of ``columns``.
        class_names: Column -> the names of its numbers, for each column of which the features define them.
        unreadable: Number of skipped rows that could not be read.
        untyped: Whether every cell is text: a label 1 is then '1'.
        notes: Findings of the reader, for the log.
        unit: Rows or lines of the source, which ``numbers`` count.
        numbers: Number of each row in the source, (rows,) int64; None: 1, 2, ...
        places: The name of each row in messages; None: by its number.
        source: Its number in ``data.sources``.
        sampled: Whether these are only some of the rows of a stream, so that their count means nothing.
        label_counts: With ``sampled``: label -> its rows in the whole stream, if they are counted.
    """

    where: str
    columns: Mapping[str, Column]
    names: Sequence[str] | None = None
    unreadable: int = 0
    untyped: bool = False
    notes: list[str] = field(default_factory=list)
    unit: str = "row"
    numbers: NDArray[np.int64] | None = None
    places: Sequence[object] | None = None
    source: int = 0
    sampled: bool = False
    label_counts: Mapping[Any, int] = field(default_factory=dict)
    class_names: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def column(self, key: str, name: str) -> Column:
        """The values of the column that ``data.<key>`` names."""
        if name not in self.columns:
            raise missing_column(self.where, key, name, self.all_names())
        return self.columns[name]

    def __len__(self) -> int:
        return max(map(len, self.columns.values()), default=0)

    def all_names(self) -> Sequence[str]:
        """The names of all columns of the source."""
        return list(self.columns) if self.names is None else self.names

    def row(self, number: int) -> str:
        """The name of a row in messages; the first row is 1."""
        if self.places is not None:
            return str(self.places[number - 1])
        return f"{self.where}, {self.unit} {number if self.numbers is None else self.numbers[number - 1]}"

    def keep(self, rows: NDArray[np.int64]) -> Table:
        """A table of some rows, numbered from 0. Messages still name each row by its number in the source."""
        if len(rows) == len(self):
            return self
        places = None if self.places is None else [self.places[row] for row in rows]
        numbers = zeros(len(rows), np.int64)
        np.add(rows, 1, out=numbers)
        if self.numbers is not None:
            numbers = take(self.numbers, rows)
        return replace(self, columns=keep_rows(self.columns, rows), numbers=numbers, places=places)


def missing_column(where: str, key: str, name: str, columns: Iterable[Any], remedy: str = "") -> RecipeError:
    """The error for a missing column that ``data.<key>`` names."""
    names = [str(column) for column in columns]
    remedy = remedy or did_you_mean(name, names).partition(" Expected")[0]
    return RecipeError(
        f"there is no column {name!r}, which data.{key} names. Its columns: {', '.join(names) or 'none'}.",
        code="unknown-column",
        place=where,
        remedy=remedy,
    )


def visible_name(name: str) -> str:
    """A name without needless spaces and characters that cannot be seen.

    Examples are a byte-order mark or a zero-width space before it, and an accent that is a character of its own.
    """
    visible = [character for character in name if unicodedata.category(character) != "Cf"]
    return " ".join(unicodedata.normalize("NFKC", "".join(visible)).split())


def same_name(name: str) -> str:
    """A key under which names are equal that differ only by case, spaces, or characters that cannot be seen."""
    return visible_name(name).casefold()


def check_names(where: str, names: Iterable[str]) -> None:
    """Raise an error for a repeated column name. Empty names may repeat: trailing commas of spreadsheets give them."""
    names = list(names)
    for name in names:
        if name and names.count(name) > 1:
            raise RecipeError(
                f"the column name {name!r} is repeated in: {', '.join(names)}.",
                code="repeated-column",
                place=where,
                remedy="Rename or remove one of them.",
            )


def show(value: Any) -> str:
    """A value for a message: shortened, with its type."""
    try:
        return f"{value!r:.60} ({type(value).__name__})"
    except RecursionError:
        return f"a deeply nested {type(value).__name__}"


def propose_cast(value: Any) -> str:
    """The remedy for a decimal of a Parquet or Arrow file, which is no label, number or text; empty for others."""
    if not isinstance(value, Decimal):
        return ""
    return " Write the column as float64, int64 or text."


def is_missing(value: Any) -> bool:
    """Whether a cell has no value: null, NaN, or a text or list without content."""
    if isinstance(value, str):
        return not value.strip()
    if isinstance(value, Real):
        return bool(value != value)
    if isinstance(value, list | tuple):
        return not value
    return value is None


class RowError(ValueError):
    """A row that cannot be read. The message names the column and the problem."""


Bad = Callable[[int, str], None]
"""Receives the number of a bad row, from 0, and its problem. It raises an error, or notes to leave out the row."""


IMAGE_FIELDS = {"bytes", "path"}
"""Fields of an image in a column of `datasets`."""


def problem_of_text(value: Any) -> str | None:
    """Why a value is not a text; None if it is one."""
    if isinstance(value, dict) and value.keys() == IMAGE_FIELDS:
        return (
            "holds an image, expected text. The task image-classification trains on a folder of images: "
            "docs/tasks/image-classification.md has a script that writes one."
        )
    if not isinstance(value, str):
        return f"holds {show(value)}, expected text.{propose_cast(value)}"
    try:
        value.encode()
    except UnicodeEncodeError:
        return "holds half of a UTF-16 pair, which is no text."
    return None


def text_column(values: Iterable[Any], name: str, key: str, bad: Bad, required: bool = False) -> list[str]:
    """The texts of a column, which ``data.<key>`` names.

    Args:
        required: Whether a missing text is an error; else it is empty.
    """
    texts: list[str] = []
    for index, value in enumerate(values):
        if value is None and not required:
            texts.append("")
            continue
        is_plain = isinstance(value, str) and value.isascii()
        if not is_plain:
            problem = problem_of_text(value)
            if problem is not None:
                bad(index, f"column {name!r} (data.{key}) {problem}")
        texts.append(value)
    return texts


def list_values(values: Any, where: str, key: str, name: str) -> list[Any]:
    """A block of the column that ``data.<key>`` names, from a reader: a list, or an array of pyarrow."""
    try:
        return list(python_values(values))
    except UnicodeDecodeError as error:  # reading Parquet does not validate its text
        raise RecipeError(
            f"the column {name!r}, which data.{key} names, is not UTF-8 ({error.reason}).",
            code="wrong-encoding",
            place=where,
            remedy="Write the file again as UTF-8.",
        ) from None


def table_of(where: str, rows: Any, columns: Mapping[str, str]) -> Table:
    """Convert a ``datasets.Dataset``, or mappings, to a table.

    Args:
        columns: Columns to read, if they are there -> the option of ``data`` that names them.
    """
    if hasattr(rows, "with_format"):
        read = {name: Column() for name in columns if name in rows.column_names}
        if read:
            for batch in rows.select_columns(list(read)).with_format("arrow").iter(BLOCK):
                for name, column in read.items():
                    column.append_block(list_values(batch.column(name), where, columns[name], name))
        return Table(where, read, rows.column_names, class_names=class_names_of(rows.features.to_dict(), read))
    row_names: dict[str, None] = {}  # columns of any row, in order
    read = {name: Column() for name in columns}
    for start, (block,) in in_blocks([rows]):
        for number, row in enumerate(block, start + 1):
            if not isinstance(row, Mapping):
                raise RecipeError(
                    code="invalid-row", place=f"{where}, row {number}", found=show(row), expected="a mapping of columns"
                )
            if not row.keys() <= row_names.keys():
                row_names |= dict.fromkeys(row)
        for name, column in read.items():
            column.append_block([row.get(name) for row in block])
    return Table(where, {name: column for name, column in read.items() if name in row_names}, list(row_names))
