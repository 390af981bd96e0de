"""Metrics of tasks with classes or numbers: ``accuracy`` and ``f1``, and those of the recipe, which names classes of
torchmetrics, of a file or of a package."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from traceback import walk_tb
from typing import TYPE_CHECKING, Any

from fastloop import RecipeError, UsageError
from fastloop.errors import did_you_mean
from fastloop.problem import typed_clause
from fastloop.runtime.delayed_imports import stand_in_for

if TYPE_CHECKING:
    from torch import Tensor
    from torchmetrics import Metric, MetricCollection

    from fastloop.recipe import Recipe
    from fastloop_plugins.tasks.shared.two_classes import Decision


def import_torchmetrics() -> None:
    """Import torchmetrics without ``scipy.signal``, which takes a second of processor time.

    torchmetrics 1.9 imports it only to restore ``scipy.signal.hamming``, which a package of audio metrics uses. It has
    no switch for this. Commands delay the import anyway; here a script that calls ``Trainer`` delays it, too.

    Raises:
        UsageError: A package that torchmetrics imports if it is installed fails, such as a torchvision for another
            torch.
    """
    if "torchmetrics" in sys.modules:
        return
    try:
        with stand_in_for("scipy.signal"):
            import torchmetrics  # noqa: F401
    except Exception as error:
        callers = [frame.f_globals["__name__"].partition(".")[0] for frame, _ in walk_tb(error.__traceback__)]
        package = [name for name in callers if name != "torch"][-1]  # torch raises errors about what others register
        raise UsageError(
            f"torchmetrics cannot be imported: the package {package} fails with {typed_clause(error)}.",
            code="import-failed",
            remedy=f"Install the version that fits your torch, or remove it: pip uninstall {package}",
        ) from error


def find_metrics(options: Mapping[str, Mapping[str, Any]], recipe: Recipe, key: str) -> dict[str, type[Metric]]:
    """Name -> class.

    Args:
        options: Name -> ``{type: class of torchmetrics or file.py:name, and its arguments}``.
        key: The recipe's key, for messages.

    Raises:
        RecipeError: A class does not exist, or is no metric.
    """
    import_torchmetrics()
    if not options:
        return {}
    import torchmetrics
    from torchmetrics import classification, regression

    from fastloop.recipe.references import import_object

    by_name: dict[str, Any] = {}
    for module in (torchmetrics, classification, regression):
        for name in module.__all__:
            by_name[name] = getattr(module, name)
    classes: dict[str, type[Metric]] = {}
    for name, arguments in options.items():
        place = f"{recipe.where}: {key}.{name}.type"
        kind = str(arguments.get("type"))
        if ":" in kind:
            cls = import_object(kind, recipe, f"{key}.{name}.type")
            if not (isinstance(cls, type) and issubclass(cls, torchmetrics.Metric)):
                raise RecipeError(
                    f"{kind} is not a subclass of torchmetrics.Metric.",
                    code="unknown-metric",
                    place=place,
                    remedy="Write a class with the methods update and compute. Functions of arrays, such as those of "
                    "scikit-learn, work in Python: Trainer(metrics={NAME: function}).",
                )
        elif kind in by_name:
            cls = by_name[kind]
        else:
            raise RecipeError(
                f"torchmetrics has no {kind!r}.",
                code="unknown-metric",
                place=place,
                remedy=did_you_mean(kind, by_name),
            )
        classes[name] = cls
    return classes


def make_metrics(
    metric_classes: Mapping[str, type[Metric]],
    options: Mapping[str, Mapping[str, Any]],
    where: str,
    task_arguments: Mapping[str, Any] | None = None,
    task_metrics: Mapping[str, Metric] | None = None,
) -> dict[str, Metric]:
    """Name -> metric: those of the task, and those of the recipe.

    Args:
        metric_classes: The result of ``find_metrics``.
        where: The recipe and the key, for messages.
        task_arguments: Arguments that the task knows, for the metrics that have such a parameter.
        task_metrics: Name -> metric of the task.

    Raises:
        RecipeError: A metric has the name of one of the task, or does not take its arguments.
    """
    metrics = dict(task_metrics or {})
    for name, cls in metric_classes.items():
        if name in metrics:
            raise RecipeError(
                f"the task has a metric {name!r}.",
                code="name-taken",
                place=f"{where}.{name}",
                remedy="Call this one something else.",
            )
        arguments = {key: value for key, value in options[name].items() if key != "type"}
        parameters = inspect.signature(cls).parameters
        for key, value in (task_arguments or {}).items():
            if key in parameters:
                arguments.setdefault(key, value)
        try:
            metrics[name] = cls(**arguments)
        except (TypeError, ValueError) as error:
            raise RecipeError(str(error), code="invalid-value", place=f"{where}.{name}") from None
    return metrics


def collect(metrics: Mapping[str, Metric], where: str) -> MetricCollection:
    """The metrics as one collection.

    Raises:
        RecipeError: A name cannot be used.
    """
    from torchmetrics import MetricCollection

    try:
        return MetricCollection(dict(metrics))
    except KeyError as error:  # names of nn.Module's attributes, such as float
        raise RecipeError(
            f"{error.args[0]}.", code="name-taken", place=where, remedy="Call the metric something else."
        ) from None


def classifier_metrics(
    metric_classes: Mapping[str, type[Metric]],
    options: Mapping[str, Mapping[str, Any]],
    where: str,
    num_classes: int,
    decision: Decision,
) -> MetricCollection:
    """``accuracy`` and ``f1``, and the recipe's metrics, of logits (N, num_classes) and labels (N,).

    Metrics of two classes, such as ``BinaryAUROC``, get the probability of the positive class, and ``f1`` of two
    classes is its own: see ``names_of_binary_metrics``. Metrics of probabilities, such as ``MulticlassAUROC``, get
    those: see ``with_probabilities``. With a threshold, metrics of predicted classes, such as ``MulticlassRecall``,
    get the classes that it decides. A subclass of these with an ``update`` of its own gets logits.

    Raises:
        RecipeError: A name is taken, or a metric is for two classes and there are others.
    """
    from torchmetrics.classification import (
        BinaryF1Score,
        MulticlassAccuracy,
        MulticlassF1Score,
    )
    from torchmetrics.wrappers import LambdaInputTransformer

    threshold = decision.threshold
    metrics: dict[str, Any] = {
        "accuracy": MulticlassAccuracy(num_classes, average="micro"),
        "f1": MulticlassF1Score(num_classes, average="macro"),
    }
    if threshold is not None:
        metrics["accuracy"] = LambdaInputTransformer(metrics["accuracy"], transform_pred=decision.classes)
    if num_classes == 2:
        f1 = BinaryF1Score(validate_args=False)
        metrics["f1"] = LambdaInputTransformer(f1, decision.positives, decision.are_positive)
    arguments: dict[str, Any] = {"num_classes": num_classes, "task": "multiclass"}
    if threshold is not None:
        arguments["threshold"] = threshold
    metrics = with_probabilities(make_metrics(metric_classes, options, where, arguments, metrics))
    if threshold is not None:
        for name in metric_classes:
            if _takes_predicted_classes(metrics[name]):
                metrics[name] = LambdaInputTransformer(metrics[name], transform_pred=decision.classes)
    for name in names_of_binary_metrics(metric_classes, options):
        if num_classes != 2:
            raise RecipeError(
                f"{metric_classes[name].__name__} is for two classes, and the data has {num_classes}.",
                code="wrong-metric",
                place=f"{where}.{name}.type",
                remedy="Use a metric of several classes: in torchmetrics, its name begins with Multiclass.",
            )
        metrics[name] = LambdaInputTransformer(metrics[name], decision.probability, decision.are_positive)
    return collect(metrics, where)


def names_of_scored_metrics(
    metric_classes: Mapping[str, type[Metric]], options: Mapping[str, Mapping[str, Any]], num_classes: int
) -> list[str]:
    """The names of the metrics of ``classifier_metrics`` that score one of two classes."""
    return ["f1", *names_of_binary_metrics(metric_classes, options)] if num_classes == 2 else []


def names_of_binary_metrics(
    metric_classes: Mapping[str, type[Metric]], options: Mapping[str, Mapping[str, Any]]
) -> list[str]:
    """The names of the recipe's metrics that take the probability of one class: those of a class such as
    ``BinaryAUROC`` or one derived from it, and those such as ``AUROC`` with ``task: binary``."""
    names = []
    for name, cls in metric_classes.items():
        has_binary_class = any(base.__name__.startswith("Binary") for base in cls.__mro__)
        if has_binary_class or options[name].get("task") == "binary":
            names.append(name)
    return names


def with_probabilities(metrics: Mapping[str, Metric]) -> dict[str, Metric]:
    """The same metrics of logits (N, classes), with probabilities for those that compute with them.

    torchmetrics takes logits for probabilities if all of an update are between 0 and 1, as a model before training may
    give them. So does a class that inherits ``update``. A class with an ``update`` of its own gets logits.
    """
    from torchmetrics.classification import (
        MulticlassCalibrationError,
        MulticlassHingeLoss,
        MulticlassPrecisionRecallCurve,
    )
    from torchmetrics.wrappers import LambdaInputTransformer

    of_probabilities = (MulticlassCalibrationError, MulticlassHingeLoss, MulticlassPrecisionRecallCurve)
    made = dict(metrics)
    for name, metric in metrics.items():
        if isinstance(metric, of_probabilities) and not _has_own_update(metric):
            made[name] = LambdaInputTransformer(metric, transform_pred=_probabilities)
    return made


def with_sigmoids(metrics: Mapping[str, Metric]) -> dict[str, Metric]:
    """The same metrics of logits, with probabilities for those of two classes and of sets of classes. See
    ``with_probabilities``, also about a class with an ``update`` of its own."""
    from torchmetrics.wrappers import LambdaInputTransformer

    made = dict(metrics)
    for name, metric in metrics.items():
        names = [base.__name__ for base in type(metric).__mro__ if _is_of_torchmetrics(base)]
        is_of_sigmoids = any(base.startswith(("Binary", "Multilabel")) for base in names)
        if is_of_sigmoids and not _has_own_update(metric):
            made[name] = LambdaInputTransformer(metric, transform_pred=sigmoids)
    return made


def _takes_predicted_classes(metric: Metric) -> bool:
    """Whether a metric of several classes compares predicted classes, not probabilities, with the labels.

    The object decides, not the recipe's class: ``MatthewsCorrCoef`` with ``task: multiclass`` makes a
    ``MulticlassMatthewsCorrCoef``, which is a ``MulticlassConfusionMatrix``.
    """
    from torchmetrics.classification import MulticlassConfusionMatrix, MulticlassStatScores

    return isinstance(metric, MulticlassStatScores | MulticlassConfusionMatrix) and not _has_own_update(metric)


def _has_own_update(metric: Metric) -> bool:
    """Whether a class of a user defines the metric's ``update``, and not one of torchmetrics."""
    for cls in type(metric).__mro__:
        if "update" in vars(cls):
            return not _is_of_torchmetrics(cls)
    return False


def _is_of_torchmetrics(cls: type) -> bool:
    return cls.__module__.partition(".")[0] == "torchmetrics"


def sigmoids(logits: Tensor) -> Tensor:
    """The probability of each class of a set, float32."""
    return logits.float().sigmoid()


def _probabilities(logits: Tensor) -> Tensor:
    """The probability of each class, float32."""
    return logits.float().softmax(1)
