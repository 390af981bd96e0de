"""``fastloop bench``: measures the speedup of each plugin of a recipe on this machine, by an ablation.

With ``--select``, it writes the recipe with the edits that pay.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Mapping
from itertools import chain
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fastloop.cli.arguments import (
    ACCEPTED,
    NoCode,
    Overrides,
    RecipeName,
    With,
    Without,
    names,
    numerics_classes,
    output_file,
)
from fastloop.cli.tables import print_markdown
from fastloop.distributed import ranks, signals
from fastloop.runtime import platform_support

if TYPE_CHECKING:
    from fastloop.plugins.plugin import Plugin
    from fastloop.recipe import Recipe
    from fastloop_tools.bench.ablation import AblationSettings
    from fastloop_tools.bench.plan import Ablation
    from fastloop_tools.trials.measuring_process import Window

SELECTION_BUDGET = "10m"
"""How long ``--select`` may take without ``--budget``."""
REPEATS = 5
"""Measurements of each variant, without ``--repeats``."""


def bench(
    recipe: RecipeName,
    overrides: Overrides = None,
    with_: With = None,
    without: Without = None,
    no_code: NoCode = False,
    select: Annotated[
        str,
        output_file(
            "--select",
            "Write the fastest recipe to this file: edits are tried one at a time, those with the largest estimated "
            "speedup first, and kept if they are faster.",
        ),
    ] = "",
    accept: Annotated[
        str | None,
        typer.Option(
            metavar="A,B", help=f"With --select: numerics classes that its edits may have [default: {ACCEPTED}]."
        ),
    ] = None,
    budget: Annotated[
        str,
        typer.Option(
            metavar="TIME",
            help="How long speeds and numerics may take, such as 90s, 10m, 1h "
            f"[default: no limit; with --select, which the whole search must fit: {SELECTION_BUDGET}].",
        ),
    ] = "",
    variants: Annotated[
        str,
        typer.Option(
            metavar="'A;A,B;...'", help="Sets of plugins to measure, instead of adding the recipe's plugins one by one."
        ),
    ] = "",
    steps: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Minimum steps to measure [default: 30; with --select: 2].")
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option(
            "--seconds", min=0, metavar="SECONDS", help="Minimum seconds to measure [default: 10; with --select: 6]."
        ),
    ] = None,
    warmup: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Steps before the measurement [default: 5; with --select: 2]."),
    ] = None,
    repeats: Annotated[
        int, typer.Option(min=1, metavar="N", help="Measurements of each variant. A speedup needs at least 5.")
    ] = REPEATS,
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

    --select FILE finds the fastest recipe instead, also with plugins that it does not list, and writes it. At the end,
    it is compared with the given recipe, in speed and in losses. A slower recipe is never written.
    """
    environment = dict(os.environ)  # before plugins are resolved, which may set variables
    from fastloop.errors import UsageError
    from fastloop_plugins._time import parse_time
    from fastloop_tools.bench.ablation import AblationSettings
    from fastloop_tools.shared.command_lines import command_line
    from fastloop_tools.shared.result_folders import refuse_output_override
    from fastloop_tools.trials.measuring_process import Window

    if ranks.world_size() > 1:
        raise UsageError("bench measures one process.", code="one-process-only", remedy="Start it without a launcher.")
    allowed = parse_time(budget, "--budget") if budget else None
    quality = quality or quality_steps is not None
    # shells start jobs in the background with SIGINT ignored; processes that measure must not outlive a script
    with signals.on_signals(signals.stop_now, also_ignored=True):
        if select:
            refuse_ablation_options(
                {
                    "--variants": variants,
                    "--repeats": repeats != REPEATS,
                    "--no-leave-one-out": not leave_one_out,
                    "--no-numerics": not numerics,
                    "--quality": quality,
                    "--timeout": timeout,
                    "--output": output,
                }
            )
            window = Window(
                warmup=2 if warmup is None else warmup,
                steps=2 if steps is None else steps,
                seconds=6.0 if seconds is None else seconds,
                profile_steps=2,
            )
            classes = numerics_classes(ACCEPTED if accept is None else accept)
            seconds_allowed = allowed or parse_time(SELECTION_BUDGET, "--budget")
            loaded = load(recipe, overrides, names(with_), without)
            write_fastest(loaded, Path(select), classes, seconds_allowed, window, environment, names(without))
            return
        if accept is not None:
            raise UsageError(
                "it is for the edits of --select.",
                code="missing-value",
                place="--accept",
                remedy="Give --select FILE, too.",
            )
        refuse_output_override(overrides or ())
        settings = AblationSettings(
            warmup=5 if warmup is None else warmup,
            steps=30 if steps is None else steps,
            seconds=10.0 if seconds is None else seconds,
            repeats=repeats,
            numerics=numerics,
            quality=quality,
            quality_steps=quality_steps,
            budget=allowed,
        )
        sets = [names(listed) for listed in variants.split(";")] if variants else []
        loaded = load(recipe, overrides, names(with_), without, chain.from_iterable(sets))
        options = {
            "--with": names(with_),
            "--without": names(without),
            "--variants": variants,
            "--steps": steps,
            "--seconds": seconds,
            "--warmup": warmup,
            "--repeats": None if repeats == REPEATS else repeats,
            "--no-leave-one-out": not leave_one_out,
            "--no-numerics": not numerics,
            "--quality": quality and quality_steps is None,
            "--quality-steps": quality_steps,
            "--budget": budget,
            "--timeout": timeout,
            "--output": output,
        }
        words = [recipe, *(overrides or ())]
        plan = plan_ablation(loaded, sets, leave_one_out)
        command = command_line("bench", words, options)
        complete = measure_ablation(plan, settings, environment, timeout, output, command)
    raise typer.Exit(0 if complete else 1)


def load(
    recipe: str,
    overrides: list[str] | None,
    added: list[str],
    without: list[str] | None,
    variants: Iterable[str] = (),
) -> Recipe:
    """The recipe to measure. Messages are shown from now on."""
    from fastloop.cli.messages import show_messages
    from fastloop.recipe import load_recipe

    loaded = load_recipe(recipe, overrides or (), added, names(without), variants)
    show_messages()
    return loaded


def refuse_ablation_options(options: Mapping[str, Any]) -> None:
    """Refuse options of the ablation that have no meaning with ``--select``.

    Args:
        options: Option -> its value.

    Raises:
        UsageError: One of them was given.
    """
    from fastloop.errors import UsageError

    for option, value in options.items():
        if value:
            raise UsageError(
                f"{option} belongs to the ablation, which is not done.",
                code="exclusive-options",
                place="--select",
                remedy="Leave one of the two out.",
            )


def write_fastest(
    recipe: Recipe,
    target: Path,
    accept: list[str],
    budget: float,
    window: Window,
    environment: Mapping[str, str],
    never: list[str],
) -> None:
    """Find the edits that make a recipe faster, write the recipe with them to ``target``, and all trials beside it.

    Args:
        accept: Numerics classes that edits may have.
        budget: Seconds that it may take.
        never: Plugins that are not tried.
    """
    from fastloop.errors import UsageError
    from fastloop.runtime.files import write
    from fastloop_tools.bench.selected_recipe import factor, selected_recipe
    from fastloop_tools.bench.selection import EditSelection
    from fastloop_tools.shared.changed_recipes import check
    from fastloop_tools.shared.tables import dump
    from fastloop_tools.trials.pairs import TrialRunner

    resolved = check(recipe)
    recipe = resolved.recipe
    resolved.plugins.hooks.check_recipe(recipe=recipe, plugins=resolved.plugins)
    if recipe.source is not None and target.resolve() == recipe.source.resolve():
        raise UsageError(
            "this is the recipe itself.", code="file-in-use", place=f"--select {target}", remedy="Give another file."
        )
    trials = target.with_suffix(".json")
    if trials == target:
        raise UsageError(
            "expected a .yaml file. The trials are written to a .json file beside it.",
            code="unknown-format",
            place=f"--select {target}",
        )
    with tempfile.TemporaryDirectory(prefix="fastloop-bench-") as cache:
        runner = TrialRunner(environment, Path(cache), typer.echo, budget)
        selection = EditSelection(recipe, accept, budget, runner, window, typer.echo, never)
        fastest = selection.run()
    write(trials, dump(selection.record()), hidden=True)
    if fastest is recipe:
        typer.echo(f"found nothing faster. All trials: {trials}")
        return
    write(target, selected_recipe(selection, f"All trials: {trials.name}", target.parent))
    typer.echo(f"{factor(selection)}; written to {target}")


def plan_ablation(recipe: Recipe, sets: list[list[str]], leave_one_out: bool) -> Ablation:
    """The variants of a recipe to measure.

    Args:
        sets: Sets of plugins to measure; empty: the recipe's plugins are added one by one.
        leave_one_out: Whether to measure the full set without each plugin, too.
    """
    from fastloop_tools.bench.plan import make_ablation

    by_reference = {reference: name for name, reference in recipe.references.items()}
    named = [[by_reference.get(name, name) for name in listed] for listed in sets]
    return make_ablation(recipe, named, leave_one_out)


def measure_ablation(
    plan: Ablation,
    settings: AblationSettings,
    environment: Mapping[str, str],
    timeout: float | None,
    output: str,
    command: str,
) -> bool:
    """Measure the variants of a recipe, and write and show the results. Returns whether all measurements succeeded.

    Args:
        timeout: Seconds that a measurement may take; None: no limit.
        output: Folder of the results; empty: one in runs/.
        command: The command line that repeats it, for the report.
    """
    from fastloop.runtime.files import write
    from fastloop_tools.bench import report
    from fastloop_tools.bench.ablation import Bench
    from fastloop_tools.shared.tables import dump
    from fastloop_tools.trials.pairs import TrialRunner

    recipe = plan.recipe
    name = recipe.source.stem if recipe.source else "recipe"
    folder = make_folder(Path(output or f"runs/bench-{name}"))
    facts = {"name": name, "command": command, **this_place(plan.plugins, recipe)}

    def keep(record: dict[str, Any]) -> None:
        write(folder / "bench.json", dump(record), hidden=True)
        write(folder / "bench.md", report.markdown(record))

    with tempfile.TemporaryDirectory(prefix="fastloop-bench-") as cache:
        runner = TrialRunner(environment, Path(cache), typer.echo, timeout)
        ablation_run = Bench(plan, settings, runner, facts, typer.echo, keep)
        typer.echo(f"{ablation_run.describe()}, into {folder}")
        for variant in plan.variants:
            if variant.why_not:
                typer.echo(f"{variant.title}: {variant.why_not}")
        try:
            complete = ablation_run.run()
        except (KeyboardInterrupt, signals.StoppedAtOnce):
            typer.echo(f"The results so far are in {folder}.")
            raise
    print_markdown(report.markdown(ablation_run.record))
    typer.echo(f"written to {folder}; chart: fastloop report {quote(str(folder))}")
    return complete


def make_folder(folder: Path) -> Path:
    """Create a folder for the results. One with results of an earlier ablation is moved aside.

    Raises:
        UsageError: The folder cannot be created.
    """
    from fastloop.runtime import files
    from fastloop_tools.shared.result_folders import explain_output_errors, make_output_folder

    with explain_output_errors(folder):
        if (folder / "bench.json").is_file():
            typer.echo(f"an earlier ablation was in {folder}: moved to {files.move_aside(folder)}")
    make_output_folder(folder)
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
    for plugin in plugins.values():
        distribution = distribution_of(type(plugin))  # type: ignore[arg-type]
        if distribution is not None:
            versions[distribution.name] = distribution.version
    return {
        "versions": versions,
        "machine": {
            "device": f"{machine.device} ({machine.name})",
            "cores": platform_support.cores(),
            "torch's threads": torch.get_num_threads(),
            "system": platform.platform(),
        },
    }
