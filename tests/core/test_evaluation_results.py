"""An evaluation computes results from the losses and predictions of its batches.

Modules:
    core/fastloop/evaluation_results.py
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import pytest
import torch
from torchmetrics import MeanSquaredError, Metric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

from fastloop import Plugin, Run, hookimpl
from fastloop import evaluation_results as results
from fastloop.errors import MetricError
from fastloop.evaluation_results import EvaluationResults, keeping_casts
from fastloop.state import Output
from fastloop.testing import TinyResult, expect_problem


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


def casts_and_outputs(world_size: int) -> tuple[int, torch.Tensor]:
    """How often two batches cast the weight of a layer to bf16, and their outputs."""
    layer = torch.nn.Linear(4, 3, bias=False)
    torch.nn.init.constant_(layer.weight, 1 / 3)
    batches = [torch.full((2, 4), value, dtype=torch.bfloat16) for value in (0.5, 0.7)]
    with torch.profiler.profile() as profile, torch.no_grad(), keeping_casts(world_size):
        outputs = []
        for batch in batches:
            with torch.autocast("cpu", torch.bfloat16):
                outputs.append(layer(batch))
    return sum(event.name == "aten::_to_copy" for event in profile.events()), torch.stack(outputs)


def test_an_evaluation_on_one_process_casts_each_weight_once() -> None:
    once, kept = casts_and_outputs(world_size=1)
    each, dropped = casts_and_outputs(world_size=2)
    assert (once, each) == (1, 2)
    assert torch.equal(kept, dropped)


def test_casts_end_with_the_evaluation() -> None:
    layer = torch.nn.Linear(4, 3, bias=False)
    batch = torch.ones(2, 4, dtype=torch.bfloat16)
    outputs = []
    for value in (1.0, 2.0):
        torch.nn.init.constant_(layer.weight, value)
        with torch.no_grad(), keeping_casts(1), torch.autocast("cpu", torch.bfloat16):
            outputs.append(float(layer(batch)[0, 0]))
    assert outputs == [4.0, 8.0]


@pytest.mark.parametrize("enabled", [False, True])
def test_settings_of_autocast_stay_as_they_are(enabled: bool) -> None:
    with torch.autocast("cpu", torch.bfloat16, enabled=enabled), keeping_casts(1):
        assert torch.is_autocast_enabled("cpu") == enabled
        assert torch.get_autocast_dtype("cpu") == torch.bfloat16


class WeightCasts(Plugin):
    """Counts the casts of the first layer's weight in each evaluation."""

    name = "weight-casts"

    def __init__(self) -> None:
        super().__init__()
        self.casts: list[int] = []

    @hookimpl(wrapper=True)
    def evaluate(self, run: Run) -> Generator[None, Any, Any]:
        weight = next(module.weight for module in run.unwrap_model().modules() if isinstance(module, torch.nn.Linear))
        with torch.profiler.profile(record_shapes=True) as profile:
            metrics = yield
        copies = [event for event in profile.events() if event.name == "aten::_to_copy"]
        self.casts.append(sum(event.input_shapes[0] == list(weight.shape) for event in copies))
        return metrics


def test_each_evaluation_of_a_run_casts_the_new_weights_once(tiny_run: Callable[..., TinyResult]) -> None:
    counter = WeightCasts()
    tiny_run(["amp", counter], epochs=2)
    assert counter.casts == [1, 1]
