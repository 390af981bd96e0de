"""Reads csv and tsv files. Every cell is text, exactly as written in the file.

The parser is Python's csv module in strict mode. It rejects malformed quotes, which other parsers repair by guessing,
and it counts lines.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from fastloop.errors import RecipeError, did_you_mean
from fastloop_plugins.rows.files import Part, Read, check_names, missing_column, open_text
from fastloop_plugins.rows.limits import check_row

DELIMITERS = {",": "comma", "\t": "tab", ";": "semicolon", "|": "bar"}
SAMPLE = 65_536
"""Characters at the start of a file that are searched for its delimiter and header line."""
LINE_ENDS = {"\n": "LF", "\r\n": "CRLF", "\r": "CR"}
LARGEST_CELL = 2**31 - 1
"""Characters: the largest limit that the csv module accepts on every platform. Its default is 131,072."""


def read_delimited(
    path: Path, how: Read, text: Mapping[str, str], labels: Sequence[str], skip_unreadable: bool
) -> Part:
    """Read the columns ``text`` and ``labels`` of one file. ``text``: column -> the option that names it.

    Raises:
        RecipeError: Quotes, line ends or cells of a line do not form a table, or the header lacks a column.
        UnicodeError: The file is not in its encoding.
    """
    with open_text(path, how) as stream:
        sample = stream.read(SAMPLE)
    file = _File(path, how, sample, text, labels)
    limit = csv.field_size_limit(LARGEST_CELL)
    try:
        with open_text(path, how) as stream:
            return file.read(stream, skip_unreadable)
    finally:
        csv.field_size_limit(limit)


def stream_delimited(path: Path, how: Read, text: Mapping[str, str]) -> Iterator[list[str]]:
    """Yield the columns ``text`` row by row. Raises like ``read_delimited``."""
    with open_text(path, how) as stream:
        sample = stream.read(SAMPLE)
    file = _File(path, how, sample, text, ())
    limit = csv.field_size_limit(LARGEST_CELL)
    try:
        with open_text(path, how) as stream:
            for _, _, row in file.records(stream, skip_unreadable=False):
                yield [row[index] for index in file.positions]
    finally:
        csv.field_size_limit(limit)


def rows_of_lines(
    path: Path, head: str, lines: Iterator[str], columns: Mapping[str, str], begun: bool, how: Read
) -> Iterator[dict[str, str]]:
    """Yield the cells of ``columns`` of each row of some lines. Raises like ``read_delimited``.

    Args:
        head: The first characters of the file.
        columns: Column -> the option that names it.
        begun: The lines are from a later part of the file, and have no header.
        how: The limits of a row.
    """
    file = _File(path, replace(how), head, columns, ())
    if begun:
        (header,) = file._first(1, file.delimiter)
        file.how.columns, file.how.delimiter = header, file.delimiter
    records = file.records(lines, skip_unreadable=False)
    while True:
        limit = csv.field_size_limit(LARGEST_CELL)
        try:
            record = next(records, None)
        finally:
            csv.field_size_limit(limit)
        if record is None:
            return
        yield {name: record[2][index] for name, index in zip(file.wanted, file.positions, strict=True)}


class _File:
    """One file, and the format that its first lines show."""

    def __init__(self, path: Path, how: Read, sample: str, text: Mapping[str, str], labels: Sequence[str]) -> None:
        self.path, self.how, self.sample, self.notes = path, how, sample, list[str]()
        self.text, self.labels = text, labels
        self.wanted = dict(text)  # column -> its key in ``data``
        self.wanted |= {name: "label" for name in labels if name not in text}
        self.delimiter = self._find_delimiter()
        self.header: list[str] = []
        self.names: set[str] = set()  # column names, to detect a repeated header
        self.positions: list[int] = []  # of the wanted columns
        self.lines: list[str] = []  # of the current record
        self.unreadable = 0

    # -- detection -----------------------------------------------------------------------------------------------------

    def _find_delimiter(self) -> str:
        """The delimiter from ``data.read`` or the suffix. Another one is used only if it alone gives a header with the
        wanted columns."""
        suffixes = [suffix.lower() for suffix in self.path.suffixes]
        usual = "\t" if ".tsv" in suffixes[-2:] else ","
        if self.how.delimiter is not None or self.how.columns is not None:
            return self.how.delimiter or usual
        wanted = set(self.wanted)
        fits = [
            delimiter
            for delimiter in DELIMITERS
            if wanted <= {name for row in self._first(1, delimiter) for name in row}
        ]
        if usual in fits or len(fits) != 1:
            return usual
        self.notes.append(f"{self.path}: the delimiter is a {DELIMITERS[fits[0]]}, as its header line shows")
        return fits[0]

    def _first(self, count: int, delimiter: str) -> list[list[str]]:
        """The first records of the sample."""
        try:
            return list(
                islice(filter(None, self._reader(io.StringIO(self.sample, newline=""), delimiter, strict=False)), count)
            )
        except csv.Error:
            return []

    def _reader(self, lines: Any, delimiter: str, strict: bool = True) -> Any:
        if self.how.quoting == "none":
            return csv.reader(lines, delimiter=delimiter, quoting=csv.QUOTE_NONE, strict=strict)
        return csv.reader(lines, delimiter=delimiter, strict=strict)

    def _remedy(self) -> str:
        """A suggestion for a header that lacks a column; empty if there is none."""
        first, *rows = self._first(50, self.delimiter) or [[]]
        wider = [
            delimiter for delimiter in DELIMITERS if len(first) == 1 and len((self._first(1, delimiter) or [[]])[0]) > 1
        ]
        if len(wider) == 1:
            return f" If the delimiter is a {DELIMITERS[wider[0]]}, give data.read.delimiter={_written(wider[0])}."
        cells = [[row[index] for row in rows if index < len(row)] for index in range(len(first))]
        number = re.compile(r"\s*[+-]?[0-9]+(\.[0-9]*)?\s*")
        is_data = any(
            cell in below or number.fullmatch(cell) or len(cell) > 40 or cell.count(" ") > 3
            for cell, below in zip(first, cells, strict=True)
        )
        if not is_data and any(name in first or " Did you" in did_you_mean(name, first) for name in self.wanted):
            return ""
        names = [f"column{index + 1}" for index in range(len(first))]
        order = sorted(range(len(first)), key=lambda index: -sum(map(len, [first[index], *cells[index]])))
        for index, name in zip(sorted(order[: len(self.text)]), self.text, strict=False):  # the longest cells
            names[index] = name
        rest = sorted(order[len(self.text) :], key=lambda index: _unlike_labels([first[index], *cells[index]]))
        for index, name in zip(sorted(rest[: len(self.labels)]), self.labels, strict=False):
            names[index] = name
        reason = (
            "Line 1 looks like data, not like column names: if so"
            if is_data
            else "If line 1 is data and not column names"
        )
        return f" {reason}, give data.read.columns=[{','.join(names)}]."

    # -- reading -------------------------------------------------------------------------------------------------------

    def read(self, stream: io.TextIOWrapper, skip_unreadable: bool) -> Part:
        """Read all rows, and skip empty lines."""
        found: dict[str, list[str]] = {name: [] for name in self.wanted}
        append = [column.append for column in found.values()]
        # records of several lines: numbers of the first and the last line, and the lines
        joined: list[tuple[int, int, list[str]]] = []
        for first, last, row in self.records(stream, skip_unreadable):
            for add, index in zip(append, self.positions, strict=True):
                add(row[index])
            if len(self.lines) > 1:
                joined.append((first, last, self.lines[:]))
        if joined and self.how.quoting is None:
            self._check_joined(joined, found)
        return Part(str(self.path), found, unreadable=self.unreadable, untyped=True, notes=self.notes)

    def records(self, stream: Iterable[str], skip_unreadable: bool) -> Iterator[tuple[int, int, list[str]]]:
        """Yield the numbers of the first and the last line of each row, and its cells; ``self.lines`` are its lines."""
        lines = self.lines

        def kept() -> Iterator[str]:
            size = 0
            for line in stream:
                size = len(line) if not lines else size + len(line)
                if lines:  # a quoted cell spans lines
                    check_row(f"{self.path}, line {first}", size, self.how)
                lines.append(line)
                yield line

        reader, first, line_end = self._reader(kept(), self.delimiter), 1, ""
        positions = self.positions = self._start(self.how.columns, 0) if self.how.columns is not None else []
        try:
            for row in reader:
                tail = lines[-1][-2:]
                if (
                    (end := tail if tail == "\r\n" else tail[-1:]) != line_end
                    and end in LINE_ENDS
                    and (row or line_end != "\r")
                ):
                    if line_end:
                        raise self._other_line_end(reader.line_num, end, line_end)
                    line_end = end
                if row and not positions:
                    positions = self.positions = self._start(row, first)
                elif row and len(row) != len(self.header):
                    if not skip_unreadable:
                        raise self._other_width(first, len(row), "".join(lines))
                    self.unreadable += 1
                elif row:
                    if row[positions[0]] in self.names and (
                        row[positions[-1]] in self.names if positions[1:] else row == self.header
                    ):
                        raise self._header_again(first, row)
                    yield first, reader.line_num, row
                first = reader.line_num + 1
                lines.clear()
        except csv.Error as error:
            raise self._bad_quotes(first, reader.line_num, error) from None

    def _start(self, header: list[str], line: int) -> list[int]:
        """Use a line as the header; returns the positions of the wanted columns."""
        check_names(f"{self.path}, line {line}", header)
        for name in self.wanted:
            if name not in header:
                raise missing_column(f"{self.path}", self.wanted[name], name, header, self._remedy())
        self.header, self.names = header, {name for name in header if name}
        return [header.index(name) for name in self.wanted]

    def _check_joined(self, joined: list[tuple[int, int, list[str]]], found: dict[str, list[str]]) -> None:
        """Raise an error for quoted cells over several lines if each line looks like a complete row: stray quotes look
        the same.

        A line looks like a row if it has as many cells as the header, and its label also occurs elsewhere. Without
        labels, all cells over several lines must look like this.
        """
        label = self.header.index(self.labels[0]) if self.labels else None
        known = set(found[self.labels[0]]) if self.labels else set()
        odd, width = [], len(self.header)
        for first, last, lines in joined:
            rows = [line.rstrip("\r\n").split(self.delimiter) for line in lines]
            if width > 1 and all(
                len(row) == width and (label is None or row[label].strip('" ') in known) for row in rows
            ):
                odd.append((first, last))
        if odd and (label is not None or len(odd) == len(joined)):
            first, last = odd[0]
            raise RecipeError(
                f"{self.path}, line {first}: a quote opens a cell here that closes in line {last}, but each of these "
                "lines reads as a row of its own. If quotes are part of the texts, give data.read.quoting=none; if "
                "the text spans these lines, data.read.quoting=double."
            )

    # -- errors --------------------------------------------------------------------------------------------------------

    def _bad_quotes(self, first: int, last: int, error: csv.Error) -> RecipeError:
        where = f"{self.path}, line {first}"
        if "expected after" in str(error):
            wrong = f"a quote opens a cell here, and more text follows where it closes in line {last}"
        elif "end of data" in str(error):
            wrong = f"a quote opens a cell here that never closes (line {last} is the last)"
        else:
            return RecipeError(f"{where}: cannot be read as rows of cells: {error}.")
        return RecipeError(
            f"{where}: {wrong}. If quotes are part of the texts, give data.read.quoting=none; otherwise double "
            'them: "".'
        )

    def _other_width(self, line: int, count: int, raw: str) -> RecipeError:
        width, name = len(self.header), DELIMITERS.get(self.delimiter, repr(self.delimiter))
        others = [other for other in DELIMITERS if other != self.delimiter and raw.count(other) == width - 1 > 0]
        remedy = f"Put quotes around a text that holds a {name} or a line end."
        if self.how.quoting == "none":
            remedy = f"With data.read.quoting=none, no text can hold a {name} or a line end."
        if self.how.columns is not None and count == 1 and others:
            remedy = f"If the delimiter is a {DELIMITERS[others[0]]}, give data.read.delimiter={_written(others[0])}."
        return RecipeError(
            f"{self.path}, line {line}: found {count} cell{'s' * (count != 1)}, expected {width} "
            f"({', '.join(self.header):.200}). {remedy}"
        )

    def _header_again(self, line: int, row: list[str]) -> RecipeError:
        where = f"{self.path}, line {line}: found the column names ({', '.join(row):.200})"
        if self.how.columns is not None:
            return RecipeError(f"{where}, which data.read.columns gives too. Remove data.read.columns, or that line.")
        return RecipeError(
            f"{where} again, as where files were joined. Remove that line, or give the files as a list: data.files."
        )

    def _other_line_end(self, line: int, end: str, before: str) -> RecipeError:
        return RecipeError(
            f"{self.path}, line {line}: ends with {LINE_ENDS[end]}, the lines before it with {LINE_ENDS[before]}. "
            "Expected one kind of line end outside of quotes: convert them (dos2unix, or mac2unix for CR)."
        )


def _unlike_labels(cells: Sequence[str]) -> tuple[int, ...]:
    """A key that sorts columns of labels before others: first those whose cells are not empty, differ, repeat, and are
    whole numbers."""
    different = set(cells)
    return (
        "" in different,
        len(different) < 2,
        len(different) > len(cells) / 2,
        not all(map(str.isdecimal, cells)),
        len(different),
    )


def _written(delimiter: str) -> str:
    """A delimiter as it is written in a recipe."""
    return "tab" if delimiter == "\t" else repr(delimiter)
