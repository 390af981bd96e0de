"""``fastloop sweep``: trains every point of a grid with several seeds, one after another, and compares results.

With ``--trials``, Optuna chooses the points: see ``search``.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from fastloop.cli.arguments import NoCode, RecipeName, With, Without, choice, names
from fastloop.distributed import signals

Values = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=A,B...",
        help="Overrides. A key with several values spans the grid. Quote a value with a comma, or put it in brackets. "
        "With --trials, also ranges such as train.lr=1e-5..1e-3.",
    ),
]


def sweep(
    recipe: RecipeName,
    values: Values = None,
    with_: With = None,
    without: Without = None,
    no_code: NoCode = False,
    seeds: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Train each point with N seeds, from train.seed on.")
    ] = None,
    folds: Annotated[
        int | None,
        typer.Option(
            min=2, metavar="K", help="Cross-validate: train each point K times, each with another fold as validation."
        ),
    ] = None,
    trials: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="Let Optuna choose N points, over all workers, instead of the whole grid."
        ),
    ] = None,
    storage: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="With --trials: the database that workers share, such as sqlite:///study.db [default: "
            "OUTPUT/study.db].",
        ),
    ] = None,
    heartbeat: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="SECONDS",
            help="With --trials: time between two heartbeats of a trial [default: 60]. After twice this time, it is "
            "lost.",
        ),
    ] = None,
    monitor: Annotated[
        str | None,
        typer.Option(
            metavar="METRIC",
            help="The metric of the validation split to compare [default: loss; with --trials: that of a plugin of "
            "the recipe that monitors one].",
        ),
    ] = None,
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

    With --trials, Optuna chooses the points. Each trial is a training in a folder of the output folder. To use more
    workers, on this machine or others, start the same command again with the same --storage: the workers share the
    trials. The output folders need the same name. The same command also continues a search that was stopped. A trial
    whose worker is stopped or lost is replaced by another one.
    """
    from fastloop.cli.messages import show_messages
    from fastloop.errors import UsageError
    from fastloop.runtime.files import read_json_object
    from fastloop_tools.shared.command_lines import command_line
    from fastloop_tools.sweep import grid, space
    from fastloop_tools.sweep.search import search
    from fastloop_tools.trials.record import Record
    from fastloop_tools.trials.runs import Trials, stop

    if trials is not None:
        if folds is not None or resume:
            option = "--resume" if resume else "--folds"
            raise UsageError(
                f"--trials and {option} exclude each other.",
                code="exclusive-options",
                remedy="Leave one of the two out.",
            )
        search(recipe, values or [], trials, storage, monitor, mode, seeds, with_, without, nproc, heartbeat or 60)
        return
    for option, value in (("--storage", storage), ("--heartbeat", heartbeat)):
        if value is not None:
            raise UsageError(
                "it is for workers that share trials.",
                code="missing-value",
                place=option,
                remedy="Give --trials N, too.",
            )
    for axis in space.parse(values or ())[0]:
        if not axis.values:
            raise UsageError(
                f"{axis.key}={axis.text}: a range has no grid.",
                code="missing-value",
                remedy="Give --trials N, or a list of values.",
            )
    monitor = monitor or "loss"
    parsed, added = grid.parse(values or ()), names(with_)
    options: dict[str, Any] = {"--with": added, "--without": names(without), "--seeds": seeds, "--folds": folds}
    options |= {"--monitor": monitor, "--mode": mode, "--nproc": nproc, "--resume": True}
    again = command_line("sweep", [recipe, *(values or ())], options)
    if folds is not None:
        if key := next((key for key in (*parsed.axes, *parsed.fixed) if key.startswith("plugins.folds.")), None):
            raise UsageError(
                "--folds sets the options of the plugin 'folds', too.",
                code="set-twice",
                place=key,
                remedy="Leave one of the two out.",
            )
        parsed.fixed.append(f"plugins.folds.of={folds}")
        added = [*added, "folds"]
    shared = Trials(recipe, parsed.fixed, added, names(without), monitor, nproc)
    base, folder = shared.base, shared.folder
    if not parsed.axes and seeds is None and folds is None:
        raise UsageError(
            "there is nothing to sweep.",
            code="nothing-to-sweep",
            expected="a key with several values, such as train.lr=1e-5,3e-5, or --seeds N, or --folds K",
        )
    if seeds is not None and "train.seed" in parsed.axes:
        raise UsageError(
            "train.seed has several values, and --seeds sets it, too.",
            code="set-twice",
            remedy="Leave one of the two out.",
        )
    numbers = [None] if seeds is None else [base.train.seed + index for index in range(seeds)]
    runs = parsed.runs(numbers, range(folds) if folds is not None else (None,))
    for run in runs:  # a value that is wrong ends the sweep before the first run
        shared.load(run.overrides)
    show_messages()
    origin = {"recipe": str(base.source), "base": base.to_dict()}
    record = Record(folder, origin, runs, monitor, shared.known_mode(mode))
    record.start(resume, again)
    with signals.on_signals(signals.stop_now):
        for number, run in enumerate(runs, start=1):
            if run.status != "finished":
                typer.echo(f"run {number} of {len(runs)}: {' '.join(run.overrides)}")
                run.status, run.reason = "running", None
                record.write()
                code = shared.train(run)
                record.write()
                if run.status == "stopped":
                    typer.echo(f"The sweep was stopped in run {number} of {len(runs)}. Continue it with: {again}")
                    raise stop(code)
            shared.check_metric(run)
            if record.mode is None and run.status == "finished":
                record.mode = shared.read_mode(read_json_object(folder / run.name / "summary.json"))
                record.write()
    record.show()
    failed = [run for run in runs if run.status == "failed"]
    for run in failed:
        typer.echo(f"failed: {run.name}: {run.reason}")
    typer.echo(f"written to {record.file}; curves: fastloop report {folder}")
    raise typer.Exit(int(bool(failed)))
