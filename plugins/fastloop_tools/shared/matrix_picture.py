"""The confusion matrix as a picture: a row for each target, a column for each prediction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from fastloop_tools.shared.svg import number, svg

CELL = 54
"""Pixels of a cell."""
EDGE = 16
"""Pixels of the margin."""
LEGEND = 24
"""Pixels of the line that names rows and columns."""
HEAD = 32
"""Pixels of the title."""
SMALL_CELL = 14
"""Pixels of a cell without its count."""
WITH_COUNTS = 20
"""Number of classes up to which cells show counts."""
NAME = 20
"""Characters of a name at most."""
CHARACTER = 7.5
"""Pixels of a character."""
STYLE = (
    "text.count { text-anchor: middle; } text.dark { fill: #fff; } rect.cell { fill: #2f6db5; } rect.frame { "
    "fill: none; stroke: #8a8f98; }"
)


@dataclass
class Matrix:
    """SVG elements, and their size in pixels. ``cell``, ``count``, ``dark`` and ``frame`` are classes for a style."""

    lines: list[str]
    width: int
    height: int


def draw(names: Sequence[str], matrix: Sequence[Sequence[int]], title: str) -> str:
    """An SVG document. The shade of a cell is its share of the row, so that rare classes show as clearly as frequent
    ones.

    Args:
        names: The classes.
        matrix: Counts, target by prediction.
    """
    drawn = draw_matrix(names, matrix)
    lines = [
        f'<text x="{EDGE}" y="26">{escape(title)}</text>',
        f'<g transform="translate(0 {HEAD})">',
        *drawn.lines,
        "</g>",
    ]
    return svg(title, max(drawn.width, 420), drawn.height + HEAD, lines, STYLE)


def draw_matrix(names: Sequence[str], matrix: Sequence[Sequence[int]]) -> Matrix:
    """The elements of the picture, without a title and a style."""
    size = CELL if len(names) <= WITH_COUNTS else SMALL_CELL
    side = size * len(names)
    half = size / 2
    texts = [escape(name if len(name) <= NAME else f"{name[: NAME - 1]}…") for name in names]
    longest = CHARACTER * max(min(len(name), NAME) for name in names)
    # names of columns rise by 40 degrees
    left = round(EDGE + longest + 8)
    top = round(LEGEND + longest * 0.64 + 22)
    lines = [f'<text x="{EDGE}" y="{EDGE}">rows: target, columns: prediction</text>']
    for row, (name, counts) in enumerate(zip(names, matrix, strict=True)):
        y = top + row * size
        total = sum(counts) or 1
        lines.append(f'<text x="{left - 8}" y="{y + half + 5:g}" text-anchor="end">{texts[row]}</text>')
        across = left + row * size + half
        lines.append(
            f'<text x="{across:g}" y="{top - 8}" transform="rotate(-40 {across:g} {top - 8})">{texts[row]}</text>'
        )
        for column, count in enumerate(counts):
            x = left + column * size
            share = count / total
            tip = f"{escape(name)} as {escape(names[column])}: {count:,} of {sum(counts):,}"
            place = f'x="{x}" y="{y}" width="{size}" height="{size}"'
            lines.append(f'<rect class="cell" {place} fill-opacity="{share:.3f}"><title>{tip}</title></rect>')
            if size == CELL:
                dark = " dark" if share > 0.5 else ""
                lines.append(f'<text class="count{dark}" x="{x + half:g}" y="{y + half + 5:g}">{number(count)}</text>')
    lines.append(f'<rect class="frame" x="{left}" y="{top}" width="{side}" height="{side}"/>')
    width = max(left + side - half + longest * 0.77, left + side) + EDGE
    return Matrix(lines, max(round(width), 270), top + side + EDGE)
