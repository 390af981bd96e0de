"""Charts as inline SVG without scripts.

They work on paper, in dark mode and in screen readers (each chart has a table of its values)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from fastloop_tools.report.metrics_log import Series
from fastloop_tools.shared.svg import number

POINTS_SHOWN = 20
"""Lines of at most this many points show their points."""
CHARACTER = 7.7
"""Width of a digit of a label at 12px, in units of the picture, in the widest of common system fonts: DejaVu Sans."""


class Size(NamedTuple):
    """The size of a chart, its margins, and the number of ticks to aim at."""

    width: int
    height: int
    top: int
    right: int
    bottom: int
    ticks: int


FULL = Size(340, 220, 28, 14, 38, 4)
SMALL = Size(150, 96, 8, 10, 20, 2)
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
        self.limits = limits
        self.size = size
        self.values = ticks(limits.low, limits.high, size.ticks)
        self.labels = tick_labels(self.values)
        self.left = round(10 + CHARACTER * max(map(len, self.labels), default=0), 1)

    def place(self, x: float, y: float) -> tuple[float, float]:
        """A point in units of the picture."""
        left, right, low, high = self.limits
        width = self.size.width - self.left - self.size.right
        height = self.size.height - self.size.top - self.size.bottom
        across = self.left + (x - left) / (right - left) * width
        down = self.size.height - self.size.bottom - (y - low) / (high - low) * height
        return round(across, 1), round(down, 1)

    def vertical(self) -> list[Tick]:
        """The ticks of the vertical axis."""
        places = [self.place(self.limits.left, value)[1] for value in self.values]
        return [Tick(place, label, place + 4) for place, label in zip(places, self.labels, strict=True)]

    def horizontal(self, values: Sequence[float], labels: Sequence[str]) -> list[Tick]:
        """Ticks of the horizontal axis, in order. Labels that would overlap are left out."""
        horizontal_ticks = []
        end = -math.inf  # of the last label
        for value, label in zip(values, labels, strict=True):
            place, _ = self.place(value, self.limits.low)
            half = CHARACTER * len(label) / 2
            text = round(max(min(place, self.size.width - half), half), 1)
            if text - half >= end:
                horizontal_ticks.append(Tick(place, label, text))
                end = text + half + CHARACTER
            else:
                horizontal_ticks.append(Tick(place, "", text))
        return horizontal_ticks


def find_limits(lines: Iterable[Series]) -> Limits | None:
    """The limits that show all values of several lines; None if there is none."""
    steps: list[float] = []
    values: list[float] = []
    for series in lines:
        if series:  # it has points
            steps.append(series.start)
            steps += [step for step, _ in series.points]
            values += [series.least, series.most]
    if not steps:
        return None
    left = min(steps)
    right = max(steps)
    if 0 <= left < 0.5 * right or left == right:  # nearly all lines begin at the first step
        left = min(left, 0.0)
        right = max(right, 1.0)
    low, high = value_range(values)
    return Limits(left, right, low, high)


def value_range(values: Sequence[float]) -> tuple[float, float]:
    """The ends of a vertical axis. It starts at zero unless the values vary little."""
    low = min(values)
    high = max(values)
    if low == high:
        margin = 0.05 * (abs(low) or 1)
        return low - margin, high + margin
    if 0 <= low < 0.5 * high:
        low = 0.0
    return low, high


class MeanMark(NamedTuple):
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
    means: list[MeanMark] = field(default_factory=list)


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
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]
    first: bool = True


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
    lines: list[Line] = []
    rows: list[tuple[str, ...]] = []
    for name, (colour, line) in drawn.items():
        dots = []
        for step, value in line.points:
            x, y = frame.place(step, value)
            dots.append((x, y, f"{name}, step {step:,.0f}: {number(value)}"))
        shown = len(dots) <= POINTS_SHOWN
        svg_path = path([(x, y) for x, y, _ in dots])
        if size != FULL and len(dots) > 1:
            dots = []  # a small chart has no room for them
        lines.append(Line(name, colour, svg_path, dots, shown))
        rows.append((name, number(line.first), number(line.last), number(line.least), number(line.most)))
    steps = [value for value in ticks(limits.left, limits.right, size.ticks) if value == int(value)]
    xs = frame.horizontal(steps, tick_labels(steps))
    columns = ("run", "first", "last", "least", "most")
    return Chart(title, unit, "step", lines, xs, frame.vertical(), columns, rows, frame.left, size)


def panel(title: str, series: Mapping[str, Series], unit: str = "", first: bool = True) -> Panel | None:
    """A small chart for each run, with common axes; None if no run has a line of two points or there is no finite
    value."""
    limits = find_limits(series.values())
    if limits is None or all(len(line.points) < 2 for line in series.values()):
        return None
    charts = []
    rows = []
    for name, line in series.items():
        chart = line_chart(name, {name: (0, line)}, unit, limits, SMALL)
        if chart is not None:
            charts.append(chart)
            rows += chart.rows
    return Panel(title, unit, charts, charts[0].columns, rows, first)


def path(places: Sequence[tuple[float, float]]) -> str:
    """The ``d`` of an SVG path through points."""
    return "M" + "L".join(f"{x} {y}" for x, y in places)


def ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Round numbers between two values, at least two of them if the values differ."""
    if high <= low:
        return [low]
    raw = (high - low) / count
    scale = 10.0 ** math.floor(math.log10(raw))
    step = next(scale * factor for factor in (1, 2, 5, 10) if scale * factor >= raw * 0.999)
    multiple = math.ceil(low / step - 1e-9)
    values = []
    while multiple * step <= high + 1e-9 * step:
        values.append(multiple * step)
        multiple += 1
    return values if len(values) > 1 else ticks(low, high, count + 1)


def tick_labels(values: Sequence[float]) -> list[str]:
    """Labels of evenly spaced values, with the same unit and as many decimals as the distance of two values needs."""
    if len(values) < 2:
        return [number(value) for value in values]
    size = max(abs(value) for value in values)
    step = values[1] - values[0]
    unit = 1.0
    suffix = ""
    if size >= 1e9:
        unit = 1e9
        suffix = "G"
    elif size >= 1e6:
        unit = 1e6
        suffix = "M"
    elif size >= 1e4:  # 1,000 to 9,999 stay as they are
        unit = 1e3
        suffix = "k"
    elif size < 1e-3:
        power = math.floor(math.log10(size))
        unit = 10.0**power
        suffix = f"e{power}"
    decimals = max(0, -math.floor(math.log10(step / unit) + 1e-9))
    return ["0" if abs(value) < step / 1e6 else f"{value / unit:.{decimals}f}{suffix}" for value in values]
