"""``fastloop profile``: the time that each part of a step takes, and the recipe edits that would reduce it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fastloop.cli import launch, startup
from fastloop.cli.arguments import NoCode, Overrides, RecipeName, With, Without, names
from fastloop.cli.tables import print_markdown
from fastloop.distributed import ranks
from fastloop.runtime.files import check_links

if TYPE_CHECKING:
    from fastloop.recipe import Recipe
    from fastloop_tools.trials.measuring_process import Window


def profile(
    recipe: RecipeName,
    overrides: Overrides = None,
    with_: With = None,
    without: Without = None,
    no_code: NoCode = False,
    steps: Annotated[int, typer.Option(min=1, metavar="N", help="Fewest steps to time.")] = 8,
    seconds: Annotated[
        float, typer.Option("--seconds", min=0, metavar="SECONDS", help="Shortest time to measure.")
    ] = 5.0,
    warmup: Annotated[int, typer.Option(min=1, metavar="N", help="Steps before them.")] = 3,
    profile_steps: Annotated[int, typer.Option(min=1, metavar="N", help="Steps that are looked into after them.")] = 3,
    nproc: Annotated[int | None, typer.Option(min=1, metavar="N", help="Start N processes on this machine.")] = None,
    output: Annotated[str, typer.Option(metavar="FOLDER", help="Where to write [default: runs/profile-RECIPE].")] = "",
) -> None:
    """Show where the time of a step goes, and what would save it.

    Suggestions are edits of the recipe. The run is short: a warm-up, steps that are timed alone, and a few under
    torch's profiler. It keeps only the figures and a trace (ui.perfetto.dev). The table of operations adds up to the
    step: "between operations" is Python, or native code that the profiler does not record, and "not attributed" is the
    time outside of all of its events.
    """
    from fastloop.cli.messages import show_messages
    from fastloop.recipe import load_recipe
    from fastloop_tools.shared.command_lines import command_line, option_words
    from fastloop_tools.shared.result_folders import make_output_folder, refuse_output_override
    from fastloop_tools.trials.measuring_process import Window

    refuse_output_override(overrides or ())
    loaded = load_recipe(recipe, overrides or (), names(with_), names(without))
    window = Window(steps=steps, seconds=seconds, warmup=warmup, profile_steps=profile_steps)
    folder = Path(output or f"runs/profile-{loaded.source.stem if loaded.source else 'recipe'}")
    make_output_folder(folder)
    check_links(folder)
    plugins = {"--with": names(with_), "--without": names(without)}
    recipe_words = [recipe, *(overrides or ()), *option_words(plugins)]
    if nproc is not None:
        words = option_words({f"--{key.replace('_', '-')}": value for key, value in vars(window).items()})
        command = ["profile", *recipe_words, *words, *option_words({"--output": output})]
        code = launch.launch(command, nproc, 1, 0, None, folder)
        if code:
            raise typer.Exit(code)
        return
    startup.end_with_launcher()
    show_messages()
    resolved = startup.resolve_early(loaded)
    startup.start_again(resolved)
    if look(resolved.recipe, folder, window, names(without)):
        fastest = f"{recipe.removesuffix('.yaml')}.fast.yaml"
        typer.echo(f"to measure these edits: {command_line('bench', recipe_words, {'--select': fastest})}")


def look(recipe: Recipe, folder: Path, window: Window, never: list[str]) -> bool:
    """Train the window, and write the page. Returns whether this process, the main one, has edits to suggest."""
    from fastloop.runtime.files import write
    from fastloop.speedup_estimates import StepProfile
    from fastloop_tools.profile import page
    from fastloop_tools.profile.suggestions import suggest
    from fastloop_tools.report.page import render
    from fastloop_tools.report.read import read
    from fastloop_tools.shared.tables import dump
    from fastloop_tools.trials.measuring_process import Spec, WarningCollector, train_short, whole_length
    from fastloop_tools.trials.profile_observer import ProfileObserver

    trace = folder / f"rank{ranks.rank()}.trace.json"
    observer = ProfileObserver(Spec(recipe={}, source=None, **vars(window)), WarningCollector(), trace)
    run = train_short(recipe, observer, ("log", "progress", "speed-check"))
    run.processes.close()
    if not run.is_main:
        return False
    profile = StepProfile(**observer.result(run)["profile"])
    profile.total_steps = whole_length(run, recipe.train.epochs, recipe.train.max_steps)
    suggestions, refused = suggest(profile, recipe, never)
    name = recipe.source.stem if recipe.source else "recipe"
    text = page.markdown(profile, suggestions, refused, name)
    write(folder / "profile.md", text)
    write(folder / "profile.json", dump(page.record(profile, suggestions, refused)), hidden=True)
    write(folder / "profile.html", render(read([folder]), f"Profile of {name}"))
    print_markdown(text)
    typer.echo(f"written to {folder}; page: {folder / 'profile.html'}")
    return bool(suggestions)
