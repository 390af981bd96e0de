"""The axes of a chart: places in units of the picture, ticks and their labels."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from fastloop_tools.report.numbers import some_ticks, tick_labels
from fastloop_tools.report.series import Series

CHARACTER = 7.7
"""Width of a digit of a label at 12px, in units of the picture, in the widest of common system fonts: DejaVu Sans."""


class Size(NamedTuple):
    """The size of a chart, its margins, the number of ticks to aim at, and the most points to draw in a line."""

    width: int
    height: int
    top: int
    right: int
    bottom: int
    ticks: int
    points: int


FULL = Size(340, 220, 28, 14, 38, 4, 300)
SMALL = Size(150, 96, 8, 10, 20, 2, 100)
"""A phone shows one full chart, or two small ones beside each other, at about this size. So text keeps its size."""


class Limits(NamedTuple):
    """The range that a chart shows: horizontally, then vertically."""

    left: float
    right: float
    low: float
    high: float


class Tick(NamedTuple):
    """A tick: its place on the axis, its label, and the place of the label, which stays inside the picture."""

    place: float
    label: str
    text: float


class Frame:
    """The axes of a chart. The left margin is as wide as the labels of the vertical axis.

    Attributes:
        left: The place of the vertical axis, in units of the picture.
    """

    def __init__(self, limits: Limits, size: Size) -> None:
        self.limits, self.size = limits, size
        self.values = some_ticks(limits.low, limits.high, size.ticks)
        self.labels = tick_labels(self.values)
        self.left = round(10 + CHARACTER * max(map(len, self.labels), default=0), 1)

    def place(self, x: float, y: float) -> tuple[float, float]:
        """A point in units of the picture."""
        (left, right, low, high), size = self.limits, self.size
        across = self.left + (x - left) / (right - left) * (size.width - self.left - size.right)
        return round(across, 1), round(
            size.height - size.bottom - (y - low) / (high - low) * (size.height - size.top - size.bottom), 1
        )

    def vertical(self) -> list[Tick]:
        """The ticks of the vertical axis."""
        places = [self.place(self.limits.left, value)[1] for value in self.values]
        return [Tick(place, label, place + 4) for place, label in zip(places, self.labels, strict=True)]

    def horizontal(self, values: Sequence[float], labels: Sequence[str]) -> list[Tick]:
        """Ticks of the horizontal axis, in order. Labels that would overlap are left out."""
        found: list[Tick] = []
        end = -math.inf
        for value, label in zip(values, labels, strict=True):
            place, half = self.place(value, self.limits.low)[0], CHARACTER * len(label) / 2
            text = round(max(min(place, self.size.width - half), half), 1)
            fits = text - half >= end
            found.append(Tick(place, label if fits else "", text))
            end = text + half + CHARACTER if fits else end
        return found


def find_limits(lines: Iterable[Series]) -> Limits | None:
    """The limits that show all values of several lines; None if there is none."""
    every = [series for series in lines if series]
    if not every:
        return None
    steps = [step for series in every for step in (series.start, *(step for step, _ in series.points))]
    left, right = min(steps), max(steps)
    if 0 <= left < 0.5 * right or left == right:  # nearly all lines begin at the first step
        left, right = min(left, 0.0), max(right, 1.0)
    return Limits(left, right, *value_range([value for series in every for value in (series.least, series.most)]))


def value_range(values: Sequence[float]) -> tuple[float, float]:
    """The ends of a vertical axis. It starts at zero unless the values vary little."""
    low, high = min(values), max(values)
    if low == high:
        return low - (abs(low) or 1) * 0.05, high + (abs(high) or 1) * 0.05
    return (0.0 if 0 <= low < 0.5 * high else low), high
