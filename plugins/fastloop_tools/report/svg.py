"""SVG documents."""

from __future__ import annotations

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
