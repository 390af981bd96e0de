"""Arguments that ``Trainer`` does not have are refused with what serves instead, before the data is read.

Modules:
    plugins/fastloop_tools/trainer/arguments.py
    plugins/fastloop_tools/trainer/function_metric.py
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from recording_plugins import WeightRecorder
from torch import nn
from torch.utils.data import TensorDataset
from torchmetrics.classification import MulticlassAccuracy
from transformers import TrainerCallback

from fastloop import Plugin, PluginError, Trainer, UsageError, hookimpl
from fastloop.testing import expect_problem
from fastloop_tools.trainer.arguments import INSTEAD
from fastloop_tools.trainer.function_metric import FunctionMetric

DATA = [(torch.zeros(2), 0)]


def make(**arguments: Any) -> Trainer:
    return Trainer(nn.Linear(2, 2), DATA, loss=nn.functional.cross_entropy, **arguments)


@pytest.mark.parametrize("name", sorted(INSTEAD))
def test_an_argument_of_another_trainer_names_what_serves(name):
    with expect_problem(f"unknown-argument Trainer: {name!r}", UsageError) as raised:
        make(**{name: None})
    assert INSTEAD[name] in str(raised.value)


def test_no_argument_of_another_trainer_is_one_of_ours():
    assert not INSTEAD.keys() & inspect.signature(Trainer).parameters.keys()


@pytest.mark.parametrize(
    ("name", "meant"),
    [("metric", "metrics"), ("epoch", "epochs"), ("plugin", "plugins"), ("eval_loaders", "eval_loader")],
)
def test_a_typing_error_is_compared_with_all_arguments(name, meant):
    with expect_problem(f"unknown-argument {name!r} {meant!r}", UsageError):
        make(**{name: None})


def test_all_wrong_arguments_are_named_at_once():
    with expect_problem("unknown-argument learning_rate num_train_epochs epoch lr epochs", UsageError):
        make(learning_rate=1e-3, num_train_epochs=2, epoch=1, batch_size=1)


@pytest.mark.parametrize(
    ("metrics", "named"),
    [
        (lambda predictions, targets: 0.0, "metrics function"),
        ({"f1": MulticlassAccuracy}, "metrics['f1'] MulticlassAccuracy"),
        ({"f1": "accuracy"}, "metrics['f1'] str"),
    ],
)
def test_a_wrong_metric_is_refused_with_its_name(metrics, named):
    with expect_problem(f"wrong-type {named}", UsageError):
        make(metrics=metrics, batch_size=1)


class Callback(TrainerCallback):
    """A callback of transformers."""


@pytest.mark.parametrize(
    ("plugin", "named"),
    [
        (Callback(), "plugins[1] Callback TransformersCallbacks"),
        (WeightRecorder, "plugins[1] WeightRecorder()"),
        (3, "plugins[1] int"),
    ],
)
def test_a_wrong_plugin_is_refused_with_its_place(plugin, named):
    with expect_problem(f"wrong-type {named}", UsageError):
        make(plugins=["log", plugin], batch_size=1)


def test_functions_of_arrays_measure_the_whole_split(tmp_path):
    inputs, targets = torch.randn(10, 3, generator=torch.Generator().manual_seed(0)), torch.arange(10) % 3
    shapes = []

    def accuracy(predictions: Any, truth: Any) -> float:
        shapes.append((predictions.shape, truth.shape))
        return (predictions.argmax(-1) == truth).mean()

    data = TensorDataset(inputs, targets)
    loss = nn.functional.cross_entropy
    metrics = {"ours": accuracy, "theirs": MulticlassAccuracy(num_classes=3, average="micro")}
    trainer = Trainer(
        nn.Linear(3, 3), data, data, loss=loss, metrics=metrics, batch_size=4, epochs=1, output=tmp_path / "run"
    )
    values = trainer.fit()["validation"]
    assert values["ours"] == pytest.approx(values["theirs"], abs=1e-6)
    assert shapes[-1] == ((10, 3), (10,))
    assert trainer.validate()["ours"] == values["ours"]


def test_arrays_of_a_metric_in_bfloat16_are_float32():
    metric = FunctionMetric(lambda predictions, targets: float(predictions.dtype == "float32"))
    metric.update(torch.zeros(2, 3, dtype=torch.bfloat16), torch.zeros(2))
    assert metric.compute() == 1.0


def test_a_metric_that_the_model_updates_itself_measures_the_split_alone(tmp_path):
    """The model counts accuracy on its own targets, in training and in evaluations."""
    accuracy = MulticlassAccuracy(num_classes=3, average="micro")

    class Counts(nn.Linear):
        def __init__(self) -> None:
            super().__init__(3, 3)
            self.accuracy = accuracy

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            predictions = super().forward(inputs)
            self.accuracy.update(predictions, torch.full((len(inputs),), 2))
            return predictions

    data = TensorDataset(torch.eye(3).repeat(4, 1), torch.arange(3).repeat(4))
    loss = nn.functional.cross_entropy
    metrics = {"given": accuracy, "ours": lambda predictions, targets: (predictions.argmax(-1) == targets).mean()}
    trainer = Trainer(Counts(), data, data, loss=loss, metrics=metrics, batch_size=4, epochs=1, output=tmp_path / "run")
    values = trainer.fit()["validation"]
    assert values["given"] == pytest.approx(values["ours"])
    assert accuracy.update_count > 0, "the model has its own counts"


def test_what_torch_compile_returns_is_refused_with_what_to_do():
    model = torch.compile(nn.Linear(3, 3), backend="eager")
    trainer = Trainer(model, DATA, batch_size=1, loss=nn.functional.cross_entropy)
    with expect_problem("wrong-type torch.compile model.compile() `compile`", PluginError):
        trainer.fit()


def test_a_layer_whose_size_the_first_forward_decides_is_refused():
    trainer = Trainer(nn.Sequential(nn.LazyLinear(2)), DATA, batch_size=1, loss=nn.functional.cross_entropy)
    with expect_problem("lazy-parameter 0.weight Sequential", PluginError):
        trainer.fit()


class CallsModel(Plugin):
    """Calls the model once with a batch, before the optimizer is built."""

    name = "calls-model"

    @hookimpl
    def before_prepare(self, model: nn.Module) -> None:
        model(torch.zeros(1, 2))


def test_a_layer_whose_size_a_plugin_decides_before_the_optimizer_is_built_trains():
    model = nn.Sequential(nn.LazyLinear(2))
    data = [(torch.ones(2), 0)] * 4
    Trainer(model, data, batch_size=2, loss=nn.functional.cross_entropy, plugins=[CallsModel()], epochs=1).fit()
    assert model[0].weight.shape == (2, 2)
