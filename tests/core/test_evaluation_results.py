"""An evaluation computes results from the losses and predictions of its batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torchmetrics import MeanSquaredError, Metric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

from fastloop import evaluation_results as results
from fastloop.errors import MetricError
from fastloop.evaluation_results import EvaluationResults
from fastloop.state import Output
from fastloop.testing import expect_problem


def classified(sizes: tuple[int, ...] = (8, 8, 8, 3)) -> list[Output]:
    """Outputs of batches of these sizes, in five classes."""
    generator = torch.Generator().manual_seed(0)

    def output(size: int) -> Output:
        scores, targets = torch.randn(size, 5, generator=generator), torch.randint(5, (size,), generator=generator)
        return Output(torch.nn.functional.cross_entropy(scores, targets), scores, targets)

    return [output(size) for size in sizes]


def metrics() -> MetricCollection:
    return MetricCollection(
        {"accuracy": MulticlassAccuracy(5, average="micro"), "f1": MulticlassF1Score(5, average="macro")}
    )


class Updates(Metric):
    """Counts its updates, and their samples."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("sizes", [], dist_reduce_fx=None)

    def update(self, predictions: Any, targets: Any) -> None:
        self.sizes.append(torch.tensor(len(predictions)))

    def compute(self) -> torch.Tensor:
        return torch.stack(self.sizes).sum()


def updates(outputs: list[Output]) -> list[int]:
    """Samples of each update."""
    found = EvaluationResults(MetricCollection({"updates": (metric := Updates())}))
    for output in outputs:
        found.add(output, 1, 1)
    found.read()
    return [int(size) for size in metric.sizes]


def test_the_numbers_are_those_of_an_update_for_each_batch():
    outputs, expected = classified(), metrics()
    found = EvaluationResults(metrics())
    total = 0.0
    for output in outputs:
        expected.update(output.predictions, output.targets)
        found.add(output, len(output.targets), len(output.targets))
        total += output.loss.item() * len(output.targets)
    values = {name: float(value) for name, value in expected.compute().items()}
    assert found.read() == (total, 27, values)


def test_a_batch_without_samples_counts_in_no_metric():
    whole, cut = EvaluationResults(metrics()), EvaluationResults(metrics())
    for output in classified():
        whole.add(output, 1, 1)
        cut.add(output, 1, 1)
    for output in classified((2,)):
        cut.add(output, 0, 0)
    assert cut.read() == whole.read()


def test_batches_are_put_together_until_so_many_bytes_wait(monkeypatch):
    outputs = classified()
    assert updates(outputs) == [27]
    monkeypatch.setattr(results, "BUFFER_BYTES", 2 * 8 * (5 * 4 + 8))
    assert updates(outputs) == [16, 11]


def test_predictions_of_other_shapes_start_an_update():
    def output(*shape: int) -> Output:
        return Output(torch.tensor(0.0), torch.zeros(shape), torch.zeros(shape))

    assert updates([output(2, 7), output(3, 7), output(2, 9), output(4, 7)]) == [5, 2, 4]


def test_predictions_that_are_no_tensors_are_passed_on_batch_by_batch():
    listed: Any = [{"boxes": 1}, {"boxes": 2}]
    assert updates(
        [Output(torch.tensor(0.0), listed, listed), *classified((3,)), Output(torch.tensor(0.0), listed, listed)]
    ) == [2, 3, 2]


def test_without_metrics_or_batches_there_is_a_loss_alone():
    found = EvaluationResults(None)
    assert found.read() == (0.0, 0, {})
    found.add(Output(torch.tensor(2.0)), 3, 3)
    assert found.read() == (6.0, 3, {})


def test_a_second_evaluation_begins_anew():
    collection = MetricCollection({"error": MeanSquaredError()})
    outputs = [Output(torch.tensor(1.0), torch.full((4,), value), torch.zeros(4)) for value in (1.0, 3.0)]
    for output, expected in zip(outputs, (1.0, 9.0), strict=True):
        found = EvaluationResults(collection)
        found.add(output, 4, 4)
        assert found.read() == (4.0, 4, {"error": pytest.approx(expected)})


class Fails(Updates):
    """Fails in one of its methods."""

    def __init__(self, method: str) -> None:
        super().__init__()
        self.method = method

    def update(self, predictions: Any, targets: Any) -> None:
        super().update(predictions, targets)
        self.fail("update")

    def compute(self) -> torch.Tensor:
        self.fail("compute")
        return super().compute()

    def fail(self, method: str) -> None:
        if self.method == method:
            raise ValueError(f"no {method}")


@pytest.mark.parametrize("method", ["update", "compute"])
def test_the_error_of_a_metric_names_the_split(method):
    collection = MetricCollection({"good": Updates(), "bad": Fails(method)}, prefix="my_")
    found, (output, *_) = EvaluationResults(collection, "r.yaml", "test"), classified()
    found.add(output, 8, 8)
    with expect_problem(f"metric-failed r.yaml ValueError no {method}", MetricError) as raised:
        found.read()
    assert raised.value.output is output
    assert isinstance(raised.value.__cause__, ValueError)


class Gives(Updates):
    """Has a given value."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value

    def compute(self) -> Any:
        return self.value


@pytest.mark.parametrize("value", [torch.zeros(2, 3), torch.zeros(0), [1.0]])
def test_a_value_that_is_not_one_number_is_an_error(value):
    found = EvaluationResults(MetricCollection({"m": Gives(value)}), "r.yaml", "test")
    found.add(classified()[0], 8, 8)
    with expect_problem("metric-not-a-number r.yaml 'm'", MetricError) as raised:
        found.read()
    assert repr(raised.value.values) == repr({"m": value})
