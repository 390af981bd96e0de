"""Which values of a metric are better: read from torchmetrics and from plugins.

Modules:
    core/fastloop/metric_modes.py
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from metric_classes import classes, construct
from recording_plugins import ScriptedScore
from torchmetrics import MetricCollection, PearsonCorrCoef
from torchmetrics.classification import (
    BinaryAccuracy,
    MulticlassAccuracy,
    MulticlassSpecificity,
    MultilabelHammingDistance,
)
from torchmetrics.wrappers import ClasswiseWrapper, LambdaInputTransformer, MinMaxMetric, MultitaskWrapper, Running

from fastloop import UsageError, hookimpl
from fastloop.metric_modes import mode_of, recorded_mode
from fastloop.testing import expect_problem


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


class Errors(BinaryAccuracy):
    """A metric of a user, with the other direction than that of its base class."""

    def compute(self) -> torch.Tensor:
        return 1 - super().compute()


class DeclaredErrors(Errors):
    higher_is_better = False


class Hits(BinaryAccuracy):
    """A metric of a user, with the value of its base class."""


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
        (Errors(), None),
        (LambdaInputTransformer(Errors(), torch.sigmoid), None),
        (DeclaredErrors(), "min"),
        (Hits(), "max"),
    ],
    ids=[
        "lambda", "nested", "classwise", "running", "minmax", "several tasks", "arithmetic", "undeclared", "own value",
        "own value inside", "declared", "inherited value",
    ],
)  # fmt: skip
def test_the_mode_of_a_metric_is_that_of_its_value(metric, mode):
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
        with expect_problem(f"unknown-direction plugins.{plugin}.mode: 'r' min max", UsageError):
            tiny_run(**options)
    else:
        assert tiny_run(**options).summary["metric_modes"] == {"loss": "min", "r": None}


def test_the_metrics_of_tasks_declare_their_direction():
    from fastloop_plugins.tasks.shared.losses import ClassLoss
    from fastloop_plugins.tasks.shared.metrics import classifier_metrics
    from fastloop_plugins.tasks.shared.problems import MultiLabel, Regression
    from fastloop_plugins.tasks.shared.two_classes import Decision
    from fastloop_plugins.tasks.tags.metrics import tag_metrics

    def modes(metrics: MetricCollection) -> dict[str, str | None]:
        return {str(name): mode_of(metric) for name, metric in metrics.items()}

    assert set(modes(classifier_metrics({}, {}, "r", 2, Decision(0.5))).values()) == {"max"}
    assert set(modes(tag_metrics(["O", "B-a"], None, {}, {}, "r")).values()) == {"max"}
    several = MultiLabel(ClassLoss("cross_entropy", "r"), 0.5)
    assert set(modes(several.metrics(["a", "b"], {}, {}, "r")).values()) == {"max"}
    regression = modes(Regression().metrics(["a"], {}, {}, "r")) | Regression.modes
    assert regression == {"mse": "min", "mae": "min", "pearson": "max", "spearman": "max"}


@pytest.mark.parametrize("modes", [None, {}, {"f1": None}, {"f1": 3}])
def test_a_summary_without_a_direction_has_none(modes):
    assert recorded_mode({"metric_modes": modes}, "f1") is None
