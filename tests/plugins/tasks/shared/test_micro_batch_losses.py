"""A loss that is not the mean over the samples of a batch is reported in the first step, if a step has micro-batches or
an evaluation several batches.

Modules:
    plugins/fastloop_plugins/tasks/shared/micro_batches.py
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from fastloop import Batch, Trainer
from fastloop.distributed import ranks
from fastloop_plugins.tasks.shared import micro_batches
from fastloop_tools.trainer import task

SAMPLES = 16


def masked_data() -> TensorDataset:
    """Sequences of eight numbers. The later a sample, the fewer positions of it count."""
    inputs = torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(0))
    counted = torch.arange(8) < torch.arange(SAMPLES)[:, None] // 2 + 1
    return TensorDataset(inputs, torch.where(counted, 3.0 * inputs, torch.nan))


def masked_mean(predictions: Tensor, targets: Tensor) -> Tensor:
    mask = ~targets.isnan()
    return ((predictions - targets.nan_to_num()) ** 2)[mask].mean()


def mean_of_samples(predictions: Tensor, targets: Tensor) -> Tensor:
    mask = ~targets.isnan()
    errors = (predictions - targets.nan_to_num()) ** 2 * mask
    return (errors.sum(1) / mask.sum(1)).mean()


def counted(samples: list[tuple[Tensor, Tensor]]) -> Batch:
    inputs = torch.stack([sample[0] for sample in samples])
    targets = torch.stack([sample[1] for sample in samples])
    return Batch((inputs, targets), loss_weight=float((~targets.isnan()).sum()))


def noisy(predictions: Tensor, targets: Tensor) -> Tensor:
    return mean_of_samples(functional.dropout(predictions, 0.5), targets)


def noisy_masked_mean(predictions: Tensor, targets: Tensor) -> Tensor:
    return masked_mean(functional.dropout(predictions, 0.5), targets)


def mean_of_a_branch(predictions: Tensor, targets: Tensor) -> Tensor:
    """Draws one scale for the whole batch, which repeats in every second call or so."""
    scale = 1.0 if random.random() < 0.5 else 3.0
    return scale * mean_of_samples(predictions, targets)


def mean_of_four_or_more(predictions: Tensor, targets: Tensor) -> Tensor:
    if len(predictions) < 4:
        raise ValueError("four samples at least")
    return mean_of_samples(predictions, targets)


def train(caplog: Any, loss: Any, **arguments: Any) -> str:
    torch.manual_seed(0)
    caplog.set_level(logging.WARNING, logger="fastloop")
    usual = {"batch_size": SAMPLES, "max_steps": 2, "output": "run", "save_every": None, "device": "cpu"}
    data = torch.utils.data.DataLoader(masked_data(), batch_size=SAMPLES, collate_fn=arguments.pop("collate", None))
    Trainer(nn.Linear(8, 8), data, loss=loss, **{**usual, **arguments}).fit()
    return caplog.text


EVALUATED: dict[str, Any] = {"eval_loader": masked_data(), "eval_batch_size": 4}


@pytest.mark.parametrize(
    ("arguments", "keys"),
    [
        ({"micro_batch_size": 4}, "train.micro_batch_size and"),
        (EVALUATED, "train.eval_batch_size and"),
        ({"micro_batch_size": 4, **EVALUATED}, "train.micro_batch_size, train.eval_batch_size and"),
    ],
    ids=["micro-batches", "evaluations", "both"],
)
def test_a_masked_mean_is_a_warning(caplog, arguments, keys):
    assert train(caplog, masked_mean, **arguments).count(f"results depend on {keys} the number of processes") == 1


def test_halves_that_agree_by_chance_hide_no_other_micro_batch(caplog):
    """A loss with weights of classes inside. The first two micro-batches hold one class, and the others two."""
    torch.manual_seed(0)
    caplog.set_level(logging.WARNING, logger="fastloop")
    weights = torch.tensor([1.0, 5.0])
    targets = torch.tensor([0] * 4 + [1] * 4 + [0, 1, 1, 1] + [0, 0, 0, 1])
    data = torch.utils.data.DataLoader(TensorDataset(torch.randn(SAMPLES, 8), targets), batch_size=SAMPLES)

    def weighted(predictions: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(predictions, targets, weight=weights)

    Trainer(nn.Linear(8, 2), data, loss=weighted, micro_batch_size=4, max_steps=1, output="run", device="cpu").fit()
    assert caplog.text.count("train.micro_batch_size") == 1


@pytest.mark.parametrize(
    ("loss", "arguments"),
    [
        (masked_mean, {}),
        (masked_mean, {"eval_loader": masked_data(), "eval_batch_size": SAMPLES}),
        (mean_of_samples, EVALUATED),
        (mean_of_samples, {"micro_batch_size": 4}),
        (masked_mean, {"micro_batch_size": 4, "collate": counted}),
        (noisy, {"micro_batch_size": 4}),
        (noisy_masked_mean, EVALUATED),
        (mean_of_a_branch, {"micro_batch_size": 4}),
        (mean_of_four_or_more, {"micro_batch_size": 4}),
    ],
    ids=[
        "one micro-batch",
        "one batch of an evaluation",
        "batches of an evaluation",
        "mean of samples",
        "counted targets",
        "noise",
        "noise of a masked mean",
        "one branch a batch",
        "a loss that fails on halves",
    ],
)
def test_other_losses_are_none(caplog, loss, arguments):
    assert train(caplog, loss, **arguments) == ""


class Noise(nn.Module):
    """Adds noise of a generator, in evaluations, too."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.draw = draw

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + self.draw()


class OwnNoise(nn.Module):
    """Adds noise of a generator that is an attribute."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.generator = generator

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + torch.rand(inputs.shape, generator=self.generator)


class Source:
    """An object that keeps a generator."""

    def __init__(self) -> None:
        self.generator = random.Random(0)

    def draw(self) -> float:
        return self.generator.random()


OF_FILE = np.random.default_rng(0)


class NoiseOfFile(nn.Module):
    """Adds noise of a generator that is a global variable."""

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + OF_FILE.random()


class RunningScale(nn.Module):
    """A loss that keeps the mean of its last losses, and divides by it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(()))
        self.calls = 0

    def forward(self, predictions: Tensor, targets: Tensor) -> Tensor:
        loss = masked_mean(predictions, targets)
        self.calls += 1
        self.scale = 0.5 * self.scale + 0.5 * loss.detach()
        return loss / self.scale / self.calls


def own_noise() -> nn.Module:
    return nn.Sequential(nn.Sequential(nn.Sequential(OwnNoise(torch.Generator().manual_seed(0)))))


def noise_of_numpy() -> nn.Module:
    return Noise(np.random.default_rng(0).random)


def noise_of_object() -> nn.Module:
    return Noise(Source().draw)


def noise_of_file() -> nn.Module:
    OF_FILE.bit_generator.state = np.random.default_rng(0).bit_generator.state
    return NoiseOfFile()


def loss_with_noise() -> Any:
    generator = np.random.default_rng(0)
    return lambda predictions, targets: masked_mean(predictions, targets) * generator.random()


class WritesToInputs(nn.Module):
    """Subtracts one from its input, in place."""

    def forward(self, inputs: Tensor) -> Tensor:
        inputs -= 1.0
        return inputs


class EmptiesDict(nn.Module):
    """Computes its loss with targets that it takes out of a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, inputs: Tensor, others: dict[str, Tensor]) -> dict[str, Tensor]:
        predictions = self.linear(inputs)
        return {"loss": masked_mean(predictions, others.pop("targets")), "logits": predictions}


LAYERS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    "dropout and batch norm": (lambda: nn.Sequential(nn.BatchNorm1d(8), nn.Dropout(0.5)), lambda: masked_mean),
    "an own generator": (own_noise, lambda: masked_mean),
    "a method of a generator": (noise_of_numpy, lambda: masked_mean),
    "a generator of an object": (noise_of_object, lambda: masked_mean),
    "a generator of a file": (noise_of_file, lambda: masked_mean),
    "a generator of the loss": (nn.Identity, loss_with_noise),
    "a loss that changes": (nn.Identity, RunningScale),
    "a layer that writes to its input": (WritesToInputs, lambda: masked_mean),
}
"""Case -> a layer of the model, and the loss."""


@pytest.mark.parametrize("case", LAYERS)
@pytest.mark.parametrize("arguments", [{"micro_batch_size": 4}, EVALUATED], ids=["micro-batches", "evaluations"])
def test_the_measurement_changes_no_number(monkeypatch, case, arguments):
    """Random numbers and statistics are those of a run without it."""
    make_layer, make_loss = LAYERS[case]
    measured = []

    def weights() -> dict[str, Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(make_layer(), nn.Linear(8, 8), make_layer(), nn.Linear(8, 8))
        usual = {"batch_size": 8, "max_steps": 3, "output": "run", "device": "cpu", **arguments}
        Trainer(model, masked_data(), loss=make_loss(), **usual).fit()
        return {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def measure(*arguments: Any) -> Any:
        measured.append(arguments)
        return measure_loss(*arguments)

    measure_loss = micro_batches._measure
    monkeypatch.setattr(micro_batches, "_measure", measure)
    with_it = weights()
    assert measured
    monkeypatch.setattr(task, "warn_of_other_means", lambda run, batches, task: None)
    without = weights()
    assert all(torch.equal(with_it[name], without[name]) for name in without)


def test_a_model_that_takes_values_out_of_its_inputs_is_measured_and_trains(caplog):
    torch.manual_seed(0)
    caplog.set_level(logging.WARNING, logger="fastloop")
    samples = [{"inputs": inputs, "others": {"targets": targets}} for inputs, targets in masked_data()]
    data: Any = torch.utils.data.DataLoader(samples, batch_size=SAMPLES)
    Trainer(EmptiesDict(), data, micro_batch_size=4, max_steps=1, output="run", device="cpu").fit()
    assert caplog.text.count("train.micro_batch_size") == 1


class ExchangingLoss:
    """A loss that needs every process in each call, and differs on process 1.

    Attributes:
        kind: Its value on process 1: "noise", "a masked mean", or "a mean of samples", as on process 0.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.calls = 0

    def __call__(self, predictions: Tensor, targets: Tensor) -> Tensor:
        in_training: list[Any] = [None, None]
        torch.distributed.all_gather_object(in_training, torch.is_grad_enabled())
        if in_training[0] != in_training[1]:
            raise RuntimeError("one process trains, and the other one measures")
        if torch.distributed.get_rank() == 0 or self.kind == "a mean of samples":
            return mean_of_samples(predictions, targets)
        self.calls += 1
        scale = self.calls if self.kind == "noise" else 1
        return masked_mean(predictions, targets) * scale


def counted_on_second(samples: list[tuple[Tensor, Tensor]]) -> Batch:
    """Batches whose weight on process 1 is the number of their targets, and on process 0 that of their samples."""
    batch = counted(samples)
    if torch.distributed.get_rank() == 0:
        batch.loss_weight = float(len(samples))
    return batch


def train_on_processes(kind: str, collate: Any) -> list[str]:
    """The messages of this process's warnings."""
    messages = list[str]()
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("fastloop").addHandler(handler)
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    if kind == "a shard":
        elements = 1 - ranks.rank()
        model.register_parameter("shard", nn.Parameter(torch.ones(elements), requires_grad=False))
        model._ddp_params_and_buffers_to_ignore = ["shard"]  # type: ignore[assignment]
    data = torch.utils.data.DataLoader(masked_data(), batch_size=SAMPLES, collate_fn=collate)
    usual: dict[str, Any] = {"output": "run", "save_every": None, "device": "cpu", "plugins": ["ddp"]}
    Trainer(model, data, loss=ExchangingLoss(kind), micro_batch_size=4, max_steps=1, **usual).fit()
    return messages


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "collate", "warnings"),
    [
        ("noise", None, 0),
        ("a masked mean", None, 1),
        ("a mean of samples", counted_on_second, 0),
        ("a shard", None, 0),
    ],
    ids=["noise", "no mean", "counted targets", "an empty shard"],
)
def test_processes_measure_the_same_number_of_losses(processes, tmp_path, kind, collate, warnings):
    """Also if process 1 alone finds a reason to stop: a loss with a collective operation waits for all. Process 0
    warns of what process 1 measured."""
    first, _ = processes(2, train_on_processes, kind, collate, folder=tmp_path, limit=120.0)
    assert "\n".join(first.result).count("is not the mean over its samples") == warnings
