"""Shared by `checkpoint-best` and `early-stopping`: read a metric of an evaluation, and compare two values of it.

A run may resume with other settings of its metrics, such as another threshold. A warning then reports that the values
from before and after are not comparable.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import is_dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from fastloop import Problem, UsageError
from fastloop.errors import did_you_mean
from fastloop.metric_modes import metric_modes, unknown_mode

if TYPE_CHECKING:
    from torchmetrics import Metric

    from fastloop import MetricMode, Run

logger = logging.getLogger("fastloop")


class Monitor:
    """A metric that a plugin monitors.

    Args:
        plugin: The plugin's name.
        name: The metric's name.
        mode: ``min``, ``max``, or ``auto``: ``check`` reads it from the run.

    Attributes:
        definition: The class of the metric and its settings, for checkpoints; empty: a plugin or the core computes it.
            ``check`` sets it.
    """

    def __init__(self, plugin: str, name: str, mode: str) -> None:
        self.plugin = plugin
        self.name = name
        self.definition = ""
        self.mode: MetricMode | None = None
        if mode == "min":
            self.mode = "min"
        elif mode == "max":
            self.mode = "max"

    def check(self, run: Run) -> None:
        """Raise an error if the run does not compute this metric, or does not know its mode.

        Raises:
            UsageError: There is no validation split, or it has no such metric; the message lists its metrics. Or the
                mode is ``auto``, and nothing declares which values are better.
        """
        options = f"{run.recipe.where}: plugins.{self.plugin}"
        if "validation" not in run.eval_loaders:
            raise UsageError(
                f"there is no validation split to compute {self.name!r} on.",
                code="unknown-split",
                place=f"{options}.monitor",
                remedy=f"Add one, or use --without {self.plugin}.",
            )
        modes = metric_modes(run)
        if self.name not in modes:
            raise UsageError(
                f"the evaluation has no metric {self.name!r}.",
                code="unknown-metric",
                place=f"{options}.monitor",
                remedy=did_you_mean(self.name, modes),
            )
        if run.metrics is not None:
            named = {str(name): metric for name, metric in run.metrics.items(copy_state=False)}
            if self.name in named:
                self.definition = describe_metric(named[self.name])
        if self.mode is None:
            self.mode = modes[self.name]
        if self.mode is None:
            raise unknown_mode(f"{options}.mode", self.name)

    def compare_definition(self, before: Any) -> None:
        """Warn if the run that saved a checkpoint computed the metric in another way.

        Args:
            before: ``definition`` in that run; None: the checkpoint has none.
        """
        if before and self.definition and before != self.definition:
            logger.warning(
                Problem(
                    f"the values of {self.name} before the break are compared with others: it was {before}, and is "
                    f"{self.definition}.",
                    code="metric-changed",
                    place=self.plugin,
                    remedy="Resume with the same settings of the metric, or start a new run.",
                )
            )

    def read(self, metrics: Mapping[str, float]) -> float:
        """The metric's value in an evaluation. NaN, with a warning, if it is missing or not finite."""
        value = metrics.get(self.name, math.nan)
        if not math.isfinite(value):
            text = metrics.get(self.name, "missing")
            logger.warning(
                Problem(
                    f"the evaluation's {self.name} is {text}, which is ignored.", code="not-finite", place=self.plugin
                )
            )
        return value

    def better(self, new: float, old: float | None, by: float = 0.0) -> bool:
        """Whether ``new`` is better than ``old`` by more than ``by``. NaN and infinity are never better; any number is
        better than None."""
        if not math.isfinite(new):
            return False
        if old is None:
            return True
        assert self.mode is not None, "check has read it"
        return new < old - by if self.mode == "min" else new > old + by

    def reaches(self, threshold: float, value: float) -> bool:
        """Whether a finite value is at the threshold, or better."""
        return math.isfinite(value) and not self.better(threshold, value)


def describe_metric(metric: Metric) -> str:
    """The class of a metric and its settings, and those of the metrics and the functions inside a wrapper:
    ``BinaryRecall(threshold=0.7)``."""
    from torchmetrics import Metric

    settings = []
    for name, value in sorted(vars(metric).items()):
        if name.startswith("_") or name in _common_attributes():
            continue
        if value is None or isinstance(value, bool | int | float | str):
            settings.append(f"{name}={value!r}")
        elif hasattr(value, "__self__"):  # a method, such as that of the decision between two classes
            owner = value.__self__
            described = repr(owner) if is_dataclass(owner) else type(owner).__qualname__  # other reprs have an address
            settings.append(f"{name}={described}.{value.__name__}")
    for child in metric.children():
        settings.append(describe_metric(child) if isinstance(child, Metric) else type(child).__name__)
    return f"{type(metric).__name__}({', '.join(settings)})"


@cache
def _common_attributes() -> frozenset[str]:
    """The attributes of every metric of torchmetrics."""
    from torchmetrics import SumMetric

    return frozenset(vars(SumMetric()))
