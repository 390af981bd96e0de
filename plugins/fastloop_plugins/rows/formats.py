"""The formats of files, and how the files of a run are read: into a table, row by row, or from any position on."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from fastloop.errors import PluginError, RecipeError
from fastloop.problem import clause
from fastloop_plugins._mapped import GrowingArray
from fastloop_plugins.rows.column import Column
from fastloop_plugins.rows.conll import Columns, Conll
from fastloop_plugins.rows.contents import check_content
from fastloop_plugins.rows.csv import Delimited
from fastloop_plugins.rows.drop import Drop
from fastloop_plugins.rows.file import BLOCK, BadRow, Block, ColumnName, File
from fastloop_plugins.rows.json import Json
from fastloop_plugins.rows.lines import codec_of
from fastloop_plugins.rows.options import Read
from fastloop_plugins.rows.remote import RemoteError
from fastloop_plugins.rows.suffixes import COLUMN_FORMATS, COMPRESSIONS, CONLL, format_of, installed_formats
from fastloop_plugins.rows.table import Table, list_values, missing_column
from fastloop_plugins.rows.text import Text

READERS: dict[str, type[File] | None] = {
    ".csv": Delimited,
    ".tsv": Delimited,
    ".json": Json,
    ".jsonl": Json,
    ".parquet": None,  # ``reader_of`` imports these two, and pyarrow
    ".arrow": None,
    ".txt": Text,
}
"""Suffix -> reader of the format, for each of ``suffixes.FORMATS``. A section that reads ``CONLL`` files has a reader
for them, too."""
ROWS_AT_ONCE = 256
"""Rows to decode at once where rows are used one by one: a row group may be larger than memory."""


def reader_of(suffix: str) -> type[File]:
    """The reader of a format."""
    if suffix == CONLL:
        return Conll
    if suffix not in READERS:
        return load_reader(suffix)
    reader = READERS[suffix]
    if reader is not None:
        return reader
    from fastloop_plugins.rows.arrow import Arrow
    from fastloop_plugins.rows.parquet import Parquet

    return Arrow if suffix == ".arrow" else Parquet


def load_reader(suffix: str) -> type[File]:
    """The reader of a format of another package.

    Raises:
        PluginError: It cannot be imported, or does not extend ``File``.
    """
    point = installed_formats()[suffix]
    where = f"format {suffix} ({point.value} of {point.dist.name if point.dist else '?'})"
    try:
        reader = point.load()
    except (Exception, SystemExit) as error:
        raise PluginError(
            f"{where} cannot be imported: {type(error).__name__}: {error}", code="import-failed"
        ) from error
    if not (isinstance(reader, type) and issubclass(reader, File)):
        raise PluginError(
            f"{where} is no reader: expected a class that extends fastloop_plugins.rows.File.", code="wrong-type"
        )
    return reader


def describe_formats() -> list[tuple[str, str, str, str, str]]:
    """The table of formats in docs/data.md: suffix, row, values, compression, and row group of a stream."""
    rows = []
    for suffix in (*READERS, CONLL):
        reader = reader_of(suffix)
        compressions = ", ".join(f"`{codec}`" for codec in COMPRESSIONS)
        if suffix in COLUMN_FORMATS:
            compressions = "no"
        values = "text, numbers, lists" if reader.lists else "text"
        rows.append((f"`{suffix}`", reader.row, values, compressions, reader.group))
    return rows


def is_untyped(path: str) -> bool:
    """Whether every cell of a file is text."""
    suffix = format_of(Path(path))[0]
    return suffix != CONLL and reader_of(suffix).untyped


@dataclass
class KeptColumns:
    """Columns of a file to predict that the task does not need. They are read together with those of the task.

    Attributes:
        columns: Their names.
        start: The first row whose values are kept.
        rows: The values of each row that ``FileLayout.rows`` has read since, None for one that the row lacks.
        names: All columns of the file, once it is read to its end.
    """

    columns: Sequence[str]
    start: int = 0
    rows: deque[tuple[Any, ...]] = field(default_factory=deque)
    names: Sequence[str] | None = None


@dataclass(frozen=True)
class FileLayout:
    """How the files of a ``data`` section are read.

    Attributes:
        columns: Column that each file must have -> the option of ``data`` that names it.
        optional: Columns that a file may have.
        conll: The columns of CoNLL files; None: the section reads none.
        conll_suffixes: Suffixes of files that are CoNLL files.
        skip_unreadable: Skip rows that cannot be read, and count them.
        predicts: See ``File``.
        kept: Columns that ``rows`` collects beside those that it yields; None: no others.
        drop: The rows that a stream leaves out.
        names: For each file of a stream, if columns have other names there: column -> its name in the file, such as
            ``{"text": ColumnName("review", "sources[1].text")}``. See ``of_file``.
        renamed: In a layout of one file: column -> its name in the file, such as ``{"text": "review"}``.
    """

    how: Read
    columns: Mapping[str, str]
    optional: Sequence[str] = ()
    conll: Columns | None = None
    conll_suffixes: Sequence[str] = field(default=(CONLL,))
    skip_unreadable: bool = False
    predicts: bool = False
    kept: KeptColumns | None = None
    drop: Drop = field(default_factory=Drop)
    names: Sequence[Mapping[str, ColumnName]] = ()
    renamed: Mapping[str, str] = field(default_factory=dict)

    def of_file(self, number: int) -> FileLayout:
        """How a file of a stream is read, with the names that its columns have."""
        if not self.names:
            return self
        names = self.names[number]
        columns = {name.in_file: name.option for name in names.values()}
        renamed = {column: name.in_file for column, name in names.items()}
        return replace(self, columns=columns, names=(), renamed=renamed, drop=self.drop.renamed(names))

    def own_names(self, columns: Sequence[str]) -> list[str]:
        """The names of columns in the file, for a result of ``of_file``."""
        return [self.renamed.get(name, name) for name in columns]

    def open(self, path: str) -> File:
        """Open a file."""
        suffix = format_of(Path(path))[0]
        if self.conll is not None and suffix in self.conll_suffixes:
            return Conll(path, self.how, self.columns, self.skip_unreadable, self.conll)
        file = reader_of(suffix)(path, self.how, self.columns, self.skip_unreadable)
        file.predicts = self.predicts
        return file

    def read(self, path: str) -> Table:
        """Read all rows of a file into a table. A cell with NA is the text NA.

        Raises:
            RecipeError: The file cannot be read in the format of its suffix, with the options in ``how``.
        """
        columns = {name: Column() for name in (*self.columns, *self.optional)}
        lines = GrowingArray(np.int64)
        with self.reading(path) as file:
            for block in self._blocks(file, BLOCK):
                if block.lines:
                    lines.extend(block.lines)
                for name, column in columns.items():
                    column.append_block(block.columns[name])
            names = list(file.names)
            if not names and not any(columns.values()):
                names = list(self.columns)  # a file without rows shows no names
            columns = {name: column for name, column in columns.items() if name in names}
            table = Table(
                path,
                columns,
                names,
                unreadable=file.unreadable,
                untyped=file.untyped,
                notes=file.notes,
                class_names=self.class_names(file),
            )
            numbers = lines.finish()
            if len(numbers):
                table.unit = "line"
                table.numbers = numbers
        return table

    def rows(self, path: str) -> Iterator[tuple[str, tuple[Any, ...]]]:
        """Yield the name of each row in messages, as a table of the file names it, and its columns; None for an
        optional column that is not there.

        Raises:
            RecipeError: The file cannot be read, or lacks a column.
        """
        count = 0
        names = dict.fromkeys([*self.columns, *self.optional])
        others = () if self.kept is None else self.kept.columns
        with self.reading(path) as file:
            file.check_whole()
            for block in self._blocks(file, ROWS_AT_ONCE, others):
                if not count:
                    self.check(file)
                unit = "row"
                numbers: Sequence[int] = range(count + 1, count + block.rows + 1)
                if block.lines is not None:
                    unit = "line"
                    numbers = block.lines
                kept_rows = block.tuples(others)
                rows = zip(*(block.columns[name] for name in names), strict=True)
                for row, (number, values, kept_row) in enumerate(zip(numbers, rows, kept_rows, strict=True), count):
                    if self.kept is not None and row >= self.kept.start:
                        self.kept.rows.append(kept_row)
                    yield f"{path}, {unit} {number}", values
                count += block.rows
            if self.kept is not None:
                self.kept.names = list(file.names)

    def _blocks(self, file: File, size: int, others: Sequence[str] = ()) -> Iterator[Block]:
        """Yield all rows of a file, ``size`` at once, with each column as a list; of None for one that is not there.

        Args:
            others: Further columns.
        """
        first = next(iter(self.columns.values()))
        names = list(dict.fromkeys([*self.columns, *self.optional, *others]))
        for block in file.blocks(names, size=size):
            columns = dict[str, list[Any]]()
            for name in names:
                values = block.columns.get(name, [None] * block.rows)
                columns[name] = list_values(values, file.path, self.columns.get(name, first), name)
            yield replace(block, columns=columns)

    @contextmanager
    def reading(self, path: str) -> Iterator[File]:
        """Open a file. Errors of reading it inside the block name the file, and the place if it is known."""
        with explain_reading(path, self.how), self.open(path) as file:
            yield file

    def class_names(self, file: File) -> dict[str, list[str]]:
        """Column -> the names that a file gives its numbers, for each column of the section of which it has them.

        Raises:
            ValueError: They are malformed.
        """
        names = file.class_names(self.columns)
        result = dict[str, list[str]]()
        for column in self.renamed or self.columns:
            own_name = self.renamed.get(column, column)
            if own_name in names:
                result[column] = names[own_name]
        return result

    def class_names_of_files(self, paths: Sequence[str]) -> Iterator[dict[str, list[str]]]:
        """Yield ``class_names`` of each file.

        Raises:
            RecipeError: A file cannot be read.
        """
        for number, path in enumerate(paths):
            layout = self.of_file(number)
            with layout.reading(path) as file:
                names = layout.class_names(file)
            yield names

    def check(self, file: File) -> None:
        """Raise an error for a file without a column, after its first block."""
        for name, key in self.columns.items():
            if name not in file.names:
                raise missing_column(file.path, key, name, file.names)

    def first_names(self, path: str) -> list[str]:
        """The columns of a file's first row. Empty if they cannot be read, which reading the file then reports."""
        import pyarrow

        with contextlib.suppress(OSError, ValueError, RecipeError, pyarrow.ArrowException), self.open(path) as file:
            return file.first_names()
        return []


@contextmanager
def explain_reading(path: str, how: Read) -> Iterator[None]:
    """Raise errors of reading a file inside the block as errors that name the file, and the place if it is known.

    Raises:
        RecipeError: The file has another format than its suffix, or cannot be read with the options in ``how``.
    """
    import pyarrow

    try:
        check_content(path, how)
        yield
    except BadRow as error:
        raise RecipeError(str(error), code="invalid-row", place=f"{path}, {error.place}") from None
    except RemoteError as error:
        raise RecipeError(f"cannot be read: {clause(error)}.", code="unreachable-url", place=str(path)) from None
    except UnicodeDecodeError as error:  # reading Parquet does not validate its text
        raise RecipeError(
            f"its text is not UTF-8 ({error.reason}).",
            code="wrong-encoding",
            place=str(path),
            remedy="Write the file again as UTF-8.",
        ) from None
    except (OSError, ValueError, TypeError, pyarrow.ArrowException) as error:
        suffix = format_of(Path(path))[0]
        codec = None
        if suffix not in COLUMN_FORMATS:
            with contextlib.suppress(OSError):
                codec = codec_of(path, how)
        remedy = ""
        if codec:
            remedy = f"It is read as {codec}: if it has another compression, give data.read.compression."
        raise RecipeError(
            f"cannot be read as {suffix}: {clause(error)}.", code="file-unreadable", place=str(path), remedy=remedy
        ) from None
