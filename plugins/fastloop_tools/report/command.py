"""``fastloop report``: shows runs, sweeps, ablations and profiles on one HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    folders: Annotated[list[Path], typer.Argument(metavar="RUN", help="Output folders of train, sweep, bench or profile.")],
    output: Annotated[Path, typer.Option(metavar="FILE", help="The HTML file to write.")] = Path("report.html"),
    title: Annotated[str, typer.Option(metavar="TEXT", help="Title of the page.")] = "",
) -> None:
    """Write an HTML page about runs.

    It shows curves, metrics, differences of recipes, sweeps, ablations, and the time spent in each part of a step. The page is
    self-contained: it needs no network and no scripts.
    """
    from fastloop.errors import UsageError
    from fastloop.runtime.files import write
    from fastloop_tools.report.page import render
    from fastloop_tools.report.read import read

    found = read(folders)
    if output.is_dir() or not output.absolute().parent.is_dir():
        raise UsageError(f"--output {output}: expected a file in an existing folder.")
    write(output, render(found, title or ", ".join(folder.name for folder in folders)))
    typer.echo(f"written to {output}")
