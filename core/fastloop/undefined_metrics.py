"""Metrics of torchmetrics that are not defined on a split, for which it returns a number nevertheless.

AUROC of a split with one class is 0.0, for example, and so is Spearman's coefficient of constants. For some of them,
torchmetrics warns; these functions read the states that the value is computed from. The accuracy of predictions that
are NaN is the share of one class.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torchmetrics import Metric

NEAR_ZERO = 1e-4
"""Sum of squared deviations below which torchmetrics' ``R2Score`` takes targets as constant."""
NO_POSITIVES = "no target of the split is positive"
NO_NEGATIVES = "no target of the split is negative"
ONE_CLASS = "all targets of the split have one class"
MISSING_CLASS = "a class has no target, or all targets, of the split"
CONSTANT_TARGETS = "all targets of the split are equal"
CONSTANT_PREDICTIONS = "all predictions for the split are equal"


@dataclass(frozen=True)
class UndefinedMetricRule:
    """How to find out whether metrics of some classes are undefined.

    Attributes:
        kinds: The classes.
        find_reason: A metric, with states of all processes -> why it is undefined, or None. It reads the device.
        values: All values that torchmetrics returns for an undefined metric; None: any value.
    """

    kinds: tuple[type, ...]
    find_reason: Callable[[Any], str | None]
    values: tuple[float, ...] | None = None


def why_undefined(metric: Metric, value: float) -> str | None:
    """Why the newest value of a metric says nothing, or None.

    Every process must call it with the same value: states are reduced over processes. A metric that was given a
    ``zero_division`` other than 0 has a value by definition, and so has a metric of a class with a ``compute`` of its
    own, which is derived from one of torchmetrics.
    """
    metric = unwrapped(metric)
    if not _is_of_torchmetrics(metric, "compute"):
        return None
    for rule in _rules():
        if not isinstance(metric, rule.kinds):
            continue
        if rule.values is not None and value not in rule.values:
            return None
        with metric.sync_context(
            dist_sync_fn=metric.dist_sync_fn,
            process_group=metric.process_group,
            should_sync=metric.sync_on_compute,  # else processes have different values
        ):
            return rule.find_reason(metric)
    return None


def _is_of_torchmetrics(metric: Metric, method: str) -> bool:
    """Whether a class of torchmetrics defines a method of the metric, and not one that is derived from it."""
    for cls in type(metric).__mro__:
        if method in vars(cls):
            return cls.__module__.startswith("torchmetrics.")
    return False


def misreads_nan(metric: Metric) -> bool:
    """Whether a metric gives a number for predictions that are NaN: those of torchmetrics take NaN for the first class,
    or for a probability of 0.

    Some have a rule for NaN: those of aggregation, of nominal values (``nan_strategy``), and ``MultioutputWrapper``
    (``remove_nans``). A metric of a task or of a user with an ``update`` of its own may use NaN for values that do not
    count.
    """
    from torchmetrics.aggregation import BaseAggregator

    metric = unwrapped(metric)
    if not _is_of_torchmetrics(metric, "update") or isinstance(metric, BaseAggregator):
        return False
    return not hasattr(metric, "nan_strategy") and not getattr(metric, "remove_nans", False)


def ignored_target(metric: Metric) -> int | None:
    """The target of the rows that a metric ignores, its ``ignore_index``; None: it counts all rows."""
    index = getattr(unwrapped(metric), "ignore_index", None)
    return index if isinstance(index, int) else None


def unwrapped(metric: Metric) -> Metric:
    """The metric inside wrappers, such as those that change its inputs."""
    from torchmetrics import Metric
    from torchmetrics.wrappers.abstract import WrapperMetric

    while isinstance(metric, WrapperMetric):
        inner = [child for child in metric.children() if isinstance(child, Metric)]
        if len(inner) != 1:
            break
        metric = inner[0]
    return metric


@cache
def _rules() -> list[UndefinedMetricRule]:
    from torchmetrics import classification as classes
    from torchmetrics import regression

    of_positives = (
        classes.BinaryFBetaScore,
        classes.BinaryPrecision,
        classes.BinaryRecall,
        classes.MultilabelFBetaScore,
        classes.MultilabelPrecision,
        classes.MultilabelRecall,
    )
    of_negatives = (
        classes.BinaryNegativePredictiveValue,
        classes.BinarySpecificity,
        classes.MultilabelNegativePredictiveValue,
        classes.MultilabelSpecificity,
    )
    of_agreement = (
        classes.BinaryCohenKappa,
        classes.BinaryMatthewsCorrCoef,
        classes.MulticlassCohenKappa,
        classes.MulticlassMatthewsCorrCoef,
        classes.MultilabelMatthewsCorrCoef,
    )
    of_roc_curve = (
        classes.BinaryAUROC,
        classes.BinaryEER,
        classes.BinaryLogAUC,
        classes.MulticlassAUROC,
        classes.MulticlassEER,
        classes.MulticlassLogAUC,
        classes.MultilabelAUROC,
        classes.MultilabelEER,
        classes.MultilabelLogAUC,
    )
    return [
        UndefinedMetricRule(of_positives, _without_positives, (0.0,)),
        UndefinedMetricRule(of_negatives, _without_negatives, (0.0,)),
        UndefinedMetricRule(
            (classes.BinaryJaccardIndex, classes.MultilabelJaccardIndex), _without_positives_in_matrix, (0.0,)
        ),
        UndefinedMetricRule(of_agreement, _one_class),
        UndefinedMetricRule(
            (classes.BinaryAveragePrecision, classes.MultilabelAveragePrecision), _without_recall, (0.0,)
        ),
        UndefinedMetricRule(of_roc_curve, _without_curve),
        UndefinedMetricRule((regression.SpearmanCorrCoef,), _constant_values),
        UndefinedMetricRule((regression.R2Score, regression.ExplainedVariance), _constant_squares),
    ]


def _without_positives(metric: Any) -> str | None:
    if metric.zero_division != 0 or not isinstance(metric.tp, Tensor):  # a list has a value for each sample
        return None
    return NO_POSITIVES if int((metric.tp + metric.fn).sum()) == 0 else None


def _without_negatives(metric: Any) -> str | None:
    if getattr(metric, "zero_division", 0) != 0 or not isinstance(metric.tn, Tensor):
        return None
    return NO_NEGATIVES if int((metric.tn + metric.fp).sum()) == 0 else None


def _without_positives_in_matrix(metric: Any) -> str | None:
    if metric.zero_division != 0:
        return None
    return NO_POSITIVES if int(metric.confmat[..., 1, :].sum()) == 0 else None


def _one_class(metric: Any) -> str | None:
    samples = metric.confmat.sum(-1)  # of each class; the rows of the matrix are the targets
    if samples.dim() > 1:  # labels, of which each has a matrix of its own
        samples = samples.sum(0)
    return ONE_CLASS if int((samples > 0).sum()) < 2 else None


def _without_curve(metric: Any) -> str | None:
    """For metrics of the ROC curve, which needs positive and negative targets of each class."""
    positives, negatives = _target_counts(metric)
    if getattr(metric, "average", None) == "weighted":
        has_weight = positives > 0  # a class without targets has none
        positives = positives[has_weight]
        negatives = negatives[has_weight]
    if positives.numel() == 1:
        return ONE_CLASS if int(positives) == 0 or int(negatives) == 0 else None
    return MISSING_CLASS if not bool(((positives > 0) & (negatives > 0)).all()) else None


def _without_recall(metric: Any) -> str | None:
    positives, _ = _target_counts(metric)
    return NO_POSITIVES if int(positives.sum()) == 0 else None


def _target_counts(metric: Any) -> tuple[Tensor, Tensor]:
    """Positive and negative targets of each class, from the state of a curve: (classes,) each."""
    from torchmetrics.utilities import dim_zero_cat

    if metric.thresholds is not None:
        # (thresholds, 2, 2), or (thresholds, classes, 2, 2), by target and prediction; each threshold has all targets
        counts = metric.confmat[0].sum(-1).view(-1, 2)
        return counts[:, 1], counts[:, 0]
    targets = dim_zero_cat(metric.target)
    classes = getattr(metric, "num_classes", None)
    if classes is not None and getattr(metric, "average", None) != "micro":  # class numbers
        positives = torch.bincount(targets.flatten(), minlength=classes)
        return positives, targets.numel() - positives
    columns = targets.reshape(-1, getattr(metric, "num_labels", None) or 1)  # of 0 and 1; others are ignored
    return (columns == 1).sum(0), (columns == 0).sum(0)


def _constant_values(metric: Any) -> str | None:
    from torchmetrics.utilities import dim_zero_cat

    for values, reason in ((metric.target, CONSTANT_TARGETS), (metric.preds, CONSTANT_PREDICTIONS)):
        columns = dim_zero_cat(values)
        if bool((columns == columns[:1]).all(0).any()):
            return reason
    return None


def _constant_squares(metric: Any) -> str | None:
    from torchmetrics import ExplainedVariance

    if isinstance(metric, ExplainedVariance):
        squares = metric.sum_squared_target
        total = metric.sum_target
        count = metric.num_obs
    else:  # R2Score names the sums of targets so
        squares = metric.sum_squared_error
        total = metric.sum_error
        count = metric.total
    deviations = squares - total * total / count
    return CONSTANT_TARGETS if bool((deviations.abs() <= NEAR_ZERO).any()) else None
