"""Reads json and jsonl files: an object for each row, one a line, or all in one list."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

from fastloop_plugins.rows.file import BadRow
from fastloop_plugins.rows.limits import check_row
from fastloop_plugins.rows.lines import LineFormat
from fastloop_plugins.rows.options import Read


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise RepeatedKey(f"the key {twice!r} is repeated in one object. Remove one of them.")
    return mapping


class RepeatedKey(Exception):
    """An object has a key twice."""


ERRORS = (ValueError, RepeatedKey, RecursionError)
"""Errors of a decoder. Thousands of digits are a ``ValueError``, and of nested brackets a ``RecursionError``."""
SPACE = " \t\r\n"
SPACES = re.compile(f"[{SPACE}]*")
DECODER = json.JSONDecoder(object_pairs_hook=_unique)
SHOWN = 20
"""Characters that the error for malformed JSON shows."""


def parse_json(content: str, place: str) -> Any:
    """Parse one JSON document.

    Args:
        place: Where it is in its file, such as ``line 3``.

    Raises:
        BadRow: It is not valid JSON, an object has a key twice, or the document cannot be read.
    """
    content = content.rstrip(SPACE)
    try:
        value, end = DECODER.raw_decode(content, _after_space(content, 0))
    except ERRORS as error:
        raise explain_json(error, place) from None
    if end < len(content):
        end = _after_space(content, end)
        raise malformed_json("Extra data", content, end, end + 1, place)
    return value


def explain_json(error: BaseException, place: str) -> BadRow:
    """The error for JSON that cannot be parsed."""
    if isinstance(error, json.JSONDecodeError):
        return malformed_json(error.msg, error.doc, error.pos, error.pos + 1, place)
    if isinstance(error, RepeatedKey):
        return BadRow(str(error), place)
    return BadRow(f"cannot be read as JSON: {str(error).partition(';')[0]}.", place)


def malformed_json(problem: str, text: str, at: int, column: int, place: str) -> BadRow:
    """The error for JSON that is malformed at a position of a text.

    Args:
        column: The position's character in its line, from 1.
        place: The name of the line in messages.
    """
    position = f"character {column}, the end"
    if at < len(text):
        position = f"character {column}: {text[at : at + SHOWN]!r}"
    return BadRow(f"not valid JSON: {problem.removesuffix(' at')}. See {position}.", place)


def _after_space(text: str, at: int) -> int:
    """The position of the next character that is no white space."""
    match = SPACES.match(text, at)
    return at if match is None else match.end()


class Json(LineFormat):
    """Rows of a json or jsonl file. A column is there if any row has it.

    A list is read as a whole: it has no lines at which a reader could begin.
    """

    row = "an object, one a line; or one list of objects"
    lists = True

    def __init__(self, path: str, how: Read, columns: Mapping[str, str], skip_unreadable: bool = False) -> None:
        super().__init__(path, how, columns, skip_unreadable)
        self.is_list = self.text.head.lstrip(SPACE).startswith("[")
        self.parses_all = self.is_list
        self.list_facts = ""
        if self.is_list:
            self.reads_from_start = True
            self.unit = "row"
            self.not_streamed = "it is one list, which is read as a whole. Write an object a line instead (.jsonl)."

    def facts(self) -> list[str]:
        return [self.list_facts] if self.is_list else super().facts()

    def parse(self, content: Any, place: str) -> Any:
        return content if self.is_list else parse_json(content, place)

    def items(self, start: int) -> Iterator[tuple[int, tuple[Any, int]]]:
        if not self.is_list:
            yield from super().items(start)
            return
        text = self.text.read()
        self.list_facts = f"{len(text)} {zlib.crc32(text.encode())}"
        for number, row in enumerate(self._elements(text), 1):
            yield 0, (row, number)

    def _elements(self, text: str) -> Iterator[Any]:
        """Yield the elements of the list that a text is.

        Raises:
            BadRow: The text is malformed from here on.
            RecipeError: An element is too large.
        """
        at = _after_space(text, 0) + len("[")
        at = _after_space(text, at)
        mark = "]" if text[at : at + 1] == "]" else ","
        while mark == ",":
            element, end = self._element(text, at)
            yield element
            at = _after_space(text, end)
            mark = text[at : at + 1]
            if mark not in (",", "]"):
                raise self._malformed("Expecting ',' delimiter", text, at)
            if mark == ",":
                at = _after_space(text, at + 1)
        at = _after_space(text, at + 1)
        if at < len(text):
            raise self._malformed("Extra data", text, at)

    def _element(self, text: str, at: int) -> tuple[Any, int]:
        """The element at a position, and the position after it."""
        try:
            element, end = DECODER.raw_decode(text, at)
        except json.JSONDecodeError as error:
            raise self._malformed(error.msg, text, error.pos) from None
        except ERRORS as error:
            raise explain_json(error, _line_at(text, at)) from None
        if end - at > self.how.max_row_mib * 2**20:
            check_row(f"{self.path}, {_line_at(text, at)}", end - at, self.how)
        return element, end

    def _malformed(self, problem: str, text: str, at: int) -> BadRow:
        column = at - text.rfind("\n", 0, at)  # in the first line, it counts from the -1 of "not found"
        return malformed_json(problem, text, at, column, _line_at(text, at))


def _line_at(text: str, at: int) -> str:
    """The name of the line of a position in messages."""
    return f"line {text.count(chr(10), 0, at) + 1}"
