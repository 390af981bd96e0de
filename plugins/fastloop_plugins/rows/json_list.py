"""The objects of one JSON list, parsed one by one: the list may be larger than memory."""

from __future__ import annotations

import codecs
import json
import re
import zlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from fastloop_plugins.rows.file import BadRow
from fastloop_plugins.rows.limits import check_row

if TYPE_CHECKING:
    from fastloop_plugins.rows.lines import LineFile

SPACE = re.compile(r"[ \t\r\n]*")
ENDS = 16
"""Characters at the end of the text read so far that may be the beginning of something longer, such as ``\\ud83d``."""


SHOWN = 20
"""Characters that the error for malformed JSON shows."""


def malformed_json(problem: str, text: str, at: int, column: int, place: str) -> BadRow:
    """The error for JSON that is malformed at a position of a text.

    Args:
        column: The position's character in its line, from 1.
        place: The name of the line in messages.
    """
    there = f"character {column}: {text[at : at + SHOWN]!r}" if at < len(text) else f"character {column}, the end"
    return BadRow(f"not valid JSON: {problem.removesuffix(' at')}. See {there}.", place)


class Elements:
    """The elements of a list, from an offset on.

    Args:
        parse: Parses the value that begins at a position of a text. Returns it, and its end. Raises
            ``json.JSONDecodeError`` for one that is malformed or does not end.
        start: 0, or the offset of an element.

    Attributes:
        offset: Bytes before the next element.
        checksum: A checksum of the bytes read so far.

    Raises:
        BadRow: The list is not valid JSON, or is not in its encoding.
        RecipeError: An element is too large.
    """

    def __init__(self, file: LineFile, parse: Callable[[str, int], tuple[Any, int]], start: int) -> None:
        self.file, self.parse, self.start, self.chunks = file, parse, start, file.chunks(start)
        self.encoding = "utf-8" if file.transcodes else file.encoding
        self.decoder = codecs.getincrementaldecoder(self.encoding)()
        self.text, self.at, self.offset, self.line, self.checksum = "", 0, start or len(file.mark), 1, 0
        self.column = 1  # of the next character in its line

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        """Yield the offset and the value of each element."""
        if not self.start:
            self._next()
            self._take(1)
            if self._next() == "]":
                self._take(1)
                return self._finish()
        while True:
            self._next()
            offset = self.offset
            value = self._value()
            yield offset, value
            after = self._next()
            if after not in (",", "]"):
                raise self._malformed("Expecting ',' delimiter")
            self._take(1)
            if after == "]":
                return self._finish()

    def _finish(self) -> None:
        if self._next():
            raise self._malformed("Extra data")

    def _value(self) -> Any:
        while True:
            try:
                value, end = self.parse(self.text, self.at)
                if end < len(self.text) or not self._read():  # the next characters may belong to a number
                    self._take(end - self.at)
                    return value
            except json.JSONDecodeError as error:
                position = error.pos - self.at  # before ``_read``, which removes what is parsed
                may_end = error.msg.startswith("Unterminated") or error.pos + ENDS >= len(self.text)
                if not may_end or not self._read():
                    self._take(position)
                    raise self._malformed(error.msg) from None

    def _next(self) -> str:
        """The next character that is no white space; empty at the end of the file."""
        while True:
            found = SPACE.match(self.text, self.at)
            self._take(found.end() - self.at if found else 0)
            if self.at < len(self.text):
                return self.text[self.at]
            if not self._read():
                return ""

    def _take(self, count: int) -> None:
        piece = self.text[self.at : self.at + count]
        self.at, self.offset = self.at + count, self.offset + len(piece.encode(self.encoding))
        self.line += piece.count("\n") or piece.count("\r")
        line_end = max(piece.rfind("\n"), piece.rfind("\r"))
        self.column = len(piece) - line_end if line_end >= 0 else self.column + len(piece)

    def _read(self) -> bool:
        """Read as many characters again as are not parsed yet. Returns whether there were any."""
        rest, found = self.text[self.at :], list[str]()
        check_row(f"{self.file.path}, line {self.line}", len(rest), self.file.how)
        try:
            while sum(map(len, found)) <= len(rest) and (chunk := next(self.chunks, b"")):
                self.checksum = zlib.crc32(chunk, self.checksum)
                found.append(self.decoder.decode(chunk))
        except UnicodeDecodeError as error:
            before = "".join([rest, *found])
            raise self.file.undecodable(error, self.line + (before.count("\n") or before.count("\r"))) from None
        self.text, self.at = "".join([rest, *found]), 0
        return bool(found)

    def _malformed(self, problem: str) -> BadRow:
        return malformed_json(problem, self.text, self.at, self.column, f"line {self.line}")
