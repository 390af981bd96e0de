"""What `checkpoint-best` and `early-stopping` share: a metric of the evaluation, and which of two values is better."""

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

FALLING = ("loss", "perplexity", "error", "mae", "mse", "rmse")
"""Metrics that are better when smaller, for ``mode: auto``; a name that ends in one of them counts too."""


class Monitor:
    """A metric that a plugin watches; ``mode`` is ``min``, ``max`` or ``auto``."""

    def __init__(self, plugin: str, name: str, mode: str) -> None:
        self.plugin, self.name = plugin, name
        self.minimise = mode == "min" or (mode == "auto" and name.lower().endswith(FALLING))

    def check(self, run: Run) -> None:
        """Refuse a run that does not measure this.

        Raises:
            UsageError: There is no evaluation split, or it has no such metric; names those it has.
        """
        where = f"{run.recipe.where}: plugins.{self.plugin}.monitor"
        if "validation" not in run.eval_loaders:
            raise UsageError(f"{where}: there is no evaluation split to watch {self.name!r} on. Give one, or use --without {self.plugin}.")
        if self.name not in (names := run.metric_names()):
            raise UsageError(f"{where}: the evaluation has no metric {self.name!r}.{did_you_mean(self.name, names)}")

    def read(self, metrics: Mapping[str, float]) -> float:
        """The metric of an evaluation; NaN, and said, where that has none."""
        value = metrics.get(self.name, math.nan)
        if not math.isfinite(value):
            found = metrics.get(self.name, "missing")
            logger.warning("%s: the evaluation's %s is %s, which counts for nothing", self.plugin, self.name, found)
        return value

    def better(self, new: float, old: float | None, by: float = 0.0) -> bool:
        """Whether ``new`` beats ``old`` by more than ``by``. NaN and infinities beat nothing, and any number beats None."""
        if not math.isfinite(new):
            return False
        if old is None:
            return True
        return new < old - by if self.minimise else new > old + by
