"""Metrics that a split does not define are NaN, for every class of torchmetrics that returns a number nevertheless.

Modules:
    core/fastloop/undefined_metrics.py
"""

from __future__ import annotations

import inspect
import logging
import math
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torchmetrics import Metric, MetricCollection, classification, regression
from torchmetrics import nominal as nominal_metrics
from torchmetrics.wrappers import LambdaInputTransformer, MultioutputWrapper

from fastloop import Trainer
from fastloop.errors import MetricError
from fastloop.evaluation_results import EvaluationResults
from fastloop.state import Output
from fastloop.testing import assert_problem, tiny_data, tiny_model

ARGUMENTS = {"num_classes": 3, "num_labels": 3, "beta": 1.0, "p": 2.0, "threshold": 0.5}
DEFINED = {
    "Accuracy", "CalibrationError", "ExactMatch", "HammingDistance", "HingeLoss", "CoverageError", "RankingLoss",
    "RankingAveragePrecision",
}  # fmt: skip
"""Metrics of classes that are defined for any targets, and those of the rank of each label in a sample."""
PER_CLASS = {
    "AveragePrecision", "F1Score", "FBetaScore", "JaccardIndex", "NegativePredictiveValue", "Precision", "Recall",
    "Specificity",
}  # fmt: skip
"""Metrics of several classes, of which torchmetrics leaves out those without targets."""
SAMPLES = 12


def evaluate(metric: Metric, predictions: torch.Tensor, targets: torch.Tensor) -> float | None:
    """The value in an evaluation; None: the metric does not take these arguments, or gives several numbers."""
    results = EvaluationResults(MetricCollection({"value": metric}))
    try:
        results.add(Output(torch.tensor(0.0), predictions, targets), 1, 1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torchmetrics, about classes that it leaves out of an average
            return results.read()[2]["value"]
    except (IndexError, MetricError, RuntimeError, ValueError):
        return None


def make(home: Any, name: str, **more: Any) -> Metric | None:
    cls = getattr(home, name)
    parameters = inspect.signature(cls).parameters
    known = {key: value for key, value in ARGUMENTS.items() if key in parameters and key != "threshold"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # classes that keep all samples
        try:
            return cls(**known, **{key: value for key, value in more.items() if key in parameters})
        except (TypeError, ValueError):
            return None


def kind_of(name: str) -> tuple[str, str]:
    """``BinaryAUROC`` -> ``("Binary", "AUROC")``."""
    for task in ("Binary", "Multiclass", "Multilabel"):
        if name.startswith(task):
            return task, name.removeprefix(task)
    return "", name


def class_inputs(task: str, targets: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Predictions of a task, and targets: ``negative``, ``positive`` or ``mixed``."""
    generator = torch.Generator().manual_seed(0)
    if task == "Multiclass":
        ids = {"negative": torch.zeros(SAMPLES), "positive": torch.ones(SAMPLES), "mixed": torch.arange(SAMPLES) % 3}
        return torch.rand(SAMPLES, 3, generator=generator).softmax(1), ids[targets].long()
    shape = (SAMPLES,) if task == "Binary" else (SAMPLES, 3)
    alternating = (torch.arange(SAMPLES) % 2).view(-1, *[1] * (len(shape) - 1)).expand(shape)
    found = {"negative": torch.zeros(shape), "positive": torch.ones(shape), "mixed": alternating}
    return torch.rand(shape, generator=generator), found[targets].long()


NAMES = [
    name
    for name in classification.__all__
    if kind_of(name)[0] and not any(part in name for part in ("Curve", "StatScores", "Matrix", "Group", "Fairness"))
]


@pytest.mark.parametrize("thresholds", [None, 5], ids=["exact", "binned"])
@pytest.mark.parametrize("targets", ["negative", "positive"])
def test_metrics_of_one_class_are_nan_unless_one_class_defines_them(targets, thresholds):
    """Of every class of torchmetrics for classes that gives one number for usual targets."""
    checked: dict[str, bool] = {}
    for name in NAMES:
        task, what = kind_of(name)
        metric = make(classification, name, thresholds=thresholds, average="micro" if what in PER_CLASS else "macro")
        metric = metric or make(classification, name, thresholds=thresholds)
        if metric is None or not math.isfinite(evaluate(metric, *class_inputs(task, "mixed")) or math.nan):
            continue
        value = evaluate(metric, *class_inputs(task, targets))
        assert value is not None, name
        checked[name] = math.isnan(value)
    defined = {name for name in checked if kind_of(name)[1] in DEFINED}
    per_class = {name for name in checked if kind_of(name)[1] in PER_CLASS}
    for name in per_class:
        task, what = kind_of(name)
        needs = "negative" if what in ("NegativePredictiveValue", "Specificity") else "positive"
        if task == "Multiclass" or targets == needs:
            defined.add(name)
    assert {name for name, nan in checked.items() if not nan} == defined
    assert len(checked) > 30
    assert not defined & {"BinaryAUROC", "MulticlassAUROC", "MultilabelAUROC", "BinaryMatthewsCorrCoef"}


@pytest.mark.parametrize(
    ("predictions", "targets"),
    [("constant", "varying"), ("varying", "constant"), ("constant", "constant"), ("varying", "zero")],
)
def test_correlations_of_constants_are_nan(predictions, targets):
    values = {"constant": torch.full((8,), 0.5), "varying": torch.linspace(0.1, 0.9, 8) ** 2, "zero": torch.zeros(8)}
    found = {}
    for name in ("SpearmanCorrCoef", "PearsonCorrCoef", "KendallRankCorrCoef", "ConcordanceCorrCoef", "R2Score",
                 "ExplainedVariance"):  # fmt: skip
        metric = make(regression, name)
        assert metric is not None
        found[name] = evaluate(metric, values[predictions], values[targets])
    # these two compare with the mean of the targets
    defined = {"R2Score", "ExplainedVariance"} if targets == "varying" else set()
    assert {name for name, value in found.items() if not math.isnan(value)} == defined


def test_the_log_names_metric_split_and_reason_and_other_metrics_keep_their_value(caplog):
    metrics = MetricCollection({"auc": classification.BinaryAUROC(), "accuracy": classification.BinaryAccuracy()})
    results = EvaluationResults(metrics, "r.yaml", "test")
    results.add(Output(torch.tensor(0.0), torch.tensor([0.1, 0.9]), torch.tensor([0, 0])), 1, 1)
    with caplog.at_level(logging.WARNING, "fastloop"):
        values = results.read()[2]
    assert math.isnan(values["auc"])
    assert values["accuracy"] == 0.5
    assert len(caplog.records) == 1
    assert_problem(caplog, "undefined-metric r.yaml: 'auc' test")


@pytest.mark.parametrize("average", ["macro", "weighted"])
def test_an_average_leaves_out_a_missing_class_only_where_it_has_no_weight(average):
    predictions, targets = class_inputs("Multiclass", "mixed")
    metric = classification.MulticlassAUROC(3, average=average)
    value = evaluate(metric, predictions, targets.clamp(max=1))  # without class 2
    assert value is not None
    assert math.isnan(value) == (average == "macro")


def test_wrapped_metrics_and_values_by_definition():
    negative = (torch.tensor([0.1, 0.2]), torch.tensor([0, 0]))
    wrapped = LambdaInputTransformer(classification.BinaryF1Score(), transform_pred=torch.clone)
    assert math.isnan(evaluate(wrapped, *negative) or 0.0)
    assert evaluate(classification.BinaryF1Score(zero_division=1), *negative) == 1.0


class FalseAlarms(classification.BinaryPrecision):
    """The number of wrong positive predictions."""

    def compute(self) -> torch.Tensor:
        return self.fp


class Renamed(classification.BinaryF1Score):
    """A metric of a user that computes as torchmetrics does."""


class KnownOnly(classification.BinaryF1Score):
    """Leaves out predictions that are NaN."""

    def update(self, preds: torch.Tensor, target: torch.Tensor) -> None:
        super().update(preds[~preds.isnan()], target[~preds.isnan()])


@pytest.mark.parametrize(
    ("metric", "predictions", "targets", "expected"),
    [
        (FalseAlarms(), [0.1, 0.2], [0, 0], 0.0),
        (Renamed(), [0.1, 0.2], [0, 0], math.nan),
        (Renamed(), [0.9, math.nan], [1, 0], math.nan),
        (KnownOnly(), [0.9, math.nan], [1, 0], 1.0),
    ],
)
def test_a_derived_metric_is_judged_as_torchmetrics_where_it_computes_as_torchmetrics(
    metric, predictions, targets, expected
):
    value = evaluate(metric, torch.tensor(predictions), torch.tensor(targets))
    assert value == pytest.approx(expected, nan_ok=True)


def test_ignored_targets_do_not_define_a_metric():
    metric = classification.BinaryAUROC(ignore_index=1)
    assert math.isnan(evaluate(metric, torch.tensor([0.1, 0.9, 0.4]), torch.tensor([0, 1, 0])) or 0.0)


def evaluate_parts(parts: list[list[int]]) -> list[float]:
    """AUROC, exact and binned, and F1 of targets of which each process has its part."""
    from accelerate import Accelerator

    from fastloop.distributed.processes import Processes

    run_processes = Processes(Accelerator(cpu=True))
    own = torch.tensor(parts[run_processes.rank])
    metrics = {
        "exact": classification.BinaryAUROC(),
        "binned": classification.BinaryAUROC(thresholds=5),
        "f1": classification.BinaryF1Score(),
    }
    results = EvaluationResults(MetricCollection(dict(metrics)), processes=run_processes)
    if len(own):
        results.add(Output(torch.tensor(0.0), 0.2 + 0.5 * own, own), 1, len(own))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a process without samples updates no metric
        values = results.read()[2]
    return [values[name] for name in metrics]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ([[1, 1], [0, 0]], [1.0, 1.0, 1.0]),
        ([[0, 0], [0, 0]], [math.nan, math.nan, math.nan]),
        ([[0, 0], []], [math.nan, math.nan, math.nan]),
        ([[0, 1], []], [1.0, 1.0, 1.0]),
    ],
    ids=["a class each", "one class", "one class on one process", "both on one process"],
)
def test_processes_decide_by_the_targets_of_all(processes, tmp_path, parts, expected):
    first, second = (ended.result for ended in processes(2, evaluate_parts, parts, folder=tmp_path))
    assert first == pytest.approx(expected, nan_ok=True)
    assert second == pytest.approx(expected, nan_ok=True)


# -- predictions that are NaN ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("predictions", [torch.full((6, 3), math.nan), torch.tensor([[0.1, 0.9, math.nan]] * 6)])
def test_metrics_of_predictions_that_are_nan_are_nan(predictions, caplog):
    targets = torch.tensor([0, 0, 0, 0, 1, 2])
    metrics = MetricCollection(
        {
            "accuracy": classification.MulticlassAccuracy(3, average="micro"),
            "wrapped": LambdaInputTransformer(classification.MulticlassF1Score(3), transform_pred=torch.clone),
        }
    )
    results = EvaluationResults(metrics, "r.yaml", "test")
    usual = torch.eye(3)[targets]
    results.add(Output(torch.tensor(0.0), usual, targets), 1, 1)
    assert results.read().metrics == {"accuracy": 1.0, "wrapped": 1.0}
    results = EvaluationResults(metrics, "r.yaml", "test")
    results.add(Output(torch.tensor(0.0), usual, targets), 1, 1)
    results.add(Output(torch.tensor(math.nan), predictions, targets), 1, 1)
    with caplog.at_level(logging.WARNING, "fastloop"):
        values = results.read().metrics
    assert all(map(math.isnan, values.values()))
    assert "'accuracy' is NaN for test: 6 rows of predictions hold NaN" in caplog.text


class CountsNan(Metric):
    """A metric of a user for which NaN is a value."""

    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("count", torch.tensor(0.0), dist_reduce_fx="sum")

    def update(self, predictions: torch.Tensor, targets: torch.Tensor) -> None:
        self.count += predictions.isnan().sum()

    def compute(self) -> torch.Tensor:
        return self.count


@pytest.mark.parametrize("rows", [(0, 3), (0,)])
def test_predictions_without_rows_hold_no_nan(rows):
    metrics = MetricCollection({"count": CountsNan()})
    results = EvaluationResults(metrics, "r.yaml", "test")
    results.add(Output(torch.tensor(0.0), torch.zeros(rows), torch.zeros(0)), 1, 1)
    assert results.read().metrics == {"count": 0.0}


@pytest.mark.parametrize("targets", [[0, 0, 1], [-100, 0, 1]])
def test_one_row_that_counts_makes_a_metric_nan_that_ignores_others(targets, caplog):
    metrics = MetricCollection({"accuracy": classification.MulticlassAccuracy(3, average="micro", ignore_index=-100)})
    predictions = torch.eye(3)[[0, 0, 1]]
    predictions[0] = math.nan
    results = EvaluationResults(metrics, "r.yaml", "test")
    results.add(Output(torch.tensor(0.0), predictions, torch.tensor(targets)), 1, 1)
    with caplog.at_level(logging.WARNING, "fastloop"):
        value = results.read().metrics["accuracy"]
    if targets[0] == -100:
        assert value == 1
        assert not caplog.records
    else:
        assert math.isnan(value)
        assert "'accuracy' is NaN for test: 1 row of predictions holds NaN" in caplog.text


def test_metrics_for_which_nan_is_a_value_keep_theirs():
    assert evaluate(CountsNan(), torch.tensor([math.nan, 1.0]), torch.zeros(2)) == 1
    pairs = torch.tensor([[0.0, 0.0], [1.0, 2.0], [math.nan, 1.0]])
    outputs = MultioutputWrapper(regression.MeanSquaredError(), 1)
    assert evaluate(outputs, pairs[:, :1], pairs[:, 1:]) == 0.5
    nominal = torch.tensor([0.0, 1.0, 0.0, 1.0, math.nan])
    targets = torch.tensor([0.0, 1.0, 0.0, 1.0, 1.0])
    dropping = nominal_metrics.CramersV(2, bias_correction=False, nan_strategy="drop")
    assert evaluate(dropping, nominal, targets) == 1
    ignoring = classification.MulticlassAccuracy(3, ignore_index=-100)
    predictions = torch.tensor([[math.nan] * 3, [0.1, 0.9, 0.0]])
    assert evaluate(ignoring, predictions, torch.tensor([-100, 1])) == 1


class NanOnRankOne(nn.Module):
    """A model whose logits are NaN on process 1, in an evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = tiny_model()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.layers(inputs)
        is_nan = not self.training and torch.distributed.get_rank() == 1
        return logits * math.nan if is_nan else logits


def train_with_nan() -> dict[str, float]:
    accuracy = classification.MulticlassAccuracy(3, average="micro")
    data = tiny_data(16)
    options: Any = {"loss": nn.functional.cross_entropy, "metrics": {"accuracy": accuracy}, "device": "cpu"}
    trainer = Trainer(NanOnRankOne(), data, data, batch_size=8, max_steps=1, output="run", **options)
    metrics: dict[str, float] = trainer.fit()["validation"]
    return metrics


@pytest.mark.slow
def test_a_nan_of_one_process_is_that_of_all(processes, tmp_path):
    for process in processes(2, train_with_nan, folder=tmp_path):
        assert math.isnan(process.result["accuracy"]), process.output
