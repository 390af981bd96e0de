"""Rows of a source that cannot be read: their number, and the first row of each problem."""

from __future__ import annotations

import numpy as np

from fastloop import RecipeError
from fastloop_plugins._mapped import zeros
from fastloop_plugins.rows.table import Table

SHOWN = 5
"""Different problems that an error names at most, so that all can be mended at once."""


class UnreadableRows:
    """Collects the rows of a table that cannot be read.

    Attributes:
        is_unreadable: Whether each row is one of them.
        problems: Problem -> the first row that has it, numbered from 0.
    """

    def __init__(self, part: Table) -> None:
        self.part = part
        self.is_unreadable = zeros(len(part), np.bool_)
        self.problems: dict[str, int] = {}

    def add(self, index: int, problem: str) -> None:
        """Add a row."""
        self.is_unreadable[index] = True
        if problem in self.problems:
            self.problems[problem] = min(index, self.problems[problem])
        elif len(self.problems) < SHOWN:
            self.problems[problem] = index

    def describe_first(self) -> str:
        """The first row and its problem, as a sentence."""
        problem, index = min(self.problems.items(), key=lambda item: item[1])
        return f"The first is {self.part.row(index + 1)}: {problem}"

    def error(self, unit: str, remedy: str) -> RecipeError:
        """The error for these rows: the first one, their number, and the first row of each other problem.

        Args:
            unit: The name of rows, such as ``rows`` or ``sentences``.
        """
        (text, first), *others = sorted(self.problems.items(), key=lambda item: item[1])
        count = int(self.is_unreadable.sum())
        if count > 1 and not self.part.sampled:
            text += f" {count} of {len(self.part)} {unit} cannot be read."
        for problem, index in others:
            text += f"\n  {self.part.row(index + 1)}: {problem}"
        return RecipeError(text, code="invalid-row", place=self.part.row(first + 1), remedy=remedy)
