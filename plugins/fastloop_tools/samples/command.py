"""``fastloop plan --samples``: the first training samples, as read and as tokens, and which tokens have a loss."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fastloop.cli.arguments import Overrides, RecipeName, With, Without, names, output_file
from fastloop_tools.scale.command import DeviceMemory


def plan_samples(
    recipe: RecipeName,
    overrides: Overrides = None,
    with_: With = None,
    without: Without = None,
    samples: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Read the data, and show N training samples and their tokens."),
    ] = None,
    output: Annotated[
        Path | None, output_file("--output", "With --samples: write them to this HTML file instead.", Path)
    ] = None,
    json_file: Annotated[str, typer.Option()] = "",
    device_memory: DeviceMemory = "",
) -> bool:
    """Show training samples. Returns whether the option was given."""
    from fastloop.distributed import ranks
    from fastloop.errors import UsageError

    if samples is None:
        if output is not None:
            raise UsageError("--output: it is for the page of --samples. Give both, such as --samples 3.")
        return False
    if json_file or device_memory:
        option = "--json" if json_file else "--device-memory"
        raise UsageError(f"--samples and {option}: plan does one of them at a time. Leave one out.")
    if ranks.world_size() > 1:
        raise UsageError("--samples reads the data in one process. Start it without a launcher.")
    from fastloop.cli.messages import show_messages
    from fastloop.plugins.resolve import expand
    from fastloop.recipe import load_recipe
    from fastloop.runtime.files import write

    show_messages()
    loaded = expand(load_recipe(recipe, overrides or (), names(with_), names(without)))
    from fastloop_tools.samples.read import read_samples
    from fastloop_tools.samples.show import page, show

    found = read_samples(loaded, samples)
    if output is None:
        show(found)
    else:
        write(output, page(found, loaded.where))
        typer.echo(f"written to {output}")
    return True
