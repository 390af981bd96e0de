"""Tests of gan: what it learns, and fastloop's conformance tests."""

import pytest
import torch
from fastloop.lifecycle import execute, open_run
from fastloop.plugins.resolve import resolve
from fastloop.recipe import make_recipe
from fastloop.testing import Conformance
from sklearn.datasets import load_digits
from sklearn.neighbors import KNeighborsClassifier

from digits_gan.task import LATENT, Networks, digits

TASK = {
    "model": {"module": "digits_gan.task:Networks", "arguments": {"width": 32}},
    "data": {"module": "digits_gan.task:digits", "arguments": {"train": 35, "validation": 32}},
    "plugins": [{"module": {"loss": "digits_gan.task:discriminator_loss"}}],
    "train": {"lr": 3e-3},
}


@pytest.fixture
def fit(tmp_path):
    """Train the task: ``fit(epochs=2)`` -> its run and the summary."""

    def call(**train):
        sections = {"model": {"module": "digits_gan.task:Networks"}, "data": {"module": "digits_gan.task:digits"}}
        train = {"batch_size": 64, "lr": 2e-3, "device": "cpu", "evaluate_every": None, "save_every": None} | train
        recipe = make_recipe(sections | {"train": train, "plugins": ["module", "gan"], "output": str(tmp_path / "run")})
        with open_run(resolve(recipe)) as run:
            return run, execute(run)

    return call


def distance(images, others):
    """The squared 2-norm between the mean images of two sets."""
    return float((images.mean(0) - others.mean(0)).square().sum())


def test_it_draws_digits(fit):
    run, summary = fit(epochs=30)
    torch.manual_seed(0)
    real = digits()["validation"].tensors[0]
    with torch.no_grad():
        untrained = Networks().sample(500)
        drawn = run.unwrap_model().eval().sample(500)
    assert distance(drawn, real) < 0.25 * distance(untrained, real)
    images, targets = load_digits(return_X_y=True)
    reader = KNeighborsClassifier(5).fit(images / 16, targets)
    kinds, counts = torch.tensor(reader.predict(drawn.numpy())).unique(return_counts=True)
    assert len(kinds) >= 8, "it draws most of the ten digits"
    assert counts.max() < 250, "and not one of them only"
    assert summary["steps"] == 30 * 24


def test_each_update_changes_its_own_network(fit):
    run, summary = fit(epochs=1, max_steps=3)
    states = {
        name: {int(state["step"]) for state in run.optimizer[name].state.values()}
        for name in ("discriminator", "generator")
    }
    assert states == {"discriminator": {3}, "generator": {3}}
    assert summary["steps"] == 3
    assert [group["betas"] for group in run.optimizer.param_groups] == [(0.5, 0.999)] * 2
    assert run.unwrap_model().sample(2).shape == (2, 64)
    assert LATENT == run.unwrap_model().generator[0].in_features


class TestConformance(Conformance):
    plugin = "gan"
    task = TASK
    refuses = ("deepspeed",)  # it steps one optimizer
    slow = ("processes[fsdp]", "processes[deepspeed]")
