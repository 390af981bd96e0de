"""Reads words and their tags from CoNLL files: a word a line, tabs or spaces between, blank lines after sentences."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Any

from fastloop.problem import agree, counted
from fastloop_plugins.rows.file import BLOCK, BadRow, Block
from fastloop_plugins.rows.lines import LineFormat
from fastloop_plugins.rows.options import Read

DOCUMENT = "-DOCSTART-"
"""First column of a line that begins a document. It is no word."""
HASH = re.compile(r"#(\s|$|(begin|end) document\b)")
"""The beginning of a comment before a sentence, as in CoNLL-U and CoNLL-2012, or of a line whose word is #."""
KEYED = re.compile(r"#\s*([\w.:-]+\s*=|(newdoc|newpar|begin document|end document)\b)")
"""The beginning of a line that is a comment whatever its number of columns, unless they are separated by tabs."""


@dataclass(frozen=True)
class Columns:
    """The columns of a CoNLL file, by number: from 0, or from the end (-1 is the last)."""

    words: int = 0
    tags: int = -1


@dataclass
class Sentence:
    """A sentence of a CoNLL file and its first line. The problem of a line that cannot be read, if there is one."""

    line: int = 0
    words: list[str] = field(default_factory=list)
    tags: list[str] = field(default_factory=list)
    problem: BadRow | None = None


class Conll(LineFormat):
    """Sentences of a CoNLL file. Rows are named by their lines.

    Args:
        columns: The names that the columns of words and tags get.
        numbers: Those columns in the file.
    """

    lists = True
    row = "a sentence: a word and its tag a line, blank lines between sentences"

    def __init__(
        self,
        path: str,
        how: Read,
        columns: Mapping[str, str],
        skip_unreadable: bool = False,
        numbers: Columns | None = None,
    ) -> None:
        super().__init__(path, how, columns, skip_unreadable)
        self.numbers = numbers or Columns()
        self.keys = {key: name for name, key in columns.items()}
        self.names = dict.fromkeys(name for name, key in columns.items() if key in ("words", "tags"))

    def blocks(self, columns: Sequence[str], start: int = 0, size: int = BLOCK, skip: int = 0) -> Iterator[Block]:
        """See ``File``. Tags are only read if their column is among ``columns``."""
        comments = list[int]()
        tagged = self.keys.get("tags") in columns

        def read(sentence: Sentence) -> Sentence:
            if sentence.problem is not None:
                raise sentence.problem
            return sentence

        def make(place: int, sentences: list[Sentence]) -> Block:
            table = dict[str, list[Any]]()
            for key, name in self.keys.items():
                if name in columns:
                    table[name] = [getattr(sentence, key) for sentence in sentences]
            lines = [sentence.line for sentence in sentences]
            return Block(place, len(sentences), table, lines)

        yield from self.in_blocks(self._sentences(start, tagged, comments), read, make, size, skip)
        if comments:
            verb = agree(len(comments), "is a comment", "are comments")
            self.notes.append(f"{self.path}: {counted(len(comments), 'line')} {verb}, the first is line {comments[0]}")

    def _sentences(self, start: int, tagged: bool, comments: list[int]) -> Iterator[tuple[int, Sentence]]:
        """Yield each sentence, with an offset before it.

        Args:
            comments: Receives the numbers of the lines before a sentence that are comments.
        """
        sentence = Sentence()
        position = start
        first, example = self._first_word
        width = len(_cells(example))
        tabbed = "\t" in example
        lines = self.begin(start)
        for line in chain(lines, [""]):
            number = lines.number
            cells = _cells(line)
            if not any(cells) or cells[0] == DOCUMENT:
                if sentence.line:
                    yield position, sentence
                sentence = Sentence()
                position = lines.offset
                continue
            if not sentence.line and HASH.match(line):
                keyed = "\t" not in line and KEYED.match(line)
                if keyed or len(cells) != width or ("\t" in line) != tabbed:
                    comments.append(number)
                    continue
            sentence.line = sentence.line or number
            if sentence.problem is None:
                problem = self._add(sentence, cells, width, tagged, first)
                if problem:
                    sentence.problem = BadRow(problem, f"line {number}")

    @cached_property
    def _first_word(self) -> tuple[int, str]:
        """Number and text of the first line that certainly holds a word; 0 if there is none."""
        lines = self.text.lines()
        for line in lines:
            cells = _cells(line)
            if any(cells) and cells[0] != DOCUMENT and not HASH.match(line):
                return lines.number, line
        return 0, ""

    def _add(self, sentence: Sentence, cells: list[str], width: int, tagged: bool, first: int) -> str | None:
        """Add a line to its sentence. Returns the line's problem, or None."""
        if tagged and len(cells) != width:
            columns = counted(len(cells), "column")
            return f"found {columns}, expected {width}, as in line {first}. Blank lines separate sentences."
        problem = _cell_problem(cells, self.numbers.words, "words")
        if problem is not None:
            return problem
        sentence.words.append(cells[self.numbers.words])
        if not tagged:
            return None
        if width == 1:
            return "found one column, expected a word and its tag, separated by a tab or by spaces."
        problem = _cell_problem(cells, self.numbers.tags, "tags")
        if problem is not None:
            return problem
        sentence.tags.append(cells[self.numbers.tags])
        return None


def _cell_problem(cells: Sequence[str], column: int, key: str) -> str | None:
    """Why a line has no value in the column that ``data.<key>`` names; None if it has one."""
    if not -len(cells) <= column < len(cells):
        return f"there is no column {column}, which data.{key} names. The line has {len(cells)}, counted from 0."
    if not cells[column]:
        return f"column {column} (data.{key}) is empty."
    return None


def _cells(line: str) -> list[str]:
    """The cells of a line: separated by tabs, or by spaces in a line without tabs."""
    if "\t" in line:
        return [cell.strip() for cell in line.split("\t")]
    return line.split()
