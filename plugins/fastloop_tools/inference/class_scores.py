"""Counts of target and predicted class in an evaluation, and the metrics of each class."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric, MetricCollection

from fastloop import Plugin, Run, hookimpl
from fastloop_plugins.tasks.shared.two_classes import Decision, TwoClassOptions

KEY = "fastloop_class_counts"
"""Name of the additional metric. It is removed from the results."""


class Counts(Metric):
    """Counts pairs of target and predicted class on this process. Ignores outputs of other shapes: its value has no
    meaning.

    Attributes:
        matrix: (classes, classes), int64, target by prediction; None: no output had one score for each class.
        decision: That of the task between two classes.
    """

    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        self.matrix: Tensor | None = None
        self.decision = Decision()

    def reset(self) -> None:
        super().reset()
        self.matrix = None

    def update(self, predictions: Any, targets: Any) -> None:
        """Add (N, classes) scores and (N,) class ids."""
        if not classifies(predictions, targets) or len(targets) == 0:
            return
        classes = predictions.shape[1]
        # with 3 classes, target 1 and prediction 2 are the pair 5: row 1, column 2 of the matrix
        pairs = targets * classes + self.decision.classes(predictions)
        has_target = targets >= 0
        matrix = torch.bincount(pairs[has_target], minlength=classes**2).reshape(classes, classes)
        self.matrix = matrix if self.matrix is None else self.matrix + matrix

    def compute(self) -> Tensor:
        return torch.zeros(())


class ClassCounts(Plugin):
    """Counts the predictions of an evaluation by class, through an additional metric."""

    name = "class-counts"

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counts()

    @hookimpl(wrapper=True, trylast=True)
    def build_metrics(self, run: Run) -> Generator[None, MetricCollection | None, MetricCollection | None]:
        metrics = yield
        if metrics is not None:
            task = run.plugins.task
            if isinstance(task, TwoClassOptions):
                self.counts.decision = task.decided
            metrics.add_metrics({KEY: self.counts})
            self.counts = metrics[KEY]  # type: ignore[assignment]
        return metrics

    @hookimpl(wrapper=True, trylast=True)
    def evaluate(self) -> Generator[None, dict[str, float], dict[str, float]]:
        metrics = yield
        return {name: value for name, value in metrics.items() if name != KEY}

    def results(self, run: Run) -> dict[str, Any]:
        """``classes``, the metrics of each class, and ``confusion``, the counts over all processes: a row for each
        target.

        With a metric that scores types of entities: ``entities``, the same for each type.

        Both are empty for a task that does not classify. Every process must call it."""
        local = None if self.counts.matrix is None else self.counts.matrix.cpu()
        matrices = [matrix for matrix in run.processes.all_gather_object(local) if matrix is not None]
        if not matrices:
            return {"classes": [], "confusion": []}
        matrix = torch.stack(matrices).sum(0).tolist()
        classes = []
        for index, name in enumerate(class_names(run, len(matrix))):
            classes.append({"name": name, **scores(matrix, index), "samples": sum(matrix[index])})
        results: dict[str, Any] = {"classes": classes, "confusion": matrix}
        entities = entity_scores(run)
        if entities:
            results["entities"] = entities
        return results


def entity_scores(run: Run) -> list[dict[str, Any]]:
    """The scores of each type of entity: the attribute ``classes`` of a metric, which it sets when it is computed."""
    if run.metrics is None:
        return []
    for metric in run.metrics.values(copy_state=False):
        classes = getattr(metric, "classes", None)
        if isinstance(classes, list):
            return classes
    return []


def scored_classes(run: Run) -> dict[str, str]:
    """Metric -> the name of the only class that it scores, such as ``f1`` of two classes."""
    task = run.plugins.task
    return dict(task.scored_classes) if isinstance(task, TwoClassOptions) else {}


def classifies(predictions: Any, targets: Any) -> bool:
    """Whether the output of a batch has scores of two or more classes, (N, classes), and class ids as targets, (N,)."""
    if not isinstance(predictions, Tensor) or not isinstance(targets, Tensor) or predictions.dim() != 2:
        return False
    return targets.shape == predictions.shape[:1] and not targets.is_floating_point() and predictions.shape[1] > 1


def class_names(run: Run, count: int) -> list[str]:
    """The names in the model's configuration, or its attribute ``class_names``. Numbers of the classes if there are not
    ``count`` names."""
    model = run.unwrap_model()
    names = getattr(getattr(model, "config", None), "id2label", None) or getattr(model, "class_names", None) or {}
    return [str(names[index]) if len(names) == count else str(index) for index in range(count)]


def scores(matrix: list[list[int]], index: int) -> dict[str, float]:
    """Precision, recall and F1 of one class; 0 where a denominator is 0, as in scikit-learn."""
    hits = matrix[index][index]
    predicted = sum(row[index] for row in matrix)
    actual = sum(matrix[index])
    total = predicted + actual
    return {
        "precision": hits / predicted if predicted else 0.0,
        "recall": hits / actual if actual else 0.0,
        "f1": 2 * hits / total if total else 0.0,
    }
