"""``fastloop plan --device-memory``: memory and traffic of each strategy, without its devices and real weights.

The options ``--nnodes``, ``--device-flops``, ``--bandwidth`` and ``--json`` of ``fastloop plan`` begin it, too.
"""

from __future__ import annotations

from fastloop.cli.arguments import RecipeArguments


def show_memory(
    arguments: RecipeArguments,
    nproc: int,
    nnodes: int,
    device_memory: str,
    device_flops: float | None,
    bandwidth: str,
    json_file: str,
) -> None:
    """Estimate memory and traffic, print them, and write them to ``json_file``, with the plan.

    Args:
        nproc: Processes of one machine.
        nnodes: Machines.
        device_memory: Memory of a device, such as ``80GiB``; empty: unknown.
        device_flops: FLOP/s of a device; None: estimate no times.
        bandwidth: Rate at which a process sends, such as ``50GB/s``; empty: estimate no times.
        json_file: The file to write the estimates and the plan to; empty: none, ``-``: stdout.

    Raises:
        UsageError: An option or the recipe is wrong, or a launcher started this process.
    """
    from fastloop.cli.messages import show_messages
    from fastloop.distributed import ranks
    from fastloop.errors import UsageError
    from fastloop.plugins.resolve import expand
    from fastloop_tools.plan.memory.sizes import parse_bytes

    if ranks.world_size() > 1:
        raise UsageError(
            "plan estimates several processes in one.",
            code="one-process-only",
            remedy="Start it without a launcher, and with --nproc N.",
        )
    if (device_flops is None) != (not bandwidth):
        raise UsageError("--device-flops and --bandwidth: step times need both.", code="missing-value")
    if device_flops is not None and not device_flops > 0:
        raise UsageError(
            code="out-of-range", place=f"--device-flops {device_flops:g}", expected="a number above 0, such as 400e12"
        )
    memory = parse_bytes(device_memory, "--device-memory") if device_memory else None
    rate = parse_bytes(bandwidth.removesuffix("/s"), "--bandwidth") if bandwidth else None
    if json_file == "-":
        import rich

        rich.reconfigure(stderr=True)  # log messages must not mix with JSON
    show_messages()
    with ranks.planned(nproc * nnodes):  # `auto` selects for as many processes
        recipe = expand(arguments.load())
    from fastloop_tools.plan.memory.change import Command  # imports torch, and errors of the recipe come before
    from fastloop_tools.plan.memory.estimate import estimate
    from fastloop_tools.plan.memory.table import show, write_json
    from fastloop_tools.plan.show import make_plan

    command = Command(
        arguments.recipe,
        arguments.overrides,
        arguments.with_plugins,
        arguments.without_plugins,
        nproc,
        nnodes,
    )
    estimated = estimate(recipe, nproc, nnodes, memory, device_flops, rate, command)
    if json_file:
        write_json(estimated, make_plan(recipe, nproc * nnodes, any_machine=True), json_file)
    if json_file != "-":
        show(estimated, recipe, command)
