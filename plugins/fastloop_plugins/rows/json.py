"""Reads json and jsonl files: an object for each row, one a line, or all in one list."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from fastloop_plugins.rows.file import BLOCK, BadRow, Block
from fastloop_plugins.rows.json_list import Elements
from fastloop_plugins.rows.lines import LineFormat
from fastloop_plugins.rows.options import Read
from fastloop_plugins.rows.table import show


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise RepeatedKey(f"the key {twice!r} is repeated in one object. Remove one of them.")
    return found


class RepeatedKey(Exception):
    """An object has a key twice."""


DECODER = json.JSONDecoder(object_pairs_hook=_unique)


def parse_json(content: str, place: str) -> Any:
    """Parse one JSON document.

    Args:
        place: Where it is in its file, such as ``line 3``.

    Raises:
        BadRow: It is not valid JSON, an object has a key twice, or the document cannot be read.
    """
    try:
        with _explained(place):
            return DECODER.decode(content)
    except json.JSONDecodeError as error:
        raise BadRow(f"not valid JSON: {error.msg}.", place) from None


@contextmanager
def _explained(place: str) -> Iterator[None]:
    """Raise errors of parsing as a ``BadRow``, except for malformed JSON."""
    try:
        yield
    except json.JSONDecodeError:
        raise
    except RepeatedKey as error:
        raise BadRow(str(error), place) from None
    except (ValueError, RecursionError) as error:  # thousands of digits or of nested brackets
        raise BadRow(f"cannot be read as JSON: {str(error).partition(';')[0]}.", place) from None


class Json(LineFormat):
    """Rows of a json or jsonl file. A column is there if any row has it."""

    row = "an object, one a line; or one list of objects"
    lists = True

    def __init__(self, path: str, how: Read, columns: Mapping[str, str], skip_unreadable: bool = False) -> None:
        super().__init__(path, how, columns, skip_unreadable)
        self.is_list = self.text.head.lstrip().startswith("[")  # it may be one long line
        # other encodings may have several forms of a character: its bytes cannot be counted
        self.is_whole = self.is_whole or (self.is_list and self.text.encoding != "utf-8")

    def blocks(self, columns: Sequence[str], start: int = 0, size: int = BLOCK, skip: int = 0) -> Iterator[Block]:
        """See ``File``. Without columns, only the first row of a file of lines is parsed."""

        def read(found: tuple[Any, str]) -> Any:
            content, place = found
            if not self.is_list and not columns and self.names:
                return None
            row = content if self.is_list else parse_json(content, place)
            if not isinstance(row, Mapping):
                raise BadRow(f"found {show(row)}, expected a mapping of columns.", place)
            self.names |= dict.fromkeys(row)
            return row

        def make(place: int, rows: list[Any]) -> Block:
            there = [name for name in columns if name in self.names]
            return Block(place, len(rows), {name: [row.get(name) for row in rows] for name in there})

        return self.in_blocks(self._listed(start) if self.is_list else self._lines(start), read, make, size, skip)

    def _lines(self, start: int) -> Iterator[tuple[int, tuple[Any, str]]]:
        lines, position = self.begin(start), start
        for line in lines:
            if not line.isspace():
                yield position, (line, f"line {lines.number}")
            position = lines.offset

    def _listed(self, start: int) -> Iterator[tuple[int, tuple[Any, str]]]:
        def parse(text: str, at: int) -> tuple[Any, int]:
            with _explained(f"line {elements.line}"):
                return DECODER.raw_decode(text, at)

        elements = Elements(self.text, parse, start)
        if not start:
            self.last = elements
        for number, (position, row) in enumerate(elements, 1):
            yield position, (row, f"row {number}")
