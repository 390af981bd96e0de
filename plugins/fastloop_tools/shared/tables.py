"""Results as text: tables in the terminal and in markdown, and JSON."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from fastloop.cli.tables import print_table
from fastloop.recipe import secrets
from fastloop.runtime import json_text

NARROWEST = 24
"""Characters that the wrapping column of a table keeps on a narrow terminal: two of ``train.lr=1e-3``."""


class Cell(NamedTuple):
    """A value, and whether it is the best of its kind."""

    text: str
    best: bool = False


@dataclass
class ReportTable:
    """A table with a head and names of rows.

    Attributes:
        corner: The head of the names.
        numbers: Whether the cells are numbers.
    """

    corner: str
    columns: list[str]
    rows: list[tuple[str, list[Cell]]]
    numbers: bool = False

    def transposed(self, corner: str) -> ReportTable:
        """The table with its columns as rows."""
        cells = zip(*(cells for _, cells in self.rows), strict=True)
        rows = [(name, list(row)) for name, row in zip(self.columns, cells, strict=True)]
        return ReportTable(corner, [name for name, _ in self.rows], rows, self.numbers)


def show_table(head: Sequence[str], rows: Sequence[Sequence[str]], title: str | None = None, wraps: int = 0) -> None:
    """Print a table whose cells may contain anything. Its first column is text.

    Args:
        wraps: The number of the column that wraps, -1 for the last one.
    """
    import rich
    from rich.markup import escape
    from rich.table import Table

    console = rich.get_console()
    table = Table(box=None, pad_edge=False, title=title, title_justify="left", title_style="bold")
    for number, name in enumerate(head):
        wide = number == wraps % len(head)
        widest = max((len(row[number]) for row in rows), default=0)
        table.add_column(
            fold_head(name, widest) if console.is_terminal else name,
            justify="left" if wide or number == 0 else "right",
            no_wrap=not wide,
            overflow="fold",
            min_width=min(widest, NARROWEST) if wide else widest,
        )
    for row in rows:
        table.add_row(*map(escape, row))
    print_table(table)


def fold_head(name: str, width: int) -> str:
    """Break the head of a column between words, so that it is not wider than its cells, if they have ``width``."""
    longest_word = max(map(len, name.split()), default=0)
    return textwrap.fill(name, max(width, longest_word, 1))


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a markdown table. Its first column is text."""
    lines = [f"| {' | '.join(head)} |", "|---|" + "---:|" * (len(head) - 1)]
    return [*lines, *(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows), ""]


def dump(record: Mapping[str, Any]) -> str:
    """A record as JSON, without secrets."""
    return json_text.dumps(secrets.hidden(record), indent=1) + "\n"
