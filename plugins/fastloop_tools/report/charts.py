"""Charts as inline SVG without scripts. They work on paper, in dark mode and in screen readers (each chart has a table of its values)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from fastloop_tools.report.read import Points

MOST = 300
"""Points drawn in one line at most. Longer series are averaged."""
TEXT = "text { font: 13px system-ui, sans-serif; fill: #222; } @media (prefers-color-scheme: dark) { text { fill: #ddd; } }"
"""The style of text in an SVG document."""
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 480, 240, 66, 12, 10, 30


@dataclass
class Line:
    """One line of a chart: its name, the number of its colour, and its points in chart coordinates."""

    name: str
    colour: int
    path: str
    dots: list[tuple[float, float, str]]


@dataclass
class Chart:
    """A chart as the template draws it, in units of the picture."""

    title: str
    lines: list[Line]
    xs: list[tuple[float, str]]
    ys: list[tuple[float, str]]
    rows: list[tuple[str, str, str, str, str]]
    width: int = WIDTH
    height: int = HEIGHT
    left: int = LEFT
    bottom: int = HEIGHT - BOTTOM


@dataclass
class Bar:
    """One bar. ``size``, ``low`` and ``high`` are shares of the longest bar."""

    name: str
    size: float
    label: str
    low: float | None = None
    high: float | None = None
    note: str = ""


def svg(title: str, width: int, height: int, lines: Sequence[str], style: str) -> str:
    """An SVG document of its own, for light and dark backgrounds.

    Args:
        lines: Its elements.
        style: Rules for them, beside those of text.
    """
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img">'
    return "\n".join([head, f"<title>{escape(title)}</title>", f"<style>{TEXT} {style}</style>", *lines, "</svg>"]) + "\n"


def number(value: float) -> str:
    """A number as short text."""
    if not math.isfinite(value):
        return "-"
    size = abs(value)
    if size >= 1e9:
        return f"{value / 1e9:.3g}G"
    if size >= 1e6:
        return f"{value / 1e6:.4g}M"
    if size >= 1e4:
        return f"{value / 1e3:.4g}k"
    if size and size < 1e-3:
        return f"{value:.3g}"
    return f"{value:.4g}"


def ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Round numbers between two values."""
    if high <= low:
        return [low]
    raw = (high - low) / count
    scale = 10.0 ** math.floor(math.log10(raw))
    step = next(scale * factor for factor in (1, 2, 5, 10) if scale * factor >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    found = []
    while first * step <= high + 1e-9 * step:
        found.append(first * step)
        first += 1
    return found


def thinned(points: Points) -> Points:
    """Reduce points to at most ``MOST``, by averaging neighbours."""
    size = math.ceil(len(points) / MOST)
    if size <= 1:
        return points
    groups = [points[start : start + size] for start in range(0, len(points), size)]
    return [(group[-1][0], sum(value for _, value in group) / len(group)) for group in groups]


def line_chart(title: str, series: Mapping[str, tuple[int, Points]]) -> Chart | None:
    """A chart of values over steps; None if there is no finite value.

    Args:
        series: Name -> the number of its colour, and its points.
    """
    drawn = {name: (colour, [point for point in points if math.isfinite(point[1])]) for name, (colour, points) in series.items()}
    drawn = {name: (colour, points) for name, (colour, points) in drawn.items() if points}
    if not drawn:
        return None
    every = [point for _, points in drawn.values() for point in points]
    left, right = min(x for x, _ in every), max(x for x, _ in every)
    low, high = min(y for _, y in every), max(y for _, y in every)
    if low == high:
        low, high = low - (abs(low) or 1) * 0.05, high + (abs(high) or 1) * 0.05
    elif 0 <= low < 0.5 * high:
        low = 0.0  # start the axis at zero unless values vary little
    if left == right:
        left, right = left - 1, right + 1

    def place(x: float, y: float) -> tuple[float, float]:
        across = LEFT + (x - left) / (right - left) * (WIDTH - LEFT - RIGHT)
        return round(across, 1), round(HEIGHT - BOTTOM - (y - low) / (high - low) * (HEIGHT - TOP - BOTTOM), 1)

    lines, rows = [], []
    for name, (colour, points) in drawn.items():
        shown = thinned(points)
        places = [place(*point) for point in shown]
        path = "M" + "L".join(f"{x} {y}" for x, y in places)
        dots = [(x, y, f"{name}, step {point[0]:,.0f}: {number(point[1])}") for (x, y), point in zip(places, shown, strict=True)]
        lines.append(Line(name, colour, path, dots))
        values = [value for _, value in points]
        rows.append((name, number(values[0]), number(values[-1]), number(min(values)), number(max(values))))
    xs = [(place(value, low)[0], number(value)) for value in ticks(left, right) if value == int(value)]  # steps are integers
    ys = [(place(left, value)[1], number(value)) for value in ticks(low, high)]
    return Chart(title, lines, xs, ys, rows)


def bars(values: Sequence[tuple[str, float, str, tuple[float, float] | None, str]]) -> list[Bar]:
    """Bars on one scale, from name, value, label, interval and note."""
    longest = max([value for _, value, *_ in values] + [interval[1] for *_, interval, _ in values if interval], default=0.0) or 1.0
    return [
        Bar(
            name,
            value / longest,
            label,
            interval[0] / longest if interval else None,
            interval[1] / longest if interval else None,
            note,
        )
        for name, value, label, interval, note in values
    ]


def ablation_bars(record: Mapping[str, Any]) -> list[Bar]:
    """The variants of an ablation by speed."""
    rows: list[tuple[str, float, str, tuple[float, float] | None, str]] = []
    for variant in record.get("variants", []):
        results = variant.get("results")
        if variant.get("kind") == "without":
            continue
        if not results:
            rows.append((variant["title"], 0.0, "not measured", None, variant.get("why_not") or variant.get("error") or ""))
            continue
        rate = results[f"{results['unit']}_per_second"]
        over = results.get("over_baseline")
        label = f"{rate['median']:,.0f} {results['unit']}/s" + (f", x {over['median']:.2f}" if over else "")
        verdict = (results.get("over_before") or {}).get("verdict", "")
        memory = f"{results['peak_memory_bytes'] / 2**20:,.0f} MiB"
        rows.append((variant["title"], rate["median"], label, (rate["low"], rate["high"]), "; ".join(filter(None, [verdict, memory]))))
    return bars(rows)


def region_bars(record: Mapping[str, Any]) -> list[Bar]:
    """The regions of a step by seconds."""
    profile = record["profile"]
    rows = sorted(profile["regions"].items(), key=lambda item: -item[1])
    return bars([(name, value, f"{1000 * value:,.1f} ms, {value / profile['seconds']:.0%}", None, "") for name, value in rows])
