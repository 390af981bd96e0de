"""Reads csv and tsv files. Every cell is text, exactly as written in the file.

The parser is Python's csv module in strict mode. It rejects malformed quotes, which other parsers repair by guessing,
and it counts lines.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any

from fastloop.errors import RecipeError, did_you_mean
from fastloop.problem import clause
from fastloop_plugins.rows.file import BLOCK, BadRow, Block, at_row
from fastloop_plugins.rows.limits import check_row
from fastloop_plugins.rows.lines import LineFormat, Lines
from fastloop_plugins.rows.options import Read
from fastloop_plugins.rows.suffixes import format_of
from fastloop_plugins.rows.table import check_names, missing_column, same_name

Record = tuple[int, list[str]]
"""The first line of a row, and its cells."""
DELIMITERS = {",": "comma", "\t": "tab", ";": "semicolon", "|": "bar"}
LINE_ENDS = {"\n": "LF", "\r\n": "CRLF", "\r": "CR"}
LARGEST_CELL = 2**31 - 1
"""Characters: the largest limit that the csv module accepts on every platform. Its default is 131,072."""
KNOWN = 100_000
"""Different labels that are kept to recognize rows in a quoted cell. Classes are fewer."""


def spellings(name: str) -> set[str]:
    """A column's name as the header of another file may have it: in other case, or after a byte-order mark."""
    names = set[str]()
    for cased in (name, name.lower(), name.upper(), name.title(), name.capitalize()):
        for before in ("", " ", "\ufeff"):
            names.add(f"{before}{cased}")
            names.add(f"{before}{cased} ")
    return names


class Joined:
    """Quoted cells over several lines. Stray quotes join rows in the same way.

    Attributes:
        known: Labels of the file.
        doubles_quotes: Whether a cell in quotes has doubled ones: the program that wrote the file puts no stray quotes.
    """

    def __init__(self, delimiter: str) -> None:
        self.delimiter = delimiter
        self.count = 0
        self.known = set[str]()
        self.doubles_quotes = False
        self.candidates: list[tuple[int, int, list[str]]] = []

    def add(self, first: int, last: int, lines: Sequence[str], width: int, label: int | None) -> None:
        """Add a record. It is a candidate if each of its lines has as many cells as the header."""
        self.count += 1
        rows = [line.rstrip("\r\n").split(self.delimiter) for line in lines]
        if width > 1 and all(len(row) == width for row in rows):
            labels = [] if label is None else [row[label].strip('" ') for row in rows]
            self.candidates.append((first, last, labels))

    def find(self, labelled: bool) -> tuple[int, int] | None:
        """First and last line of a record whose lines look like rows: their labels also occur elsewhere. Without
        labels, all records must be candidates. None: there is no such record, or the file doubles quotes."""
        if self.doubles_quotes:
            return None
        odd = [(first, last) for first, last, labels in self.candidates if self.known.issuperset(labels)]
        if odd and (labelled or len(odd) == self.count):
            return odd[0]
        return None


def has_doubled_quotes(row: Sequence[str], line: str) -> bool:
    """Whether a cell in quotes has doubled ones in the first line of its record: ``"a ""fine"" film"``. Later lines are
    not searched, because a stray quote may have joined them to the record.

    Args:
        row: The cells of the record.
        line: Its first line, as it is written.
    """
    for cell in row:
        if '"' not in cell:
            continue
        text = re.split("[\r\n]", cell, maxsplit=1)[0]  # the cell may span lines
        if '"' in text and '"' + text.replace('"', '""') in line:
            return True
    return False


@contextmanager
def large_cells() -> Iterator[None]:
    """The csv module has one limit of a cell for all readers: inside the block, it is the largest."""
    limit = csv.field_size_limit(LARGEST_CELL)
    try:
        yield
    finally:
        csv.field_size_limit(limit)


class Delimited(LineFormat):
    """Rows of a csv or tsv file. The first lines of the file show its format."""

    untyped = True
    row = "a line, or several with a quoted cell; every cell is text"

    def __init__(self, path: str, how: Read, columns: Mapping[str, str], skip_unreadable: bool = False) -> None:
        super().__init__(path, how, columns, skip_unreadable)
        self.sample = self.text.head
        kinds = {name: key.rpartition(".")[2] for name, key in columns.items()}  # of sources[0].label: label
        self.labels = [name for name, kind in kinds.items() if kind == "label"]
        self.delimiter = self._find_delimiter()
        self.header: list[str] = []
        # to detect a repeated header: its names, and two wanted columns
        self.headings = set[str]()
        self.ends = (0, 0)
        if how.columns is not None:
            self._start(how.columns, 0)

    # -- detection -----------------------------------------------------------------------------------------------------

    def _find_delimiter(self) -> str:
        """The delimiter from ``data.read`` or the suffix. Another one is used only if it alone gives a header with the
        wanted columns."""
        usual = "\t" if format_of(Path(self.path))[0] == ".tsv" else ","
        if self.how.delimiter is not None or self.how.columns is not None:
            return self.how.delimiter or usual
        wanted = set(self.wanted)
        fits = [delimiter for delimiter in DELIMITERS if wanted.issubset(self._first(delimiter))]
        if usual in fits or len(fits) != 1:
            return usual
        self.notes.append(f"{self.path}: the delimiter is a {DELIMITERS[fits[0]]}, as its header line shows")
        return fits[0]

    def _first(self, delimiter: str) -> list[str]:
        """The cells of the sample's first record that is not empty; none if there is no such record."""
        lines = io.StringIO(self.sample, newline="")
        try:
            for row in self._reader(lines, delimiter, strict=False):
                if row:
                    return list(row)
        except csv.Error:
            pass  # reading the file reports it
        return []

    def _reader(self, lines: Any, delimiter: str, strict: bool = True) -> Any:
        if self.how.quoting == "none":
            return csv.reader(lines, delimiter=delimiter, quoting=csv.QUOTE_NONE, strict=strict)
        return csv.reader(lines, delimiter=delimiter, strict=strict)

    def _remedy(self) -> str:
        """A suggestion for a header that lacks a column; empty if there is none."""
        if re.match(r'"?sep=.?"?[\r\n]', self.sample):
            return " Line 1 is an instruction to Excel: remove it."
        first = self._first(self.delimiter)
        wider = [delimiter for delimiter in DELIMITERS if len(self._first(delimiter)) > 1]
        if len(first) == 1 and len(wider) == 1:
            return f" If the delimiter is a {DELIMITERS[wider[0]]}, give data.read.delimiter={_written(wider[0])}."
        is_header = any(name in first or " Did you" in did_you_mean(name, first) for name in self.wanted)
        if is_header or len(first) < len(self.wanted):
            return ""
        names = [*self.wanted, *(f"column{number + 1}" for number in range(len(self.wanted), len(first)))]
        return (
            f" If line 1 is data and not column names, give data.read.columns=[{','.join(names)}], with the names in "
            "the order of the file."
        )

    # -- reading -------------------------------------------------------------------------------------------------------

    def blocks(self, columns: Sequence[str], start: int = 0, size: int = BLOCK, skip: int = 0) -> Iterator[Block]:
        """See ``File``. Skips empty lines."""
        if start and not self.header:
            self._start(self._first(self.delimiter), 1)
        lines = self.begin(start)
        records = islice(self._records(lines, start), skip, None)
        place = start
        rows, problem = self._some(records, size)
        while rows:
            cells = dict[str, list[str]]()
            for name in columns:
                if name in self.names:
                    index = self.header.index(name)
                    cells[name] = [row[index] for _, row in rows]
            numbers = [line for line, _ in rows]
            yield Block(place, len(rows), cells, numbers)
            if problem is not None:
                break
            place = start if self.reads_from_start else lines.offset
            rows, problem = self._some(records, size)
        if problem is not None:
            raise problem

    def _some(self, records: Iterator[Record], size: int) -> tuple[list[Record], Exception | None]:
        """Some records, and the error after them."""
        rows = list[Record]()
        try:
            with large_cells():
                rows.extend(islice(records, size))  # which has the records before an error, too
        except (BadRow, RecipeError) as error:
            return rows, error
        return rows, None

    def check_whole(self) -> None:
        if self.how.quoting is not None:
            return
        joined = Joined(self.delimiter)
        # other errors come after the rows before them
        with large_cells(), suppress(BadRow, RecipeError):
            for _ in self._parse(self.text.lines(), 0, joined):
                pass
        self._refuse_joined(joined)

    def _records(self, stream: Lines, start: int) -> Iterator[Record]:
        """Yield the first line of each row, and its cells. At the end of a whole file, check quoted cells over several
        lines."""
        checks = not start and self.how.quoting is None and not self.predicts
        joined = Joined(self.delimiter) if checks else None
        yield from self._parse(stream, start, joined)
        if joined is not None:
            self._refuse_joined(joined)

    def _parse(self, stream: Lines, start: int, joined: Joined | None) -> Iterator[Record]:
        """Yield the first line of each row, and its cells.

        Args:
            joined: Receives quoted cells over several lines; None: they are not checked.
        """
        lines: list[str] = []  # of the current record

        def collect_lines() -> Iterator[str]:
            size = 0
            for line in stream:
                if lines:  # a quoted cell spans lines
                    size += len(line)
                    check_row(f"{self.path}, line {first}", size, self.how)
                else:
                    size = len(line)
                lines.append(line)
                yield line

        reader = self._reader(collect_lines(), self.delimiter)
        first = 1  # the line in which the record begins
        line_end = ""
        count = 0
        begun = bool(self.header) and (start > 0 or self.how.columns is not None)
        label = self.header.index(self.labels[0]) if begun and self.labels else None
        names = self.headings
        width = len(self.header)
        ends = self.ends
        try:
            for row in reader:
                tail = lines[-1][-2:]
                end = tail if tail == "\r\n" else tail[-1:]
                if end != line_end and end in LINE_ENDS and (row or line_end != "\r"):
                    if line_end:
                        raise self._other_line_end(reader.line_num, end, line_end)
                    line_end = end
                if row and not begun:
                    self._start(row, first)
                    begun = True
                    names = self.headings
                    width = len(row)
                    ends = self.ends
                    label = row.index(self.labels[0]) if self.labels else None
                elif row and len(row) != width:
                    if not self.skip_unreadable:
                        raise self._other_width(first, len(row), "".join(lines))
                    self.unreadable += 1
                elif row:
                    if row[ends[0]] in names and row[ends[1]] in names and self._is_header(row):
                        raise self._header_again(first, row)
                    if joined is not None:
                        if label is not None and len(joined.known) < KNOWN:
                            joined.known.add(row[label])
                        if not joined.doubles_quotes and '""' in lines[0]:
                            joined.doubles_quotes = has_doubled_quotes(row, lines[0])
                        if len(lines) > 1:
                            joined.add(first, reader.line_num, lines, width, label)
                    yield first, row
                    count += 1
                first = reader.line_num + 1
                lines.clear()
        except (csv.Error, BadRow) as error:
            problem = error if isinstance(error, BadRow) else self._bad_quotes(first, reader.line_num, error)
            raise at_row(problem, count) from None

    def _refuse_joined(self, joined: Joined) -> None:
        """Raise an error for a quoted cell whose lines look like rows."""
        odd = joined.find(bool(self.labels))
        if odd is not None:
            raise BadRow(
                f"a quote opens a cell here that closes in line {odd[1]}, but each of these lines reads as a row of "
                "its own. If quotes are part of the texts, give data.read.quoting=none; if the text spans these lines, "
                "data.read.quoting=double.",
                f"line {odd[0]}",
            )

    def _start(self, header: list[str], line: int) -> None:
        """Use a line as the header."""
        check_names(f"{self.path}, line {line}", header)
        self.names = dict.fromkeys(header)
        for name, key in self.wanted.items():
            if name not in self.names:
                raise missing_column(self.path, key, name, header, self._remedy())
        positions = [header.index(name) for name in self.wanted]
        self.header = header
        self.ends = (positions[0], positions[-1])
        self.headings = set()
        for name in header:
            if name:
                self.headings |= spellings(name)

    def _is_header(self, row: list[str]) -> bool:
        """Whether a row repeats the header, maybe with the columns in another order, or with names in another spelling.

        Two wanted columns with exact names are enough. One may be a text such as "label": then all cells count.
        """
        first, last = self.ends
        if first != last and row[first] in self.names and row[last] in self.names:
            return True
        return sorted(map(same_name, row)) == sorted(map(same_name, self.header))

    # -- errors --------------------------------------------------------------------------------------------------------

    def _bad_quotes(self, first: int, last: int, error: csv.Error) -> BadRow:
        if "expected after" in str(error):
            wrong = f"a quote opens a cell here, and more text follows where it closes in line {last}"
        elif "end of data" in str(error):
            wrong = f"a quote opens a cell here that never closes (line {last} is the last)"
        else:
            return BadRow(f"cannot be read as rows of cells: {clause(error)}.", f"line {first}")
        remedy = (
            'Remove this quote or double it: "". Only if no cell of the file is in quotes, give data.read.quoting=none.'
        )
        return BadRow(f"{wrong}. {remedy}", f"line {first}")

    def _other_width(self, line: int, count: int, raw: str) -> BadRow:
        width = len(self.header)
        name = DELIMITERS.get(self.delimiter, repr(self.delimiter))
        others = list[str]()  # delimiters with which the row would have the right width
        for delimiter in DELIMITERS:
            if delimiter != self.delimiter and width > 1 and raw.count(delimiter) == width - 1:
                others.append(delimiter)
        remedy = f"Put quotes around a text that holds a {name} or a line end."
        if self.how.quoting == "none":
            remedy = f"Without quotes (data.read.quoting=none), no text can hold a {name} or a line end."
        if self.how.columns is not None and count == 1 and others:
            remedy = f"If the delimiter is a {DELIMITERS[others[0]]}, give data.read.delimiter={_written(others[0])}."
        cells = "cell" if count == 1 else "cells"
        names = ", ".join(self.header)
        return BadRow(f"found {count} {cells}, expected {width} ({names:.200}). {remedy}", f"line {line}")

    def _header_again(self, line: int, row: list[str]) -> BadRow:
        names = f"({', '.join(row):.200})"
        problem = (
            f"found the column names {names} again, as where files were joined. Remove that line, or give the files as "
            "a list: data.files."
        )
        if self.how.columns is not None:
            problem = (
                f"found the column names {names}, which data.read.columns gives too. Remove data.read.columns, or that "
                "line."
            )
        return BadRow(problem, f"line {line}")

    def _other_line_end(self, line: int, end: str, before: str) -> BadRow:
        return BadRow(
            f"ends with {LINE_ENDS[end]}, the lines before it with {LINE_ENDS[before]}. Expected one kind of line end "
            "outside of quotes: convert them (dos2unix, or mac2unix for CR).",
            f"line {line}",
        )


def _written(delimiter: str) -> str:
    """A delimiter as it is written in a recipe."""
    return "tab" if delimiter == "\t" else repr(delimiter)
