"""Reads json and jsonl files: an object for each row, one a line, or all in one list."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from fastloop.errors import RecipeError
from fastloop_plugins.rows.file import BLOCK, BadRow, Block, at_row
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


FIRST = 16
"""Chunks of a list in which its first row must end for ``first_names``: 1 MiB."""
DECODER = json.JSONDecoder(object_pairs_hook=_unique)


def parse_json(content: str, line: int | None = None) -> Any:
    """Parse one JSON document.

    Args:
        line: Its line in the file; None: it is the whole file.

    Raises:
        BadRow: It is not valid JSON, an object has a key twice, or the document cannot be read.
    """
    try:
        return DECODER.decode(content)
    except json.JSONDecodeError as error:
        raise BadRow(f"not valid JSON: {error.msg}.", f"line {line or error.lineno}") from None
    except RepeatedKey as error:
        raise BadRow(str(error), f"line {line or 1}") from None
    except (ValueError, RecursionError) as error:  # thousands of digits or of nested brackets
        raise BadRow(f"cannot be read as JSON: {str(error).partition(';')[0]}.", f"line {line or 1}") from None


class Json(LineFormat):
    """Rows of a json or jsonl file. A column is there if any row has it."""

    row = "an object, one a line; or one list of objects, which is not streamed"
    lists = True

    def __init__(self, path: str, how: Read, columns: Mapping[str, str], skip_unreadable: bool = False) -> None:
        super().__init__(path, how, columns, skip_unreadable)
        self.is_parsed_whole = self.text.head.lstrip().startswith("[")  # it may be one long line
        self.is_whole = self.text.is_whole or self.is_parsed_whole

    def first_names(self) -> list[str]:
        if not self.is_parsed_whole:
            return super().first_names()
        start = b"".join(islice(self.text.chunks(), FIRST)).decode(errors="ignore")
        row = DECODER.raw_decode(start.lstrip("[ \t\r\n"))[0]
        return list(row) if isinstance(row, dict) else []

    def blocks(self, columns: Sequence[str], start: int = 0, size: int = BLOCK, skip: int = 0) -> Iterator[Block]:
        """See ``File``. Without columns, only the first row is parsed."""
        if self.is_parsed_whole:
            listed = parse_json(self.text.read())
            for number, row in enumerate(listed, 1):
                self._check(row, f"row {number}")
            if rows := listed[skip:]:
                yield self._block(0, rows, columns)
            return
        lines = self.begin(start)
        place, rows, count = start, list[Any](), 0
        try:
            for line in lines:
                if line.isspace():
                    continue
                if count >= skip:
                    row = None
                    if columns or not self.names:
                        try:
                            self._check(row := parse_json(line, lines.number), f"line {lines.number}")
                        except BadRow:
                            if not self.skip_unreadable:
                                raise
                            self.unreadable += 1
                            continue
                    rows.append(row)
                count += 1
                if len(rows) == size:
                    yield self._block(place, rows, columns)
                    place, rows = 0 if self.is_whole else lines.offset, []
        except (BadRow, RecipeError) as error:
            if rows:
                yield self._block(place, rows, columns)
            raise at_row(error, count) from None
        if rows:
            yield self._block(place, rows, columns)

    def _check(self, row: Any, place: str) -> None:
        if not isinstance(row, Mapping):
            raise BadRow(f"found {show(row)}, expected a mapping of columns.", place)
        self.names |= dict.fromkeys(row)

    def _block(self, start: int, rows: list[Any], columns: Sequence[str]) -> Block:
        there = [name for name in columns if name in self.names]
        return Block(start, len(rows), {name: [row.get(name) for row in rows] for name in there})
