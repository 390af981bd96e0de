"""Opens files of lines: local or at a URL of fsspec, compressed, in any encoding and with any line ends."""

from __future__ import annotations

import codecs
import io
import os
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fastloop.errors import RecipeError
from fastloop_plugins.rows.file import BLOCK, BadRow, Block, File
from fastloop_plugins.rows.limits import Expanded, check_row, size_of
from fastloop_plugins.rows.options import Read
from fastloop_plugins.rows.paths import URL
from fastloop_plugins.rows.remote import RemoteFile
from fastloop_plugins.rows.suffixes import format_of
from fastloop_plugins.rows.table import show

MAGIC = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}
"""First bytes that no text file starts with -> codec. A bz2 file starts with letters, so only its suffix identifies
it."""
MARKS = {
    codecs.BOM_UTF8: "utf-8",
    codecs.BOM_UTF32_LE: "utf-32-le",  # before UTF-16, whose mark is a prefix of it
    codecs.BOM_UTF32_BE: "utf-32-be",
    codecs.BOM_UTF16_LE: "utf-16-le",
    codecs.BOM_UTF16_BE: "utf-16-be",
}
"""Byte-order mark -> encoding."""
LINE_END = re.compile(b"\r\n?|\n")
CHUNK = 2**16
"""Bytes to read at once: few enough for the many files and positions of a stream."""
CHECKED = 512
"""Bytes that ``contents`` looks at: enough to recognize text."""
ASCII = bytes(range(128))
UTF8_CHARACTERS = 8
"""Characters beyond ASCII from which a text that is valid UTF-8 is taken for it. Fewer may be valid by chance, as a
word in GBK."""


def open_binary(path: str) -> Any:
    """Open a file at a path or a URL of fsspec. Files that are not closed give no warning."""
    if URL.match(path):
        return RemoteFile(path)
    import pyarrow

    return pyarrow.OSFile(os.fsencode(path))  # a name that is not UTF-8 is no text for pyarrow


def codec_of(path: str, how: Read, head: bytes | None = None) -> str | None:
    """The codec of a compressed file, by ``data.read``, suffix or first bytes."""
    if how.compression is not None:
        return None if how.compression == "none" else how.compression
    codec = format_of(Path(path))[1]
    if codec is None:
        if head is None:
            with open_binary(path) as file:
                head = file.read(4)
        codec = next((codec for magic, codec in MAGIC.items() if head.startswith(magic)), None)
    return codec


class LineFile:
    """An open file of lines.

    Attributes:
        head: Its first characters.
        first_bytes: Its first ``CHECKED`` bytes, decompressed.
        reads_from_start: Whether it can only be read from its beginning: it is compressed, or its bytes do not show its
            line ends.
    """

    def __init__(self, path: str, how: Read) -> None:
        self.path = path
        self.how = how
        self.raw = open_binary(path)
        self.size = size_of(self.raw)
        self.codec = codec_of(path, how, self.raw.read(4))
        self.reads_from_start = self.codec is not None
        self.raw.seek(0)
        head: bytes = self._stream().read(CHUNK)
        self.mark = next((mark for mark in MARKS if head.startswith(mark)), b"")
        self.encoding = MARKS.get(self.mark, how.encoding or "utf-8")
        if self.encoding == "utf-8" and not self.mark:
            self._check_utf16(head[:1024])
        if how.encoding is not None and not self.mark:
            self._check_utf8(head)
        self.first_bytes = head[:CHECKED]
        self.head = head[len(self.mark) :].decode(self.encoding, "ignore")
        self.transcodes = ASCII.decode(self.encoding, "replace") != ASCII.decode()
        self.reads_from_start = self.reads_from_start or self.transcodes

    def _check_utf16(self, head: bytes) -> None:
        # "ab" is b"a\0b\0" in little-endian UTF-16: each byte at an odd place is 0, and no byte at an even one
        for zero_places, other_places, name in (
            (slice(1, None, 2), slice(0, None, 2), "utf-16-le"),
            (slice(0, None, 2), slice(1, None, 2), "utf-16-be"),
        ):
            if head[zero_places].count(0) > len(head) / 4 and not head[other_places].count(0):
                raise RecipeError(
                    "not UTF-8, but looks like UTF-16.",
                    place=f"{self.path}, line 1",
                    code="wrong-encoding",
                    remedy=f"If it is, give data.read.encoding={name}.",
                )

    def _check_utf8(self, head: bytes) -> None:
        """Raise an error for UTF-8 that ``data.read.encoding`` would read as other characters: in cp1252, each byte is
        one."""
        if codecs.lookup(self.encoding).name.startswith("utf"):
            return
        try:
            text = codecs.getincrementaldecoder("utf-8")().decode(head)
        except UnicodeDecodeError:
            return
        beyond_ascii = [character for character in text if not character.isascii()]
        if len(beyond_ascii) < UTF8_CHARACTERS:
            return
        first = beyond_ascii[0]
        read_as = first.encode().decode(self.encoding, "replace")
        line = len(LINE_END.findall(text[: text.index(first)].encode())) + 1
        raise RecipeError(
            f"it is UTF-8, and {self.encoding} (data.read.encoding) would read {first!r} as {read_as!r}.",
            place=f"{self.path}, line {line}",
            code="wrong-encoding",
            remedy="data.read.encoding is for all files: leave it out, and convert those of another encoding to UTF-8: "
            f"iconv -f {self.encoding} -t utf-8.",
        )

    def _stream(self) -> Any:
        """The decompressed content. A file that can only be read from its beginning is opened again."""
        if not self.reads_from_start:
            return self.raw
        if self.codec is None:
            return open_binary(self.path)
        import pyarrow

        packed = pyarrow.CompressedInputStream(open_binary(self.path), self.codec)
        return io.BufferedReader(Expanded(packed, self.path, self.size, self.how), CHUNK)

    def chunks(self, start: int = 0) -> Iterator[bytes]:
        """Yield the content from an offset on, without its byte-order mark, in an encoding whose bytes show line ends.
        Other iterators may move the file's position in between."""
        start = start or len(self.mark)
        if not self.reads_from_start:
            while True:
                self.raw.seek(start)
                chunk = self.raw.read(CHUNK)
                if not chunk:
                    return
                start += len(chunk)
                yield chunk
        stream = self._stream()
        stream.read(start)
        decoder = codecs.getincrementaldecoder(self.encoding)() if self.transcodes else None
        while chunk := stream.read(CHUNK):
            if decoder is None:
                yield chunk
            else:
                yield from self._decoded(decoder, chunk)
        if decoder is not None:
            yield from self._decoded(decoder, b"")

    def _decoded(self, decoder: codecs.IncrementalDecoder, chunk: bytes) -> Iterator[bytes]:
        try:
            yield decoder.decode(chunk, final=not chunk).encode()
        except UnicodeDecodeError as error:
            yield error.object[: error.start].decode(self.encoding, "ignore").encode()
            raise

    def lines(self, start: int = 0) -> Lines:
        """The lines from an offset on."""
        return Lines(self, start)

    def read(self) -> str:
        """The whole text, with LF as line end. No limit of a line applies."""
        chunks = list[bytes]()
        try:
            for chunk in self.chunks():
                chunks.append(chunk)
            content = b"".join(chunks)
            text = content.decode("utf-8" if self.transcodes else self.encoding)
        except UnicodeDecodeError as error:
            before = b"".join(chunks) if self.transcodes else error.object[: error.start]
            raise self.undecodable(error, len(LINE_END.findall(before)) + 1) from None
        return re.sub("\r\n?", "\n", text)

    def undecodable(self, error: UnicodeDecodeError, line: int) -> BadRow:
        """The error for a line that is not in the encoding."""
        name = "UTF-8" if self.encoding.startswith("utf-8") else self.encoding
        remedy = (
            "If all files have another encoding, give it, such as data.read.encoding=cp1252. Otherwise, convert this "
            "one: iconv -f cp1252 -t utf-8 (with its real encoding)."
        )
        if self.mark:  # which decides the encoding, whatever data.read has
            remedy = "The file begins with the byte-order mark of this encoding: it is damaged, or cut off."
        return BadRow(f"not {name} ({error.reason}). {remedy}", f"line {line}")

    def close(self) -> None:
        """Close the file."""
        self.raw.close()


class Lines:
    """The lines of a file from an offset on, with their ends.

    Attributes:
        offset: Bytes before the next line.
        number: Number of the last line, counted from where reading began.
        checksum: A checksum of the bytes read so far.
    """

    def __init__(self, file: LineFile, start: int) -> None:
        self.file = file
        self.start = start
        self.number = 0
        self.offset = start or len(file.mark)
        self.checksum = 0 if start else zlib.crc32(file.mark)

    def __iter__(self) -> Iterator[str]:
        file = self.file
        longest = file.how.max_row_mib * 2**20
        encoding = "utf-8" if file.transcodes else file.encoding
        pending: list[bytes] = []  # the chunks that begin a line whose end is not read yet
        size = 0  # bytes of ``pending``
        try:
            for chunk in file.chunks(self.start):
                self.checksum = zlib.crc32(chunk, self.checksum)
                pending.append(chunk)
                size += len(chunk)
                if b"\n" in chunk or b"\r" in chunk:
                    # pending b"on" and the chunk b"e\ntwo\nthr" give the lines b"one\n" and b"two\n"; b"thr" is pending
                    pieces = b"".join(pending).splitlines(keepends=True)
                    pending = [pieces.pop()]  # it may continue in the next chunk
                    size = len(pending[0])
                    for piece in pieces:
                        self.offset += len(piece)
                        self.number += 1
                        yield piece.decode(encoding)
                if size > longest:
                    check_row(f"{file.path}, line {self.number + 1}", size, file.how)
            for piece in b"".join(pending).splitlines(keepends=True):
                self.offset += len(piece)
                self.number += 1
                yield piece.decode(encoding)
        except UnicodeDecodeError as error:
            line = self.number
            if file.transcodes:  # the error is in the line after those that are complete
                line += 1
                if b"".join(pending).endswith((b"\n", b"\r")):
                    line += 1
            raise file.undecodable(error, line) from None


class LineFormat(File):
    """An open file of a format whose rows are lines. A position is an offset in bytes.

    A format with one row per line implements ``parse``.

    Attributes:
        parses_all: Whether rows are parsed that are only counted.
        unit: ``line``, or ``row`` in a file that is one list: the items that ``items`` numbers.
    """

    group = "1,024 rows"
    parses_all = False
    unit = "line"

    def __init__(self, path: str, how: Read, columns: Mapping[str, str], skip_unreadable: bool = False) -> None:
        super().__init__(path, how, columns, skip_unreadable)
        self.text = LineFile(path, how)
        self.reads_from_start = self.text.reads_from_start
        self.last = self.text.lines()

    def parse(self, line: str, place: str) -> Any:
        """The row of a line: column -> value.

        Args:
            line: A line that is not blank, with its end.
            place: Its name in messages, such as ``line 3``.

        Raises:
            BadRow: It cannot be parsed.
        """
        raise NotImplementedError(f"{type(self).__name__} has neither `parse` nor `blocks`.")

    def items(self, start: int) -> Iterator[tuple[int, tuple[Any, int]]]:
        """Yield the position of each row, its line, and the number of the line."""
        lines = self.begin(start)
        position = start
        for line in lines:
            if not line.isspace():
                yield position, (line, lines.number)
            position = lines.offset

    def blocks(self, columns: Sequence[str], start: int = 0, size: int = BLOCK, skip: int = 0) -> Iterator[Block]:
        """See ``File``. A column is there if any row has it. Without columns, only the first row is parsed."""
        numbers = list[int]()  # of the lines of the next block

        def read(item: tuple[Any, int]) -> Any:
            content, number = item
            if not columns and self.names and not self.parses_all:
                numbers.append(number)
                return None
            place = f"{self.unit} {number}"
            row = self.parse(content, place)
            if not isinstance(row, dict):
                raise BadRow(f"found {show(row)}, expected a mapping of columns.", place)
            if not row.keys() <= self.names.keys():
                self.names |= dict.fromkeys(row)
            numbers.append(number)
            return row

        def make(place: int, rows: list[Any]) -> Block:
            table = {name: [row.get(name) for row in rows] for name in columns if name in self.names}
            lines = None
            if self.unit == "line":
                lines = numbers.copy()
            numbers.clear()
            return Block(place, len(rows), table, lines)

        return self.in_blocks(self.items(start), read, make, size, skip)

    def begin(self, start: int) -> Lines:
        """The lines from a position on."""
        lines = self.text.lines(start)
        if not start:
            self.last = lines
        return lines

    def facts(self) -> list[str]:
        return [f"{self.last.offset} {self.last.checksum}"]

    def close(self) -> None:
        self.text.close()
