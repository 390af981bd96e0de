"""Logs values, metrics, recipe and summary to experiment trackers, through Accelerate's tracker classes.

    plugins:
      - trackers: {trackers: [mlflow, wandb], project: reviews}

Each tracker is a package of its own; ``pip install 'fastloop-train[trackers]'`` installs W&B and MLflow's client. A
tracker reads its settings from the environment, such as ``MLFLOW_TRACKING_URI``. The recipe's keys are parameters,
without its secrets. A resumed run is a new run of the tracker. The plugin ``tensorboard`` continues the curves.
fastloop's tests read the files of MLflow and offline W&B only.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

from fastloop import Plugin, PluginError, hookimpl, option
from fastloop.errors import did_you_mean
from fastloop.recipe import secrets

if TYPE_CHECKING:
    from fastloop import Run
    from fastloop.recipe import Recipe

logger = logging.getLogger("fastloop")

NAME_ARGUMENTS = {
    "aim": None,
    "clearml": "task_name",
    "comet_ml": None,
    "dvclive": None,
    "mlflow": "run_name",
    "swanlab": "experiment_name",
    "trackio": "name",
    "wandb": "name",
}
"""Tracker, which is also the name of its module -> the argument that names a run, if it has one."""


class Trackers(Plugin):
    """Logs to the trackers that Accelerate supports, on the main process."""

    name = "trackers"
    read_only = True
    publishes = True
    description = "logs to experiment trackers, such as MLflow and W&B"

    @dataclass(kw_only=True)
    class Config:
        """Options."""

        trackers: Annotated[list[str], option(f"Trackers: {', '.join(NAME_ARGUMENTS)}.")] = field(default_factory=list)
        project: Annotated[str, option("Project or experiment that the run belongs to.")] = "fastloop"

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.started: list[Any] = []

    @hookimpl
    def check_recipe(self, recipe: Recipe) -> None:
        where = f"{recipe.where}: plugins.trackers.trackers"
        if not self.config.trackers:
            logger.warning(
                "%s: lists no tracker, so nothing is logged. Expected some of: %s", where, ", ".join(NAME_ARGUMENTS)
            )
        for name in self.config.trackers:
            if name == "tensorboard":
                raise PluginError(f"{where}: found 'tensorboard'. List the plugin tensorboard instead.")
            if name not in NAME_ARGUMENTS:
                raise PluginError(f"{where}: no tracker {name!r}.{did_you_mean(name, NAME_ARGUMENTS)}")
            if importlib.util.find_spec(name) is None:
                raise PluginError(f"{where}: {name} is not installed. Install it: pip install {name}")

    @hookimpl
    def before_fit(self, run: Run) -> None:
        if not run.is_main:
            return
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS

        recipe = run.recipe
        parameters = dict(flatten(secrets.hidden(recipe.to_dict() | {"plugins": recipe.listed(recipe.plugins)})))
        for name in self.config.trackers:
            argument = NAME_ARGUMENTS[name]
            tracker = LOGGER_TYPE_TO_CLASS[name](
                self.config.project, **({argument: run.folder.name} if argument else {})
            )
            tracker.start()
            self.started.append(tracker)
            tracker.store_init_configuration(parameters)

    @hookimpl
    def log_scalars(self, scalars: Mapping[str, float], step: int) -> None:
        for tracker in self.started:
            tracker.log(dict(scalars), step=step)

    @hookimpl(trylast=True)
    def write_summary(self, run: Run, summary: dict[str, Any]) -> None:
        numbers = {f"summary/{key}": value for key, value in flatten(summary) if isinstance(value, int | float)}
        for tracker in self.started:
            tracker.log(numbers, step=run.state.step)

    @hookimpl
    def teardown(self) -> None:
        while self.started:
            self.started.pop().finish()


def flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, bool | int | float | str]]:
    """Dotted keys -> values; lists and None as text. An empty mapping, such as a plugin without options, is ``on``."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield (
                f"{prefix}{key}",
                value if isinstance(value, bool | int | float | str) else "on" if value == {} else str(value),
            )
