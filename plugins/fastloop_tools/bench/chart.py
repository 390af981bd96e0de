"""``bench.svg``: the speed of each variant, with its interval."""

from __future__ import annotations

from html import escape
from typing import Any

from fastloop_tools.report.bars import ablation_bars
from fastloop_tools.report.svg import svg

WIDTH, LEFT, RIGHT, ROW, TOP = 900, 260, 190, 34, 44
"""Pixels of the picture, of the names, of the labels, of one bar and of the title."""
COLOURS = {"faster": "#2a7f62", "slower": "#b5493a"}
OTHER = "#8a8f98"
STYLE = (
    ".interval { stroke: #222; stroke-width: 1.5; } @media (prefers-color-scheme: dark) { .interval { stroke: #ddd; } }"
)


def draw(record: dict[str, Any]) -> str:
    """The chart of an ablation as an SVG document. Its bars are those of `fastloop report`."""
    rows = [row for row in record["variants"] if row["kind"] != "without"]
    bars = ablation_bars(record)
    title = f"{record['name']} on {record['machine']['device']}: green is a claimed win over the variant before"
    lines = [f'<text x="12" y="26">{escape(title)}</text>']
    scale, half = WIDTH - LEFT - RIGHT, ROW / 2
    for index, (row, bar) in enumerate(zip(rows, bars, strict=True)):
        y = TOP + index * ROW
        over = (row["results"] or {}).get("over_before") or {}
        colour, end = COLOURS.get(over.get("verdict", ""), OTHER), LEFT + scale * max(bar.size, bar.high or 0.0)
        lines.append(f'<text x="{LEFT - 10}" y="{y + half + 5:g}" text-anchor="end">{escape(bar.name)}</text>')
        lines.append(
            f'<rect x="{LEFT}" y="{y + 5}" width="{scale * bar.size:.1f}" height="{ROW - 10}" fill="{colour}"/>'
        )
        if bar.low is not None and bar.high is not None:
            low, high = (LEFT + scale * share for share in (bar.low, bar.high))
            lines.append(
                f'<path class="interval" d="M{low:.1f} {y + half:g}H{high:.1f}M{low:.1f} {y + 12}v10M{high:.1f} '
                f'{y + 12}v10"/>'
            )
        lines.append(f'<text x="{end + 8:.1f}" y="{y + half + 5:g}">{escape(bar.label)}</text>')
    height = TOP + ROW * len(rows) + 8
    return svg(title, WIDTH, height, lines, STYLE)
