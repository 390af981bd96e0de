"""``fastloop sweep`` without ``--trials``: trains every point of a grid with each seed and fold, and compares them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from shlex import quote

import typer

from fastloop.cli.messages import show_messages
from fastloop.distributed import signals
from fastloop.errors import UsageError
from fastloop.runtime.files import read_json_object
from fastloop_tools.shared.command_lines import command_line
from fastloop_tools.sweep import grid, space
from fastloop_tools.sweep.arguments import SweepArguments
from fastloop_tools.trials.record import Record
from fastloop_tools.trials.runs import SweepSettings, TrialRun, monitored_metric, stop


def sweep_grid(arguments: SweepArguments, folds: int | None, resume: bool) -> None:
    """Train a grid of values, seeds and folds, and print the results.

    Args:
        folds: Folds of the training data; None: the recipe's validation split.
        resume: Whether to continue the sweep in the output folder.

    Raises:
        UsageError: The command line is wrong, or the output folder has other content.
        typer.Exit: With the exit code.
    """
    refuse_ranges(arguments.values)
    points = grid.parse(arguments.values)
    added = arguments.added
    if folds is not None:
        points = with_folds(points, folds)
        added = [*added, "folds"]
    settings = SweepSettings(
        arguments.recipe, points.fixed, added, arguments.left_out, arguments.monitor or "", arguments.nproc
    )
    monitor = arguments.monitor or monitored_metric(settings.base).name
    settings = replace(settings, monitor=monitor)
    again = command_line(
        "sweep",
        [arguments.recipe, *arguments.values],
        {
            "--with": arguments.added,
            "--without": arguments.left_out,
            "--seeds": arguments.seeds,
            "--folds": folds,
            "--monitor": monitor,
            "--mode": arguments.mode,
            "--nproc": arguments.nproc,
            "--resume": True,
        },
    )
    runs = list_runs(points, settings, arguments.seeds, folds)
    for run in runs:  # a value that is wrong ends the sweep before the first run
        settings.load(run.overrides)
    show_messages()
    origin = {"recipe": str(settings.base.source), "base": settings.base.to_dict()}
    record = Record(settings.folder, origin, runs, monitor, settings.known_mode(arguments.mode))
    record.start(resume, again)
    with signals.on_signals(signals.stop_now):
        train_runs(runs, settings, record, again)
    record.show()
    failed = [run for run in runs if run.status == "failed"]
    for run in failed:
        typer.echo(f"failed: {run.name}: {run.reason}")
    typer.echo(f"written to {record.file}; curves: fastloop report {quote(str(settings.folder))}")
    raise typer.Exit(1 if failed else 0)


def refuse_ranges(values: Iterable[str]) -> None:
    """Check that each override has single values: a range, such as 1e-5..1e-3, is for a search.

    Raises:
        UsageError: One has a range.
    """
    axes, _ = space.parse(values)
    for axis in axes:
        if not axis.values:
            raise UsageError(
                f"{axis.key}={axis.text}: a range has no grid.",
                code="missing-value",
                remedy="Give --trials N, or a list of values.",
            )


def with_folds(points: grid.Grid, folds: int) -> grid.Grid:
    """The grid with the number of folds among the overrides of all points.

    Raises:
        UsageError: The command line also sets an option of the plugin ``folds``.
    """
    for key in (*points.axes, *points.fixed):
        if key.startswith("plugins.folds."):
            raise UsageError(
                "--folds sets the options of the plugin 'folds', too.",
                code="set-twice",
                place=key,
                remedy="Leave one of the two out.",
            )
    return grid.Grid(points.axes, [*points.fixed, f"plugins.folds.of={folds}"])


def list_runs(points: grid.Grid, settings: SweepSettings, seeds: int | None, folds: int | None) -> list[TrialRun]:
    """The runs of the sweep, in the order in which they are trained.

    With 3 seeds and ``train.seed`` 123, each point is trained with 123, 124 and 125.

    Raises:
        UsageError: There is one run only, or the seed is set twice.
    """
    first_seed = settings.base.train.seed
    if not points.axes and seeds is None and folds is None:
        raise UsageError(
            "there is nothing to sweep.",
            code="nothing-to-sweep",
            expected="a key with several values, such as train.lr=1e-5,3e-5, or --seeds N, or --folds K",
        )
    if seeds is not None and "train.seed" in points.axes:
        raise UsageError(
            "train.seed has several values, and --seeds sets it, too.",
            code="set-twice",
            remedy="Leave one of the two out.",
        )
    seed_numbers: list[int | None] = [None]
    if seeds is not None:
        seed_numbers = [first_seed + index for index in range(seeds)]
    fold_numbers: list[int | None] = [None]
    if folds is not None:
        fold_numbers = list(range(folds))
    return points.runs(seed_numbers, fold_numbers)


def train_runs(runs: list[TrialRun], settings: SweepSettings, record: Record, again: str) -> None:
    """Train the runs that are not finished, one after another, and record the result of each.

    Args:
        again: The command that continues the sweep.

    Raises:
        UsageError: A run does not have the metric to compare, or does not know which of its values are better.
        typer.Exit: A signal stopped a run.
    """
    for number, run in enumerate(runs, start=1):
        if run.status != "finished":
            typer.echo(f"run {number} of {len(runs)}: {' '.join(run.overrides)}")
            run.status = "running"
            run.reason = None
            record.write()
            code = settings.train(run)
            record.write()
            if run.status == "stopped":
                typer.echo(f"The sweep was stopped in run {number} of {len(runs)}. Continue it with: {again}")
                raise stop(code)
        settings.check_metric(run)
        if record.mode is None and run.status == "finished":  # the first finished run knows it
            record.mode = settings.read_mode(read_json_object(settings.folder / run.name / "summary.json"))
            record.write()
