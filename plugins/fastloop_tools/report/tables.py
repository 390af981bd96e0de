"""Tables of the page."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Cell(NamedTuple):
    """A value, and whether it is the best of its kind."""

    text: str
    best: bool = False


@dataclass
class Table:
    """A table with a head and names of rows.

    Attributes:
        corner: The head of the names.
        numbers: Whether the cells are numbers.
    """

    corner: str
    columns: list[str]
    rows: list[tuple[str, list[Cell]]]
    numbers: bool = False

    def transposed(self, corner: str) -> Table:
        """The table with its columns as rows."""
        cells = zip(*(cells for _, cells in self.rows), strict=True)
        rows = [(name, list(row)) for name, row in zip(self.columns, cells, strict=True)]
        return Table(corner, [name for name, _ in self.rows], rows, self.numbers)
