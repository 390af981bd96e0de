"""Print tables and pages: as wide as a terminal, and without line breaks of our own into a file or a pipe."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from rich.table import Table

LONGEST_LINE = 10_000
"""Characters of a table's row in a file at most: more than any row has."""


def print_table(table: Table) -> None:
    """Print a table of rich.

    On a terminal, cells wrap where their columns allow it. If even the shortest lines are wider than the terminal, the
    terminal breaks them. Into a file or a pipe, each row is one line, without spaces at its end, so that ``grep``,
    ``cut`` and ``less -S`` read whole rows.
    """
    import rich
    from rich.console import Console
    from rich.measure import Measurement

    console = rich.get_console()
    needed = Measurement.get(console, console.options.update(max_width=LONGEST_LINE), table)
    width = needed.minimum if console.is_terminal else needed.maximum
    if width > console.width:
        console = Console(file=console.file, width=width)
    if console.is_terminal:
        console.print(table)
        return
    with console.capture() as captured:
        console.print(table)
    for line in captured.get().removesuffix("\n").split("\n"):
        print(line.rstrip(" "), file=console.file)  # rich pads the last column


def print_markdown(page: str) -> None:
    """Print a page of markdown: rendered on a terminal, and as it is into a file or a pipe."""
    import rich
    from rich.markdown import Markdown

    if rich.get_console().is_terminal:
        rich.print(Markdown(page))
    else:
        typer.echo(page.rstrip("\n"))
