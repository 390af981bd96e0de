"""``fastloop plan``: show what a recipe would run, its samples or its memory, without training."""

from __future__ import annotations

from collections.abc import Mapping
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
        output_file("--json", "Estimate memory, and write it to this file, with the plan.", stdout=True),
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

    It shows the files whose code runs, the plugins in call order, the device and the effective batch. With --samples,
    it shows training samples instead; with --device-memory, --nnodes, --device-flops, --bandwidth or --json, the memory
    of each strategy.
    """
    from fastloop.errors import UsageError

    arguments = RecipeArguments.read(recipe, overrides, with_, without)
    memory_options = {
        "--json": json_file,
        "--device-memory": device_memory,
        "--nnodes": nnodes,
        "--device-flops": device_flops,
        "--bandwidth": bandwidth,
    }
    if samples is not None:
        refuse_together("--samples", memory_options | {"--nproc": nproc, "--verbose": verbose})
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
    for name, value in memory_options.items():
        if not is_given(value):
            continue
        refuse_together(name, {"--verbose": verbose})
        from fastloop_tools.plan.memory.command import show_memory

        show_memory(arguments, nproc or 1, nnodes or 1, device_memory, device_flops, bandwidth, json_file)
        return
    from fastloop_tools.plan.show import show_plan

    show_plan(arguments, nproc, verbose)


def is_given(value: object) -> bool:
    """Whether the command line gives an option: a value that is not given is None, False or empty."""
    return value is not None and value is not False and value != ""


def refuse_together(name: str, others: Mapping[str, object]) -> None:
    """Refuse options that have no effect beside the option ``name``.

    Args:
        others: Option -> its value.

    Raises:
        UsageError: One of them is given.
    """
    from fastloop.errors import UsageError

    for other, value in others.items():
        if is_given(value):
            raise UsageError(
                f"{name} and {other}: plan does one of them at a time.",
                code="exclusive-options",
                remedy="Leave one out.",
            )
