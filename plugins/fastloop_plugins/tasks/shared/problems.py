"""Loss, metrics and predictions of text classification: for one class a text, sets of classes, and numbers.

Problem is the word of transformers, whose ``config.problem_type`` names the same three.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from fastloop import Output, RecipeError
from fastloop_plugins.tasks.shared.losses import LossOptions
from fastloop_plugins.tasks.shared.metrics import classifier_metrics, collect, make_metrics, sigmoids
from fastloop_plugins.tasks.shared.predicted_columns import predicted_columns

if TYPE_CHECKING:
    from torch import Tensor
    from torchmetrics import Metric, MetricCollection

    from fastloop import MetricMode
    from fastloop_plugins.tasks.shared.losses import ClassLoss
    from fastloop_plugins.tasks.shared.two_classes import Decision, TwoClassOptions


class SingleLabel:
    """One class for each text.

    Args:
        decide: Returns the decision between classes of some names.
    """

    modes: ClassVar[Mapping[str, MetricMode]] = {}

    def __init__(self, loss: ClassLoss, decide: Callable[[Sequence[str]], Decision]) -> None:
        self.loss = loss
        self.decide = decide

    def output(self, logits: Tensor, targets: Tensor) -> Output:
        """The loss of logits (N, C) and targets (N,) int64, computed in float32."""
        return Output(self.loss(logits.float(), targets), logits, targets)

    def metrics(
        self, names: Sequence[str], metric_classes: Mapping[str, type[Metric]], options: Mapping[str, Any], where: str
    ) -> MetricCollection:
        """See ``classifier_metrics``."""
        return classifier_metrics(metric_classes, options, where, len(names), self.decide(names))

    def column_names(self, names: Sequence[str]) -> list[str]:
        """The names of ``columns``."""
        return ["label", "probability", *(f"probability_{name}" for name in names)]

    def columns(self, output: Output, names: Sequence[str]) -> dict[str, list[Any]]:
        """See ``predicted_columns``."""
        return predicted_columns(output, names, self.decide(names))


class Regression:
    """One number for each text: mean squared error, as in transformers."""

    modes: ClassVar[Mapping[str, MetricMode]] = {"pearson": "max"}
    """Name -> mode, for metrics whose class in torchmetrics declares none."""

    def output(self, logits: Tensor, targets: Tensor) -> Output:
        """The loss of logits (N, 1) and targets (N,), computed in float32."""
        from torch.nn.functional import mse_loss

        values = logits.float().squeeze(1)
        return Output(mse_loss(values, targets.float()), values, targets.float())

    def metrics(
        self, names: Sequence[str], metric_classes: Mapping[str, type[Metric]], options: Mapping[str, Any], where: str
    ) -> MetricCollection:
        """``mse``, ``mae``, ``pearson`` and ``spearman``, and the recipe's metrics."""
        from torchmetrics import MeanAbsoluteError, MeanSquaredError, PearsonCorrCoef, SpearmanCorrCoef

        metrics: dict[str, Any] = {"mse": MeanSquaredError(), "mae": MeanAbsoluteError(), "pearson": PearsonCorrCoef()}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*will save all targets")  # two numbers for each text
            metrics["spearman"] = SpearmanCorrCoef()
        return collect(make_metrics(metric_classes, options, where, task_metrics=metrics), where)

    def column_names(self, names: Sequence[str]) -> list[str]:
        """The names of ``columns``."""
        return ["prediction"]

    def columns(self, output: Output, names: Sequence[str]) -> dict[str, list[Any]]:
        """``prediction``: the number of each text."""
        assert output.predictions is not None
        return {"prediction": output.predictions.tolist()}


class MultiLabel:
    """Any number of classes for each text: binary cross entropy of each class, as in transformers.

    Args:
        loss: With the weights of the classes, if they have any.
        threshold: A text has a class if its probability is above this.
    """

    modes: ClassVar[Mapping[str, MetricMode]] = {}

    def __init__(self, loss: ClassLoss, threshold: float) -> None:
        self.loss = loss
        self.threshold = threshold

    def output(self, logits: Tensor, targets: Tensor) -> Output:
        """The loss of logits (N, C) and targets (N, C) of 0.0 and 1.0, computed in float32."""
        return Output(self.loss.of_sets(logits.float(), targets), logits, targets)

    def metrics(
        self, names: Sequence[str], metric_classes: Mapping[str, type[Metric]], options: Mapping[str, Any], where: str
    ) -> MetricCollection:
        """``f1_micro``, ``f1_macro`` and ``subset_accuracy``: the share of texts with all classes right. And the
        recipe's metrics."""
        from torchmetrics.classification import MultilabelExactMatch, MultilabelF1Score
        from torchmetrics.wrappers import LambdaInputTransformer

        known = {"num_labels": len(names), "task": "multilabel", "threshold": self.threshold}
        metrics: dict[str, Any] = {
            "f1_micro": MultilabelF1Score(len(names), self.threshold, average="micro"),
            "f1_macro": MultilabelF1Score(len(names), self.threshold, average="macro"),
            "subset_accuracy": MultilabelExactMatch(len(names), self.threshold),
        }
        metrics = make_metrics(metric_classes, options, where, known, metrics)
        return collect(
            {name: LambdaInputTransformer(metric, sigmoids, _whole_numbers) for name, metric in metrics.items()},
            where,
        )

    def column_names(self, names: Sequence[str]) -> list[str]:
        """The names of ``columns``."""
        return ["labels", *(f"probability_{name}" for name in names)]

    def columns(self, output: Output, names: Sequence[str]) -> dict[str, list[Any]]:
        """``labels``: the classes of each text, and the probability of each class."""
        assert output.predictions is not None
        rows = sigmoids(output.predictions).tolist()
        columns: dict[str, list[Any]] = {"labels": []}
        for row in rows:
            chosen = [name for name, value in zip(names, row, strict=True) if value > self.threshold]
            columns["labels"].append(chosen)
        for index, name in enumerate(names):
            columns[f"probability_{name}"] = [row[index] for row in rows]
        return columns


def make_problem(
    label_type: str, loss: ClassLoss, task: TwoClassOptions, where: str
) -> SingleLabel | MultiLabel | Regression:
    """The problem of a label type.

    Args:
        loss: The task's option ``loss``.
        task: With the options ``threshold`` and ``positive``.
        where: The recipe and the task, for messages.

    Raises:
        RecipeError: An option is for another problem.
    """
    if label_type == "class":
        return SingleLabel(loss, task.decision)
    if task.positive is not None:
        raise RecipeError(
            f"is for two classes, and data.label_type is {label_type}.",
            code="unknown-option",
            place=f"{where}.positive",
            remedy="Remove it.",
        )
    _check_loss(label_type, loss.options, f"{where}.loss")
    threshold = task.threshold
    if label_type == "number" and threshold is not None:
        raise RecipeError(
            "is for classes, and data.label_type is number.",
            code="unknown-option",
            place=f"{where}.threshold",
            remedy="Remove it.",
        )
    if label_type == "number":
        return Regression()
    return MultiLabel(loss, 0.5 if threshold is None else threshold)


def _check_loss(label_type: str, options: LossOptions, where: str) -> None:
    """Refuse an option of the loss that sets of classes, or numbers, do not have.

    Args:
        where: The place of the option, for messages.

    Raises:
        RecipeError: There is one.
    """
    used = "mean squared error"
    remedy = "Remove it."
    if label_type == "classes":
        options = replace(options, class_weights=None)
        used = "binary cross entropy"
        remedy = "Remove it. Only class_weights are for several labels, too."
    if options != LossOptions():
        raise RecipeError(
            f"is for one class a text, and data.label_type is {label_type}, which uses {used}.",
            code="unknown-option",
            place=where,
            remedy=remedy,
        )


def _whole_numbers(targets: Tensor) -> Tensor:
    return targets.long()
