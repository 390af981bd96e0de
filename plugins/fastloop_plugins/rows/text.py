"""Reads txt files: a row for each paragraph, or for each line if there are no paragraphs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby, islice

from fastloop_plugins.rows.file import BLOCK, Block
from fastloop_plugins.rows.lines import LineFormat
from fastloop_plugins.rows.options import Read


class Text(LineFormat):
    """Rows of a txt file, which has one column. Blank lines separate paragraphs. In a file to predict, each line is a
    row."""

    row = "a paragraph, or a line if no line is blank; to predict: each line; with `blank_lines`, the file"
    group = ""
    is_parsed_whole = True

    def __init__(self, path: str, how: Read, columns: Mapping[str, str], skip_unreadable: bool = False) -> None:
        super().__init__(path, how, columns, skip_unreadable)
        self.names = dict.fromkeys(list(columns)[:1])

    def blocks(self, columns: Sequence[str], start: int = 0, size: int = BLOCK, skip: int = 0) -> Iterator[Block]:
        """See ``File``."""
        if self.how.blank_lines:
            content = "".join(self.begin(0))
            if content.strip() and not skip:
                yield Block(0, 1, {name: [content] for name in columns if name in self.names})
            return
        lines = (line.removesuffix("\n").removesuffix("\r") for line in self.begin(0))
        rows = islice(lines if self.predicts else self._paragraphs(list(lines)), skip, None)
        while block := list(islice(rows, size)):
            yield Block(0, len(block), {name: block for name in columns if name in self.names})

    def _paragraphs(self, lines: list[str]) -> Iterator[str]:
        """Paragraphs, or lines if there are no paragraphs."""
        groups = [list(group) for filled, group in groupby(lines, key=lambda line: bool(line.strip())) if filled]
        filled = sum(map(len, groups))
        paragraphs = len(groups) > 1
        count = len(groups) if paragraphs else filled
        if count:
            note = f"{self.path}: read as {count} {'paragraphs' if paragraphs else 'lines'}, each a text of its own"
            if paragraphs:
                blank = sum(not line.strip() for line in "\n".join(lines).strip("\n").split("\n"))
                note += f". The {blank} blank lines between them are not kept: an end token follows each text"
            self.notes.append(note)
        for group in groups:
            yield from ["\n".join(group)] if paragraphs else group
