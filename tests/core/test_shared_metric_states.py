"""Metrics share their states if one function updates them with the same settings, whatever the first states are.

Modules:
    core/fastloop/shared_metric_states.py
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset
from torchmetrics import MeanSquaredError, Metric, MetricCollection
from torchmetrics.classification import (
    BinaryAUROC,
    BinaryHingeLoss,
    BinaryPrecision,
    BinaryRecall,
    MulticlassAccuracy,
    MulticlassAUROC,
    MulticlassF1Score,
    MulticlassFBetaScore,
    MulticlassPrecision,
)

from fastloop import Trainer
from fastloop.shared_metric_states import group_metrics, update_alike
from fastloop_plugins.tasks.tags.metrics import EntityScores
from fastloop_tools.trainer.function_metric import FunctionMetric


class Hits(Metric):
    """Counts predictions above a threshold, which it keeps under a name of its own."""

    def __init__(self, threshold: float) -> None:
        super().__init__()
        self._above = threshold
        self.add_state("hits", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, predictions: torch.Tensor, targets: torch.Tensor) -> None:
        self.hits = self.hits + (predictions > self._above).sum()

    def compute(self) -> torch.Tensor:
        return self.hits


class Weighted(Metric):
    """Sums predictions, times a weight that is a parameter."""

    def __init__(self, weight: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(weight))
        self.add_state("sum", torch.tensor(0.0), dist_reduce_fx="sum")

    def update(self, predictions: torch.Tensor, targets: torch.Tensor) -> None:
        self.sum = self.sum + (predictions * self.weight.detach()).sum()

    def compute(self) -> torch.Tensor:
        return self.sum


@pytest.mark.parametrize(
    ("first", "second", "share"),
    [
        (BinaryRecall(0.7), BinaryRecall(0.9), False),
        (BinaryRecall(0.7), BinaryPrecision(0.7), True),
        (BinaryRecall(), BinaryRecall(ignore_index=-100), False),
        (BinaryAUROC(thresholds=[0.2, 0.5]), BinaryAUROC(thresholds=[0.2, 0.6]), False),
        (BinaryAUROC(thresholds=[0.2, 0.5]), BinaryAUROC(thresholds=[0.2, 0.5]), True),
        (BinaryAUROC(), BinaryAUROC(max_fpr=0.5), True),
        (BinaryHingeLoss(squared=True), BinaryHingeLoss(), False),
        (MulticlassF1Score(3), MulticlassPrecision(3), True),
        (MulticlassF1Score(3), MulticlassFBetaScore(2.0, 3), True),
        (MulticlassF1Score(3), MulticlassPrecision(3, average="micro"), False),
        (MulticlassAccuracy(3), MulticlassAccuracy(3, top_k=2), False),
        (MulticlassAUROC(3), MulticlassAUROC(3, average="weighted"), False),
        (MeanSquaredError(), MeanSquaredError(num_outputs=2), False),
        (Hits(0.7), Hits(0.9), False),
        (Hits(0.7), Hits(0.7), True),
        (Weighted(1.0), Weighted(2.0), False),
        (Weighted(1.0), Weighted(1.0), True),
        (FunctionMetric(min), FunctionMetric(max), True),
        (EntityScores("f1", ["O", "B-a"], None), EntityScores("recall", ["O", "B-a"], None), True),
        (EntityScores("f1", ["O", "B-a"], None), EntityScores("f1", ["O", "B-a"], "IOB2"), False),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Metric) else str(value),
)
def test_metrics_share_states_by_their_settings(first: Metric, second: Metric, share: bool) -> None:
    metrics = MetricCollection({"first": first, "second": second})
    group_metrics(metrics)
    assert sorted(metrics.compute_groups.values()) == ([["first", "second"]] if share else [["first"], ["second"]])


@pytest.mark.parametrize("chosen", [False, [["first", "second"]]])
def test_groups_that_the_author_of_a_collection_chose_stay(chosen: Any) -> None:
    metrics = MetricCollection({"first": BinaryRecall(), "second": BinaryPrecision()}, compute_groups=chosen)
    before = dict(metrics.compute_groups)
    group_metrics(metrics)
    assert metrics.compute_groups == before


class Bias(nn.Module):
    """Predicts the same for all samples."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(()))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.bias.expand(len(inputs))


def test_metrics_that_agree_in_the_first_evaluation_differ_later(tmp_path):
    """The probabilities after the three epochs are 0.62, 0.71 and 0.76."""
    data = TensorDataset(torch.zeros(8), torch.ones(8))
    trainer = Trainer(
        Bias(),
        data,
        data,
        batch_size=8,
        loss=nn.functional.binary_cross_entropy_with_logits,
        metrics={"above_70": BinaryRecall(0.7), "above_90": BinaryRecall(0.9), "hits": Hits(1.0), "more": Hits(2.0)},
        optimizer="SGD",
        lr=1.0,
        epochs=3,
        output=tmp_path / "run",
    )
    metrics = trainer.fit()["validation"]
    assert (metrics["above_70"], metrics["above_90"]) == (1.0, 0.0)
    assert (metrics["hits"], metrics["more"]) == (8.0, 0.0)


def test_metrics_share_no_states_if_a_function_of_their_classes_updates_them() -> None:
    """As IntersectionOverUnion of torchmetrics, which needs torchvision, and its subclasses do."""

    class Loss(Metric):
        def __init__(self) -> None:
            super().__init__()
            self.add_state("sum", torch.tensor(0.0), dist_reduce_fx="sum")

        @staticmethod
        def error(prediction: torch.Tensor) -> torch.Tensor:
            return prediction.abs()

        def update(self, predictions: torch.Tensor, targets: torch.Tensor) -> None:
            self.sum = self.sum + self.error(predictions - targets).sum()

        def compute(self) -> torch.Tensor:
            return self.sum

    class Squared(Loss):
        @staticmethod
        def error(prediction: torch.Tensor) -> torch.Tensor:
            return prediction.square()

    for cls in (Loss, Squared):
        cls.__module__ = "torchmetrics.detection.loss"
    assert not update_alike(Loss(), Squared())
