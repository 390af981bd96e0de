"""``fastloop import``: write a recipe from a config of Axolotl, TRL or transformers."""

from __future__ import annotations

from pathlib import Path
from shlex import quote
from typing import Annotated

import typer
from fastloop_tools.toolkit import choice, output_file

from fastloop_migrate.keys import FORMATS
from fastloop_migrate.preference import TRAINERS


def import_config(
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE", help="Axolotl's YAML, or arguments of TRL or transformers as YAML or JSON."),
    ],
    output: Annotated[Path | None, output_file("--output", "The recipe to write [default: stdout].", Path)] = None,
    format: Annotated[str, choice("--format", ("auto", *FORMATS), "Format of the file; auto: by its keys.")] = "auto",
    trainer: Annotated[
        str,
        choice("--trainer", ("auto", *TRAINERS), "The trainer of TRL that reads the file; auto: by its keys."),
    ] = "auto",
    nproc: Annotated[
        int, typer.Option(min=1, metavar="N", help="Processes of the run: batch_size counts samples over all of them.")
    ] = 1,
) -> None:
    """Write a recipe from a config of Axolotl, TRL or transformers.

    Keys without a counterpart are comments of the recipe, each with the reason or what to do instead.
    """
    from fastloop import UsageError
    from fastloop_tools.toolkit import make_recipe, recipe_text, write_file

    from fastloop_migrate.convert import convert
    from fastloop_migrate.data import MISSING
    from fastloop_migrate.read import read_config

    config, kind = read_config(file, format)
    try:
        recipe, notes = convert(config, kind, nproc, file, trainer)
    except (AttributeError, TypeError, ValueError) as error:
        why = " ".join(str(error).split())
        raise UsageError(
            f"a value has another form than in configs of {kind}: {why}.", code="wrong-format", place=str(file)
        ) from error
    make_recipe(recipe)  # checks its values
    head = [f"Made by `fastloop import` from {' '.join(file.name.split())} ({kind})."]
    if notes:
        head += ["Keys without an equal counterpart:", *(f"  {key}: {reason}" for key, reason in notes.items())]
    missing = []
    for section in ("model", "data"):
        for key, value in (recipe.get(section) or {}).items():
            if value == MISSING:
                missing.append(f"{section}.{key}")
    remarks = dict.fromkeys(missing, "fill this in")
    if config.get("output_dir"):
        remarks["output"] = f"instead of {' '.join(str(config['output_dir']).split())}, the old trainer's folder"
    text = recipe_text(recipe, head, remarks)
    if output is None:
        typer.echo(text, nl=False)
        return
    write_file(output, text)
    for key, reason in notes.items():
        typer.echo(f"{key}: {reason}")
    command = f"fastloop train {quote(str(output))}"
    if nproc > 1:
        command += f" --nproc {nproc}"
    typer.echo(f"written to {output}\nNext steps:")
    if missing:
        typer.echo(f"  fill in {' and '.join(missing)}")
    typer.echo(f"  fastloop plan {quote(str(output))}")
    typer.echo(f"  {command}")
