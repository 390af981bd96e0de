"""``fastloop bench``: measures the speedup of each plugin of a recipe on this machine, by an ablation."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fastloop.cli.arguments import Overrides, RecipeName, With, Without, names
from fastloop.distributed import ranks
from fastloop.runtime import platform_support

if TYPE_CHECKING:
    from fastloop.plugins.plugin import Plugin
    from fastloop.recipe import Recipe


def bench(
    recipe: RecipeName,
    overrides: Overrides = None,
    with_: With = None,
    without: Without = None,
    variants: Annotated[
        str,
        typer.Option(
            metavar="'A;A,B;...'", help="Sets of plugins to measure, instead of adding the recipe's plugins one by one."
        ),
    ] = "",
    steps: Annotated[int, typer.Option(min=1, metavar="N", help="Minimum steps to measure.")] = 30,
    seconds: Annotated[
        float, typer.Option("--seconds", min=0, metavar="SECONDS", help="Minimum seconds to measure.")
    ] = 10.0,
    warmup: Annotated[int, typer.Option(min=1, metavar="N", help="Steps before the measurement.")] = 5,
    repeats: Annotated[
        int, typer.Option(min=1, metavar="N", help="Measurements of each variant. A speedup needs at least 5.")
    ] = 5,
    leave_one_out: Annotated[bool, typer.Option(help="Also measure the full set without each plugin.")] = True,
    numerics: Annotated[bool, typer.Option(help="Check each plugin's numerics class.")] = True,
    quality: Annotated[
        bool, typer.Option("--quality", help="Train baseline and full set to the end, with three seeds each.")
    ] = False,
    quality_steps: Annotated[int | None, typer.Option(min=1, metavar="N", help="The same, for N steps.")] = None,
    timeout: Annotated[
        float | None, typer.Option(min=1, metavar="SECONDS", help="Kill a measurement that takes longer.")
    ] = None,
    output: Annotated[str, typer.Option(metavar="FOLDER", help="Output folder [default: runs/bench-RECIPE].")] = "",
) -> None:
    """Measure the speedup and numerics of each plugin of a recipe.

    Memory and start-up time are measured, too. Plugins are added one by one in the recipe's order. Each variant runs in
    processes of its own: --warmup steps, then a window of at least --steps and --seconds, in alternating order. Exit
    code 1: a measurement failed or a plugin broke its numerics class; the other results are written.
    """
    environment = dict(os.environ)  # before plugins are resolved, which may set variables
    import rich
    from rich.markdown import Markdown

    from fastloop.cli.messages import show_messages
    from fastloop.errors import UsageError
    from fastloop.recipe import load_recipe
    from fastloop.runtime.files import write
    from fastloop_tools.bench import report
    from fastloop_tools.bench.ablation import Bench, Settings
    from fastloop_tools.bench.plan import make_ablation
    from fastloop_tools.trials.pairs import TrialRunner
    from fastloop_tools.trials.runs import command_line
    from fastloop_tools.trials.tables import dump

    if ranks.world_size() > 1:
        raise UsageError("bench measures one process. Start it without a launcher.")
    sets = [names(listed) for listed in variants.split(";")] if variants else []
    added = list(dict.fromkeys([*names(with_), *(name for listed in sets for name in listed)]))
    loaded = load_recipe(recipe, overrides or (), added, names(without))
    show_messages()
    by_reference = {reference: name for name, reference in loaded.references.items()}
    sets = [[by_reference.get(name, name) for name in listed] for listed in sets]
    plan = make_ablation(loaded, sets, leave_one_out)
    loaded = plan.recipe
    name = loaded.source.stem if loaded.source else "recipe"
    options = {"--with": names(with_), "--without": names(without), "--variants": variants}
    folder = make_folder(Path(output or f"runs/bench-{name}"))
    command = command_line("bench", [recipe, *(overrides or ())], options)
    facts = {"name": name, "command": command, **this_place(plan.plugins, loaded)}
    typer.echo(
        f"{len(plan.measured())} variants x {repeats} repeats, {warmup} + at least {steps} steps and {seconds:g} s "
        f"each, into {folder}"
    )
    for variant in plan.variants:
        if variant.why_not:
            typer.echo(f"{variant.title}: {variant.why_not}")
    size: dict[str, Any] = {"steps": steps, "seconds": seconds, "warmup": warmup, "repeats": repeats}
    quality = quality or quality_steps is not None
    settings = Settings(**size, numerics=numerics, quality=quality, quality_steps=quality_steps)

    def keep(record: dict[str, Any]) -> None:
        write(folder / "bench.json", dump(record), hidden=True)
        write(folder / "bench.md", report.markdown(record))

    with tempfile.TemporaryDirectory(prefix="fastloop-bench-") as cache:
        runner = TrialRunner(environment, Path(cache), typer.echo, timeout)
        ablation_run = Bench(plan, settings, runner, facts, typer.echo, keep)
        try:
            complete = ablation_run.run()
        except KeyboardInterrupt:
            typer.echo(f"The results so far are in {folder}.")
            raise
    rich.print(Markdown(report.markdown(ablation_run.record)))
    typer.echo(f"written to {folder}; chart: fastloop report {folder}")
    raise typer.Exit(0 if complete else 1)


def make_folder(folder: Path) -> Path:
    """Create a folder for the results. One with results of an earlier ablation is moved aside.

    Raises:
        UsageError: The folder cannot be created.
    """
    from fastloop.errors import UsageError
    from fastloop.runtime import files

    try:
        if (folder / "bench.json").is_file():
            typer.echo(f"an earlier ablation was in {folder}: moved to {files.move_aside(folder)}")
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--output {folder}: cannot be created: {error}.") from None
    files.check_links(folder)
    return folder


def this_place(plugins: Mapping[str, Plugin], recipe: Recipe) -> dict[str, Any]:
    """The machine and the versions that the results belong to."""
    import platform

    import torch

    from fastloop import __version__
    from fastloop.plugins.manager import distribution_of
    from fastloop.runtime.hardware import this_machine

    machine = this_machine(recipe.train.device)
    versions = {"python": platform.python_version(), "torch": torch.__version__, "fastloop": __version__}
    found = [distribution_of(type(plugin)) for plugin in plugins.values()]  # type: ignore[arg-type]
    return {
        "versions": versions | {one.name: one.version for one in found if one is not None},
        "machine": {
            "device": f"{machine.device} ({machine.name})",
            "cores": platform_support.cores(),
            "torch's threads": torch.get_num_threads(),
            "system": platform.platform(),
        },
    }
