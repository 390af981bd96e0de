"""The runs of sweeps and searches: a training by `fastloop train` with overrides, and its result."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ConfigDict, StringConstraints, TypeAdapter

from fastloop.cli import launch
from fastloop.distributed import signals
from fastloop.errors import UsageError, did_you_mean
from fastloop.metric_modes import MetricMode, recorded_mode, unknown_mode
from fastloop.recipe import Recipe, load_recipe, safe_yaml
from fastloop.runtime.files import read_json_object
from fastloop.runtime.json_text import with_nan
from fastloop.runtime.step_folders import checkpoints
from fastloop_tools.shared.command_lines import option_words
from fastloop_tools.shared.json_files import Number

STOPPED = (signals.EXIT_INTERRUPTED, signals.EXIT_STOPPED, 128 + 2, 128 + 15)
"""Exit codes of a run that a signal has stopped: saved, or too early in its start to save."""


@dataclass
class TrialRun:
    """A run of a sweep or a search: a variant of the recipe, with one seed.

    Attributes:
        name: Name of the run folder.
        values: Key -> value, as on the command line.
        seed, fold: That of ``--seeds`` and ``--folds``, counted from 0; None: the recipe's, and no folds.
        metrics: The last metrics of the validation split; None: not finished, or there is no such split.
        reason: The error of a failed run.
    """

    name: Annotated[str, StringConstraints(pattern=r"^[^./\\][^/\\]*$")]
    values: dict[str, str]
    seed: int | None = None
    status: Annotated[str, StringConstraints(pattern="^(pending|running|finished|stopped|failed)$")] = "pending"
    metrics: dict[str, Number] | None = None
    reason: str | None = None
    fold: int | None = None

    __pydantic_config__ = ConfigDict(extra="forbid")

    @property
    def point(self) -> tuple[Any, ...]:
        """The values as the recipe reads them, seed and fold: equal for runs that train the same."""
        values = sorted((key, as_read(key, value)) for key, value in self.values.items())
        return (*values, self.seed, self.fold)

    @property
    def overrides(self) -> list[str]:
        """The overrides that make a recipe this run."""
        seed = [] if self.seed is None else [f"train.seed={self.seed}"]
        fold = [] if self.fold is None else [f"plugins.folds.number={self.fold}"]
        return [*(f"{key}={value}" for key, value in self.values.items()), *seed, *fold]


def as_read(key: str, value: str) -> str:
    """A value of the command line as the recipe reads it, in a form by which values are compared: 1e-3 and 0.001 are
    equal, and so are 'a' and a; 1 and true differ.

    Raises:
        RecipeError: It is not the value of an override.
    """
    return json.dumps(_with_floats(safe_yaml.load(value, f"{key}={value}", in_shell=True)), sort_keys=True)


def _with_floats(value: Any) -> Any:
    """The same value, with integers as floats where both are equal."""
    if isinstance(value, dict):
        return {str(key): _with_floats(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_floats(item) for item in value]
    is_exact = isinstance(value, int) and not isinstance(value, bool) and abs(value) <= 2**53
    return float(value) if is_exact else value


def parse_runs(records: Any) -> list[TrialRun]:
    """The runs of a record that may have been changed.

    Raises:
        ValueError: They have another form than ``TrialRun``, or a folder that is not in the folder of the trials.
    """
    return TypeAdapter(list[TrialRun]).validate_python(records)


@dataclass(frozen=True)
class SweepSettings:
    """The settings that all runs of a sweep or a search share: the recipe and its overrides, ``--with`` and
    ``--without``, a metric of the validation split, and the processes of each run."""

    recipe: str
    fixed: list[str]
    added: list[str]
    left_out: list[str]
    monitor: str
    nproc: int

    def load(self, overrides: Iterable[str] = ()) -> Recipe:
        """The recipe of a run."""
        return load_recipe(self.recipe, [*self.fixed, *overrides], self.added, self.left_out)

    @cached_property
    def base(self) -> Recipe:
        """The recipe without the values of a run."""
        return self.load()

    @property
    def folder(self) -> Path:
        """The folder of the run folders."""
        return Path(self.base.output)

    @property
    def words(self) -> list[str]:
        """The words of a command line that all runs share."""
        return [self.recipe, *self.fixed, *option_words({"--with": self.added, "--without": self.left_out})]

    def train(self, run: TrialRun) -> int:
        """Train a run, or resume it, and set its status, metrics and reason. Returns the exit code. If the exported
        model is the best one by ``monitor``, its value counts instead of the last one. A run whose value is NaN or
        infinite has failed."""
        output = self.folder / run.name
        own = [*run.overrides, f"output={output}"]
        if self.base.has_plugin("remote-output"):  # its own folder at the URL
            own.append(f"plugins.remote-output.folder={json.dumps(f'{output.absolute().parent.name}/{output.name}')}")
        resume = ["--resume="] if checkpoints(output) else []
        code = launch.launch(["train", *self.words, *own, *resume], self.nproc, 1, 0, None, output, brief=True)
        run.status = "failed"
        if code == 0:
            run.status = "finished"
        elif code in STOPPED:
            run.status = "stopped"
        summary = read_json_object(output / "summary.json")
        if run.status == "finished":
            run.metrics = with_nan(summary.get("validation") or {}) or None
            monitored = monitored_metric(self.load(run.overrides))
            keeps_best = monitored.keeps_best and monitored.name == self.monitor
            if run.metrics and keeps_best and self.monitor in run.metrics and summary.get("best"):
                run.metrics[self.monitor] = summary["best"]["value"]
            value = (run.metrics or {}).get(self.monitor, 0.0)  # `check_metric` reports a metric that is missing
            if not math.isfinite(value):
                run.status = "failed"
                run.reason = f"validation {self.monitor} is {value}"
        elif run.status == "failed":
            run.reason = summary.get("reason") or f"exit code {code}, before training; its error is in the output"
        return code

    def check_metric(self, run: TrialRun) -> None:
        """Check that a finished run has the metric to compare.

        Raises:
            UsageError: It has none; the message lists its metrics.
        """
        if run.status == "finished" and self.monitor not in (run.metrics or {}):
            place = f"--monitor {self.monitor}"
            if not run.metrics:
                raise UsageError(
                    "there is no validation split to compare the runs on.",
                    code="unknown-split",
                    place=place,
                    remedy="Add one to the data.",
                )
            raise UsageError(
                f"the validation split has no metric {self.monitor!r}.",
                code="unknown-metric",
                place=place,
                remedy=did_you_mean(self.monitor, run.metrics),
            )

    def known_mode(self, mode: str) -> MetricMode | None:
        """Which values of the metric are better, as far as it is known before a run.

        Args:
            mode: The option ``--mode``. With ``auto``, the recipe's plugin that monitors the same metric has it.
        """
        if mode == "auto":
            monitored = monitored_metric(self.base)
            if monitored.name == self.monitor:
                mode = monitored.mode
        if mode == "auto" and self.monitor == "loss":
            return "min"
        if mode == "min":
            return "min"
        return "max" if mode == "max" else None

    def read_mode(self, summary: Mapping[str, Any]) -> MetricMode:
        """Which values of the metric are better, as a run's summary says.

        Raises:
            UsageError: The run does not know.
        """
        mode = recorded_mode(summary, self.monitor)
        if mode is None:
            raise unknown_mode("--mode", self.monitor, "--mode min or --mode max")
        return mode


def stop(code: int) -> typer.Exit:
    """The end of a command whose run a signal has stopped."""
    return typer.Exit(signals.EXIT_INTERRUPTED if code == signals.EXIT_INTERRUPTED else signals.EXIT_STOPPED)


@dataclass(frozen=True)
class MonitoredMetric:
    """A metric of the validation split that a recipe monitors.

    Attributes:
        mode: The option ``mode`` of the plugin that monitors it: ``min``, ``max`` or ``auto``.
        keeps_best: Whether ``checkpoint-best`` monitors it, so that the exported model has its best value.
    """

    name: str
    mode: str
    keeps_best: bool


def monitored_metric(recipe: Recipe) -> MonitoredMetric:
    """The metric of ``checkpoint-best``, else that of ``early-stopping``, else ``loss``."""
    for plugin in ("checkpoint-best", "early-stopping"):
        options = recipe.plugins.get(plugin, False)
        if options is not False:
            name = str(options.get("monitor", "loss"))
            return MonitoredMetric(name, options.get("mode", "auto"), keeps_best=plugin == "checkpoint-best")
    return MonitoredMetric("loss", "auto", keeps_best=False)
