"""``fastloop sweep``: trains every point of a grid with several seeds, one after another, and compares results."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from fastloop.cli.arguments import RecipeName, With, Without, choice, names
from fastloop.distributed import signals

Values = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=A,B...",
        help="Overrides. A key with several values spans the grid. Quote a value with a comma, or put it in brackets.",
    ),
]


def sweep(
    recipe: RecipeName,
    values: Values = None,
    with_: With = None,
    without: Without = None,
    seeds: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Train each point with N seeds, from train.seed on.")
    ] = None,
    folds: Annotated[
        int | None,
        typer.Option(
            min=2, metavar="K", help="Cross-validate: train each point K times, each with another fold as validation."
        ),
    ] = None,
    monitor: Annotated[
        str, typer.Option(metavar="METRIC", help="The metric of the validation split to compare.")
    ] = "loss",
    mode: Annotated[
        str, choice("--mode", ("auto", "min", "max"), "Whether a lower or a higher value is better.")
    ] = "auto",
    nproc: Annotated[int, typer.Option(min=1, metavar="N", help="Start N processes for each run.")] = 1,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the sweep in the output folder. Finished runs are not repeated.")
    ] = False,
) -> None:
    """Train and compare a grid of values, seeds and folds.

    Runs start one after another, each in a folder of the output folder. There, sweep.json has the results: the mean and
    the deviation of each point over the seeds and folds. It also has the differences to the best point for the same
    seeds and folds, with a 95% interval. A run that fails is recorded, and the sweep continues. Exit codes: 0 done; 1 a
    run failed; 2 usage error; 75 or 130 stopped, continue with --resume.
    """
    from fastloop.cli.messages import show_messages
    from fastloop.errors import UsageError
    from fastloop.runtime.files import read_json_object
    from fastloop_tools.sweep import grid
    from fastloop_tools.trials.record import Record
    from fastloop_tools.trials.runs import Trials, command_line, stop

    parsed, added = grid.parse(values or ()), names(with_)
    options: dict[str, Any] = {"--with": added, "--without": names(without), "--seeds": seeds, "--folds": folds}
    options |= {"--monitor": monitor, "--mode": mode, "--nproc": nproc, "--resume": True}
    again = command_line("sweep", [recipe, *(values or ())], options)
    if folds is not None:
        if key := next((key for key in (*parsed.axes, *parsed.fixed) if key.startswith("plugins.folds.")), None):
            raise UsageError(f"{key}: --folds sets the options of the plugin 'folds', too. Leave one of the two out.")
        parsed.fixed.append(f"plugins.folds.of={folds}")
        added = [*added, "folds"]
    trials = Trials(recipe, parsed.fixed, added, names(without), monitor, nproc)
    base, folder = trials.base, trials.folder
    if not parsed.axes and seeds is None and folds is None:
        raise UsageError(
            "there is nothing to sweep. Expected a key with several values, such as train.lr=1e-5,3e-5, or --seeds N, "
            "or --folds K."
        )
    if seeds is not None and "train.seed" in parsed.axes:
        raise UsageError("train.seed has several values, and --seeds sets it, too. Leave one of the two out.")
    numbers = [None] if seeds is None else [base.train.seed + index for index in range(seeds)]
    runs = parsed.runs(numbers, range(folds) if folds is not None else (None,))
    for run in runs:  # a value that is wrong ends the sweep before the first run
        trials.load(run.overrides)
    show_messages()
    origin = {"recipe": str(base.source), "base": base.to_dict()}
    record = Record(folder, origin, runs, monitor, trials.known_mode(mode))
    record.start(resume, again)
    with signals.on_signals(signals.stop_now):
        for number, run in enumerate(runs, start=1):
            if run.status != "finished":
                typer.echo(f"run {number} of {len(runs)}: {' '.join(run.overrides)}")
                run.status, run.reason = "running", None
                record.write()
                code = trials.train(run)
                record.write()
                if run.status == "stopped":
                    typer.echo(f"The sweep was stopped in run {number} of {len(runs)}. Continue it with: {again}")
                    raise stop(code)
            trials.check_metric(run)
            if record.mode is None and run.status == "finished":
                record.mode = trials.read_mode(read_json_object(folder / run.name / "summary.json"))
                record.write()
    record.show()
    failed = [run for run in runs if run.status == "failed"]
    for run in failed:
        typer.echo(f"failed: {run.name}: {run.reason}")
    typer.echo(f"written to {record.file}; curves: fastloop report {folder}")
    raise typer.Exit(int(bool(failed)))
