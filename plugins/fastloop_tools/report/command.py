"""``fastloop report``: shows runs, sweeps, ablations and profiles on one HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fastloop.cli.arguments import output_file


def report(
    folders: Annotated[
        list[Path], typer.Argument(metavar="RUN", help="Output folders of train, sweep, bench or profile.")
    ],
    output: Annotated[
        Path | None, output_file("--output", "The HTML file to write [default: report.html].", Path)
    ] = None,
    title: Annotated[str, typer.Option(metavar="TEXT", help="Title of the page.")] = "",
) -> None:
    """Write an HTML page about runs.

    It shows curves, metrics, differences of recipes and environments, sweeps, evaluations, ablations, and the time
    spent in each part of a step. The page is self-contained: it needs no network and no scripts.
    """
    from fastloop.runtime.files import check_links, write
    from fastloop_tools.report.page import page_title, render
    from fastloop_tools.report.read import read

    for folder in folders:
        check_links(folder)
    contents = read(folders)
    output = output or Path("report.html")
    write(output, render(contents, title or page_title(contents)))
    typer.echo(f"written to {output}")
