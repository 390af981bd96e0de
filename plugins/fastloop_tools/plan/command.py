"""``fastloop plan``: show what a recipe would run, without training."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fastloop.cli.arguments import NoCode, Overrides, RecipeArguments, RecipeName, With, Without, output_file


def plan(
    recipe: RecipeName,
    overrides: Overrides = None,
    with_: With = None,
    without: Without = None,
    no_code: NoCode = False,
    nproc: Annotated[int | None, typer.Option(min=1, metavar="N", help="For N processes.")] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Also show slots, effects, options and all reasons.")
    ] = False,
    json_file: Annotated[
        str,
        output_file("--json", "Estimate memory, and write it to this file.", stdout=True),
    ] = "",
    samples: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Read the data, and show N training samples and their tokens."),
    ] = None,
    output: Annotated[
        Path | None, output_file("--output", "With --samples: write them to this HTML file instead.", Path)
    ] = None,
    device_memory: Annotated[
        str, typer.Option(metavar="SIZE", help="Estimate memory: does it fit into SIZE, such as 80GiB?")
    ] = "",
    nnodes: Annotated[
        int | None, typer.Option(min=1, metavar="K", help="Estimate memory: on K machines with N processes each.")
    ] = None,
    device_flops: Annotated[
        float | None, typer.Option(metavar="FLOPS", help="And step times: FLOP/s of a device, such as 400e12.")
    ] = None,
    bandwidth: Annotated[
        str, typer.Option(metavar="RATE", help="And step times: what a process sends, such as 50GB/s.")
    ] = "",
) -> None:
    """Resolve a recipe and show what would run, without training.

    It shows the files whose code runs, the plugins in call order, the device and the effective batch.
    """
    from fastloop.errors import UsageError

    arguments = RecipeArguments.read(recipe, overrides, with_, without)
    if samples is not None:
        if json_file or device_memory:
            option = "--json" if json_file else "--device-memory"
            raise UsageError(
                f"--samples and {option}: plan does one of them at a time.",
                code="exclusive-options",
                remedy="Leave one out.",
            )
        from fastloop_tools.plan.samples.command import show_samples

        show_samples(arguments, samples, output)
        return
    if output is not None:
        raise UsageError(
            "it is for the page of --samples.",
            code="missing-value",
            place="--output",
            remedy="Give both, such as --samples 3.",
        )
    if nnodes is not None or device_flops is not None or device_memory or bandwidth or json_file:
        from fastloop_tools.plan.memory.command import estimate_memory

        estimate_memory(arguments, nproc or 1, nnodes or 1, device_memory, device_flops, bandwidth, json_file)
        return
    from fastloop_tools.plan.show import show_plan

    show_plan(arguments, nproc, verbose)
