"""``fastloop plan --samples``: the first training samples, as read and as tokens, and which tokens have a loss."""

from __future__ import annotations

from pathlib import Path

import typer

from fastloop.cli.arguments import RecipeArguments


def show_samples(arguments: RecipeArguments, count: int, output: Path | None) -> None:
    """Read the data, and show training samples.

    Args:
        count: How many.
        output: The HTML file to write them to; None: print them.

    Raises:
        UsageError: The recipe or its data is wrong, or a launcher started this process.
    """
    from fastloop.cli.messages import show_messages
    from fastloop.distributed import ranks
    from fastloop.errors import UsageError
    from fastloop.plugins.resolve import expand
    from fastloop.runtime.files import write

    if ranks.world_size() > 1:
        raise UsageError(
            "--samples reads the data in one process.", code="one-process-only", remedy="Start it without a launcher."
        )
    show_messages()
    recipe = expand(arguments.load())
    from fastloop_tools.plan.samples.read import read_samples  # imports torch, and errors of the recipe come before
    from fastloop_tools.plan.samples.show import page, show

    samples = read_samples(recipe, count)
    if output is None:
        show(samples)
    else:
        write(output, page(samples, recipe.where))
        typer.echo(f"written to {output}")
