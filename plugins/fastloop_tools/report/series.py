"""A value over the steps of a run, in bounded memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

Points = list[tuple[float, float]]
"""(step, value) of each point."""
MOST = 10_000
"""Most points that a series keeps. A line on the page has far fewer."""


def _no_points() -> np.ndarray:
    return np.empty((0, 2))


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
    _means: np.ndarray = field(default_factory=_no_points)
    _rest: np.ndarray = field(default_factory=_no_points)
    _size: int = 1

    def __bool__(self) -> bool:
        return bool(len(self._means) or len(self._rest))

    @property
    def points(self) -> Points:
        """The points to draw."""
        shown = np.concatenate([self._means, _means(self._rest, len(self._rest))])
        return [(step, value) for step, value in shown.tolist()]

    def extend(self, points: Sequence[tuple[float, float]] | np.ndarray) -> Series:
        """Add points, and return the series."""
        added = np.asarray(points, dtype=np.float64).reshape(-1, 2)
        added = added[np.isfinite(added[:, 1])]
        if not len(added):
            return self
        if not self:
            self.start, self.first = added[0].tolist()
        values = added[:, 1]
        self.last = float(values[-1])
        self.least, self.most = min(self.least, float(values.min())), max(self.most, float(values.max()))
        rest = np.concatenate([self._rest, added])
        whole = len(rest) // self._size * self._size
        self._means, self._rest = np.concatenate([self._means, _means(rest[:whole], self._size)]), rest[whole:]
        while len(self._means) > MOST:
            even = len(self._means) // 2 * 2  # the rest begins with a mean that has no neighbour yet
            self._rest = np.concatenate([np.repeat(self._means[even:], self._size, axis=0), self._rest])
            self._means, self._size = _means(self._means[:even], 2), 2 * self._size
        return self

    def scaled(self, factor: float) -> Series:
        """The series in another unit."""
        means, rest = (part * (1.0, factor) for part in (self._means, self._rest))
        first, last, least, most = (value * factor for value in (self.first, self.last, self.least, self.most))
        return Series(self.start, first, last, least, most, means, rest, self._size)


def mean(points: Points) -> tuple[float, float]:
    """The mean of neighbours, at the step of the last one."""
    return points[-1][0], sum(value for _, value in points) / len(points)


def _means(points: np.ndarray, size: int) -> np.ndarray:
    """The mean of each ``size`` neighbours, at the step of the last one. ``points`` are a multiple of them."""
    if size <= 1:
        return points
    groups = points.reshape(-1, size, 2)
    return np.stack([groups[:, -1, 0], groups[:, :, 1].mean(axis=1)], axis=1)
