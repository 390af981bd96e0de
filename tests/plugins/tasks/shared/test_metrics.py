"""Metrics by name, in tasks of classes, against torchmetrics.

Modules:
    plugins/fastloop_plugins/tasks/shared/metrics.py
    plugins/fastloop_plugins/tasks/shared/two_classes.py
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from text_helpers import text_run
from torch import Tensor
from torchmetrics import AUROC, AveragePrecision, F1Score, MatthewsCorrCoef
from torchmetrics.classification import (
    BinaryAUROC,
    BinaryFBetaScore,
    MulticlassAccuracy,
    MulticlassAUROC,
    MulticlassAveragePrecision,
    MulticlassCalibrationError,
    MulticlassHingeLoss,
)
from torchmetrics.functional.classification import binary_auroc, binary_f1_score, multiclass_recall
from training_runs import execute

from fastloop.cli.summary import summary_rows
from fastloop.errors import RecipeError
from fastloop.testing import expect_problem
from fastloop_plugins.tasks.shared.metrics import (
    classifier_metrics,
    names_of_scored_metrics,
    with_probabilities,
    with_sigmoids,
)
from fastloop_plugins.tasks.shared.two_classes import Decision
from fastloop_plugins.tasks.tags.metrics import tag_metrics


def validation_logits(run: Any) -> tuple[Tensor, Tensor]:
    """The logits and labels of the validation split, one sample at a time."""
    dataset, collate = run.datasets["validation"], run.loaders.collators["validation"]
    batches = [collate([dataset[index]]).inputs for index in range(len(dataset))]
    model = run.unwrap_model().eval()
    with torch.no_grad():
        logits = [model(**{key: value for key, value in batch.items() if key != "labels"}).logits for batch in batches]
    return torch.cat(logits), torch.cat([batch["labels"] for batch in batches])


def test_metrics_and_a_threshold_beside_the_built_in_ones():
    metrics = {
        "auroc": {"type": "BinaryAUROC"},
        "recall": {"type": "MulticlassRecall", "average": "macro"},
        "acc": {"type": "Accuracy"},
    }
    run = text_run(metrics=metrics, threshold=0.4)
    execute(run)
    logits, labels = validation_logits(run)
    probability, found = logits.softmax(1)[:, 1], run.state.metrics["validation"]
    predicted = (probability > 0.4).long()
    assert set(found) == {"loss", "accuracy", "f1", *metrics}
    assert found["accuracy"] == pytest.approx((predicted == labels).float().mean().item())
    assert found["f1"] == pytest.approx(binary_f1_score(predicted, labels).item())
    assert found["auroc"] == pytest.approx(binary_auroc(probability, labels).item(), abs=1e-6)
    assert found["recall"] == pytest.approx(multiclass_recall(logits, labels, 2).item())
    assert found["acc"] == pytest.approx((logits.argmax(1) == labels).float().mean().item())


def test_a_metric_of_two_classes_for_three_is_refused():
    with expect_problem("wrong-metric r.m.type: BinaryAUROC 3 Multiclass", RecipeError):
        classifier_metrics({"m": BinaryAUROC}, {"m": {}}, "r", 3, Decision())


@pytest.mark.parametrize("make", [classifier_metrics, tag_metrics], ids=["texts", "words"])
@pytest.mark.parametrize(
    "cls", [MulticlassAUROC, MulticlassAveragePrecision, MulticlassCalibrationError, MulticlassHingeLoss]
)
def test_metrics_of_probabilities_get_them_if_logits_look_like_some(cls, make):
    """torchmetrics takes values between 0 and 1 for probabilities."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.rand(40, 3, generator=generator)
    labels = torch.randint(3, (40,), generator=generator)
    if make is classifier_metrics:
        metrics = classifier_metrics({"m": cls}, {"m": {}}, "r", 3, Decision())
    else:
        metrics = tag_metrics(["O", "B-a", "B-b"], None, {"m": cls}, {"m": {}}, "r")
    expected = cls(3)
    metrics["m"].update(logits, labels)
    expected.update(logits.softmax(1), labels)
    assert metrics["m"].compute() == pytest.approx(expected.compute().item())


class Doubled(BinaryFBetaScore):
    """A metric of a user."""

    def __init__(self) -> None:
        super().__init__(beta=2.0)


class OneOfSeveral(MulticlassAUROC):
    """A metric of a user."""


class OwnExponentials(MulticlassAUROC):
    """A metric of a user, of logits."""

    def update(self, preds: torch.Tensor, target: torch.Tensor) -> None:
        super().update(preds.exp(), target)


class OwnThreshold(BinaryFBetaScore):
    """A metric of a user, of logits."""

    def update(self, preds: torch.Tensor, target: torch.Tensor) -> None:
        super().update((preds > 0).long(), target)


@pytest.mark.parametrize(
    ("make", "metric", "is_inherited"),
    [
        (with_probabilities, OneOfSeveral(3), True),
        (with_probabilities, OwnExponentials(3), False),
        (with_sigmoids, Doubled(), True),
        (with_sigmoids, OwnThreshold(beta=2.0), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_derived_metric_gets_probabilities_unless_it_has_an_update_of_its_own(make, metric, is_inherited):
    generator = torch.Generator().manual_seed(0)
    if make is with_probabilities:
        logits = torch.rand(40, 3, generator=generator)
        labels = torch.randint(3, (40,), generator=generator)
        probabilities = logits.softmax(1)
    else:
        logits = torch.rand(40, generator=generator) - 0.5 * (not is_inherited)
        labels = torch.randint(2, (40,), generator=generator)
        probabilities = logits.sigmoid()
    expected = copy.deepcopy(metric)
    expected.update(probabilities if is_inherited else logits, labels)
    other = copy.deepcopy(metric)
    other.update(logits if is_inherited else probabilities, labels)
    made = make({"m": metric})["m"]
    made.update(logits, labels)
    assert made.compute() == pytest.approx(expected.compute().item())
    assert made.compute() != pytest.approx(other.compute().item())


class OwnRule(MulticlassAccuracy):
    """A metric of a user, of logits."""

    def update(self, preds: torch.Tensor, target: torch.Tensor) -> None:
        super().update((preds[..., 1] > 1).long(), target)


def test_a_derived_metric_with_an_update_of_its_own_gets_logits_beside_a_threshold():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(40, 2, generator=generator)
    labels = torch.randint(2, (40,), generator=generator)
    metrics = classifier_metrics({"m": OwnRule}, {"m": {}}, "r", 2, Decision(threshold=0.4))
    expected = OwnRule(2)
    metrics["m"].update(logits, labels)
    expected.update(logits, labels)
    assert metrics["m"].compute() == pytest.approx(expected.compute().item())


@pytest.mark.parametrize(
    ("cls", "arguments"),
    [(Doubled, {}), *((cls, {"task": "binary"}) for cls in (AUROC, F1Score, AveragePrecision, MatthewsCorrCoef))],
)
@pytest.mark.parametrize("positive", [0, 1])
def test_metrics_of_two_classes_get_the_probability_of_one_however_they_are_named(cls, arguments, positive):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(40, 2, generator=generator)
    labels = torch.randint(2, (40,), generator=generator)
    metrics = classifier_metrics({"m": cls}, {"m": arguments}, "r", 2, Decision(positive=positive))
    assert names_of_scored_metrics({"m": cls}, {"m": arguments}, 2) == ["f1", "m"]
    expected = cls(**arguments)
    metrics["m"].update(logits, labels)
    expected.update(logits.softmax(1)[:, positive], (labels == positive).long())
    assert metrics["m"].compute() == pytest.approx(expected.compute().item())


@pytest.mark.parametrize("threshold", [None, 0.4])
@pytest.mark.parametrize(("positive", "chosen"), [(None, 1), ("1", 1), ("0", 0), (0, 0)])
def test_the_recipe_names_the_class_that_metrics_of_two_classes_score(positive, chosen, threshold):
    metrics = {"auroc": {"type": "BinaryAUROC"}, "hits": {"type": "BinaryRecall"}}
    run = text_run(metrics=metrics, threshold=threshold, positive=positive)
    summary = execute(run)
    logits, labels = validation_logits(run)
    values = run.state.metrics["validation"]
    probability = logits.softmax(1)[:, chosen]
    predicted = (probability > (threshold or 0.5)).long()  # whether the chosen class is predicted
    targets = (labels == chosen).long()
    if threshold is None:
        assert 0 < predicted.sum() < len(predicted)
    assert values["f1"] == pytest.approx(binary_f1_score(predicted, targets).item())
    assert values["hits"] == pytest.approx((predicted * targets).sum().item() / targets.sum().item())
    assert values["auroc"] == pytest.approx(binary_auroc(probability, targets).item(), abs=1e-6)
    assert values["accuracy"] == pytest.approx((predicted == targets).float().mean().item())
    assert summary["metric_classes"] == dict.fromkeys(("f1", "auroc", "hits"), str(chosen))
    assert summary_rows(summary, run.folder)["positive"] == f"{chosen} (f1, auroc, hits)"
