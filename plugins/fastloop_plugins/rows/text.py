"""Reads txt files: a row for each paragraph, or for each line if there are no paragraphs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from fastloop_plugins.rows.file import BLOCK, Block
from fastloop_plugins.rows.limits import check_row
from fastloop_plugins.rows.lines import LineFormat
from fastloop_plugins.rows.options import Read


class Text(LineFormat):
    """Rows of a txt file, which has one column. Blank lines separate paragraphs. In a file to predict, each line is a
    row.

    A position is an offset and whether rows are paragraphs, which only the whole file shows: ``2 + 2 * offset``, plus 1
    for paragraphs.
    """

    row = "a paragraph, or a line if no line is blank; to predict: each line; with `blank_lines`, the file"

    def __init__(self, path: str, how: Read, columns: Mapping[str, str], skip_unreadable: bool = False) -> None:
        super().__init__(path, how, columns, skip_unreadable)
        self.names = dict.fromkeys(list(columns)[:1])
        if how.blank_lines:
            self.not_streamed = "data.read.blank_lines makes it one row. Remove one of blank_lines and data.streaming."

    def blocks(self, columns: Sequence[str], start: int = 0, size: int = BLOCK, skip: int = 0) -> Iterator[Block]:
        """See ``File``."""

        def read(row: tuple[str, int]) -> tuple[str, int]:
            return row

        def make(place: int, rows: list[tuple[str, int]]) -> Block:
            texts = [text for text, _ in rows]
            lines = [line for _, line in rows]
            return Block(place, len(rows), {name: texts for name in columns if name in self.names}, lines)

        if self.how.blank_lines:
            rows = self._whole_file()
        elif start:
            rows = self._rows(start // 2 - 1, bool(start % 2))
        else:
            rows = self._rows(0, not self.predicts and self._has_paragraphs())
        return self.in_blocks(rows, read, make, size, skip)

    def _whole_file(self) -> Iterator[tuple[int, tuple[str, int]]]:
        """Yield the content as one row, unless it is blank."""
        content = "".join(self.begin(0))
        if content.strip():
            yield 0, (content, 1)

    def _has_paragraphs(self) -> bool:
        """Whether a blank line is between two others."""
        has_text = False
        blank_after_text = False
        for line in self.text.lines():
            if line.isspace():
                blank_after_text = has_text
            elif blank_after_text:
                return True
            else:
                has_text = True
        return False

    def _rows(self, offset: int, paragraphs: bool) -> Iterator[tuple[int, tuple[str, int]]]:
        """Yield the position of each row, the row, and its first line."""
        lines = self.begin(offset)
        texts = list[str]()  # lines of the current row
        size = 0  # of these lines
        first = offset  # where the current row begins, and in which line
        first_line = 1
        before = offset  # where the current line begins
        count = 0  # of the rows before
        blank = 0  # lines between rows
        gap = 0  # blank lines since the last row; those at the end of the file are not between rows
        for line in lines:
            text = line.removesuffix("\n").removesuffix("\r")
            if self.predicts or text.strip():
                if not texts:
                    first = before
                    first_line = lines.number
                texts.append(text)
                size += len(line)
                blank += gap
                gap = 0
                check_row(f"{self.path}, line {lines.number}", size, self.how)
            elif count or texts:
                gap += 1
            if texts and (not paragraphs or not text.strip()):
                yield 2 + 2 * first + paragraphs, ("\n".join(texts), first_line)
                texts = []
                size = 0
                count += 1
            before = lines.offset
        if texts:
            yield 2 + 2 * first + paragraphs, ("\n".join(texts), first_line)
            count += 1
        if count and not offset and not self.predicts:
            note = f"{self.path}: read as {count} {'paragraphs' if paragraphs else 'lines'}, each a text of its own"
            if paragraphs:
                note += f". The {blank} blank lines between them are not kept: an end token follows each text"
            self.notes.append(note)
