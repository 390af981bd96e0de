"""``fastloop plan --untrusted``: list the code, files and URLs of a recipe from a stranger, and refuse code that is not installed."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import typer

from fastloop.cli.arguments import Overrides, RecipeName, With, Without, names


def plan_code(
    recipe: RecipeName,
    overrides: Overrides = None,
    with_: With = None,
    without: Without = None,
    untrusted: Annotated[
        bool, typer.Option("--untrusted", help="Only list the code, files and URLs of the recipe, and refuse code that is not installed.")
    ] = False,
    json_file: Annotated[
        str,
        typer.Option("--json", metavar="FILE", help="Estimate memory, and write it to this file; with --untrusted, the list. -: stdout."),
    ] = "",
) -> bool:
    """List the code of a recipe, without importing it. Returns whether the option was given."""
    if not untrusted:
        return False
    from fastloop.errors import RecipeError
    from fastloop.recipe import load_recipe, secrets
    from fastloop.runtime.files import write
    from fastloop_tools.untrusted.listing import lines, list_recipe, visible

    found = list_recipe(load_recipe(recipe, overrides or (), names(with_), names(without)))
    if json_file:
        text = secrets.hide(json.dumps(dataclasses.asdict(found), indent=1, default=str))
        if json_file == "-":
            typer.echo(text)
        else:
            write(Path(json_file), text + "\n")
    if json_file != "-":
        for line in lines(found):
            typer.echo(visible(secrets.hide(line)))
    if found.refused:
        reasons = "".join(f"\n  {visible(reason)}." for reason in found.refused)
        raise RecipeError(
            f"{found.recipe}: it runs code that is not installed:{reasons}\nRead that code first. If you trust it, leave out --untrusted."
        )
    if json_file != "-":
        typer.echo("\nAll code is installed. Installed code can do anything with the arguments that a recipe gives: read them.")
    return True
