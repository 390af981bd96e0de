"""``fastloop sweep --trials``: finds the best values of recipe keys with Optuna, by workers that share a database."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from fastloop.distributed import signals

if TYPE_CHECKING:
    from fastloop import MetricMode
    from fastloop_tools.sweep.arguments import SweepArguments
    from fastloop_tools.sweep.space import Axis
    from fastloop_tools.sweep.study import TrialRow
    from fastloop_tools.trials.runs import SweepSettings


def search(arguments: SweepArguments, count: int, storage: str | None, heartbeat: int) -> None:
    """Search the best values of keys with Optuna: ``fastloop sweep --trials``.

    Args:
        count: Trials of the search, over all workers.
        storage: URL of the database that the workers share; None: a file in the output folder.
        heartbeat: Seconds between two heartbeats of a trial.

    Raises:
        UsageError: The command line is wrong, Optuna is not installed, or the study belongs to another search.
        typer.Exit: With the exit code.
    """
    require_optuna()
    from fastloop.cli.messages import show_messages
    from fastloop.recipe import secrets
    from fastloop_tools.shared.result_folders import make_output_folder
    from fastloop_tools.sweep import space
    from fastloop_tools.sweep.study import open_study, rank_trials, read_runs, storage_errors
    from fastloop_tools.sweep.worker import Worker
    from fastloop_tools.trials.record import Record
    from fastloop_tools.trials.runs import SweepSettings, monitored_metric

    seeds = arguments.seeds
    axes, fixed = space.parse(arguments.values)
    check_axes(axes, seeds)
    settings = SweepSettings(
        arguments.recipe, fixed, arguments.added, arguments.left_out, arguments.monitor or "", arguments.nproc
    )
    check_values(settings, axes)
    monitor = arguments.monitor or monitored_metric(settings.base).name
    settings = replace(settings, monitor=monitor)
    show_messages()
    better = settings.known_mode(arguments.mode)
    if better is None:
        better = measure_mode(settings, [f"{axis.key}={axis.examples()[0]}" for axis in axes])
    folder = settings.folder
    check_folder(folder)
    make_output_folder(folder, "output")
    origin = {
        "recipe": {key: value for key, value in settings.base.to_dict().items() if key != "output"},
        "search": {axis.key: axis.text for axis in axes},
        "seeds": seeds,
        "optimized": f"{'lowest' if better == 'min' else 'highest'} {monitor}",
    }
    record = Record(folder, origin, [], monitor, better)
    url = storage or f"sqlite:///{folder / 'study.db'}"
    study = open_study(url, folder.name, better, record.origin, heartbeat)
    record.origin = {**record.origin, "study": study.study_name}

    def write() -> None:
        record.runs = read_runs(study)
        record.write()

    seed_numbers: list[int | None] = [None]
    if seeds is not None:
        seed_numbers = [settings.base.train.seed + index for index in range(seeds)]
    with storage_errors(url), signals.on_signals(signals.stop_now):
        write()  # an error of the study comes before the first line
        for axis in axes:
            typer.echo(secrets.hide(axis.describe()))
        Worker(study, axes, seed_numbers, count, settings, write).work()
        write()
        rows = rank_trials(study)
    show_trials(rows, settings, better)
    typer.echo(f"curves: fastloop report {shlex.quote(str(folder))}")
    has_failed = any(row.error for row in rows)
    raise typer.Exit(1 if has_failed else 0)


def require_optuna() -> None:
    """Check that Optuna is installed.

    Raises:
        UsageError: It is not.
    """
    try:
        import optuna  # noqa: F401
    except ImportError:
        from fastloop.errors import UsageError

        raise UsageError(
            "Optuna is not installed.",
            code="not-installed",
            place="--trials",
            remedy="Install it:",
            command="pip install 'fastloop-train[optuna]'",
        ) from None


def check_axes(axes: Sequence[Axis], seeds: int | None) -> None:
    """Check that there are values to search, and that the seed is set once.

    Raises:
        UsageError: One of them is not so.
    """
    from fastloop.errors import UsageError

    if not axes:
        raise UsageError(
            "there is nothing to search.",
            code="nothing-to-sweep",
            expected="a range or a list, such as train.lr=1e-5..1e-3 or train.batch_size=16,32",
        )
    if seeds is not None and any(axis.key == "train.seed" for axis in axes):
        raise UsageError(
            "train.seed is searched, and --seeds sets it, too.", code="set-twice", remedy="Leave one of the two out."
        )


def check_values(settings: SweepSettings, axes: Sequence[Axis]) -> None:
    """Resolve the recipe with the values of each list and both ends of each range, before the first trial.

    The other keys have their first value then: with lr=1e-5..1e-3 and batch_size=16,32, lr is tried with a batch size
    of 16, and the batch sizes with an lr of 1e-5.

    Raises:
        UsageError: A key or a value is wrong.
    """
    from fastloop.plugins.resolve import resolve

    for axis in axes:
        fixed = [f"{fixed_axis.key}={fixed_axis.examples()[0]}" for fixed_axis in axes if fixed_axis is not axis]
        for value in axis.examples():
            resolve(settings.load([*fixed, f"{axis.key}={value}"]))


def show_trials(rows: Sequence[TrialRow], settings: SweepSettings, better: MetricMode) -> None:
    """Print the table of the trials, the errors of failed ones, and the command that trains the best one.

    Args:
        rows: The trials, best first.
    """
    from fastloop.metric_modes import direction
    from fastloop.recipe import secrets
    from fastloop_tools.shared.tables import show_table
    from fastloop_tools.sweep.study import trial_name

    cells = [[trial_name(row.number), row.shown, secrets.hide(" ".join(row.overrides))] for row in rows]
    show_table(["trial", f"validation {settings.monitor}{direction(better)}", "overrides"], cells, wraps=-1)
    for row in rows:
        if row.error:
            typer.echo(secrets.hide(f"{trial_name(row.number)} failed: {row.error}"))
    if rows and rows[0].value is not None:
        words = [part for part in settings.words if not part.startswith("output=")]
        best = shlex.join(["fastloop", "train", *words, *rows[0].overrides, f"output={settings.folder}-best"])
        typer.echo(secrets.hide(f"best: {best}"))


def measure_mode(settings: SweepSettings, overrides: Iterable[str]) -> MetricMode:
    """Which values of the metric are better. Trains one step of the recipe in a process of its own, because only a
    built run knows.

    Raises:
        UsageError: The run does not know, or fails.
    """
    from fastloop.errors import UsageError
    from fastloop_tools.trials.measure import run_process
    from fastloop_tools.trials.measuring_process import Spec

    recipe = settings.load(overrides)
    tree = recipe.to_dict()
    length = {"epochs": recipe.train.epochs, "max_steps": recipe.train.max_steps}
    spec = Spec(recipe=tree, source=str(recipe.source) if recipe.source else None, steps=1)
    result = run_process(spec, length, os.environ, None)
    if "error" in result:
        raise UsageError(
            f"found auto, and a step of training, which would show whether a lower or a higher {settings.monitor!r} is "
            f"better, fails: {result['error']} Repair the recipe, or set --mode min or --mode max.",
            code="unknown-direction",
            place="--mode",
        )
    return settings.read_mode(result["summary"])


def check_folder(folder: Path) -> None:
    """Check that the output folder is new, empty, or that of a search.

    Raises:
        UsageError: It has other content.
    """
    from fastloop.runtime.files import check_links
    from fastloop_tools.shared.json_files import read_json
    from fastloop_tools.trials.record import used_folder

    if not folder.exists():
        return
    check_links(folder)
    record = folder / "sweep.json"
    if record.exists():
        may_be_used = "study" in read_json(record)
    else:
        may_be_used = folder.is_dir() and not (folder / "recipe.yaml").is_file()
    if not may_be_used:
        raise used_folder(folder, "search")
