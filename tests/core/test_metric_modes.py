"""Which values of a metric are better: read from torchmetrics and from plugins."""

from __future__ import annotations

import importlib
import inspect
import warnings
from typing import Any

import pytest
import torch
from recording_plugins import ScriptedScore
from torchmetrics import Metric, MetricCollection, PearsonCorrCoef
from torchmetrics.classification import (
    BinaryAccuracy,
    MulticlassAccuracy,
    MulticlassSpecificity,
    MultilabelHammingDistance,
)
from torchmetrics.wrappers import ClasswiseWrapper, LambdaInputTransformer, MinMaxMetric, MultitaskWrapper, Running

from fastloop import UsageError, hookimpl
from fastloop.metric_modes import mode_of, recorded_mode

PARTS = ("classification", "regression", "text", "retrieval", "clustering", "nominal", "segmentation", "wrappers")
ARGUMENTS = {
    "num_classes": 3,
    "num_labels": 3,
    "num_groups": 2,
    "task": "binary",
    "beta": 1.0,
    "p": 2.0,
    "min_precision": 0.5,
    "min_recall": 0.5,
    "min_sensitivity": 0.5,
    "min_specificity": 0.5,
    "things": {0},
    "stuffs": {1},
    "data_range": 1.0,
    "threshold": 0.5,
}
"""Parameters without a default -> an argument."""


def classes() -> list[type[Metric]]:
    """All classes of metrics that torchmetrics exports."""
    homes = [
        importlib.import_module("torchmetrics"),
        *(importlib.import_module(f"torchmetrics.{name}") for name in PARTS),
    ]
    listed = [getattr(home, name) for home in homes for name in home.__all__]
    metrics = [cls for cls in listed if isinstance(cls, type) and issubclass(cls, Metric)]
    return list(dict.fromkeys(metrics))


def construct(cls: type[Metric]) -> Metric | None:
    """A metric of a class; None: it needs another package, a model or another metric."""
    parameters = inspect.signature(cls).parameters.values()
    required = [
        each.name for each in parameters if each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD
    ]
    if not ARGUMENTS.keys() >= set(required):
        return None
    try:
        made: Any = cls(**{name: ARGUMENTS[name] for name in required})
    except (ImportError, RuntimeError, TypeError, ValueError, OSError):
        return None
    return made if isinstance(made, Metric) else None


def test_the_mode_of_every_class_of_torchmetrics_is_its_attribute():
    expected: dict[Any, str | None] = {True: "max", False: "min", None: None}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # classes that keep all samples, or moved to another module
        made = [metric for metric in map(construct, classes()) if metric is not None]
    assert len(made) > 120
    modes = {type(metric).__name__: mode_of(metric) for metric in made}
    assert modes == {type(metric).__name__: expected[metric.higher_is_better] for metric in made}
    assert {"min", "max", None} == set(modes.values())
    assert modes["MultilabelHammingDistance"] == modes["MeanSquaredLogError"] == modes["WordErrorRate"] == "min"
    assert modes["BinaryAccuracy"] == modes["MeanIoU"] == modes["SpearmanCorrCoef"] == "max"


@pytest.mark.parametrize(
    ("metric", "mode"),
    [
        (LambdaInputTransformer(MultilabelHammingDistance(3), torch.sigmoid), "min"),
        (LambdaInputTransformer(LambdaInputTransformer(BinaryAccuracy(), torch.sigmoid)), "max"),
        (ClasswiseWrapper(MulticlassAccuracy(3, average=None)), "max"),
        (Running(BinaryAccuracy(), window=2), "max"),
        (MinMaxMetric(BinaryAccuracy()), "max"),
        (MultitaskWrapper({"a": BinaryAccuracy()}), None),
        (1 - BinaryAccuracy(), None),
        (LambdaInputTransformer(PearsonCorrCoef(), torch.sigmoid), None),
    ],
    ids=["lambda", "nested", "classwise", "running", "minmax", "several tasks", "arithmetic", "undeclared"],
)
def test_a_wrapper_has_the_mode_of_its_metric_and_arithmetic_has_none(metric, mode):
    assert mode_of(metric) == mode


@pytest.mark.parametrize(("name", "mode"), [("error", "max"), ("accuracy", "min")])
@pytest.mark.parametrize("plugin", ["checkpoint-best", "early-stopping"])
def test_a_name_says_nothing_about_the_direction(tiny_run, plugin, name, mode):
    """Both names look like the other direction."""

    class Scored(ScriptedScore):
        adds_metrics = {name: mode}

        @hookimpl(wrapper=True)
        def evaluate(self):
            metrics = yield
            return {**metrics, name: next(self.values)}

    values = (0.5, 0.9, 0.7) if mode == "max" else (0.9, 0.5, 0.7)
    options = {"monitor": name} | ({"patience": 1} if plugin == "early-stopping" else {})
    result = tiny_run([{plugin: options}, Scored(*values)], epochs=3)
    assert result.summary["metric_modes"] == {"loss": "min", name: mode}
    if plugin == "checkpoint-best":
        assert result.summary["best"]["step"] == 18
    assert result.summary["epochs"] == 3
    assert result.summary["status"] == ("stopped" if plugin == "early-stopping" else "completed")


@pytest.mark.parametrize("plugin", ["checkpoint-best", "early-stopping"])
@pytest.mark.parametrize("mode", ["auto", "max"])
def test_auto_is_refused_where_no_one_declares_a_direction(tiny_run, plugin, mode):
    metrics = MetricCollection({"r": MulticlassSpecificity(3)})  # torchmetrics does not say
    options = {"plugins": [{plugin: {"monitor": "r", "mode": mode}}], "epochs": 1, "metrics": metrics}
    if mode == "auto":
        with pytest.raises(UsageError, match=rf"plugins\.{plugin}\.mode: .*'r'.* mode: min or mode: max"):
            tiny_run(**options)
    else:
        assert tiny_run(**options).summary["metric_modes"] == {"loss": "min", "r": None}


def test_the_metrics_of_tasks_declare_their_direction():
    from fastloop_plugins.tasks.heads.metrics import classifier_metrics
    from fastloop_plugins.tasks.heads.problems import MultiLabel, Regression
    from fastloop_plugins.tasks.tags.metrics import tag_metrics

    def modes(metrics: MetricCollection) -> dict[str, str | None]:
        return {str(name): mode_of(metric) for name, metric in metrics.items()}

    assert set(modes(classifier_metrics({}, {}, "r", 2, 0.5)).values()) == {"max"}
    assert set(modes(tag_metrics(["O", "B-a"], None, {}, {}, "r")).values()) == {"max"}
    assert set(modes(MultiLabel(0.5).metrics(["a", "b"], {}, {}, "r")).values()) == {"max"}
    regression = modes(Regression().metrics(["a"], {}, {}, "r")) | Regression.modes
    assert regression == {"mse": "min", "mae": "min", "pearson": "max", "spearman": "max"}


@pytest.mark.parametrize("modes", [None, {}, {"f1": None}, {"f1": 3}])
def test_a_summary_without_a_direction_has_none(modes):
    assert recorded_mode({"metric_modes": modes}, "f1") is None
