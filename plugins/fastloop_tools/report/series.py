"""A value over the steps of a run, in bounded memory."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

Points = list[tuple[float, float]]
"""(step, value) of each point."""
MOST = 10_000
"""Most points that a series keeps. A line on the page has far fewer."""


@dataclass(eq=False)
class Series:
    """A value over steps. Of more than ``MOST`` points it keeps means of neighbours. Ignores NaN and infinity.

    Attributes:
        start: The first step. This and the values below are exact.
        first, last: The first value and the last one.
        least, most: The smallest value and the largest one.
    """

    start: float = 0.0
    first: float = math.nan
    last: float = math.nan
    least: float = math.inf
    most: float = -math.inf
    _groups: list[tuple[float, float, int]] = field(default_factory=list)
    """The last step, the sum and the number of neighbours; all but the last have ``_size``."""
    _size: int = 1

    def __bool__(self) -> bool:
        return bool(self._groups)

    @property
    def points(self) -> Points:
        """The points to draw: the mean of neighbours, at the step of the last one."""
        return [(step, total / count) for step, total, count in self._groups]

    def extend(self, points: Iterable[tuple[float, float]]) -> Series:
        """Add points, and return the series."""
        for step, value in points:
            if not math.isfinite(value):
                continue
            if not self._groups:
                self.start, self.first = step, value
            self.last, self.least, self.most = value, min(self.least, value), max(self.most, value)
            if self._groups and self._groups[-1][2] < self._size:
                self._groups[-1] = _joined([self._groups[-1], (step, value, 1)])
            else:
                self._groups.append((step, value, 1))
            if len(self._groups) > MOST:
                pairs = range(0, len(self._groups), 2)
                self._groups, self._size = [_joined(self._groups[at : at + 2]) for at in pairs], 2 * self._size
        return self

    def scaled(self, factor: float) -> Series:
        """The series in another unit."""
        groups = [(step, total * factor, count) for step, total, count in self._groups]
        first, last, least, most = (value * factor for value in (self.first, self.last, self.least, self.most))
        return Series(self.start, first, last, least, most, groups, self._size)


def _joined(groups: Sequence[tuple[float, float, int]]) -> tuple[float, float, int]:
    return groups[-1][0], sum(total for _, total, _ in groups), sum(count for *_, count in groups)


def mean(points: Points) -> tuple[float, float]:
    """The mean of neighbours, at the step of the last one."""
    return points[-1][0], sum(value for _, value in points) / len(points)
