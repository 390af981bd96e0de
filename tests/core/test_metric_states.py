"""Processes compare the states of metrics before torchmetrics gathers them.

Modules:
    core/fastloop/metric_states.py
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from metric_classes import Inputs, candidate_inputs, classes, construct
from torchmetrics import CatMetric, Metric, MetricCollection, R2Score, classification

from fastloop import UsageError
from fastloop.errors import ProcessesDisagree
from fastloop.evaluation_results import EvaluationResults
from fastloop.metric_states import StateLayout, StateName, TensorForm, find_goals, read_states
from fastloop.state import Output
from fastloop.testing import expect_problem

ROWS = 12
SHARES = {
    "uneven": [[[0, 1, 2, 3], [4, 5, 6]], [[7, 8, 9, 10, 11]]],
    "one row": [[[0, 1, 2, 3], [4, 5, 6, 7, 8, 9, 10]], [[11]]],
    "none on the second": [[[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]], []],
    "none on the first": [[], [[0, 1, 2, 3, 4, 5, 6, 7, 8, 9], [10, 11]]],
}
"""The rows of each batch of each of two processes."""
KEEPS_MORE_THAN_STATES = {"_RootMeanSquaredErrorUsingSlidingWindow"}
"""A process without rows cannot compute them: they need an attribute of the first update that is no state."""
NAME = StateName("score", "values")
FLOAT = torch.float32


def tensor(*shape: int, updated: bool = True, dtype: torch.dtype = FLOAT) -> StateLayout:
    return StateLayout("tensor", updated, TensorForm(dtype, shape))


def rows(count: int, *shape: int, dtype: torch.dtype = FLOAT) -> StateLayout:
    return StateLayout("concatenated", True, TensorForm(dtype, shape), count)


def items(*elements: str, updated: bool = True) -> StateLayout:
    return StateLayout("list", updated, elements=elements)


NO_LIST = StateLayout("concatenated", False)


@pytest.mark.parametrize(
    ("layouts", "goal"),
    [
        ([tensor(), tensor()], 0),
        ([tensor(3), tensor(updated=False)], 0),
        ([tensor(updated=False), tensor(3)], 1),
        ([tensor(updated=False), tensor(updated=False), tensor(2, 3, dtype=torch.float64)], 2),
        ([rows(2, 3), rows(5, 3)], 0),
        ([NO_LIST, rows(5, 3, dtype=torch.int64)], 1),
        ([rows(0), rows(5, 3)], 1),
        ([NO_LIST, rows(0, 3)], 1),
        ([NO_LIST, NO_LIST], None),
        ([items("1-d float32"), items("1-d float32")], None),
    ],
    ids=str,
)
def test_a_process_without_rows_takes_the_layout_of_the_others(layouts, goal):
    goals = find_goals([{NAME: layout} for layout in layouts], "r")
    assert goals == ({} if goal is None else {NAME: layouts[goal]})


@pytest.mark.parametrize(
    ("layouts", "first", "second"),
    [
        ([tensor(3), tensor()], 0, 1),
        ([tensor(), tensor(dtype=torch.float64)], 0, 1),
        ([tensor(3), tensor(3), tensor(2)], 0, 2),
        ([tensor(5, updated=False), tensor(3), tensor(3)], 1, 0),
        ([rows(2, 3), rows(2)], 0, 1),
        ([rows(2, 3), rows(2, 3, dtype=torch.float64)], 0, 1),
        ([NO_LIST, rows(2, 3), rows(2, 4)], 1, 2),
        ([items("1-d float32"), items("1-d float32", "1-d float32")], 0, 1),
        ([items("1-d float32"), items("2-d float32")], 0, 1),
        ([items(updated=False), items("1-d float32")], 1, 0),
        ([tensor(3), rows(2, 3)], 0, 1),
    ],
    ids=str,
)
def test_any_other_difference_names_metric_state_and_processes(layouts, first, second):
    with pytest.raises(ProcessesDisagree) as raised:
        find_goals([{NAME: layout} for layout in layouts], "r.yaml")
    message = str(raised.value)
    for part in ("r.yaml", "'score'", "'values'", f"process {first} has", f"process {second} has"):
        assert part in message
    assert ("dist_reduce_fx" in message) == (layouts[0].kind == "list")


def test_a_metric_that_only_one_process_has_and_tensors_that_cannot_be_concatenated():
    with expect_problem("processes-disagree 1", ProcessesDisagree):
        find_goals([{NAME: tensor()}, {}], "r")
    problem = StateLayout("concatenated", True, problem="sizes differ")
    with expect_problem("processes-disagree 1", ProcessesDisagree):
        find_goals([{NAME: rows(2)}, {NAME: problem}], "r")


def gathered(metrics: dict[str, Metric]) -> MetricCollection:
    """A collection that torchmetrics would gather from other processes."""
    for metric in metrics.values():
        metric.distributed_available_fn = lambda: True
    return MetricCollection(dict(metrics))


def test_a_state_keeps_its_neutral_value_in_another_layout():
    metrics = gathered({"all": CatMetric(), "r2": R2Score(multioutput="uniform_average")})
    states = {state.name: state for state in read_states(metrics)}
    states[StateName("all", "value")].take_layout(rows(4, 3, dtype=torch.float64))
    states[StateName("r2", "residual")].take_layout(tensor(3, dtype=torch.float64))
    (empty,) = metrics["all"].value
    assert (empty.shape, empty.dtype) == ((0, 3), torch.float64)
    assert torch.equal(metrics["r2"].residual, torch.zeros(3, dtype=torch.float64))


def test_scalars_and_shared_lists_are_concatenated_once():
    metrics = gathered({"auc": classification.BinaryAUROC(), "ap": classification.BinaryAveragePrecision()})
    for _ in range(3):
        metrics.update(torch.tensor([0.2, 0.9]), torch.tensor([0, 1]))
    layouts = {state.name: state.layout for state in read_states(metrics)}
    assert {layout.rows for layout in layouts.values()} == {6}
    shared = [metric.preds for metric in metrics.values(copy_state=False)]
    assert shared[0] is shared[1]
    assert len(shared[0]) == 1
    scalar = gathered({"all": CatMetric()})
    scalar.update(torch.tensor(2.0))
    (state,) = read_states(scalar)
    assert state.layout == rows(1)


def evaluate(metrics: MetricCollection, inputs: Inputs, batches: list[list[int]], processes: Any = None) -> Any:
    """Values of the metrics; or the name of the error."""
    results = EvaluationResults(metrics, processes=processes)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about classes without targets
            for batch in batches:
                results.add(Output(torch.tensor(0.0), *inputs.of(batch)), 1, len(batch))
                results._update()
            return results.read()[2]
    except UsageError as error:
        return type(error).__name__


class ListOfErrors(Metric):
    """Keeps one tensor of each update."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("errors", default=[], dist_reduce_fx=None)

    def update(self, predictions: torch.Tensor, targets: torch.Tensor) -> None:
        self.errors.append((predictions - targets).abs())

    def compute(self) -> torch.Tensor:
        return torch.cat(self.errors).max()


def groups() -> MetricCollection:
    """Metrics that share states."""
    names = ("BinaryAUROC", "BinaryAveragePrecision", "BinaryF1Score", "BinaryPrecision", "BinaryRecall")
    return MetricCollection({name: getattr(classification, name)() for name in names})


def measured_classes() -> dict[str, tuple[str, float]]:
    """Class -> the inputs that it measures, and its value on one process, which does not depend on the batches."""
    candidates = candidate_inputs(ROWS)
    chosen: dict[str, tuple[str, float]] = {}
    for cls in classes():
        for name, inputs in candidates.items():
            metric = construct(cls)
            if metric is None:
                break
            metrics = MetricCollection({"value": metric})
            whole = evaluate(metrics, inputs, [list(range(ROWS))])
            divided = evaluate(metrics, inputs, [*SHARES["uneven"][0], *SHARES["uneven"][1]])
            if not isinstance(whole, dict) or not math.isfinite(whole.get("value", math.nan)):
                continue
            if divided == pytest.approx(whole, rel=1e-4, abs=1e-5):
                chosen[cls.__name__] = (name, whole["value"])
                break
    return chosen


def evaluate_shares(inputs_of: dict[str, str]) -> dict[tuple[str, str], Any]:
    """Class and shares -> what this process got."""
    from accelerate import Accelerator

    from fastloop.distributed.processes import Processes

    run_processes = Processes(Accelerator(cpu=True))
    candidates = candidate_inputs(ROWS)
    known = {cls.__name__: cls for cls in classes()}
    results: dict[tuple[str, str], Any] = {}
    for share, batches in SHARES.items():
        own = batches[run_processes.rank]
        for name, kind in inputs_of.items():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # classes that keep all samples, or moved to another module
                metric = construct(known[name])
            assert metric is not None
            metrics = MetricCollection({"value": metric})
            results[name, share] = evaluate(metrics, candidates[kind], own, run_processes)
        results["groups", share] = evaluate(groups(), candidates["binary"], own, run_processes)
        metrics = MetricCollection({"value": ListOfErrors()})
        results["ListOfErrors", share] = evaluate(metrics, candidates["numbers"], own, run_processes)
    return results


@pytest.mark.slow
def test_every_class_of_torchmetrics_has_the_value_of_one_process_or_is_refused_on_both(processes, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # classes that keep all samples, or moved to another module
        chosen = measured_classes()
    assert len(chosen) > 120
    inputs_of = {name: kind for name, (kind, _) in chosen.items()}
    first, second = (ended.result for ended in processes(2, evaluate_shares, inputs_of, folder=tmp_path))
    refused = {key for key, value in first.items() if value == "ProcessesDisagree"}
    assert refused == {key for key, value in second.items() if value == "ProcessesDisagree"}
    expected: dict[tuple[str, str], Any] = {}
    for share in SHARES:
        expected |= {(name, share): {"value": value} for name, (_, value) in chosen.items()}
        expected["groups", share] = evaluate(groups(), candidate_inputs(ROWS)["binary"], [list(range(ROWS))])
    differing = {}
    for key, values in expected.items():
        if key in refused:
            continue
        for own in (first[key], second[key]):
            if own != pytest.approx(values, rel=1e-4, abs=1e-5):
                differing[key] = (own, values)
    assert {name for name, _ in differing} == KEEPS_MORE_THAN_STATES
    assert all(share.startswith("none") for _, share in differing)
    assert refused == {("ListOfErrors", share) for share in SHARES}
    assert "R2Score" in chosen
    assert "ExplainedVariance" in chosen
