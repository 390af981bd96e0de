"""The results of a search: a table, a JSON record, and the file ``sweep.json`` for `fastloop report`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import optuna
from optuna.trial import TrialState

from fastloop.recipe import secrets
from fastloop_tools.search.study import ERROR, RUNS, SURPLUS, read_trials
from fastloop_tools.trials.record import write_record
from fastloop_tools.trials.runs import TrialRun

STATUS = {TrialState.COMPLETE: "finished", TrialState.RUNNING: "running", TrialState.WAITING: "waiting"}
"""Optuna's states, in our words. A failed trial without an error is one whose worker was stopped or lost."""


def collect(study: optuna.Study) -> list[dict[str, Any]]:
    """The trials, best first, then those without a value."""
    rows = []
    for trial in read_trials(study):
        if SURPLUS in trial.user_attrs:
            continue
        status = STATUS.get(trial.state, "failed" if ERROR in trial.user_attrs else "lost")
        runs = trial.user_attrs.get(RUNS, [])
        rows.append(
            {
                "trial": trial.number,
                "status": status,
                "value": trial.values[0] if trial.values else None,
                "overrides": [f"{key}={value}" for key, value in (runs[0]["values"] if runs else trial.params).items()],
                "runs": [run["name"] for run in runs],
                "error": trial.user_attrs.get(ERROR),
            }
        )
    minimise = study.direction == optuna.study.StudyDirection.MINIMIZE
    return sorted(
        rows,
        key=lambda row: (
            row["value"] is None,
            0 if row["value"] is None else row["value"] if minimise else -row["value"],
        ),
    )


def write_sweep(folder: Path, study: optuna.Study, origin: Mapping[str, Any], monitor: str) -> None:
    """Write ``sweep.json`` in the form of `fastloop sweep`, with the runs of all workers. Several workers may write it
    at once."""
    found: dict[str, TrialRun] = {}
    for trial in read_trials(study):
        for run in trial.user_attrs.get(RUNS, ()):
            found.setdefault(run["name"], TrialRun(**run))
    minimise = study.direction == optuna.study.StudyDirection.MINIMIZE
    write_record(folder, {**origin, "study": study.study_name}, list(found.values()), monitor, minimise)


def show(rows: Sequence[Mapping[str, Any]], monitor: str) -> None:
    """Print the table of a search."""
    import rich
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column("trial", justify="right")
    table.add_column(f"validation {monitor}", justify="right")
    table.add_column("overrides", overflow="fold")
    for row in rows:
        value = row["status"] if row["value"] is None else f"{row['value']:.4f}"
        table.add_row(str(row["trial"]), value, secrets.hide(" ".join(row["overrides"])))
    rich.print(table)


@contextlib.contextmanager
def stdout_to_stderr() -> Any:
    """Send everything that this process and its children print to stderr, so that stdout has only JSON."""
    saved = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(saved, 1)
        os.close(saved)
