"""``fastloop tune``: finds the fastest set of plugins for a recipe on this machine, and writes it as a recipe."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Annotated

import typer

from fastloop.cli.arguments import (
    ACCEPTED,
    Overrides,
    RecipeName,
    With,
    Without,
    choice,
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
    stop_after: Annotated[
        str,
        choice(
            "--stop-after",
            ("budget", "suggestions"),
            "budget: when the time is over. suggestions: when each suggested edit was measured in five pairs or more.",
        ),
    ] = "budget",
    budget: Annotated[
        str, typer.Option(metavar="TIME", help="With --stop-after budget, how long it may take: 90s, 10m, 1h.")
    ] = "10m",
    accept: Annotated[
        str, typer.Option(metavar="A,B", help="What plugins may do to the numbers (numerics classes).")
    ] = ACCEPTED,
    steps: Annotated[int, typer.Option(min=1, metavar="N", help="Fewest steps of a measurement.")] = 2,
    seconds: Annotated[float, typer.Option(min=0, metavar="SECONDS", help="Shortest time to measure.")] = 6.0,
    warmup: Annotated[int, typer.Option(min=1, metavar="N", help="Steps before them.")] = 2,
    nproc: Annotated[int, typer.Option(min=1, metavar="N", help="Measure with N processes on this machine.")] = 1,
    output: Annotated[str, output_file("--output", "The recipe to write [default: RECIPE.tuned.yaml].")] = "",
) -> None:
    """Find the fastest set of plugins for a recipe on this machine.

    The result is written as a recipe. Plugins estimate their speedups. All of their edits are tried at once, and each
    is then left out to measure what it adds. Further edits are tried one at a time, in processes of their own, and kept
    if they are faster. At the end the result is compared with the given recipe, in speed and in losses. A slower result
    is never written.

    With --stop-after suggestions it tries only what `fastloop profile` suggests, and keeps an edit only when it is
    faster beyond noise.
    """
    environment = dict(os.environ)  # before plugins are resolved, which may set variables
    from fastloop.cli.messages import show_messages
    from fastloop.errors import UsageError
    from fastloop.recipe import load_recipe
    from fastloop.runtime.files import write
    from fastloop_plugins._time import parse_time
    from fastloop_tools.bench.plan import check
    from fastloop_tools.trials.pairs import TrialRunner
    from fastloop_tools.trials.statistics import LEAST_PAIRS
    from fastloop_tools.trials.tables import dump
    from fastloop_tools.trials.worker import Window
    from fastloop_tools.tune import write as writing
    from fastloop_tools.tune.search import Search

    if ranks.world_size() > 1:
        raise UsageError("tune starts the processes that it measures. Start it without a launcher, and with --nproc N.")
    classes = numerics_classes(accept)
    thorough = stop_after == "suggestions"
    allowed = math.inf if thorough else parse_time(budget, "--budget")
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
    if target.suffix in (".json", ".md") or target.is_dir() or not target.absolute().parent.is_dir():
        raise UsageError(f"--output {target}: expected a .yaml file in a folder that exists.")
    timeout = None if thorough else allowed
    with TrialRunner.open("tune", environment, loaded, nproc=nproc, timeout=timeout) as runner:
        window = Window(steps=steps, seconds=seconds, warmup=warmup, profile_steps=2)
        pairs = LEAST_PAIRS if thorough else None
        search = Search(loaded, classes, allowed, runner, window, typer.echo, pairs, names(without))
        found = search.run()
    record = search.record()
    write(target.with_suffix(".json"), dump(record), hidden=True)
    write(target.with_suffix(".md"), writing.reports(search))
    if found is loaded:
        typer.echo(f"found nothing faster. All trials: {target.with_suffix('.json')}")
        return
    write(target, writing.tuned(search, f"All trials: {target.with_suffix('.json').name}", target.parent))
    typer.echo(f"{writing.factor(search)}; written to {target}")
