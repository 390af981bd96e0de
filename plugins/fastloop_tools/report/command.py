"""``fastloop report``: runs, ablations and profiles on one page of HTML."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    folders: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders that train, bench or profile wrote.")],
    output: Annotated[Path, typer.Option(metavar="FILE", help="The page to write.")] = Path("report.html"),
    title: Annotated[str, typer.Option(help="What stands on top.")] = "",
) -> None:
    """Write one page of HTML about runs: curves, metrics, where recipes differ, ablations, and where a step's time goes.

    The page needs nothing else: no network, no scripts.
    """
    from fastloop.errors import UsageError
    from fastloop.runtime.files import write
    from fastloop_tools.report.page import render
    from fastloop_tools.report.read import read

    found = read(folders)
    if output.is_dir() or not output.absolute().parent.is_dir():
        raise UsageError(f"--output {output}: expected a file in a folder that is there.")
    write(output, render(found, title or ", ".join(folder.name for folder in folders)))
    typer.echo(f"written to {output}")
