"""Logs values, metrics, recipe and summary to experiment trackers, through Accelerate's tracker classes.

    plugins:
      - trackers: {trackers: [mlflow, wandb], project: reviews}

Each tracker is a package of its own; ``pip install 'fastloop-train[trackers]'`` installs W&B and MLflow's client. A
tracker reads its settings from the environment, such as ``MLFLOW_TRACKING_URI``. The recipe's keys are parameters,
without its secrets. A resumed run is a new run of the tracker. The plugin ``tensorboard`` continues the curves.

The tracker's run ends with the status of ``summary.json``: in MLflow, a failed run is FAILED, and one that a signal
interrupts is KILLED. One that early stopping ends is FINISHED. A name or value that a tracker refuses is replaced or
cut, and reported once. Rows of ``run.log_rows`` become tables of MLflow, W&B and ClearML. fastloop's tests read the
files of MLflow and offline W&B only.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fastloop import Plugin, PluginError, Problem, hookimpl, option
from fastloop.errors import did_you_mean
from fastloop.recipe import secrets
from fastloop_plugins.observe._tracker_names import TRACKERS, TrackerNames, Value

if TYPE_CHECKING:
    from accelerate.tracking import GeneralTracker

    from fastloop import Run
    from fastloop.recipe import Recipe

logger = logging.getLogger("fastloop")

MLFLOW_STATUS = {"completed": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
"""Status of a run -> MLflow's ``RunStatus``."""
WANDB_EXIT_CODE = {"completed": 0, "stopped": 255, "failed": 1}
"""Status of a run -> the exit code that W&B sets after Ctrl-C or an exception."""
SWANLAB_STATE = {"completed": "success", "stopped": "aborted", "failed": "crashed"}
"""Status of a run -> SwanLab's state of an experiment."""


@dataclass
class Started:
    """A tracker whose run has begun.

    Attributes:
        name: The tracker.
        tracker: Accelerate's object.
        names: The names that it accepts.
        params: The recipe's keys.
    """

    name: str
    tracker: GeneralTracker
    names: TrackerNames
    params: Mapping[str, Value]

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Log values of a step."""
        self.tracker.log(self.names.metrics(values), step=step)

    def log_rows(self, name: str, rows: Sequence[Mapping[str, Any]], step: int) -> bool:
        """Log rows as a table; returns whether the tracker has tables."""
        columns: dict[str, None] = {}  # in the order of their first row
        for row in rows:
            columns.update(dict.fromkeys(row))
        if self.name == "mlflow":
            import mlflow

            data = {column: [row.get(column) for row in rows] for column in columns}
            mlflow.log_table({"step": [step] * len(rows), **data}, f"{name}.json")
            return True
        if not hasattr(self.tracker, "log_table"):
            return False
        cells = [[row.get(column) for column in columns] for row in rows]
        self.tracker.log_table(name, columns=list(columns), data=cells, step=step)
        return True

    def finish(self, status: str, reason: str | None) -> None:
        """End the tracker's run.

        Args:
            status: ``completed``, ``stopped`` (interrupted) or ``failed``. MLflow, W&B and SwanLab have such a status
                of a run. Other trackers get the param ``summary.status``, and trackio logs it.
            reason: Why it was stopped or has failed.
        """
        if self.name == "mlflow":
            import mlflow

            mlflow.end_run(status=MLFLOW_STATUS[status])
        elif self.name == "wandb":
            self.tracker.tracker.finish(exit_code=WANDB_EXIT_CODE[status])
        elif self.name == "swanlab":
            self.tracker.tracker.finish(
                state=SWANLAB_STATE[status], error=secrets.hide(str(reason)) if status == "failed" else None
            )
        else:
            ended = {"summary.status": status, "summary.reason": secrets.hide(str(reason))}
            try:
                if self.name == "trackio":  # it writes params once, with the first values
                    self.tracker.log(ended)
                else:
                    self.tracker.store_init_configuration(self.names.params({**self.params, **ended}))
            finally:
                self.tracker.finish()


class Trackers(Plugin):
    """Logs to experiment trackers that Accelerate supports, such as MLflow and W&B."""

    name = "trackers"
    read_only = True
    publishes = True

    trackers: list[str] = option(f"Trackers: {', '.join(TRACKERS)}.", default_factory=list)
    project: str = option("Project or experiment that the run belongs to.", default="fastloop", min_length=1)

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.started: list[Started] = []
        self.without_tables = set[tuple[str, str]]()  # trackers and names of rows that the log has named
        self.status = "failed"  # unless the summary has another one
        self.reason: str | None = None

    @hookimpl
    def check_recipe(self, recipe: Recipe) -> None:
        where = f"{recipe.where}: plugins.trackers.trackers"
        if not self.trackers:
            logger.warning(
                Problem(
                    f"lists no tracker, so nothing is logged. Expected some of: {', '.join(TRACKERS)}.",
                    code="nothing-selected",
                    place=where,
                )
            )
        for name in self.trackers:
            if name == "tensorboard":
                raise PluginError(
                    "found 'tensorboard'.",
                    code="unknown-choice",
                    place=where,
                    remedy="List the plugin tensorboard instead.",
                )
            if name not in TRACKERS:
                raise PluginError(
                    f"no tracker {name!r}.", code="unknown-choice", place=where, remedy=did_you_mean(name, TRACKERS)
                )
            if importlib.util.find_spec(name) is None:
                raise PluginError(
                    f"{name} is not installed.",
                    code="not-installed",
                    place=where,
                    remedy="Install it:",
                    command=f"pip install {name}",
                )

    @hookimpl
    def before_fit(self, run: Run) -> None:
        if not run.is_main:
            return
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS

        # an earlier fit has another one
        self.status = "failed"
        self.reason = None
        recipe = run.recipe
        parameters = dict(flatten(secrets.hidden(recipe.to_dict() | {"plugins": recipe.listed(recipe.plugins)})))
        for name in self.trackers:
            rules = TRACKERS[name]
            names = TrackerNames(name, rules)
            run_name = {rules.run_argument: names.run(run.folder.name)} if rules.run_argument else {}
            tracker = LOGGER_TYPE_TO_CLASS[name](names.project(self.project), **run_name)
            tracker.start()
            self.started.append(Started(name, tracker, names, parameters))
            tracker.store_init_configuration(names.params(parameters))

    @hookimpl
    def log_scalars(self, scalars: Mapping[str, float], step: int) -> None:
        for started in self.started:
            started.log(scalars, step)

    @hookimpl
    def log_rows(self, name: str, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        for started in self.started:
            if not started.log_rows(name, rows, step) and (started.name, name) not in self.without_tables:
                self.without_tables.add((started.name, name))
                self.log.info("%s has no tables, so it does not get the rows of %r", started.name, name)

    @hookimpl(trylast=True)
    def write_summary(self, run: Run, summary: dict[str, Any]) -> None:
        self.status = summary["status"]
        self.reason = summary["reason"]
        if self.status == "stopped" and self.reason == run.state.stop_reason and not run.interrupted:
            self.status = "completed"  # a plugin ended the training, such as early-stopping: the run has its results
        numbers = {f"summary/{key}": value for key, value in flatten(summary) if isinstance(value, int | float)}
        for started in self.started:
            started.log(numbers, run.state.step)

    @hookimpl
    def teardown(self) -> None:
        with ExitStack() as finishing:  # finishes each, also if one raises
            for started in self.started:
                finishing.callback(started.finish, self.status, self.reason)
            self.started = []


def flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Value]]:
    """Dotted keys -> values; lists and None as text. An empty mapping, such as a plugin without options, is ``on``."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{prefix}{key}.")
        elif value == {}:
            yield f"{prefix}{key}", "on"
        elif isinstance(value, bool | int | float | str):
            yield f"{prefix}{key}", value
        else:
            yield f"{prefix}{key}", str(value)
