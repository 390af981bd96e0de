"""The Optuna study that the workers of a search share, and the trials that count."""

from __future__ import annotations

import math
import re
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import optuna
from optuna.exceptions import ExperimentalWarning, StorageInternalError
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy.engine import make_url
from sqlalchemy.exc import SQLAlchemyError

from fastloop.errors import FastloopError, UsageError
from fastloop.metric_modes import MetricMode
from fastloop.problem import clause, typed_clause
from fastloop.recipe import secrets
from fastloop_tools.shared.differing_keys import dotted, rows_that_differ
from fastloop_tools.shared.json_files import MALFORMED
from fastloop_tools.trials.runs import TrialRun, parse_runs

SQLITE_TIMEOUT = 60
"""Seconds to wait for a lock of SQLite. Its default of 5 is short for several workers on a network file system."""
ATTEMPTS = 5
"""Attempts to open the storage. Workers that create the tables at the same time fail once."""
ORIGIN, ERROR, WORKER, RUNS, SURPLUS = (f"fastloop:{name}" for name in ("origin", "error", "worker", "runs", "surplus"))
"""User attributes: of the study, the search that made it; of a trial, why it failed, its worker, its runs, and whether
it was not trained because several workers began the last trial at the same time."""
STATUS = {TrialState.COMPLETE: "finished", TrialState.RUNNING: "running", TrialState.WAITING: "waiting"}
"""Optuna's states, in our words. A failed trial without an error is one whose worker was stopped or lost."""


def open_study(url: str, name: str, mode: MetricMode, origin: Mapping[str, Any], heartbeat: int) -> optuna.Study:
    """The study ``name`` of a database. It is created if it does not exist.

    Args:
        mode: Which values of the metric are better.
        origin: The settings that all workers share; see ``check_origin``.
        heartbeat: Seconds between two heartbeats of a trial.

    Raises:
        UsageError: The database cannot be reached, or the study is malformed or belongs to another search.
    """
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        storage = _open_storage(url, heartbeat)
        # takes the running trials of other workers into account
        sampler = optuna.samplers.TPESampler(constant_liar=True)
    direction: Any = "minimize" if mode == "min" else "maximize"
    with storage_errors(url), malformed(name):
        study = optuna.create_study(
            storage=storage, sampler=sampler, study_name=name, direction=direction, load_if_exists=True
        )
        if ORIGIN not in study.user_attrs:
            if read_trials(study):
                raise UsageError(
                    f"the study {name!r} was not made by `fastloop sweep --trials`.",
                    code="wrong-study",
                    place="--storage",
                    remedy="Set another output or another storage.",
                )
            study.set_user_attr(ORIGIN, origin)
        check_origin(name, study.user_attrs[ORIGIN], origin)
        if study.direction.name.lower() != direction:
            raise ValueError(f"its direction is {study.direction.name.lower()}, expected {direction}")
    return study


def _open_storage(url: str, heartbeat: int) -> optuna.storages.RDBStorage:
    for attempt in range(1, ATTEMPTS + 1):
        try:
            parsed = make_url(url)
            secrets.remember({"password": parsed.password}, "--storage")
            connect = {"timeout": SQLITE_TIMEOUT} if parsed.get_backend_name() == "sqlite" else {}
            return optuna.storages.RDBStorage(url, {"connect_args": connect}, heartbeat_interval=heartbeat)
        except (SQLAlchemyError, StorageInternalError, ImportError, RuntimeError, ValueError) as error:
            if attempt == ATTEMPTS or not isinstance(error, SQLAlchemyError | StorageInternalError) or "://" not in url:
                raise UsageError(
                    f"cannot be opened: {clause(error)}.",
                    code="unreachable-url",
                    place=f"--storage {hide_password(url)}",
                    expected=(
                        "a database that SQLAlchemy can reach, such as sqlite:///study.db or "
                        "postgresql://USER:PASSWORD@HOST/NAME"
                    ),
                ) from None
            time.sleep(0.2 * attempt)
    raise AssertionError


def hide_password(url: str) -> str:
    """A database's URL, without its password."""
    try:
        return make_url(url).render_as_string(hide_password=True)
    except SQLAlchemyError:
        return url


@contextmanager
def storage_errors(url: str) -> Iterator[None]:
    """Raise errors of the database as errors that name it.

    Raises:
        FastloopError: The database failed.
    """
    try:
        yield
    except (SQLAlchemyError, StorageInternalError) as error:
        reason = clause(error.__cause__ or error)
        raise FastloopError(
            f"the database failed: {reason}. Finished trials are kept: repeat the command to continue.",
            code="storage-failed",
            place=f"--storage {hide_password(url)}",
        ) from error


@contextmanager
def malformed(name: str) -> Iterator[None]:
    """Raise errors of reading a study as errors that name it. Others may have changed its database.

    Raises:
        UsageError: A value of the study is malformed.
    """
    try:
        yield
    except MALFORMED as error:
        raise UsageError(
            f"the study {name!r} is malformed: {typed_clause(error)}. Restore its database, or set another "
            "output or another storage for a new search.",
            code="wrong-study",
            place="--storage",
        ) from None


def read_trials(study: optuna.Study) -> list[FrozenTrial]:
    """The trials of a study.

    Raises:
        UsageError: The database holds values that no search has written.
    """
    with malformed(study.study_name):
        trials = study.get_trials(deepcopy=False)
        for trial in trials:
            _check(trial, study.user_attrs.get(ORIGIN, {}).get("search", {}))
    return trials


def _check(trial: FrozenTrial, axes: Mapping[str, Any]) -> None:
    """Raise one of ``MALFORMED`` if a trial has other values than a search writes."""
    right = [isinstance(trial.number, int), isinstance(trial.user_attrs.get(ERROR, ""), str)]
    if trial.state == TrialState.COMPLETE:  # raises for values outside their ranges
        optuna.trial.create_trial(
            state=trial.state, values=trial.values, params=trial.params, distributions=trial.distributions
        )
        right += [math.isfinite(trial.values[0])]
    for run in parse_runs(trial.user_attrs.get(RUNS, [])):
        right += [re.fullmatch(r"trial-\d{4,}(_seed-\d+)?", run.name) is not None, run.values.keys() <= axes.keys()]
        right += [text.isprintable() for text in (*run.values.values(), *(run.metrics or ()))]
    if not all(right):
        raise ValueError(f"trial {trial.number!r:.20} has values that no search writes")


def check_origin(name: str, of_study: Mapping[str, Any], of_search: Mapping[str, Any]) -> None:
    """Check that a study belongs to this search.

    Args:
        name: The name of the study.
        of_study: Its recipe and ranges.
        of_search: Those of this search.

    Raises:
        UsageError: It belongs to another recipe or other ranges; shows both.
    """
    changed = rows_that_differ([dotted(of_study), dotted(of_search)])
    if changed:
        parts = [f"{key}: {old or '(none)'} in the study, {new or '(none)'} here" for key, (old, new) in changed]
        if len(parts) > 5:
            parts[5:] = [f"and {len(parts) - 5} more"]
        raise UsageError(
            f"the study {name!r} was made with other settings: {'; '.join(parts)}.",
            code="wrong-study",
            place="--storage",
            remedy="Use the same settings, or set another output or another storage for a new search.",
        )


def is_counted(trial: FrozenTrial) -> bool:
    """Whether a trial is one of ``--trials``. One whose worker was lost or stopped is not: another trial replaces it.

    A running one is, so that several workers begin no more than ``--trials``. If its worker is lost,
    ``fail_lost_trials`` ends it without an error, and it counts no more.
    """
    return trial.state in (TrialState.COMPLETE, TrialState.RUNNING) or ERROR in trial.user_attrs


def fail_lost_trials(study: optuna.Study) -> None:
    """Mark the trials of lost workers as failed: those without a heartbeat for twice the interval."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        optuna.storages.fail_stale_trials(study)


def trial_name(number: int) -> str:
    """The name of a trial in messages, and of its folder. The numbers of Optuna begin at 0, and count lost trials,
    too."""
    return f"trial-{number:04d}"


@dataclass(frozen=True)
class TrialRow:
    """A trial in the table. ``shown`` is its value, or its status."""

    number: int
    value: float | None
    shown: str
    overrides: list[str]
    error: str | None


def rank_trials(study: optuna.Study) -> list[TrialRow]:
    """The trials, best first, then those without a value."""
    rows = []
    for trial in read_trials(study):
        if SURPLUS in trial.user_attrs:
            continue
        error = trial.user_attrs.get(ERROR)
        runs = trial.user_attrs.get(RUNS, [])
        value = trial.values[0] if trial.values else None
        if value is not None:
            shown = f"{value:.4f}"
        elif trial.state in STATUS:
            shown = STATUS[trial.state]
        else:
            shown = "failed" if error else "lost"
        values = runs[0]["values"] if runs else trial.params
        overrides = [f"{key}={text}" for key, text in values.items()]
        rows.append(TrialRow(trial.number, value, shown, overrides, error))
    with_value = [row for row in rows if row.value is not None]
    without_value = [row for row in rows if row.value is None]
    with_value.sort(key=lambda row: row.value or 0.0, reverse=study.direction != StudyDirection.MINIMIZE)
    return with_value + without_value


def read_runs(study: optuna.Study) -> list[TrialRun]:
    """The runs of all workers. Trials of the same values share theirs."""
    by_name: dict[str, TrialRun] = {}
    for trial in read_trials(study):
        for run in parse_runs(trial.user_attrs.get(RUNS, [])):
            first = by_name.pop(run.name, run)
            by_name[run.name] = first  # in the place of the last trial that has it
    return list(by_name.values())
