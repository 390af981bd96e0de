"""Tables of Markdown, for code hosts and for mkdocs."""

from __future__ import annotations

import html
import re

CODE = re.compile(r"``([^`]*\|[^`]*)``|`([^`]*\|[^`]*)`")


def table(head: str, rows: list[tuple[str, ...]]) -> str:
    """A table; ``head`` holds the titles of its columns with ``|`` between.

    Code hosts and mkdocs disagree about a bar in code in a cell, so it is written as HTML.
    """
    columns = head.split("|")
    lines = [columns, ["---"] * len(columns), *([cell(text) for text in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def cell(text: str) -> str:
    """A text as a cell of a table."""
    text = CODE.sub(
        lambda code: f"<code>{html.escape(code[1] or code[2], quote=False).replace('|', '&#124;')}</code>", text
    )
    return text.replace("|", "\\|")
