"""``fastloop recipes``: the shipped recipes."""

from __future__ import annotations

from typing import Annotated

import typer


def recipes(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="Print this recipe, so that it can be copied.")
    ] = None,
) -> None:
    """List the shipped recipes, or print one.

    The first line of a printed recipe names its JSON Schema, for the YAML support of editors.
    """
    from fastloop.recipe import find_recipe, shipped_recipes

    if name is not None:
        path = find_recipe(name)
        schema = path.with_name("recipe.schema.json")
        if schema.is_file():
            typer.echo(f"# yaml-language-server: $schema={schema}")
        typer.echo(path.read_text(encoding="utf-8"), nl=False)
        return
    shipped = shipped_recipes()
    width = max(map(len, shipped), default=0)
    for key, path in shipped.items():
        first = path.read_text(encoding="utf-8").partition("\n")[0]
        typer.echo(f"{key:{width}}  {first.removeprefix('#').strip()}")
