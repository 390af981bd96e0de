"""Finds the file and the line of a sample: rows may be dropped, held out of train, or drawn by a limit."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from fastloop_plugins.rows.table import Table
    from fastloop_plugins.text.data import TextData


@dataclass(frozen=True)
class RowPlace:
    """The place of a row in its source.

    Attributes:
        table: The rows of the source.
        row: Its number in them, from 0.
    """

    table: Table
    row: int

    @property
    def number(self) -> int:
        """Its line in a format of lines, or its row, both from 1."""
        return self.row + 1 if self.table.numbers is None else int(self.table.numbers[self.row])

    def __str__(self) -> str:
        return self.table.row(self.row + 1)


def find_places(data: TextData, split: str, rows: Iterable[int]) -> list[RowPlace] | None:
    """The places of some rows of an evaluated split. Reads the data once more, because a cache has only its tokens.

    Args:
        rows: Numbers of the rows in the split, from 0.

    Returns:
        None: the rows of the split are not in memory, or are parts of the texts of a file.
    """
    logger = logging.getLogger("fastloop")
    data.keeps_places = True
    logger.addFilter(_drop)  # the log has the findings about the data already
    try:
        loaded = data.load()
    finally:
        logger.removeFilter(_drop)
    if split not in loaded:
        return None
    numbers = loaded[split].numbers
    if numbers is None:
        return None
    tables = data.tables[split if split in data.tables else "train"]  # a part of train may be held out
    # For tables of 3 and 2 rows, the ends are [3 5]: row 3 is row 0 of the second table.
    ends = np.cumsum([len(table) for table in tables])
    places = []
    for row in rows:
        number = int(numbers[row])
        index = int(np.searchsorted(ends, number, side="right"))
        before = int(ends[index - 1]) if index else 0
        places.append(RowPlace(tables[index], number - before))
    return places


def _drop(record: logging.LogRecord) -> bool:
    return False
