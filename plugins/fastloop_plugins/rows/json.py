"""Reads json and jsonl files: an object for each row, one a line, or all in one list."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from fastloop_plugins.rows.file import BadRow
from fastloop_plugins.rows.json_list import Elements, malformed_json
from fastloop_plugins.rows.lines import LineFormat
from fastloop_plugins.rows.options import Read


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise RepeatedKey(f"the key {twice!r} is repeated in one object. Remove one of them.")
    return found


class RepeatedKey(Exception):
    """An object has a key twice."""


ERRORS = (ValueError, RepeatedKey, RecursionError)
"""Errors of a decoder. Thousands of digits are a ``ValueError``, and of nested brackets a ``RecursionError``."""
SPACE = " \t\r\n"
DECODER = json.JSONDecoder(object_pairs_hook=_unique)


def parse_json(content: str, place: str) -> Any:
    """Parse one JSON document.

    Args:
        place: Where it is in its file, such as ``line 3``.

    Raises:
        BadRow: It is not valid JSON, an object has a key twice, or the document cannot be read.
    """
    content = content.rstrip(SPACE)
    start = len(content) - len(content.lstrip(SPACE))
    try:
        found, end = DECODER.raw_decode(content, start)
    except ERRORS as error:
        raise explain_json(error, place) from None
    if end < len(content):
        end += len(content[end:]) - len(content[end:].lstrip(SPACE))
        raise malformed_json("Extra data", content, end, end + 1, place)
    return found


def explain_json(error: BaseException, place: str) -> BadRow:
    """The error for JSON that cannot be parsed."""
    if isinstance(error, json.JSONDecodeError):
        return malformed_json(error.msg, error.doc, error.pos, error.pos + 1, place)
    if isinstance(error, RepeatedKey):
        return BadRow(str(error), place)
    return BadRow(f"cannot be read as JSON: {str(error).partition(';')[0]}.", place)


class Json(LineFormat):
    """Rows of a json or jsonl file. A column is there if any row has it."""

    row = "an object, one a line; or one list of objects"
    lists = True

    def __init__(self, path: str, how: Read, columns: Mapping[str, str], skip_unreadable: bool = False) -> None:
        super().__init__(path, how, columns, skip_unreadable)
        self.is_list = self.text.head.lstrip().startswith("[")  # it may be one long line
        # other encodings may have several forms of a character: its bytes cannot be counted
        self.parses_all = self.is_list
        self.is_whole = self.is_whole or (self.is_list and self.text.encoding != "utf-8")

    def parse(self, content: Any, place: str) -> Any:
        return content if self.is_list else parse_json(content, place)

    def items(self, start: int) -> Iterator[tuple[int, tuple[Any, str]]]:
        return self._elements(start) if self.is_list else super().items(start)

    def _elements(self, start: int) -> Iterator[tuple[int, tuple[Any, str]]]:
        def parse(text: str, at: int) -> tuple[Any, int]:
            try:
                return DECODER.raw_decode(text, at)
            except json.JSONDecodeError:
                raise
            except ERRORS as error:
                raise explain_json(error, f"line {elements.line}") from None

        elements = Elements(self.text, parse, start)
        if not start:
            self.last = elements
        for number, (position, row) in enumerate(elements, 1):
            yield position, (row, f"row {number}")
