"""The confusion matrix as a picture: a row for each target, a column for each prediction."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from fastloop_tools.report.charts import number, svg

CELL, LEFT, TOP, EDGE = 54, 170, 150, 16
"""Pixels of a cell, of the names of targets, of the names of predictions with the title, and of the margin."""
SMALL_CELL, WITH_COUNTS = 14, 20
"""Pixels of a cell without its count, and the number of classes up to which cells show counts."""
NAME = 20
"""Characters of a name at most."""
STYLE = "text.count { text-anchor: middle; } text.dark { fill: #fff; } rect { fill: #2f6db5; } rect.frame { fill: none; stroke: #8a8f98; }"


def draw(names: Sequence[str], matrix: Sequence[Sequence[int]], title: str) -> str:
    """An SVG document. The shade of a cell is its share of the row, so that rare classes show as clearly as frequent ones.

    Args:
        names: The classes.
        matrix: Counts, target by prediction.
    """
    size = CELL if len(names) <= WITH_COUNTS else SMALL_CELL
    side, half = size * len(names), size / 2
    lines = [f'<text x="{EDGE}" y="26">{escape(title)}</text>', f'<text x="{EDGE}" y="{TOP - 10}">target \\ prediction</text>']
    for row, (name, counts) in enumerate(zip(names, matrix, strict=True)):
        y, total = TOP + row * size, sum(counts) or 1
        shown = escape(name if len(name) <= NAME else f"{name[: NAME - 1]}…")
        lines.append(f'<text x="{LEFT - 8}" y="{y + half + 5:g}" text-anchor="end">{shown}</text>')
        across = LEFT + row * size + half
        lines.append(f'<text x="{across:g}" y="{TOP - 8}" transform="rotate(-40 {across:g} {TOP - 8})">{shown}</text>')
        for column, count in enumerate(counts):
            x, share = LEFT + column * size, count / total
            tip = f"{escape(name)} as {escape(names[column])}: {count:,} of {sum(counts):,}"
            place = f'x="{x}" y="{y}" width="{size}" height="{size}"'
            lines.append(f'<rect {place} fill-opacity="{share:.3f}"><title>{tip}</title></rect>')
            if size == CELL:
                dark = " dark" if share > 0.5 else ""
                lines.append(f'<text class="count{dark}" x="{x + half:g}" y="{y + half + 5:g}">{number(count)}</text>')
    lines.append(f'<rect class="frame" x="{LEFT}" y="{TOP}" width="{side}" height="{side}"/>')
    return svg(title, max(LEFT + side + 90, 420), TOP + side + EDGE, lines, STYLE)
