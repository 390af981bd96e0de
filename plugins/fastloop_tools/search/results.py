"""The results of a search: a table, a JSON record, and the file ``sweep.json`` for `fastloop report`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from typing import Any

import optuna
from optuna.study import StudyDirection
from optuna.trial import TrialState

from fastloop.recipe import secrets
from fastloop_tools.search.study import ERROR, RUNS, SURPLUS, read_trials
from fastloop_tools.trials.runs import TrialRun, parse_runs
from fastloop_tools.trials.tables import show_table

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
    sign = 1 if study.direction == StudyDirection.MINIMIZE else -1
    return sorted(rows, key=lambda row: (row["value"] is None, sign * (row["value"] or 0)))


def read_runs(study: optuna.Study) -> list[TrialRun]:
    """The runs of all workers. Trials of the same values share theirs."""
    runs = [run for trial in read_trials(study) for run in parse_runs(trial.user_attrs.get(RUNS, []))]
    return list({run.name: run for run in reversed(runs)}.values())[::-1]


def show(rows: Sequence[Mapping[str, Any]], monitor: str) -> None:
    """Print the table of a search."""
    cells = [
        [
            str(row["trial"]),
            row["status"] if row["value"] is None else f"{row['value']:.4f}",
            secrets.hide(" ".join(row["overrides"])),
        ]
        for row in rows
    ]
    show_table(["trial", f"validation {monitor}", "overrides"], cells, wraps=-1)


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
