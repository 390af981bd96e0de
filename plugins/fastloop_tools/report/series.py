"""A value over the steps of a run, in bounded memory."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

Points = list[tuple[float, float]]
"""(step, value) of each point."""
MOST = 10_000
"""Most points that a series keeps. A line on the page has far fewer."""


@dataclass
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
    _means: Points = field(default_factory=list)
    _rest: Points = field(default_factory=list)
    _size: int = 1

    def __bool__(self) -> bool:
        return bool(self._means or self._rest)

    @property
    def points(self) -> Points:
        """The points to draw."""
        return self._means + ([mean(self._rest)] if self._rest else [])

    def extend(self, points: Iterable[tuple[float, float]]) -> Series:
        """Add points, and return the series."""
        if not (added := [point for point in points if math.isfinite(point[1])]):
            return self
        if not self:
            self.start, self.first = added[0]
        self.last, values = added[-1][1], [value for _, value in added]
        self.least, self.most = min(self.least, *values), max(self.most, *values)
        self._rest += added
        whole = len(self._rest) // self._size * self._size
        self._means += _groups(self._rest[:whole], self._size)
        del self._rest[:whole]
        while len(self._means) > MOST:
            odd = len(self._means) % 2  # the rest begins with a mean that has no neighbour yet
            self._rest = [self._means[-1]] * self._size * odd + self._rest
            self._means, self._size = _groups(self._means[: len(self._means) - odd], 2), 2 * self._size
        return self

    def scaled(self, factor: float) -> Series:
        """The series in another unit."""
        means, rest = ([(step, value * factor) for step, value in part] for part in (self._means, self._rest))
        first, last, least, most = (value * factor for value in (self.first, self.last, self.least, self.most))
        return Series(self.start, first, last, least, most, means, rest, self._size)


def mean(points: Points) -> tuple[float, float]:
    """The mean of neighbours, at the step of the last one."""
    return points[-1][0], sum(value for _, value in points) / len(points)


def _groups(points: Points, size: int) -> Points:
    return points if size == 1 else [mean(points[start : start + size]) for start in range(0, len(points), size)]
