"""The losses of a range test over the learning rate, as an SVG document."""

from __future__ import annotations

import math
from collections.abc import Mapping
from html import escape
from typing import Any

from fastloop_tools.report.charts import Frame, Size, find_limits, line_chart
from fastloop_tools.report.metrics import Series
from fastloop_tools.report.svg import svg

SIZE = Size(width=480, height=240, top=10, right=12, bottom=30, ticks=4)
TITLE, FOOT = 34, 24
"""Pixels above and below the chart, for the title and the name of the axis."""
STYLE = (
    ".axis { stroke: #c4cad4; } .line { fill: none; stroke-width: 2; } .loss { stroke: #8a8f98; stroke-width: 1; } "
    ".smoothed { stroke: #2f6db5; } .chosen { stroke: #2a7f62; stroke-width: 2; stroke-dasharray: 4 3; }"
)


def draw(record: Mapping[str, Any]) -> str:
    """The loss of each step and its average, over the logarithm of the rate. A dashed line shows the suggestion.

    Args:
        record: The contents of the ``--json`` file. Losses far above those before the divergence are left out.
    """
    logs, chosen = [math.log10(rate) for rate in record["rates"]], record["suggestion"]
    finite = [value for value in record["smoothed"] if math.isfinite(value)]
    lowest = min(range(len(finite)), key=finite.__getitem__)
    most = 1.2 * max(finite[: lowest + 1])
    series = {
        name: (
            number,
            Series().extend([(x, value) for x, value in zip(logs, record[key], strict=True) if value <= most]),
        )
        for number, (name, key) in enumerate([("loss", "losses"), ("smoothed", "smoothed")])
    }
    limits = find_limits(line for _, line in series.values())
    chart = line_chart(record["recipe"], series, limits=limits, size=SIZE)
    assert chart is not None
    assert limits is not None
    left, right, bottom = chart.left, SIZE.width - SIZE.right, TITLE + SIZE.height - SIZE.bottom
    title = f"{record['recipe']}: " + (f"suggested train.lr {chosen['lr']:.1e}" if chosen else "no suggestion")
    lines = [f'<text x="12" y="24">{escape(title)}</text>']
    for tick in chart.ys:
        y = TITLE + tick.place
        lines.append(f'<path class="axis" d="M{left} {y}H{right}"/>')
        lines.append(f'<text x="{left - 6:g}" y="{y + 4}" text-anchor="end">{tick.label}</text>')
    lines += [
        f'<text x="{tick.text}" y="{bottom + 18}" text-anchor="middle">1e{tick.label}</text>'
        for tick in chart.xs
        if tick.label
    ]
    lines.append(
        f'<text x="{(left + right) / 2:g}" y="{bottom + 38}" text-anchor="middle">train.lr; thin: each step, thick: '
        "smoothed</text>"
    )
    if chosen and limits.left <= math.log10(chosen["lr"]) <= limits.right:
        x, _ = Frame(limits, SIZE).place(math.log10(chosen["lr"]), limits.low)
        lines.append(f'<path class="chosen" d="M{x:.1f} {TITLE + SIZE.top}V{bottom}"/>')
    for line in chart.lines:
        lines.append(f'<path class="line {line.name}" transform="translate(0 {TITLE})" d="{line.path}"/>')
    return svg(title, SIZE.width, TITLE + SIZE.height + FOOT, lines, STYLE)
