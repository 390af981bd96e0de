"""Tests of mixup: its losses, its workers, its effect on digits, and fastloop's conformance tests."""

import pytest
import torch
from fastloop import Plugin, Trainer, hookimpl
from fastloop.testing import Conformance, tiny_data, tiny_model
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from mixup import Mixed, Mixup


class Batches(Plugin):
    """Keeps the training batches."""

    name = "batches"

    def __init__(self):
        super().__init__()
        self.batches = []

    @hookimpl
    def before_step(self, batches):
        self.batches += batches


def losses_by_hand(alpha: float, epochs: int = 2, seed: int = 123) -> list[float]:
    """Losses of a loop that a person would write."""
    (inputs, targets), model = tiny_data().tensors, tiny_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    torch.manual_seed(seed)
    losses = []
    for epoch in range(epochs):
        for ids in torch.randperm(len(targets), generator=torch.Generator().manual_seed(seed + epoch)).split(8):
            order = torch.randperm(len(ids))
            share = torch.distributions.Beta(alpha, alpha).sample()
            scores = model(share * inputs[ids] + (1 - share) * inputs[ids][order])
            pairs = [cross_entropy(scores, labels) for labels in (targets[ids], targets[ids][order])]
            loss = share * pairs[0] + (1 - share) * pairs[1]
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses


def test_losses_are_those_of_a_hand_written_mixup(tiny_run):
    assert tiny_run([Mixup(alpha=0.5)]).losses == losses_by_hand(0.5)
    assert tiny_run([Mixup(alpha=0.5)]).losses != tiny_run().losses


def test_evaluation_is_not_mixed(tiny_run):
    result = tiny_run([Mixup(alpha=1.0)])
    inputs, targets = tiny_data(32, seed=1).tensors
    with torch.no_grad():
        loss = cross_entropy(result.model.eval()(inputs), targets).item()
    assert result.summary["validation"]["loss"] == pytest.approx(loss, rel=1e-5)


def test_workers_mix_and_draw_the_same_numbers_in_any_number(tiny_run):
    runs = []
    for workers in (2, 1):
        batches = Batches()
        tiny_run([Mixup(alpha=1.0), {"dataloader-workers": {"num_workers": workers}}, batches], epochs=1)
        runs.append(batches.batches)
    assert {batch.worker for batch in runs[0]} == {0, 1}
    assert all(isinstance(batch.inputs, Mixed) for batch in runs[0])
    assert len({batch.inputs.share.item() for batch in runs[0]}) == len(runs[0]), "each micro-batch draws its own share"
    for batch, again in zip(*runs, strict=True):
        assert torch.equal(batch.inputs.inputs, again.inputs.inputs)


def test_it_learns_better_from_digits_with_wrong_labels(tmp_path):
    images, labels = load_digits(return_X_y=True)
    random = torch.Generator().manual_seed(0)
    order = torch.randperm(len(labels), generator=random)
    data = TensorDataset(torch.tensor(images, dtype=torch.float32)[order] / 16, torch.tensor(labels)[order])
    train = TensorDataset(*data[:600])
    validation = TensorDataset(*data[600:])
    train.tensors[1][:240] = torch.randint(10, (240,), generator=random)
    found = {}
    for name, plugins in (("plain", []), ("mixup", [Mixup(alpha=1.0)])):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
        settings = {
            "epochs": 30,
            "batch_size": 32,
            "lr": 3e-3,
            "device": "cpu",
            "evaluate_every": None,
            "save_every": None,
        }
        metrics = {"accuracy": MulticlassAccuracy(10, average="micro")}
        run = Trainer(
            model,
            train,
            validation,
            loss=cross_entropy,
            metrics=metrics,
            plugins=plugins,
            output=tmp_path / name,
            **settings,
        )
        found[name] = run.fit()["validation"]["accuracy"]
    assert found["mixup"] > found["plain"] + 0.03


class TestConformance(Conformance):
    plugin = "mixup"
    options = {"alpha": 0.4}
    slow = ("processes[fsdp]", "processes[deepspeed]")
