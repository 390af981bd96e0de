"""Losses of torch, given to ``Trainer``, train and evaluate as a plain loop over whole batches, however a step is
divided."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from fastloop import Plugin, Trainer, hookimpl
from fastloop.testing import ProcessResult

ROWS = 17
BATCH = 6
LR = 0.1
SEED = 7
DRAW = torch.Generator().manual_seed(0)
INPUTS = torch.randn(ROWS, 6, generator=DRAW)
NUMBERS = torch.randn(ROWS, 3, generator=DRAW)
CLASSES = torch.randint(3, (ROWS,), generator=DRAW)
SOME_CLASSES = CLASSES.where(torch.arange(ROWS) % 3 > 0, -100)
SETS = torch.randint(2, (ROWS, 3), generator=DRAW).float()
SIGNS = 2 * SETS - 1
SHARES = torch.rand(ROWS, 3, generator=DRAW).softmax(1)
PIXELS = torch.randint(3, (ROWS, 4), generator=DRAW)
SOME_PIXELS = PIXELS.where(torch.rand(ROWS, 4, generator=DRAW) < 0.6, -100)
WEIGHTS = torch.tensor([1.0, 2.5, 0.25])


class Pixels(nn.Module):
    """Scores of three classes for each of four pixels: (batch, 3, 4)."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 12)

    def forward(self, inputs: Tensor) -> Tensor:
        scores: Tensor = self.layer(inputs)
        return scores.view(-1, 3, 4)


def scores() -> nn.Module:
    return nn.Linear(6, 3)


def log_probabilities() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 3), nn.LogSoftmax(1))


Case = tuple[Callable[[], nn.Module], Tensor, Any]
SMOOTHED = nn.CrossEntropyLoss(weight=WEIGHTS, label_smoothing=0.1)
CASES: dict[str, Case] = {
    "mse": (scores, NUMBERS, nn.MSELoss()),
    "smooth l1": (scores, NUMBERS, functional.smooth_l1_loss),
    "huber": (scores, NUMBERS, nn.HuberLoss(delta=0.5)),
    "poisson": (scores, NUMBERS.abs(), nn.PoissonNLLLoss()),
    "sets": (scores, SETS, nn.BCEWithLogitsLoss(weight=WEIGHTS, pos_weight=WEIGHTS.flip(0))),
    "soft margin of sets": (scores, SETS, nn.MultiLabelSoftMarginLoss(weight=WEIGHTS)),
    "soft margin": (scores, SIGNS, nn.SoftMarginLoss()),
    "hinge": (scores, SIGNS, nn.HingeEmbeddingLoss()),
    "probabilities": (scores, SHARES, SMOOTHED),
    "divergence": (log_probabilities, SHARES, partial(functional.kl_div, reduction="batchmean")),
    "margin": (scores, CLASSES, nn.MultiMarginLoss(weight=WEIGHTS)),
    "ignored targets": (scores, SOME_CLASSES, SMOOTHED),
    "ignored pixels": (Pixels, SOME_PIXELS, SMOOTHED),
    "weights": (log_probabilities, CLASSES, nn.NLLLoss(weight=WEIGHTS)),
    "an ignored class": (log_probabilities, CLASSES, nn.NLLLoss(ignore_index=1)),
}
"""Name -> model, targets and loss."""


class Losses(Plugin):
    """Keeps the loss of each step."""

    name = "losses"

    def __init__(self) -> None:
        super().__init__()
        self.values: list[float] = []

    @hookimpl
    def after_step(self, loss: Tensor) -> None:
        self.values.append(loss.item())


@dataclass(kw_only=True)
class Trained:
    """The losses of all steps and then of an evaluation, and the weights."""

    losses: list[float]
    weights: dict[str, Tensor]


def train(name: str, micro_batch: int, *strategy: str) -> Trained:
    make, targets, loss = CASES[name]
    torch.manual_seed(0)
    model = make()
    data = TensorDataset(INPUTS, targets)
    losses = Losses()
    summary = Trainer(
        model, data, data, loss=loss, plugins=[losses, *strategy, {"log": False}, {"progress": False}],
        batch_size=BATCH, micro_batch_size=micro_batch, eval_batch_size=4, epochs=1, optimizer="SGD", lr=LR, seed=SEED,
        device="cpu", output=f"{name} {micro_batch}",
    ).fit()  # fmt: skip
    return Trained(losses=[*losses.values, summary["validation"]["loss"]], weights=model.state_dict())


def train_all(micro_batch: int) -> dict[str, Trained]:
    """Name -> training of one of two processes."""
    return {name: train(name, micro_batch, "ddp") for name in CASES}


def train_plainly(name: str) -> Trained:
    """Train on the batches that fastloop documents."""
    make, targets, loss = CASES[name]
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    losses = []
    for ids in torch.randperm(ROWS, generator=torch.Generator().manual_seed(SEED)).split(BATCH):
        of_step = loss(model(INPUTS[ids]), targets[ids])
        of_step.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(of_step.item())
    with torch.no_grad():
        losses.append(loss(model(INPUTS), targets).item())
    return Trained(losses=losses, weights=model.state_dict())


def compare(ours: Trained, expected: Trained) -> None:
    assert ours.losses == pytest.approx(expected.losses, rel=1e-5)
    torch.testing.assert_close(ours.weights, expected.weights, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("micro_batch", [BATCH, 2])
@pytest.mark.parametrize("name", CASES)
def test_a_loss_of_torch_trains_as_in_a_plain_loop(name: str, micro_batch: int):
    compare(train(name, micro_batch), train_plainly(name))


@pytest.mark.slow
def test_two_processes_train_with_losses_of_torch_as_a_plain_loop(
    processes: Callable[..., list[ProcessResult]], tmp_path: Path
):
    """One sample a micro-batch: the second process has two of the five in the last step."""
    for ended in processes(2, train_all, 1, folder=tmp_path):
        for name, ours in ended.result.items():
            compare(ours, train_plainly(name))
