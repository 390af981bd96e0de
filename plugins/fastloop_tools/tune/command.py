"""``fastloop tune``: finds the fastest set of plugins for a recipe on this machine, and writes it as a recipe."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from fastloop.cli.arguments import (
    ACCEPTED,
    Overrides,
    RecipeName,
    With,
    Without,
    names,
    numerics_classes,
    output_file,
)
from fastloop.distributed import ranks


def tune(
    recipe: RecipeName,
    overrides: Overrides = None,
    with_: With = None,
    without: Without = None,
    budget: Annotated[str, typer.Option(metavar="TIME", help="How long it may take: 90s, 10m, 1h.")] = "10m",
    accept: Annotated[
        str, typer.Option(metavar="A,B", help="What plugins may do to the numbers (numerics classes).")
    ] = ACCEPTED,
    steps: Annotated[int, typer.Option(min=1, metavar="N", help="Fewest steps of a measurement.")] = 2,
    seconds: Annotated[
        float, typer.Option("--seconds", min=0, metavar="SECONDS", help="Shortest time to measure.")
    ] = 6.0,
    warmup: Annotated[int, typer.Option(min=1, metavar="N", help="Steps before them.")] = 2,
    output: Annotated[str, output_file("--output", "The recipe to write [default: RECIPE.tuned.yaml].")] = "",
) -> None:
    """Find the fastest set of plugins for a recipe on this machine.

    The result is written as a recipe. Edits are tried one at a time, those with the largest estimate of `fastloop
    profile` first, in processes of their own, and kept if they are faster. At the end the result is compared with the
    given recipe, in speed and in losses. A slower result is never written.
    """
    environment = dict(os.environ)  # before plugins are resolved, which may set variables
    from fastloop.cli.messages import show_messages
    from fastloop.errors import UsageError
    from fastloop.recipe import load_recipe
    from fastloop.runtime.files import write
    from fastloop_plugins._time import parse_time
    from fastloop_tools.bench.plan import check
    from fastloop_tools.trials.pairs import TrialRunner
    from fastloop_tools.trials.tables import dump
    from fastloop_tools.trials.worker import Window
    from fastloop_tools.tune import write as writing
    from fastloop_tools.tune.search import Search

    if ranks.world_size() > 1:
        raise UsageError("tune measures one process. Start it without a launcher.")
    classes = numerics_classes(accept)
    allowed = parse_time(budget, "--budget")
    loaded = load_recipe(recipe, overrides or (), names(with_), names(without))
    resolved = check(loaded)
    loaded = resolved.recipe
    resolved.plugins.hooks.check_recipe(recipe=loaded, plugins=resolved.plugins)
    show_messages()
    # relative paths in a recipe keep their meaning there
    base = Path(recipe) if Path(recipe).is_file() else Path(Path(recipe).stem)
    target = Path(output) if output else base.with_suffix(".tuned.yaml")
    if loaded.source is not None and target.resolve() == loaded.source.resolve():
        raise UsageError(f"--output {target}: this is the recipe itself. Give another file.")
    if target.suffix == ".json" or target.is_dir() or not target.absolute().parent.is_dir():
        raise UsageError(f"--output {target}: expected a .yaml file in a folder that exists.")
    window = Window(steps=steps, seconds=seconds, warmup=warmup, profile_steps=2)
    with tempfile.TemporaryDirectory(prefix="fastloop-tune-") as cache:
        runner = TrialRunner(environment, Path(cache), typer.echo, allowed)
        search = Search(loaded, classes, allowed, runner, window, typer.echo, names(without))
        found = search.run()
    record = search.record()
    write(target.with_suffix(".json"), dump(record), hidden=True)
    if found is loaded:
        typer.echo(f"found nothing faster. All trials: {target.with_suffix('.json')}")
        return
    write(target, writing.tuned(search, f"All trials: {target.with_suffix('.json').name}", target.parent))
    typer.echo(f"{writing.factor(search)}; written to {target}")
