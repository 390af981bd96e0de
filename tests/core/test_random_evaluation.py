"""Evaluation leaves the random numbers of training as they are."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from fastloop import Trainer
from fastloop.testing import tiny_data, tiny_model


class Noisy(Dataset[Any]):
    """Draws random numbers for each sample, as augmentations do."""

    def __init__(self) -> None:
        self.data = tiny_data(16, seed=1)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        inputs, target = self.data[index]
        return inputs + torch.randn_like(inputs), target


def trained(output: str, data: Any, **settings: Any) -> torch.Tensor:
    torch.manual_seed(0)
    model = tiny_model()
    quiet: list[Any] = [{"log": False}, {"progress": False}]
    Trainer(
        model,
        tiny_data(),
        data,
        plugins=quiet,
        loss=nn.functional.cross_entropy,
        output=output,
        epochs=1,
        device="cpu",
        **settings,
    ).fit()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def test_random_evaluation_data_does_not_change_training(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    often, once = trained("often", Noisy(), evaluate_every=2), trained("once", Noisy())
    assert torch.equal(often, once)
