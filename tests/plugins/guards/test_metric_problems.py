"""The message for a metric that fails in an evaluation names the metric, the split, and what was found.

Modules:
    plugins/fastloop_plugins/guards/_metric_problems.py
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torchmetrics import Metric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy

from fastloop import Plugin, UsageError, hookimpl
from fastloop.testing import expect_problem
from fastloop_plugins.guards._metric_problems import find_shape_problem


class Fails(Metric):
    """Fails in ``compute`` of an evaluation, but not with one batch."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("count", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, predictions: Any, targets: Any) -> None:
        self.count += len(predictions)

    def compute(self) -> torch.Tensor:
        if self.count > 8:
            raise ValueError("no compute.")
        return self.count.float()


class Shapes(Fails):
    """Gives one number for each sample that it counted, if those are more than a batch."""

    def compute(self) -> torch.Tensor:
        return torch.zeros(int(self.count) if self.count > 8 else 1)


@pytest.mark.parametrize(
    ("value", "described"),
    [(torch.zeros(2, 3), "(2, 3) float32"), (torch.zeros(0), "(0,) float32"), ([1.0], "a value of type list")],
)
def test_a_value_that_is_not_one_number_is_described(value, described):
    problem = find_shape_problem("r.yaml", "m", "test", value)
    assert problem is not None
    assert all(fact in problem for fact in ("r.yaml: ", "'m'", described, " test", "average: macro"))
    assert find_shape_problem("r.yaml", "m", "test", torch.zeros(1)) is None
    assert find_shape_problem("r.yaml", "m", "test", 0.5) is None


@pytest.mark.parametrize(
    ("metric", "expected"),
    [
        (
            Fails,
            "metric-failed 'my_bad' 3 float32 int64 ValueError",
        ),
        (Shapes, "metric-failed 'my_bad' 32 float32"),
    ],
)
def test_a_metric_that_fails_in_an_evaluation_is_named(tiny_run, metric, expected):
    class Metrics(Plugin):
        name = "metrics"

        @hookimpl
        def build_metrics(self) -> MetricCollection:
            return MetricCollection({"good": MulticlassAccuracy(3), "bad": metric()}, prefix="my_")

    with expect_problem(expected, UsageError):
        tiny_run([Metrics()], epochs=1)
