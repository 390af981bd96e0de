"""The runs of sweeps and searches: a training by `fastloop train` with overrides, and its result."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from fastloop.distributed import signals
from fastloop.errors import UsageError, did_you_mean
from fastloop.recipe import Recipe, secrets

STOPPED = (signals.EXIT_INTERRUPTED, signals.EXIT_STOPPED, 128 + 2, 128 + 15)
"""Exit codes of a run that a signal has stopped: saved, or too early in its start to save."""


@dataclass
class TrialRun:
    """A run of a sweep or a search: a variant of the recipe, with one seed.

    Attributes:
        name: Name of the run folder.
        values: Key -> value, as on the command line.
        seed: The seed of ``--seeds``; None: that of the recipe.
        status: ``pending``, ``running``, ``finished``, ``stopped`` or ``failed``.
        metrics: The last metrics of the validation split; None: not finished, or there is no such split.
        reason: The error of a failed run.
        fold: The fold to validate on, from 0; None: no ``--folds``.
    """

    name: str
    values: dict[str, str]
    seed: int | None
    status: str = "pending"
    metrics: dict[str, float] | None = None
    reason: str | None = None
    fold: int | None = None

    @property
    def overrides(self) -> list[str]:
        """The overrides that make a recipe this run."""
        seed = [] if self.seed is None else [f"train.seed={self.seed}"]
        fold = [] if self.fold is None else [f"plugins.folds.number={self.fold}"]
        return [*(f"{key}={value}" for key, value in self.values.items()), *seed, *fold]


def option_words(options: Mapping[str, Any]) -> list[str]:
    """Options as words of a command line. A list is joined by commas; None, False and empty values are left out."""
    words = []
    for key, value in options.items():
        if value is not None and value is not False and value not in ("", []):  # 0 is a value
            words += [key] if value is True else [key, ",".join(value) if isinstance(value, list) else str(value)]
    return words


def command_line(name: str, words: Iterable[str], options: Mapping[str, Any]) -> str:
    """The command line that repeats a command; see ``option_words``."""
    return secrets.hide(shlex.join(["fastloop", name, *words, *option_words(options)]))


def end_run(run: TrialRun, code: int, folder: Path, monitor: str, kept_best: bool) -> None:
    """Set the status, the metrics and the reason of a run that has ended.

    Args:
        code: Its exit code.
        folder: Its run folder.
        kept_best: See ``read_metrics``.
    """
    run.status = "finished" if code == 0 else "stopped" if code in STOPPED else "failed"
    summary = read_summary(folder)
    run.metrics = (read_metrics(summary, monitor, kept_best) or None) if code == 0 else None
    reason = summary.get("reason") or f"exit code {code}, before training; its error is in the output"
    run.reason = reason if run.status == "failed" else None


def stop(code: int) -> typer.Exit:
    """The end of a command whose run a signal has stopped."""
    return typer.Exit(signals.EXIT_INTERRUPTED if code == signals.EXIT_INTERRUPTED else signals.EXIT_STOPPED)


def check_metric(run: TrialRun, monitor: str) -> None:
    """Check that a finished run has the metric to compare.

    Raises:
        UsageError: It has none; the message lists its metrics.
    """
    if run.status == "finished" and monitor not in (run.metrics or {}):
        there = f"has no metric {monitor!r}" if run.metrics else "does not exist"
        raise UsageError(
            f"--monitor {monitor}: the validation split {there}.{did_you_mean(monitor, run.metrics or ())}"
        )


def monitored(recipe: Recipe) -> tuple[str | None, str, str]:
    """The metric of ``checkpoint-best``, if the recipe lists it; the metric that the recipe monitors, and its mode."""
    for plugin in ("checkpoint-best", "early-stopping"):
        options = recipe.plugins.get(plugin, False)
        if options is not False:
            metric = str(options.get("monitor", "loss"))
            return metric if plugin == "checkpoint-best" else None, metric, options.get("mode", "auto")
    return None, "loss", "auto"


def read_metrics(summary: Mapping[str, Any], monitor: str, kept_best: bool) -> dict[str, Any]:
    """The last metrics of the validation split; empty if there are none.

    Args:
        kept_best: Whether the exported model is the best one by ``monitor``, so that its value counts, and not the last
            one.
    """
    found = dict(summary.get("validation") or {})
    if kept_best and monitor in found and summary.get("best"):
        found[monitor] = summary["best"]["value"]
    return found


def read_summary(folder: Path) -> dict[str, Any]:
    """The summary of a run; empty if it has written none."""
    try:
        found: dict[str, Any] = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def remote_folder(recipe: Recipe, run: Path) -> list[str]:
    """The override that gives a run its own folder at the URL of ``remote-output``; empty if the recipe lacks that
    plugin."""
    listed = recipe.plugins.get("remote-output", False) is not False
    return [f"plugins.remote-output.folder={json.dumps(f'{run.absolute().parent.name}/{run.name}')}"] if listed else []
