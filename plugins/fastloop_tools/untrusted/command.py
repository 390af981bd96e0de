"""``fastloop plan --untrusted``: lists code, files and URLs of a stranger's recipe; refuses uninstalled code."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer

from fastloop.cli.arguments import RecipeArguments
from fastloop.recipe import secrets


def list_code(arguments: RecipeArguments, json_file: str) -> None:
    """List the code of a recipe, without importing it.

    Args:
        json_file: The file to write the list to; empty: none, ``-``: stdout.

    Raises:
        RecipeError: The recipe runs code that is not installed.
    """
    from fastloop.errors import RecipeError
    from fastloop.runtime.files import write
    from fastloop_tools.shared.visible_text import visible
    from fastloop_tools.untrusted.listing import lines, list_recipe

    loaded = arguments.load()
    secrets.forget()  # else a value of a key like `token` would hide the same text everywhere in the list
    found = list_recipe(loaded)
    if json_file:
        text = json.dumps(_hide_values(dataclasses.asdict(found)), indent=1, default=str)
        if json_file == "-":
            typer.echo(text)
        else:
            write(Path(json_file), text + "\n", hidden=True)
    if json_file != "-":
        for line in lines(found):
            typer.echo(visible(secrets.hide(line, urls=False)))
    if found.refused:
        reasons = "".join(f"\n  {visible(reason)}." for reason in found.refused)
        raise RecipeError(
            f"{found.recipe}: it runs code that is not installed:{reasons}\nRead that code first. If you trust it, "
            "leave out --untrusted."
        )
    if json_file != "-":
        typer.echo(
            "\nAll code is installed. Installed code can do anything with the arguments that a recipe gives: read them."
        )


def _hide_values(tree: Any) -> Any:
    """Replace secrets of the environment in the values of a tree. Its keys stay, and so do values of keys like
    ``token``."""
    if isinstance(tree, Mapping):
        return {key: _hide_values(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_hide_values(value) for value in tree]
    return secrets.hide(tree, urls=False) if isinstance(tree, str) else tree
