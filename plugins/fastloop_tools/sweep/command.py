"""``fastloop sweep``: trains every point of a grid with several seeds, one after another, and compares results.

With ``--trials``, Optuna chooses the points: see ``search``.
"""

from __future__ import annotations

from typing import Annotated

import typer

from fastloop.cli.arguments import NoCode, RecipeName, With, Without, choice, names
from fastloop_tools.sweep.arguments import SweepArguments

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
            help="The metric of the validation split to compare [default: that of checkpoint-best or early-stopping in "
            "the recipe; else loss].",
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
    from fastloop.errors import UsageError

    arguments = SweepArguments(
        recipe=recipe,
        values=values or [],
        added=names(with_),
        left_out=names(without),
        seeds=seeds,
        monitor=monitor,
        mode=mode,
        nproc=nproc,
    )
    if trials is not None:
        if folds is not None or resume:
            option = "--resume" if resume else "--folds"
            raise UsageError(
                f"--trials and {option} exclude each other.",
                code="exclusive-options",
                remedy="Leave one of the two out.",
            )
        from fastloop_tools.sweep.search import search

        search(arguments, trials, storage, heartbeat or 60)
        return
    for option, value in (("--storage", storage), ("--heartbeat", heartbeat)):
        if value is not None:
            raise UsageError(
                "it is for workers that share trials.",
                code="missing-value",
                place=option,
                remedy="Give --trials N, too.",
            )
    from fastloop_tools.sweep.grid_runs import sweep_grid

    sweep_grid(arguments, folds, resume)
