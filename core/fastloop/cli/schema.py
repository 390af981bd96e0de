"""``fastloop schema``: a JSON Schema of recipes, for editors and other programs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from fastloop.cli.arguments import output_file


def schema(
    output: Annotated[Path | None, output_file("--output", "Write it there instead of printing it.", Path)] = None,
    every: Annotated[
        bool, typer.Option("--all", help="Import other packages' plugins too, for their options.")
    ] = False,
) -> None:
    """Print the JSON Schema of recipes.

    It has every section, every installed plugin and every option.
    """
    from fastloop.cli.recipe_schema import recipe_schema
    from fastloop.errors import UsageError
    from fastloop.runtime.files import refuse_full_disk, write

    result, problems = recipe_schema(every)
    for line in problems:
        typer.echo(line, err=True)
    text = json.dumps(result, indent=2)
    if output is None:
        typer.echo(text)
        return
    try:
        write(output, text + "\n", hidden=True)
    except OSError as error:
        refuse_full_disk(error, output)
        raise UsageError(
            f"{output} cannot be written: {error.strerror}.", code="file-not-writable", place="--output"
        ) from None
