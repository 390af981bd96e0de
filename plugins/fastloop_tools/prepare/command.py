"""``fastloop prepare``: reads and tokenizes the data of a recipe ahead of training."""

from __future__ import annotations

import typer

from fastloop.cli.arguments import NoCode, Overrides, RecipeArguments, RecipeName, With, Without
from fastloop_tools.shared.command_lines import command_line


def prepare(
    recipe: RecipeName,
    overrides: Overrides = None,
    with_: With = None,
    without: Without = None,
    no_code: NoCode = False,
) -> None:
    """Read, check and tokenize the data of a recipe, without training.

    The plugin token-cache keeps the token ids: a run of the recipe with it then begins at once. The command shows where
    they are, and their size. If it is interrupted or killed, it continues when it is started again.
    """
    from fastloop.cli.messages import show_messages
    from fastloop.distributed import ranks
    from fastloop.errors import UsageError
    from fastloop.plugins.resolve import expand

    arguments = RecipeArguments.read(recipe, overrides, with_, without)
    if ranks.world_size() > 1:
        raise UsageError(
            "prepare reads the data in one process.", code="one-process-only", remedy="Start it without a launcher."
        )
    show_messages()
    expanded = expand(arguments.load())
    from fastloop_tools.prepare.data import prepare_data  # imports torch, and errors of the recipe come before

    prepared = prepare_data(expanded)
    for entry in prepared.entries:
        typer.echo(f"{show_size(entry.size):>10}  {entry.rows:>12,} rows  {entry.path}")
    total = sum(entry.size for entry in prepared.entries)
    typer.echo(f"{show_size(total):>10}  in {prepared.folder}")
    if not prepared.is_selected:
        without_plugins = [name for name in arguments.without_plugins if name != "token-cache"]
        with_plugins = [*arguments.with_plugins, "token-cache"]
        plugins = {"--with": with_plugins, "--without": without_plugins}
        command = command_line("train", [arguments.recipe, *arguments.overrides], plugins)
        typer.echo(f"To train on it: {command}")


def show_size(size: int) -> str:
    """A number of bytes, for people."""
    if size < 10**6:
        return f"{size / 1e3:.1f} kB"
    if size < 10**9:
        return f"{size / 1e6:.1f} MB"
    return f"{size / 1e9:.2f} GB"
