"""A loss or metric that would broadcast predictions (N, 1) and targets (N,) is refused; others equal plain torch.

Modules:
    plugins/fastloop_plugins/tasks/shared/broadcasts.py
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset
from torchmetrics import Metric

from fastloop import Trainer, UsageError
from fastloop.testing import assert_problem
from fastloop_plugins.tasks.shared.broadcasts import BroadcastCheck

INPUTS = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
SUMS = INPUTS.sum(1)


def squared(predictions: Tensor, targets: Tensor) -> Tensor:
    return ((predictions - targets) ** 2).mean()


def chosen(predictions: Tensor, targets: Tensor) -> Tensor:
    return torch.where(targets > 0, predictions, -predictions).mean()


def scaled(predictions: Tensor, targets: Tensor) -> Tensor:
    """Both operands are computed first."""
    return functional.mse_loss(predictions.sigmoid() * 2, (targets - targets.mean()).abs())


class OwnLoss(nn.Module):
    def forward(self, predictions: Tensor, targets: Tensor) -> Tensor:
        return (predictions - targets).abs().mean()


ELEMENTWISE: dict[str, Callable[[Any, Any], Tensor]] = {
    "mse": functional.mse_loss,
    "l1": functional.l1_loss,
    "smooth l1": functional.smooth_l1_loss,
    "huber": functional.huber_loss,
    "poisson": functional.poisson_nll_loss,
    "kl": functools.partial(functional.kl_div, reduction="batchmean"),
    "soft margin": functional.soft_margin_loss,
    "bce": lambda predictions, targets: functional.binary_cross_entropy(predictions.sigmoid(), targets.sigmoid()),
    "bce with logits": functional.binary_cross_entropy_with_logits,
    "module": nn.SmoothL1Loss(),
    "own": squared,
    "own module": OwnLoss(),
    "where": chosen,
    "scaled": scaled,
    "log cosh": lambda predictions, targets: torch.log(torch.cosh(predictions.sub(targets))).mean(),
    "maximum": lambda predictions, targets: torch.maximum(predictions, targets).mean(),
    "distance": lambda predictions, targets: torch.dist(predictions, targets),
}
SHAPES = [((16, 1), (16,)), ((16,), (16, 1)), ((16, 1, 1), (16, 1)), ((16, 1, 1), (16,)), ((8, 8, 1), (8, 8))]


class Reshaped(nn.Module):
    """A linear model whose outputs have a shape, such as (N, 1, 1)."""

    def __init__(self, inner: tuple[int, ...]) -> None:
        super().__init__()
        self.inner = inner
        self.layer = nn.Linear(4, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layer(inputs).reshape(-1, *self.inner)


def trainer(model: nn.Module, loss: Any, data: Any, **settings: Any) -> Trainer:
    usual = {"batch_size": 8, "epochs": 1, "device": "cpu", "output": "run", "lr": 0.1, "optimizer": "SGD"}
    plugins = [{"log": False}, {"progress": False}]
    return Trainer(model, data, loss=loss, plugins=plugins, **{**usual, **settings})


@pytest.mark.parametrize("shapes", SHAPES, ids=str)
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_a_loss_that_would_broadcast_is_refused(name: str, shapes: Any):
    predictions = torch.rand(shapes[0], requires_grad=True)
    with pytest.raises(UsageError) as caught:
        BroadcastCheck().call_loss(ELEMENTWISE[name], predictions, torch.rand(shapes[1]))
    assert_problem(caught.value.problem, f"shapes-broadcast {shapes[0]} {shapes[1]}")
    with pytest.raises(UsageError), torch.no_grad():
        BroadcastCheck().call_loss(ELEMENTWISE[name], predictions, torch.rand(shapes[1]))


@pytest.mark.parametrize("shape", [(16,), (16, 1), (16, 1, 1), (16, 3)], ids=str)
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_losses_of_equal_shapes_are_those_of_plain_torch(name: str, shape: Any):
    predictions = torch.rand(shape)
    targets = torch.rand(shape)
    check = BroadcastCheck()
    expected = ELEMENTWISE[name](predictions, targets)
    for _ in range(2):
        assert torch.equal(check.call_loss(ELEMENTWISE[name], predictions, targets), expected)


def test_a_run_is_refused_before_its_weights_change():
    model = Reshaped((1,))
    before = model.layer.weight.detach().clone()
    with pytest.raises(UsageError) as caught:
        trainer(model, functional.mse_loss, TensorDataset(INPUTS, SUMS)).fit()
    assert_problem(caught.value.problem, "shapes-broadcast (8, 1) (8,)")
    assert torch.equal(model.layer.weight, before)


def ranking(predictions: Tensor, targets: Tensor) -> Tensor:
    """Pairs of predictions, and pairs of targets."""
    wanted = (targets[:, None] > targets[None]).float()
    return functional.binary_cross_entropy_with_logits(predictions - predictions.T, wanted)


def confusion(predictions: Tensor, targets: Tensor) -> Tensor:
    """Predictions (N, C, 1) with targets (N, 1, C)."""
    wanted = functional.one_hot(targets, 3).float()
    return (predictions.softmax(1)[:, :, None] * wanted[:, None, :]).sum(0).square().mean()


PURPOSEFUL: dict[str, tuple[Any, int, Tensor]] = {
    "squeezed in the loss": (lambda out, wanted: functional.mse_loss(out.squeeze(1), wanted), 1, SUMS),
    "flattened in the loss": (lambda out, wanted: squared(out.flatten(), wanted), 1, SUMS),
    "targets raised in the loss": (lambda out, wanted: squared(out, wanted[:, None]), 1, SUMS),
    "pairs": (ranking, 1, SUMS),
    "confusion": (confusion, 3, torch.arange(16) % 3),
    "classes": (functional.cross_entropy, 3, torch.arange(16) % 3),
    "quantiles": (lambda out, wanted: (out - wanted[:, None]).relu().mean(), 3, SUMS),
    "expanded by hand": (lambda out, wanted: (out - wanted[None]).square().mean(), 1, SUMS),
    "distances": (lambda out, wanted: torch.cdist(out, wanted[:, None]).mean(), 1, SUMS),
}


@pytest.mark.parametrize("name", PURPOSEFUL)
def test_losses_that_pair_on_purpose_are_let_through(name: str):
    loss, width, targets = PURPOSEFUL[name]
    predictions = nn.Linear(4, width)(INPUTS)
    assert torch.equal(BroadcastCheck().call_loss(loss, predictions, targets), loss(predictions, targets))


def test_a_first_batch_of_one_sample_hides_nothing():
    check = BroadcastCheck()
    loss = check.call_loss(squared, torch.zeros(1, 1), torch.full((1,), 3.0))
    assert loss.item() == 9, "(1, 1) and (1,) are compared rightly"
    with pytest.raises(UsageError):
        check.call_loss(squared, torch.zeros(4, 1), torch.zeros(4))


def test_structures_of_tensors_are_watched():
    def loss(predictions: dict[str, Tensor], targets: tuple[Tensor, Tensor]) -> Tensor:
        return squared(predictions["a"], targets[0]) + squared(predictions["b"], targets[1])

    right = {"a": torch.rand(4), "b": torch.rand(4, 1)}
    assert BroadcastCheck().call_loss(loss, right, (torch.rand(4), torch.rand(4, 1))) > 0
    with pytest.raises(UsageError):
        BroadcastCheck().call_loss(loss, right, (torch.rand(4), torch.rand(4)))


class OwnLossModel(nn.Module):
    def __init__(self, loss: Any, squeezes: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.loss = loss
        self.squeezes = squeezes

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.layer(x)
        values = logits.squeeze(1) if self.squeezes else logits
        return {"loss": self.loss(values, labels), "logits": values}


ROWS = [{"x": row, "labels": total} for row, total in zip(INPUTS, SUMS, strict=True)]


@pytest.mark.parametrize("name", ["mse", "bce with logits", "scaled"])
def test_a_model_that_computes_its_loss_is_watched_too(name: str):
    with pytest.raises(UsageError) as caught:
        trainer(OwnLossModel(ELEMENTWISE[name], squeezes=False), None, ROWS).fit()
    assert caught.value.problem.code == "shapes-broadcast"
    model = OwnLossModel(ELEMENTWISE[name], squeezes=True)
    assert trainer(model, None, ROWS).fit()["status"] == "completed"


class OwnMetric(Metric):
    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.tensor(0.0), dist_reduce_fx="sum")

    def update(self, predictions: Tensor, targets: Tensor) -> None:
        self.total += (predictions - targets).square().mean()

    def compute(self) -> Tensor:
        return self.total


METRICS: dict[str, Any] = {
    "own metric": OwnMetric(),
    "function": lambda predictions, targets: ((predictions - targets) ** 2).mean(),
    "function of computed arrays": lambda predictions, targets: abs(predictions * 2 - (targets - 1)).mean(),
    "equal": lambda predictions, targets: (predictions.round() == targets.round()).mean(),
}


@pytest.mark.parametrize(
    ("name", "predictions", "targets"),
    [*((name, (16, 1), (16,)) for name in METRICS), ("function", (16,), (16, 1)), ("own metric", (16,), (16, 1))],
)
def test_a_metric_that_would_broadcast_is_refused_before_training(name: str, predictions: Any, targets: Any):
    def loss(out: Tensor, wanted: Tensor) -> Tensor:
        return functional.mse_loss(out.flatten(), wanted.flatten())

    data = TensorDataset(INPUTS, SUMS.reshape(targets))
    model = Reshaped(predictions[1:])
    before = model.layer.weight.detach().clone()
    with pytest.raises(UsageError) as caught:
        trainer(model, loss, data, eval_loader=data, metrics={"error": METRICS[name]}).fit()
    assert_problem(caught.value.problem, f"metric-failed 'error' {(8, *predictions[1:])} {(8, *targets[1:])}")
    assert torch.equal(model.layer.weight, before)


def test_metrics_of_functions_that_pair_on_purpose_equal_numpy():
    from sklearn.metrics import mean_squared_error

    metrics = {
        "sklearn": mean_squared_error,
        "pairs": lambda predictions, targets: abs(predictions - predictions.T).mean(),
        "flat": lambda predictions, targets: ((predictions[:, 0] - targets) ** 2).mean(),
    }
    data = TensorDataset(INPUTS, SUMS)
    model = nn.Linear(4, 1)
    made = trainer(model, lambda out, wanted: squared(out[:, 0], wanted), data, eval_loader=data, metrics=metrics)
    summary = made.fit()["validation"]
    scores = model(INPUTS).detach()
    expected = squared(scores[:, 0], SUMS).item()
    assert summary["sklearn"] == pytest.approx(expected)
    assert summary["flat"] == pytest.approx(expected)
    assert summary["pairs"] == pytest.approx((scores - scores.T).abs().mean().item())


CODE = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

def net():
    return nn.Linear(4, 1)

def rows():
    inputs = torch.randn(16, 4)
    return {"train": TensorDataset(inputs, inputs.sum(1))}

def own(predictions, targets):
    return (predictions - targets).abs().mean()
"""


@pytest.mark.parametrize("loss", ["huber_loss", "code.py:own"])
def test_a_recipe_is_refused_too(loss: str):
    from fastloop.lifecycle import execute, open_run
    from fastloop.plugins.resolve import resolve
    from fastloop.recipe import make_recipe

    Path("code.py").write_text(CODE)
    tree = {
        "model": {"module": "code.py:net"},
        "data": {"module": "code.py:rows"},
        "train": {"epochs": 1, "batch_size": 8, "lr": 0.1, "device": "cpu"},
        "plugins": [{"module": {"loss": loss}}, {"log": False}, {"progress": False}],
        "output": "run",
    }
    with pytest.raises(UsageError) as caught, open_run(resolve(make_recipe(tree, Path("recipe.yaml")))) as run:
        execute(run)
    assert_problem(caught.value.problem, "shapes-broadcast (8, 1) (8,)")
