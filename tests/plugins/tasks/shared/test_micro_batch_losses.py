"""A loss that is not the mean over the samples of a batch is reported in the first step that has micro-batches."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from fastloop import Batch, Trainer

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


def train(caplog: Any, loss: Any, **arguments: Any) -> str:
    torch.manual_seed(0)
    caplog.set_level(logging.WARNING, logger="fastloop")
    usual = {"batch_size": SAMPLES, "max_steps": 2, "output": "run", "save_every": None, "device": "cpu"}
    data = torch.utils.data.DataLoader(masked_data(), batch_size=SAMPLES, collate_fn=arguments.pop("collate", None))
    Trainer(nn.Linear(8, 8), data, loss=loss, **{**usual, **arguments}).fit()
    return caplog.text


def test_a_masked_mean_over_micro_batches_is_a_warning(caplog):
    assert train(caplog, masked_mean, micro_batch_size=4).count("train.micro_batch_size") == 1


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
        (mean_of_samples, {"micro_batch_size": 4}),
        (masked_mean, {"micro_batch_size": 4, "collate": counted}),
    ],
    ids=["one micro-batch", "mean of samples", "counted targets"],
)
def test_other_losses_are_none(caplog, loss, arguments):
    assert train(caplog, loss, **arguments) == ""


def test_the_measurement_changes_no_number(monkeypatch, caplog):
    """A model with dropout and batch norm: random numbers and statistics stay."""

    def weights() -> dict[str, Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 8))
        usual = {"batch_size": 8, "micro_batch_size": 4, "max_steps": 3, "output": "run", "device": "cpu"}
        Trainer(model, masked_data(), loss=masked_mean, **usual).fit()
        return {name: tensor.clone() for name, tensor in model.state_dict().items()}

    measured = weights()
    assert "micro-batch" in caplog.text
    monkeypatch.setattr("fastloop_tools.trainer.task.warn_of_other_means", lambda run, batches, task: None)
    unmeasured = weights()
    assert all(torch.equal(measured[name], unmeasured[name]) for name in measured)
