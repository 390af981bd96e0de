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
    watch: Annotated[
        bool, typer.Option("--watch", help="Serve the page on this machine until Ctrl-C, and write no file.")
    ] = False,
    port: Annotated[
        int, typer.Option(min=0, max=65535, metavar="PORT", help="The port for --watch; 0: a free one.")
    ] = 0,
) -> None:
    """Write an HTML page about runs.

    It shows curves, metrics, differences of recipes and environments, sweeps, evaluations, ablations, and the time
    spent in each part of a step. The page is self-contained: it needs no network and no scripts. With --watch, the page
    follows runs that still train.
    """
    from fastloop.errors import UsageError
    from fastloop.runtime.files import check_links, write

    title = title or ", ".join(folder.name or folder.resolve().name for folder in folders)
    if port and not watch:
        raise UsageError("--port: it is for --watch.")
    if watch and output is not None:
        raise UsageError("--output: --watch writes no file. Leave one of the two out.")
    for folder in folders:
        check_links(folder)
    if watch:
        from fastloop_tools.report.serve import serve

        serve(folders, title, port, lambda address: typer.echo(f"serving {address}, until Ctrl-C"))
        return
    from fastloop_tools.report.page import render
    from fastloop_tools.report.read import read

    found, output = read(folders), output or Path("report.html")
    write(output, render(found, title))
    typer.echo(f"written to {output}")
