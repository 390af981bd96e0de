"""Reads words and their tags from CoNLL files: a word a line, tabs or spaces between, blank lines after sentences."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

from fastloop.errors import RecipeError
from fastloop_plugins.rows.files import Part, Read, explain_reading, open_text

DOCUMENT = "-DOCSTART-"
"""First column of a line that begins a document. It is no word."""
HASH = re.compile(r"#(\s|$|(begin|end) document\b)")
"""The beginning of a comment before a sentence, as in CoNLL-U and CoNLL-2012, or of a line whose word is #."""
KEYED = re.compile(r"#\s*([\w.:-]+\s*=|(newdoc|newpar|begin document|end document)\b)")
"""The beginning of a line that is a comment whatever its number of columns, unless they are separated by tabs."""


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
    found, unreadable, comments = list[Sentence](), 0, list[int]()
    for sentence in read_sentences(path, how, columns, comments):
        if sentence.problem is None:
            found.append(sentence)
        elif skip_unreadable:
            unreadable += 1
        else:
            raise RecipeError(sentence.problem)
    table = {names[0]: [sentence.words for sentence in found], names[1]: [sentence.tags for sentence in found]}
    notes = [f"{path}: {len(comments)} lines are comments, the first is line {comments[0]}"] if comments else []
    return ConllPart(str(path), table, unreadable=unreadable, notes=notes, lines=[sentence.line for sentence in found])


def read_sentences(path: Path, how: Read, columns: Columns, comments: list[int] | None = None) -> Iterator[Sentence]:
    """Yield the sentences of a file, one at a time.

    Args:
        comments: Receives the numbers of the lines before a sentence that are comments.
    """
    sentence = Sentence(0)
    with explain_reading(path, how):
        first, example = _find_word(path, how)
        width, tabbed = len(_cells(example)), "\t" in example
        with open_text(path, how) as stream:
            for number, line in enumerate(chain(stream, [""]), 1):
                cells = _cells(line)
                if not any(cells) or cells[0] == DOCUMENT:
                    if sentence.line:
                        yield sentence
                    sentence = Sentence(0)
                    continue
                if not sentence.line and HASH.match(line):
                    keyed = "\t" not in line and KEYED.match(line)
                    if keyed or len(cells) != width or ("\t" in line) != tabbed:
                        if comments is not None:
                            comments.append(number)
                        continue
                sentence.line = sentence.line or number
                if sentence.problem is None:
                    sentence.problem = _add(sentence, cells, width, columns, f"{path}, line {number}", f"line {first}")


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.split("\t")] if "\t" in line else line.split()


def _find_word(path: Path, how: Read) -> tuple[int, str]:
    """Number and text of the first line that certainly holds a word; 0 if there is none."""
    with open_text(path, how) as stream:
        for number, line in enumerate(stream, 1):
            if any(cells := _cells(line)) and cells[0] != DOCUMENT and not HASH.match(line):
                return number, line
    return 0, ""


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
            return (
                f"{where}: there is no column {column}, which data.{key} names. The line has {len(cells)}, "
                "counted from 0."
            )
        if not cells[column]:
            return f"{where}: column {column} (data.{key}) is empty."
        (sentence.words if key == "words" else sentence.tags).append(cells[column])
    return None
