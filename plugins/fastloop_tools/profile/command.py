"""``fastloop profile``: what a recipe's steps spend their time on, and which edits would give it back."""

from __future__ import annotations

import json
import math
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fastloop.cli.arguments import ACCEPTED, Overrides, RecipeName, With, Without, names, numerics_classes
from fastloop.distributed import launch

if TYPE_CHECKING:
    from fastloop.recipe import Recipe
    from fastloop_tools.measure.pairs import TrialRunner, Window


def profile(
    recipe: RecipeName,
    overrides: Overrides = None,
    with_: With = None,
    without: Without = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps that are timed, at the least.")] = 8,
    seconds: Annotated[float, typer.Option(min=0, help="And for at least so long.")] = 5.0,
    warmup: Annotated[int, typer.Option(min=1, help="Steps before them.")] = 3,
    profile_steps: Annotated[int, typer.Option(min=1, help="Steps that are looked into after them.")] = 3,
    nproc: Annotated[int | None, typer.Option(min=1, metavar="N", help="Start N processes on this machine.")] = None,
    output: Annotated[str, typer.Option(metavar="FOLDER", help="Where to write [default: runs/profile-RECIPE].")] = "",
    apply: Annotated[bool, typer.Option("--apply", help="Measure each edit, and keep those that are faster beyond noise.")] = False,
    accept: Annotated[
        str, typer.Option(metavar="A,B", help="With --apply: what edits may do to the numbers (numerics classes).")
    ] = ACCEPTED,
) -> None:
    """Show what a step spends its time on, and which edits of the recipe would give it back.

    A short training: a warm-up, steps that are timed alone, and a few under torch's profiler. Nothing of it is kept but the figures and a
    trace (ui.perfetto.dev).
    """
    environment = dict(os.environ)  # as it is before plugins are resolved, which may set variables
    from fastloop.cli.messages import show_messages
    from fastloop.errors import UsageError
    from fastloop.recipe import load_recipe
    from fastloop.registry import select
    from fastloop_tools.measure.pairs import TrialRunner, Window

    classes = numerics_classes(accept)
    if apply and launch.world_size() > 1:
        raise UsageError("--apply starts the processes that it measures. Start it without a launcher, and with --nproc N.")
    loaded = load_recipe(recipe, overrides or (), names(with_), names(without))
    window = Window(steps=steps, seconds=seconds, warmup=warmup, profile_steps=profile_steps)
    folder = Path(output or f"runs/profile-{loaded.source.stem if loaded.source else 'recipe'}")
    if nproc is not None:
        given = {
            "--with": ",".join(names(with_)),
            "--without": ",".join(names(without)),
            "--steps": steps,
            "--seconds": seconds,
            "--warmup": warmup,
            "--profile-steps": profile_steps,
            "--output": output,
        }
        words = [word for key, value in given.items() if value != "" for word in (key, str(value))]
        if code := launch.launch(["profile", recipe, *(overrides or ()), *words], nproc, 1, 0, None, folder):
            raise typer.Exit(code)
        show_messages()
    else:
        launch.end_with_launcher()
        show_messages()
        launch.start_again(select(loaded).environment(loaded))
        look(loaded, folder, window, names(without))
    if apply:
        with tempfile.TemporaryDirectory(prefix="fastloop-profile-") as cache:
            measure_edits(loaded, folder, TrialRunner(environment, Path(cache), typer.echo, nproc or 1), window, classes, names(without))


def look(recipe: Recipe, folder: Path, window: Window, never: list[str]) -> None:
    """Train the window, and write the page."""
    import rich
    from rich.markdown import Markdown

    from fastloop.estimates import StepProfile
    from fastloop.hooks import PluginSet
    from fastloop.lifecycle import build, execute
    from fastloop.recipe import make_recipe
    from fastloop.registry import resolve
    from fastloop.runtime.files import write
    from fastloop_tools.measure.worker import Spec, WarningCollector, whole_length
    from fastloop_tools.profile import page
    from fastloop_tools.profile.observe import Observer
    from fastloop_tools.profile.suggestions import suggest

    tree = recipe.to_dict()
    tree["train"] |= {"max_steps": 10**9, "epochs": 10**6, "save_every": None}
    tree["plugins"] = recipe.listed(recipe.plugins | dict.fromkeys(("log", "progress"), False))
    trace = folder / f"rank{launch.rank()}.trace.json"
    observer = Observer(Spec(recipe={}, source=None, **vars(window)), WarningCollector(), trace)
    with tempfile.TemporaryDirectory(prefix="fastloop-profile-") as scratch:
        short = make_recipe(tree | {"output": f"{scratch}/run"}, recipe.source)
        resolution = resolve(short)
        run = build(short, PluginSet([observer, *resolution.plugins], resolution.reasons))
        with run.signals.handled(run.rank, run.world_size):
            execute(run)
        run.processes.close()
    if run.interrupted is not None:
        raise KeyboardInterrupt
    if not run.is_main:
        return
    seen = StepProfile(**observer.result(run)["seen"])
    seen.total_steps = whole_length(run, recipe.train.epochs, recipe.train.max_steps)
    found, refused = suggest(seen, recipe, never)
    text = page.markdown(seen, found, refused, recipe.source.stem if recipe.source else "recipe")
    write(folder / "profile.md", text)
    write(folder / "profile.json", json.dumps(page.record(seen, found, refused), indent=1) + "\n")
    rich.print(Markdown(text))
    typer.echo(f"written to {folder}")


def measure_edits(recipe: Recipe, folder: Path, shop: TrialRunner, window: Window, accept: list[str], never: list[str]) -> None:
    """Every edit in five pairs, on top of those that were kept; the report, and the recipe with them."""
    from fastloop.runtime.files import write
    from fastloop_tools.bench.ablation import dump, finite
    from fastloop_tools.measure.statistics import LEAST_PAIRS
    from fastloop_tools.tune.search import Search
    from fastloop_tools.tune.write import reports, tuned

    search = Search(recipe, accept, math.inf, shop, window, typer.echo, LEAST_PAIRS, never)
    found = search.run()
    write(folder / "report.json", dump(finite(search.record())))
    write(folder / "report.md", reports(search))
    if found is recipe:
        typer.echo(f"no edit was faster beyond noise: {folder / 'report.md'}")
        return
    write(folder / "recipe.yaml", tuned(search, "What was tried: report.md", folder))
    typer.echo(f"the recipe with the edits that were kept: {folder / 'recipe.yaml'}; what each won: {folder / 'report.md'}")
