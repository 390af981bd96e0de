"""Tests of local-sgd: when processes agree, what they learn, what is refused, and fastloop's conformance tests."""

import hashlib
from pathlib import Path

import pytest
import torch
from fastloop import Layout, Plugin, PluginError, hookimpl
from fastloop.lifecycle import open_run
from fastloop.memory_estimates import Weight
from fastloop.plugins.resolve import resolve
from fastloop.recipe import make_recipe
from fastloop.testing import VECTORS, Conformance, train
from sklearn.datasets import load_digits
from torch.utils.data import TensorDataset

from local_sgd import LocalSGD

DIGITS = {
    "model": {"module": "torch.nn:Linear", "arguments": {"in_features": 64, "out_features": 10}},
    "data": {"module": "test_local_sgd:digits"},
    "plugins": [
        {
            "module": {
                "loss": "cross_entropy",
                "metrics": {"accuracy": {"type": "MulticlassAccuracy", "num_classes": 10}},
            }
        }
    ],
    "train": {
        "batch_size": 32,
        "epochs": 2,
        "lr": 1e-1,
        "optimizer": "SGD",
        "device": "cpu",
        "evaluate_every": 15,
        "save_every": None,
    },
}
"""A linear model of scikit-learn's handwritten digits of 8 x 8 pixels. SGD has no state, so averages of weights and
gradients agree."""


def digits() -> dict[str, TensorDataset]:
    """1,497 training and 300 validation images, (64,) float32."""
    images, labels = load_digits(return_X_y=True)
    # pixel values are 0 to 16
    data = TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels))
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(0))
    return {"train": TensorDataset(*data[order[300:]]), "validation": TensorDataset(*data[order[:300]])}


class Digests(Plugin):
    """A checksum of the weights of this process after each step."""

    name = "digests"

    def __init__(self):
        super().__init__()
        self.digests = []

    @hookimpl
    def after_step(self, run):
        values = b"".join(weight.detach().numpy().tobytes() for weight in run.unwrap_model().parameters())
        self.digests.append(hashlib.sha256(values).hexdigest())


def trained(output: str, strategy: dict, digests: bool = False):
    """Train on this process; returns the results, and the checksums."""
    watch = Digests()
    result = train(
        DIGITS | {"plugins": [*DIGITS["plugins"], strategy], "output": output}, *([watch] if digests else [])
    )
    return result, watch.digests


def test_processes_agree_every_few_steps_and_learn(processes, tmp_path):
    (first, ours), (second, others) = (
        ended.result for ended in processes(2, trained, "run", {"local-sgd": {"every": 4}}, True, folder=tmp_path)
    )
    agree = [step for step, pair in enumerate(zip(ours, others, strict=True), 1) if pair[0] == pair[1]]
    assert agree == [step for step in range(1, len(ours) + 1) if step % 4 == 0]
    assert first.replicas == second.replicas, "the final weights are averaged"
    assert first.metrics == second.metrics, "evaluation uses the averaged weights"
    assert first.summary["validation"]["accuracy"] > 0.85


def test_estimate_sends_the_weights_every_few_steps():
    layout = Layout(weights=(Weight(shape=(8, 4), state=256),), buffers=16, processes=4, options={"every": 2})
    (estimate,) = LocalSGD.estimate_memory(layout)
    assert (estimate.weights, estimate.gradients, estimate.optimizer) == (144, 128, 256)
    assert estimate.sent_bytes == 2 * 3 / 4 * 144 / 2
    assert estimate.total == 144 + 128 + 256 + 144


def test_with_every_step_it_is_sgd_on_averaged_gradients(processes, tmp_path):
    runs = [
        processes(2, trained, name, {name: options}, folder=tmp_path)[0].result[0]
        for name, options in (("ddp", {}), ("local-sgd", {"every": 1}))
    ]
    assert runs[1].losses == pytest.approx(runs[0].losses, rel=1e-4)


def resumed(interrupted: int) -> list[float]:
    recipe = VECTORS | {"plugins": [*VECTORS["plugins"], "local-sgd"], "output": "run"}
    recipe |= {"train": {"batch_size": 8, "lr": 1e-2, "device": "cpu", "max_steps": interrupted}}
    return train(recipe, resume=Path("run") if interrupted > 3 else None).losses


def test_another_number_of_processes_resumes_from_the_average(processes, tmp_path):
    processes(2, resumed, 3, folder=tmp_path)
    assert len(processes(1, resumed, 6, folder=tmp_path)[0].result) == 3


@pytest.mark.parametrize(
    ("plugins", "message"),
    [
        (["ema"], "'local-sgd' and 'ema' exclude each other: it averages the weights of each process."),
        (["nan-guard"], "'local-sgd' and 'nan-guard' exclude each other: it expects equal gradients on all processes."),
        (["ddp"], "fill the slot 'strategy'"),
        ([{"amp": {"dtype": "fp16"}}], "fp16"),
    ],
)
def test_plugins_that_do_not_combine_are_refused_by_name(plugins, message, tmp_path):
    recipe = make_recipe(
        VECTORS
        | {"plugins": [*VECTORS["plugins"], "local-sgd", *plugins], "train": {"device": "cpu"}, "output": str(tmp_path)}
    )
    with pytest.raises(PluginError, match=message), open_run(resolve(recipe)):
        pass


class TestConformance(Conformance):
    plugin = "local-sgd"
    options = {"every": 4}
