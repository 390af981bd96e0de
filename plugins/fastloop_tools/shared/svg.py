"""SVG documents, and numbers as short text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

TEXT = (
    "text { font: 13px system-ui, sans-serif; fill: #222; } @media (prefers-color-scheme: dark) { text { fill: "
    "#ddd; } }"
)
"""The style of text in an SVG document."""


def svg(title: str, width: int, height: int, lines: Sequence[str], style: str) -> str:
    """An SVG document of its own, for light and dark backgrounds.

    Args:
        lines: Its elements.
        style: Rules for them, beside those of text.
    """
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" role="img">'
    )
    return (
        "\n".join([head, f"<title>{escape(title)}</title>", f"<style>{TEXT} {style}</style>", *lines, "</svg>"]) + "\n"
    )


def number(value: float) -> str:
    """A number as short text."""
    if not math.isfinite(value):
        return "-"
    size = abs(value)
    for least, unit, digits, suffix in ((1e9, 1e9, 3, "G"), (1e6, 1e6, 4, "M"), (1e4, 1e3, 4, "k")):
        if size >= least:
            return f"{value / unit:.{digits}g}{suffix}"
    return f"{value:.3g}" if size and size < 1e-3 else f"{value:.4g}"
