"""Losses that are no mean, and batches that have no pair of inputs and targets, are refused with a remedy.

Modules:
    plugins/fastloop_plugins/tasks/shared/forward.py
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from fastloop import Trainer, UsageError
from fastloop.lifecycle import build
from fastloop.plugins.resolve import resolve
from fastloop.recipe import make_recipe
from fastloop.testing import expect_problem

INPUTS = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))


class OwnLoss(nn.Module):
    """Like those of torch."""

    def __init__(self, reduction: str = "mean") -> None:
        super().__init__()
        self.reduction = reduction

    def forward(self, scores: Tensor, targets: Tensor) -> Tensor:
        return functional.mse_loss(scores, targets, reduction=self.reduction)


NO_MEAN: dict[str, Any] = {
    "sum": nn.MSELoss(reduction="sum"),
    "none": nn.L1Loss(reduction="none"),
    "cross entropy": nn.CrossEntropyLoss(reduction="sum"),
    "partial": functools.partial(functional.mse_loss, reduction="sum"),
    "partial of a module": functools.partial(nn.MSELoss(reduction="sum")),
    "own": OwnLoss("sum"),
    "size_average": functools.partial(functional.mse_loss, size_average=False),
    "reduce": functools.partial(functional.mse_loss, reduce=False),
}
MEANS: dict[str, Any] = {
    "mean": nn.MSELoss(),
    "partial": functools.partial(functional.mse_loss, reduction="mean"),
    "batchmean": nn.KLDivLoss(reduction="batchmean"),
    "own": OwnLoss(),
    "function": lambda scores, targets: functional.mse_loss(scores, targets),
}


def trainer(data: Any, loss: Any, model: nn.Module | None = None) -> Trainer:
    return Trainer(
        model or nn.Linear(4, 1), data, plugins=[{"log": False}, {"progress": False}], loss=loss, batch_size=8,
        epochs=1, device="cpu", output="run",
    )  # fmt: skip


def recipe_with(loss: Any, folder: Path) -> Any:
    (folder / "own.py").write_text(
        "import torch\nfrom test_loss_settings import INPUTS, MEANS, NO_MEAN\n"
        "def net(): return torch.nn.Linear(4, 1)\n"
        "def data(): return {'train': torch.utils.data.TensorDataset(INPUTS, INPUTS[:, :1])}\n"
        f"loss = {loss}\n"
    )
    sections = {key: {"module": f"{folder}/own.py:{name}"} for key, name in (("model", "net"), ("data", "data"))}
    plugins = [{"module": {"loss": f"{folder}/own.py:loss"}}, {"log": False}, {"progress": False}]
    train = {"batch_size": 8, "epochs": 1, "device": "cpu"}
    return make_recipe({**sections, "train": train, "plugins": plugins, "output": str(folder / "run")})


@pytest.mark.parametrize("name", NO_MEAN)
def test_a_loss_that_is_no_mean_is_refused(name, tmp_path):
    with expect_problem("conflicting-values", UsageError):
        trainer(TensorDataset(INPUTS, INPUTS[:, :1]), NO_MEAN[name])
    with expect_problem("conflicting-values plugins.module.loss", UsageError):
        build(resolve(recipe_with(f"NO_MEAN[{name!r}]", tmp_path)))


@pytest.mark.parametrize("name", MEANS)
def test_a_mean_is_accepted(name, tmp_path):
    assert trainer(TensorDataset(INPUTS, INPUTS[:, :1].abs()), MEANS[name]).validate(
        TensorDataset(INPUTS, INPUTS[:, :1].abs())
    )
    build(resolve(recipe_with(f"MEANS[{name!r}]", tmp_path)))


@pytest.mark.parametrize("value", ["mean", "batchmean"])
def test_a_recipe_may_name_the_mean(value, tmp_path):
    recipe = recipe_with("None", tmp_path)
    recipe.plugins["module"]["loss"] = {"name": "kl_div", "reduction": value}
    build(resolve(recipe))


# -- samples of another form -------------------------------------------------------------------------------------------


class TwoInputs(nn.Module):
    """Takes ``(x1, x2)``, or both by name with the labels."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 1)

    def forward(self, pair: Any = None, x1: Any = None, x2: Any = None, labels: Any = None) -> Any:
        x1, x2 = (x1, x2) if pair is None else pair
        scores = self.layer(torch.cat([x1, x2], 1))
        return scores if labels is None else {"loss": functional.mse_loss(scores, labels)}


def test_three_elements_are_counted_and_both_remedies_train():
    triples = TensorDataset(INPUTS, INPUTS, INPUTS[:, :1])
    with pytest.raises(UsageError, match="3 elements") as refused:
        trainer(triples, functional.mse_loss, TwoInputs()).fit()
    message = str(refused.value)
    assert "((x1, x2), y)" in message
    assert "{'x1': x1, 'x2': x2, 'labels': y}" in message
    pairs = [((x1, x2), y) for x1, x2, y in triples]
    assert trainer(pairs, functional.mse_loss, TwoInputs()).fit()["status"] == "completed"
    mappings = [{"x1": x1, "x2": x2, "labels": y} for x1, x2, y in triples]
    assert trainer(mappings, None, TwoInputs()).fit()["status"] == "completed"


@pytest.mark.parametrize(
    ("tensors", "loss", "found"),
    [
        ((INPUTS,), functional.mse_loss, "wrong-batch 1"),
        ((INPUTS, INPUTS[:, :1]), None, "wrong-batch"),
        ((INPUTS, INPUTS, INPUTS, INPUTS[:, :1]), None, "wrong-batch 4"),
    ],
)
def test_other_batches_are_described(tensors, loss, found):
    with expect_problem(found, UsageError):
        trainer(TensorDataset(*tensors), loss).fit()
