"""``fastloop plan --device-memory``: memory and traffic of each strategy, without its devices and real weights."""

from __future__ import annotations

from typing import Annotated

import typer

from fastloop.cli.arguments import Overrides, RecipeName, With, Without, names, output_file

DeviceMemory = Annotated[
    str, typer.Option(metavar="SIZE", help="Estimate memory: does it fit into SIZE, such as 80GiB?")
]


def plan_memory(
    recipe: RecipeName,
    overrides: Overrides = None,
    with_: With = None,
    without: Without = None,
    nproc: Annotated[int | None, typer.Option()] = None,
    nnodes: Annotated[
        int | None, typer.Option(min=1, metavar="K", help="Estimate memory: on K machines with N processes each.")
    ] = None,
    device_memory: DeviceMemory = "",
    device_flops: Annotated[
        float | None, typer.Option(metavar="FLOPS", help="And step times: FLOP/s of a device, such as 400e12.")
    ] = None,
    bandwidth: Annotated[
        str, typer.Option(metavar="RATE", help="And step times: what a process sends, such as 50GB/s.")
    ] = "",
    json_file: Annotated[
        str,
        output_file("--json", "Estimate memory, and write it to this file; with --untrusted, the list.", stdout=True),
    ] = "",
) -> bool:
    """Estimate memory and traffic. Returns whether one of the options was given."""
    if nnodes is None and device_flops is None and not (device_memory or bandwidth or json_file):
        return False
    from fastloop.cli.messages import show_messages
    from fastloop.distributed import ranks
    from fastloop.errors import UsageError
    from fastloop.plugins.resolve import expand
    from fastloop.recipe import load_recipe
    from fastloop_tools.scale.sizes import parse_bytes

    if ranks.world_size() > 1:
        raise UsageError("plan estimates several processes in one. Start it without a launcher, and with --nproc N.")
    if (device_flops is None) != (not bandwidth):
        raise UsageError("--device-flops and --bandwidth: step times need both.")
    if device_flops is not None and not device_flops > 0:
        raise UsageError(f"--device-flops {device_flops:g}: expected a number above 0, such as 400e12.")
    memory = parse_bytes(device_memory, "--device-memory") if device_memory else None
    rate = parse_bytes(bandwidth.removesuffix("/s"), "--bandwidth") if bandwidth else None
    if json_file == "-":
        import rich

        rich.reconfigure(stderr=True)  # log messages must not mix with JSON
    show_messages()
    loaded = expand(load_recipe(recipe, overrides or (), names(with_), names(without)))
    from fastloop_tools.scale.change import Command
    from fastloop_tools.scale.estimate import estimate
    from fastloop_tools.scale.table import show, write_json

    command = Command(recipe, overrides or (), names(with_), names(without), nproc or 1, nnodes or 1)
    found = estimate(loaded, nproc or 1, nnodes or 1, memory, device_flops, rate, command)
    if json_file:
        write_json(found, json_file)
    if json_file != "-":
        show(found, loaded, command)
    return True
