"""``fastloop bench``: the ablation of a recipe: what each of its plugins wins on this machine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from fastloop.cli.arguments import Overrides, RecipeName, With, Without, names
from fastloop.distributed import launch


def bench(
    recipe: RecipeName,
    overrides: Overrides = None,
    with_: With = None,
    without: Without = None,
    baseline: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="Override that holds for the baseline alone. Repeat for more.")
    ] = None,
    ablation: Annotated[
        str, typer.Option(metavar="'A;A,B;...'", help="Sets of plugins to go through, in place of the recipe's list one by one.")
    ] = "",
    steps: Annotated[int, typer.Option(min=1, help="Steps that are measured, at the least.")] = 30,
    seconds: Annotated[float, typer.Option(min=0, help="And for at least so long.")] = 10.0,
    warmup: Annotated[int, typer.Option(min=1, help="Steps before them, told apart.")] = 5,
    repeats: Annotated[int, typer.Option(min=1, help="Measurements of each variant. A win is claimed from 5 on.")] = 5,
    leave_one_out: Annotated[bool, typer.Option(help="Also measure the full set less each plugin.")] = True,
    numerics: Annotated[bool, typer.Option(help="Hold each plugin to its numerics class.")] = True,
    quality: Annotated[bool, typer.Option("--quality", help="Train baseline and full set to the end, three seeds each.")] = False,
    quality_steps: Annotated[int | None, typer.Option(min=1, metavar="N", help="The same for N steps.")] = None,
    timeout: Annotated[float | None, typer.Option(min=1, metavar="SECONDS", help="End a measurement that takes longer.")] = None,
    output: Annotated[str, typer.Option(metavar="FOLDER", help="Where to write [default: runs/bench-RECIPE].")] = "",
    json_file: Annotated[str, typer.Option("--json", metavar="FILE", help="Write the raw figures here too.")] = "",
) -> None:
    """Measure what each plugin of a recipe wins: speed, memory, start-up, numerics.

    Variants are added one by one in the recipe's order, each in fresh processes of --warmup steps and a window of --steps and --seconds,
    by turns forwards and backwards. Exit code 1: a measurement failed or a plugin broke its numerics class; what was measured is there.
    """
    environment = dict(os.environ)  # as it is before plugins are resolved, which may set variables
    import tempfile

    from fastloop.cli.messages import show_messages
    from fastloop.errors import UsageError
    from fastloop.recipe import load_recipe
    from fastloop.runtime.files import write
    from fastloop_tools.bench import chart, report
    from fastloop_tools.bench.ablation import Bench, Settings, dump
    from fastloop_tools.bench.plan import make_ablation
    from fastloop_tools.measure.measure import LOUD
    from fastloop_tools.measure.pairs import TrialRunner

    if launch.world_size() > 1:
        raise UsageError("bench measures one process. Start it without a launcher.")
    sets = [names(listed) for listed in ablation.split(";")] if ablation else []
    added = list(dict.fromkeys([*names(with_), *(name for listed in sets for name in listed)]))
    loaded = load_recipe(recipe, overrides or (), added, names(without))
    lifted = load_recipe(recipe, [*(overrides or ()), *(baseline or ())], added, names(without))
    show_messages()
    by_reference = {reference: name for name, reference in loaded.references.items()}
    sets = [[by_reference.get(name, name) for name in listed] for listed in sets]
    plan = make_ablation(loaded, lifted, baseline or (), sets, leave_one_out)
    name = loaded.source.stem if loaded.source else "recipe"
    folder = make_folder(Path(output or f"runs/bench-{name}"))
    facts = {
        "name": name,
        "command": command(recipe, overrides, names(with_), names(without), baseline, ablation),
        **this_place(plan.plugins, loaded),
    }
    count = len(plan.measured())
    typer.echo(f"{count} variants x {repeats} repeats, {warmup} + at least {steps} steps and {seconds:g} s each, into {folder}")
    for variant in plan.variants:
        if variant.why_not:
            typer.echo(f"{variant.title}: {variant.why_not}")
    settings = Settings(
        steps=steps,
        seconds=seconds,
        warmup=warmup,
        repeats=repeats,
        numerics=numerics,
        quality=quality or quality_steps is not None,
        quality_steps=quality_steps,
    )

    def keep(record: dict[str, Any]) -> None:
        write(folder / "bench.json", dump(record))
        if json_file:
            write(Path(json_file), dump(record))
        write(folder / "bench.md", report.markdown(record))

    with tempfile.TemporaryDirectory(prefix="fastloop-bench-") as cache:
        shop = TrialRunner(environment, Path(cache), typer.echo, timeout=timeout)
        ablation_run = Bench(plan, settings, shop, facts, typer.echo, keep)
        try:
            whole = ablation_run.run()
        except KeyboardInterrupt:
            typer.echo(f"What was measured so far is in {folder}.")
            raise
    typer.echo()
    report.show(ablation_run.record)
    write(folder / "bench.svg", chart.draw(ablation_run.record))
    if ablation_run.record["foreign_load"]["worst"] > LOUD:
        typer.echo("For figures to publish, measure on a machine with nothing else to do.")
    typer.echo(f"\nwritten to {folder}")
    raise typer.Exit(0 if whole else 1)


def make_folder(folder: Path) -> Path:
    """An empty folder for the results; an earlier ablation's is moved aside.

    Raises:
        UsageError: It cannot be made, or holds other things.
    """
    from fastloop.errors import UsageError
    from fastloop.runtime import files

    try:
        if folder.is_dir() and any(folder.iterdir()):
            if not (folder / "bench.json").is_file():
                raise UsageError(f"--output {folder}: holds other files than an ablation's. Expected a new or empty folder.")
            typer.echo(f"an earlier ablation was in {folder}: moved to {files.move_aside(folder)}")
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--output {folder}: cannot be made: {error}.") from None
    return folder


def command(
    recipe: str, overrides: list[str] | None, with_: list[str], without: list[str], baseline: list[str] | None, ablation: str
) -> str:
    """What was asked, as it would be typed again."""
    import shlex

    words = ["fastloop", "bench", recipe, *(overrides or ())]
    listed = (("--with", ",".join(with_)), ("--without", ",".join(without)))
    for key, value in (*listed, *(("--baseline", item) for item in baseline or ()), ("--variants", ablation)):
        words += [key, value] if value else []
    return shlex.join(words)


def this_place(plugins: dict[str, Any], recipe: Any) -> dict[str, Any]:
    """The machine and the versions that the figures are of."""
    import platform
    from importlib.metadata import version

    import torch

    from fastloop.hooks import distribution_of
    from fastloop.runtime.hardware import this_machine

    machine = this_machine(recipe.train.device)
    versions = {"python": platform.python_version(), "torch": torch.__version__, "fastloop": version("fastloop")}
    for plugin in plugins.values():
        if (distribution := distribution_of(type(plugin))) is not None:
            versions[distribution.name] = distribution.version
    return {
        "versions": versions,
        "machine": {
            "device": f"{machine.device} ({machine.name})",
            "cores": launch.cores(),
            "torch's threads": torch.get_num_threads(),
            "system": platform.platform(),
        },
    }
