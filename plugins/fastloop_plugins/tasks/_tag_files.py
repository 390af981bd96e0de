"""Reads words and their tags from CoNLL files: one word a line, columns separated by a tab or by spaces, blank lines between sentences."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

from fastloop.errors import RecipeError
from fastloop_plugins.tasks._text_files import Part, Read, explain_reading, open_text

DOCUMENT = "-DOCSTART-"
"""First column of a line that begins a document. It is no word."""


@dataclass
class Columns:
    """The columns of a CoNLL file to read, by number: from 0, or from the end (-1 is the last).

    Attributes:
        tags: None: do not read tags.
    """

    words: int = 0
    tags: int | None = -1


@dataclass
class Sentence:
    """A sentence of a CoNLL file, its first line, and the problem of a line that cannot be read, if there is one."""

    line: int
    words: list[str] = field(default_factory=list)
    tags: list[str] = field(default_factory=list)
    problem: str | None = None


@dataclass
class ConllPart(Part):
    """The sentences of a CoNLL file. They are named by their lines.

    Attributes:
        lines: The first line of each sentence.
    """

    lines: list[int] = field(default_factory=list)

    def row(self, number: int) -> str:
        return f"{self.where}, line {self.lines[number - 1]}"


def read_conll(path: Path, how: Read, columns: Columns, names: tuple[str, str], skip_unreadable: bool) -> ConllPart:
    """Read a file. Its columns get the names ``names``.

    Args:
        skip_unreadable: Skip sentences with a line that cannot be read, and count them.

    Raises:
        RecipeError: A line has another number of columns than the first, or a column is missing or empty.
    """
    found, unreadable = list[Sentence](), 0
    for sentence in read_sentences(path, how, columns):
        if sentence.problem is None:
            found.append(sentence)
        elif skip_unreadable:
            unreadable += 1
        else:
            raise RecipeError(sentence.problem)
    table = {names[0]: [sentence.words for sentence in found], names[1]: [sentence.tags for sentence in found]}
    return ConllPart(str(path), table, unreadable=unreadable, lines=[sentence.line for sentence in found])


def read_sentences(path: Path, how: Read, columns: Columns) -> Iterator[Sentence]:
    """Yield the sentences of a file, one at a time."""
    width, sentence = 0, Sentence(0)
    with explain_reading(path, how), open_text(path, how) as stream:
        for number, line in enumerate(chain(stream, [""]), 1):
            cells = [cell.strip() for cell in line.split("\t")] if "\t" in line else line.split()
            if not any(cells) or cells[0] == DOCUMENT:
                if sentence.line:
                    yield sentence
                sentence = Sentence(0)
                continue
            if not width:
                width, first = len(cells), number
            sentence.line = sentence.line or number
            if sentence.problem is None:
                sentence.problem = _add(sentence, cells, width, columns, f"{path}, line {number}", f"line {first}")


def _add(sentence: Sentence, cells: list[str], width: int, columns: Columns, where: str, first: str) -> str | None:
    """Add a line to its sentence. Returns the line's problem, or None."""
    if columns.tags is not None and len(cells) != width:
        return f"{where}: found {len(cells)} columns, expected {width}, as in {first}. Blank lines separate sentences."
    for key, column in (("words", columns.words), ("tags", columns.tags)):
        if column is None:
            continue
        if key == "tags" and width == 1:
            return f"{where}: found one column, expected a word and its tag, separated by a tab or by spaces."
        if not -len(cells) <= column < len(cells):
            return f"{where}: there is no column {column}, which data.{key} names. The line has {len(cells)}, counted from 0."
        if not cells[column]:
            return f"{where}: column {column} (data.{key}) is empty."
        (sentence.words if key == "words" else sentence.tags).append(cells[column])
    return None
