"""Which metrics of a collection share their states.

torchmetrics updates one metric for all those whose states are equal after the first update. Recalls above thresholds of
0.7 and 0.9 are alike then, if a model before training predicts neither, and remain alike in all later evaluations.
fastloop compares the settings of the metrics instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from torchmetrics import Metric, MetricCollection

READ_BY_COMPUTE = ("beta", "max_fpr", "zero_division")
"""Attributes of torchmetrics' metrics that ``update`` does not read. Another metric lists its own in its attribute
``read_by_compute``."""
PLAIN = (bool, int, float, str, bytes, type(None))
"""Types of settings that are compared by value."""


def group_metrics(metrics: MetricCollection) -> None:
    """Let the metrics of a collection share their states only if one function updates them with the same settings.

    A collection keeps groups that its author has chosen.
    """
    if metrics._enable_compute_groups is not True:
        return
    members = dict(metrics.items(keep_base=True, copy_state=False))
    groups: list[list[str]] = []
    for name, metric in members.items():
        for group in groups:
            if update_alike(members[group[0]], metric):
                group.append(str(name))
                break
        else:
            groups.append([str(name)])
    metrics._enable_compute_groups = groups
    metrics._init_compute_groups()


def update_alike(first: Metric, second: Metric) -> bool:
    """Whether two metrics have the same states after any updates. False if it is not known."""
    if type(first) is not type(second) and not _update_by_one_function(first, second):
        return False
    has_children = len(list(first.children())) + len(list(second.children())) > 0
    if not first._defaults or has_children:
        return False
    return _are_equal(_settings(first), _settings(second))


def _update_by_one_function(first: Metric, second: Metric) -> bool:
    """Whether two metrics of different classes are updated by one function that calls nothing of their classes. That is
    known of the classes of torchmetrics for classification: those for detection share ``update``, which calls a
    function of each class."""
    for metric in (first, second):
        if not type(metric).__module__.startswith("torchmetrics.classification."):
            return False
    return type(first).update is type(second).update


def _settings(metric: Metric) -> dict[str, Any]:
    """The attributes of a metric that its updates may depend on."""
    unread = (*READ_BY_COMPUTE, *getattr(metric, "read_by_compute", ()), *_own_attributes())
    settings: dict[str, Any] = dict(metric.named_buffers())
    settings.update(metric.named_parameters())
    for name, value in vars(metric).items():
        if name not in unread and name not in metric._defaults:
            settings[name] = value
    settings["states"] = metric._defaults
    return settings


@cache
def _own_attributes() -> frozenset[str]:
    """The attributes that torchmetrics gives each metric for its own use."""
    from torchmetrics import SumMetric

    private = {name for name in vars(SumMetric()) if name.startswith("_")}
    return frozenset({*private, "compute", "training", "update"})


def _are_equal(first: Any, second: Any) -> bool:
    """Whether two settings are equal. Objects of other types than plain ones must be the same object."""
    if first is second:
        return True
    if type(first) is not type(second):
        return False
    if isinstance(first, Tensor):
        return first.dtype == second.dtype and first.shape == second.shape and bool((first == second).all())
    if isinstance(first, Mapping):
        return first.keys() == second.keys() and all(_are_equal(first[key], second[key]) for key in first)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(_are_equal, first, second))
    return isinstance(first, PLAIN) and first == second
