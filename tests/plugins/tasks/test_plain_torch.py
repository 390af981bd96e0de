"""Losses, gradients, weights and metrics of each task equal those of torch and scikit-learn, however a step is divided.

An evaluation has batches of four of the 17 rows: the last has one, and on two processes, one has none of it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from plain_data import write
from plain_torch import CASES, READ_WHOLE, Reference, train_case, train_cases, train_plainly

from fastloop.testing import ProcessResult
from fastloop.testing.runs import Trained

WHOLE = 6
"""A micro-batch is a step."""
THIRD = 2
"""A step has three micro-batches. The last step has five samples in micro-batches of 2, 2 and 1."""
SIXTH = 1
"""Each of two processes has three micro-batches of a step, and the second one two of the last step."""
NAMES = [*READ_WHOLE, *(pytest.param(name, marks=pytest.mark.slow) for name in CASES if name not in READ_WHOLE)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    write(folder)
    return folder


@cache
def reference(name: str) -> Reference:
    return train_plainly(CASES[name])


def compare(ours: Trained, expected: Reference) -> None:
    """Compare the losses of all steps and of the evaluation, the gradients of the first step, and the parameters after
    the last one."""
    assert ours.losses == pytest.approx(expected.losses, rel=1e-5)
    ((_, metrics),) = ours.metrics
    assert metrics == pytest.approx(expected.evaluated, rel=1e-5, abs=1e-6)
    assert ours.gradients.keys() == expected.gradients.keys()
    for name, gradient in expected.gradients.items():
        torch.testing.assert_close(ours.gradients[name], gradient, rtol=1e-4, atol=1e-6, msg=name)
    for name, weight in expected.weights.items():
        torch.testing.assert_close(ours.weights[name], weight, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("micro_batch", [pytest.param(WHOLE, marks=pytest.mark.slow), THIRD])
@pytest.mark.parametrize("name", NAMES)
def test_a_task_trains_as_torch_alone(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, micro_batch: int):
    monkeypatch.chdir(folder)
    compare(train_case(name, micro_batch), reference(name))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Grad strides do not match")  # of the class token of one image
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")  # of T5's position biases, which nothing changes in place
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_processes_train_as_torch_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch, processes: Callable[..., list[ProcessResult]], strategy: str
):
    monkeypatch.chdir(folder)
    first, second = processes(2, train_cases, list(CASES), SIXTH, strategy, folder=folder)
    for name, ours in first.result.items():
        compare(ours, reference(name))
        assert ours.replicas == second.result[name].replicas, name
