"""Charts as inline SVG without scripts.

They work on paper, in dark mode and in screen readers (each chart has a table of its values)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from fastloop_tools.report.frame import FULL, SMALL, Frame, Limits, Size, Tick, find_limits
from fastloop_tools.report.numbers import number, some_ticks, tick_labels
from fastloop_tools.report.series import Points, Series, mean

FEW = 20
"""Lines of at most this many points show their points."""


class Mean(NamedTuple):
    """A mean and the ends of its whisker, in units of the picture."""

    x: float
    y: float
    top: float
    end: float
    label: str


@dataclass
class Line:
    """One line of a chart.

    Attributes:
        colour: The number of its colour.
        path: Its SVG path; empty: points only.
        dots: Its points and their labels, in units of the picture.
        shown: Whether the points are visible without a pointer.
        means: Means with whiskers.
    """

    name: str
    colour: int
    path: str
    dots: list[tuple[float, float, str]]
    shown: bool = False
    means: list[Mean] = field(default_factory=list)


@dataclass
class Chart:
    """A chart as the template draws it.

    Attributes:
        unit: Name of the vertical axis.
        across: Name of the horizontal axis.
        columns: Heads of the table of values, the rows of which are ``rows``.
        left: The place of the vertical axis, in units of the picture.
    """

    title: str
    unit: str
    across: str
    lines: list[Line]
    xs: list[Tick]
    ys: list[Tick]
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]
    left: float
    size: Size = FULL


@dataclass
class Panel:
    """Small charts with common axes, one for each run, and the table of their values.

    Attributes:
        first: Whether the page shows it at once, and not among further values.
    """

    title: str
    unit: str
    charts: list[Chart]
    first: bool = True

    @property
    def rows(self) -> list[tuple[str, ...]]:
        """The rows of the table."""
        return [row for chart in self.charts for row in chart.rows]

    @property
    def columns(self) -> tuple[str, ...]:
        """The heads of the table."""
        return self.charts[0].columns


def line_chart(
    title: str,
    series: Mapping[str, tuple[int, Series]],
    unit: str = "",
    limits: Limits | None = None,
    size: Size = FULL,
) -> Chart | None:
    """A chart of values over steps; None if there is no finite value.

    Args:
        series: Name -> the number of its colour, and its line.
        unit: Name of the vertical axis.
        limits: The limits, for charts with common axes; None: those of ``series``.
    """
    drawn = {name: (colour, line) for name, (colour, line) in series.items() if line}
    limits = limits or find_limits(line for _, line in drawn.values())
    if limits is None or not drawn:
        return None
    frame = Frame(limits, size)
    lines, rows = list[Line](), list[tuple[str, ...]]()
    for name, (colour, line) in drawn.items():
        shown = thinned(line.points, size.points)
        places = [frame.place(*point) for point in shown]
        dots = [(*place, f"{name}, step {x:,.0f}: {number(y)}") for place, (x, y) in zip(places, shown, strict=True)]
        lines.append(Line(name, colour, path(places), dots if size == FULL or len(dots) == 1 else [], len(dots) <= FEW))
        rows.append((name, *map(number, (line.first, line.last, line.least, line.most))))
    steps = [value for value in some_ticks(limits.left, limits.right, size.ticks) if value == int(value)]
    xs, columns = frame.horizontal(steps, tick_labels(steps)), ("run", "first", "last", "least", "most")
    return Chart(title, unit, "step", lines, xs, frame.vertical(), columns, rows, frame.left, size)


def panel(title: str, series: Mapping[str, Series], unit: str = "", first: bool = True) -> Panel | None:
    """A small chart for each run, with common axes; None if no run has a line of two points or there is no finite
    value."""
    limits = find_limits(series.values())
    if limits is None or all(len(line.points) < 2 for line in series.values()):
        return None
    charts = [line_chart(name, {name: (0, line)}, unit, limits, SMALL) for name, line in series.items()]
    return Panel(title, unit, [chart for chart in charts if chart is not None], first)


def path(places: Sequence[tuple[float, float]]) -> str:
    """The ``d`` of an SVG path through points."""
    return "M" + "L".join(f"{x} {y}" for x, y in places)


def thinned(points: Points, most: int = FULL.points) -> Points:
    """Reduce points to at most ``most``, by averaging neighbours."""
    size = math.ceil(len(points) / most)
    if size <= 1:
        return points
    return [mean(points[start : start + size]) for start in range(0, len(points), size)]
