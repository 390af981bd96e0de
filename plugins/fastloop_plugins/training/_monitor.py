"""Shared by `checkpoint-best` and `early-stopping`: read a metric of an evaluation, and compare two values of it."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from fastloop import UsageError
from fastloop.errors import did_you_mean

if TYPE_CHECKING:
    from fastloop import Run

logger = logging.getLogger("fastloop")

FALLING = ("loss", "perplexity", "bits_per_character", "error", "mae", "mse", "rmse")
"""Metrics that improve when they fall, for ``mode: auto``. Names that end in one of these count too."""


def metric_names(run: Run) -> list[str]:
    """Names of the metrics that an evaluation returns."""
    return ["loss", *map(str, run.metrics or ()), *(name for plugin in run.plugins for name in plugin.adds_metrics)]


class Monitor:
    """A metric that a plugin monitors; ``mode`` is ``min``, ``max`` or ``auto``."""

    def __init__(self, plugin: str, name: str, mode: str) -> None:
        self.plugin, self.name = plugin, name
        self.minimise = mode == "min" or (mode == "auto" and name.lower().endswith(FALLING))

    def check(self, run: Run) -> None:
        """Raise an error if the run does not compute this metric.

        Raises:
            UsageError: There is no validation split, or it has no such metric; the message lists its metrics.
        """
        where = f"{run.recipe.where}: plugins.{self.plugin}.monitor"
        if "validation" not in run.eval_loaders:
            raise UsageError(
                f"{where}: there is no validation split to compute {self.name!r} on. Add one, or use --without "
                f"{self.plugin}."
            )
        if self.name not in (names := metric_names(run)):
            raise UsageError(f"{where}: the evaluation has no metric {self.name!r}.{did_you_mean(self.name, names)}")

    def read(self, metrics: Mapping[str, float]) -> float:
        """The metric's value in an evaluation. NaN, with a warning, if it is missing or not finite."""
        value = metrics.get(self.name, math.nan)
        if not math.isfinite(value):
            found = metrics.get(self.name, "missing")
            logger.warning("%s: the evaluation's %s is %s, which is ignored", self.plugin, self.name, found)
        return value

    def better(self, new: float, old: float | None, by: float = 0.0) -> bool:
        """Whether ``new`` is better than ``old`` by more than ``by``. NaN and infinity are never better; any number is
        better than None."""
        if not math.isfinite(new):
            return False
        if old is None:
            return True
        return new < old - by if self.minimise else new > old + by
