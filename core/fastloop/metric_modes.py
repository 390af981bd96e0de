"""Whether a lower or a higher value of a metric is better: its class or a plugin declares it. Names say nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from fastloop.errors import UsageError

if TYPE_CHECKING:
    from torchmetrics import Metric

    from fastloop.run import Run

MetricMode = Literal["min", "max"]
"""Which values of a metric are better: ``min``, the lower ones; ``max``, the higher ones."""


def direction(mode: str | None) -> str:
    """The mode behind a metric's name, for people: `` (lower is better)``; empty: unknown."""
    if mode is None:
        return ""
    return " (lower is better)" if mode == "min" else " (higher is better)"


def metric_modes(run: Run) -> dict[str, MetricMode | None]:
    """The metrics that an evaluation of a run returns: name -> mode; None: unknown.

    ``Plugin.adds_metrics`` precedes torchmetrics' attribute ``higher_is_better``.
    """
    modes: dict[str, MetricMode | None] = {"loss": "min"}
    if run.metrics is not None:
        for name, metric in run.metrics.items(copy_state=False):
            modes[str(name)] = mode_of(metric)
    for plugin in run.plugins:
        modes.update(plugin.adds_metrics)
    return modes


def mode_of(metric: Metric) -> MetricMode | None:
    """The mode that a metric of torchmetrics declares. That of a wrapper is the mode of all metrics that it wraps.

    None for a class of a user whose ``compute`` is its own and whose ``higher_is_better`` is inherited: with
    ``1 - super().compute()``, it would have the mode of the other direction.
    """
    from torchmetrics import Metric
    from torchmetrics.wrappers.abstract import WrapperMetric

    if _inherits_mode_alone(metric):
        return None
    higher_is_better = getattr(metric, "higher_is_better", None)
    if higher_is_better is not None:
        return "max" if higher_is_better else "min"
    if not isinstance(metric, WrapperMetric):
        return None
    wrapped = [mode_of(child) for child in metric.children() if isinstance(child, Metric)]
    agree = len(set(wrapped)) == 1
    return wrapped[0] if agree else None


def _inherits_mode_alone(metric: Metric) -> bool:
    """Whether a class of a user computes a value of its own, and no class from it on declares ``higher_is_better``."""
    if "higher_is_better" in vars(metric):
        return False
    for cls in type(metric).__mro__:
        if "higher_is_better" in vars(cls):
            return False
        if "compute" in vars(cls):
            return cls.__module__.partition(".")[0] != "torchmetrics"
    return False


def unknown_mode(key: str, name: str, choices: str = "mode: min or mode: max") -> UsageError:
    """The error for a metric without a mode.

    Args:
        key: The place of the option that is ``auto``.
        name: The metric.
        choices: The values to set, as the user writes them.
    """
    return UsageError(
        f"found auto, and neither the class of the metric {name!r} nor a plugin declares whether a lower or a higher "
        "value is better.",
        code="unknown-direction",
        place=key,
        remedy=f"Set {choices}. Or set higher_is_better in the class of the metric, also if it derives from another "
        "metric: its own compute may turn the value round.",
    )


def recorded_mode(summary: Mapping[str, Any], name: str) -> MetricMode | None:
    """The mode of a metric in a run's ``summary.json``; None: unknown, or a summary without modes."""
    modes = summary.get("metric_modes")
    mode = modes.get(name) if isinstance(modes, dict) else None
    if mode == "min":
        return "min"
    return "max" if mode == "max" else None
