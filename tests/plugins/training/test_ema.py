"""The plugin ``ema``.

Modules:
    plugins/fastloop_plugins/training/_batch_statistics.py
    plugins/fastloop_plugins/training/ema.py
"""

from __future__ import annotations

import pytest
import torch
from recording_plugins import WeightRecorder
from safetensors.torch import load_file
from torch import nn

from fastloop import Plugin, hookimpl
from fastloop.testing import assert_problem, tiny_data, tiny_model


class Order(Plugin):
    """Records the ids of each step."""

    name = "order"

    def __init__(self) -> None:
        super().__init__()
        self.ids: list[list[int]] = []

    @hookimpl
    def before_step(self, batches) -> None:
        self.ids += [list(batch.ids) for batch in batches]


def average(
    initial: dict[str, torch.Tensor], steps: list[dict[str, torch.Tensor]], decay: float, warmup: bool
) -> dict[str, torch.Tensor]:
    """The definition, written out."""
    kept = {name: weight.clone() for name, weight in initial.items()}
    for count, weights in enumerate(steps, start=1):
        now = min(decay, (1 + count) / (10 + count)) if warmup else decay
        kept = {name: now * kept[name] + (1 - now) * weights[name] for name in kept}
    return kept


@pytest.mark.parametrize(("decay", "warmup"), [(0.9, False), (0.9, True), (0.5, True)])
def test_evaluation_and_export_use_the_average_and_training_does_not(tiny_run, decay, warmup):
    plain, weights = tiny_run(), WeightRecorder()
    result = tiny_run([{"ema": {"decay": decay, "warmup": warmup}}, weights])
    assert result.losses == plain.losses, "training sees the weights themselves"
    initial = tiny_model().state_dict()
    for steps, evaluated in ((9, weights.evaluated[0]), (18, weights.evaluated[1])):
        expected = average(initial, weights.steps[:steps], decay, warmup)
        assert all(torch.allclose(evaluated[name], expected[name], atol=1e-6) for name in expected)
    exported = load_file(result.trainer.run.folder / "model" / "model.safetensors")
    assert all(torch.equal(exported[name], weights.evaluated[1][name]) for name in exported)


def test_update_every_averages_every_nth_step(tiny_run):
    weights = WeightRecorder()
    tiny_run([{"ema": {"decay": 0.9, "warmup": False, "update_every": 3}}, weights])
    expected = average(tiny_model().state_dict(), weights.steps[2::3], 0.9, warmup=False)
    assert all(torch.allclose(weights.evaluated[1][name], expected[name], atol=1e-6) for name in expected)


def test_training_weights_are_restored_after_failed_evaluation(tiny_run):
    class Fails(Plugin):
        name = "fails"
        runs_after = ("ema",)

        @hookimpl(wrapper=True)
        def evaluate(self):
            yield
            raise RuntimeError("on purpose")

    weights, model = WeightRecorder(), tiny_model()
    with pytest.raises(Exception, match="on purpose"):
        tiny_run([{"ema": {"decay": 0.9}}, weights, Fails()], model=model)
    assert all(torch.equal(model.state_dict()[name].cpu(), tensor) for name, tensor in weights.steps[-1].items())


def test_a_run_that_ends_before_the_first_update_warns(tiny_run, caplog):
    result = tiny_run([{"ema": {"start": 20, "update_every": 6}}])
    assert_problem(caplog, "never-updated plugins.ema: 18 24 start update_every")
    assert all(torch.equal(result.weights[name], weight) for name, weight in tiny_run().weights.items())


class Narrow(nn.Module):
    """The tiny model with weights in bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = tiny_model().bfloat16()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layers(inputs.bfloat16()).float()


def rounds_to(tensor: torch.Tensor, exact: torch.Tensor) -> bool:
    """Whether a tensor differs from the exact values by its rounding alone."""
    return torch.allclose(tensor.double(), exact, rtol=torch.finfo(tensor.dtype).eps, atol=1e-6)


@pytest.mark.parametrize("options", [{"decay": 0.99, "warmup": False}, {"mean": True}], ids=["decay", "mean"])
def test_the_average_of_bf16_weights_is_that_of_float64(tiny_run, options):
    weights = WeightRecorder()
    model = Narrow()
    expected = {name: weight.detach().double() for name, weight in model.named_parameters()}
    result = tiny_run([{"ema": options}, weights], model=model, evaluate_every=1)
    for count, step in enumerate(weights.steps, start=1):
        share = 1 / count if "mean" in options else 0.01
        for name in expected:
            expected[name] += share * (step[name].double() - expected[name])
        for name in expected:
            assert rounds_to(weights.evaluated[count - 1][name], expected[name])
    assert all(rounds_to(result.weights[name], expected[name]) for name in expected)


def test_frozen_weights_and_buffers_are_left_alone(tiny_run):
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 3))
    model[0].requires_grad_(False)
    frozen = model[0].weight.clone()
    result = tiny_run([{"ema": {"decay": 0.9}}], model=model, data=tiny_data(64))
    assert torch.equal(result.weights["0.weight"], frozen)
    assert result.weights["1.num_batches_tracked"] == 16


def test_mean_is_that_of_the_weights_after_the_start(tiny_run):
    weights = WeightRecorder()
    options = {"mean": True, "start": 8, "update_every": 2}
    result = tiny_run([{"ema": options}, weights])
    assert all(torch.equal(weights.evaluated[0][name], tensor) for name, tensor in weights.steps[8].items())
    taken = weights.steps[9::2]
    expected = {name: sum(step[name] for step in taken) / len(taken) for name in taken[0]}
    assert all(torch.allclose(result.weights[name], expected[name], atol=1e-6) for name in expected)


def test_statistics_of_batch_norm_are_those_of_the_averaged_weights(tiny_run):
    def model():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 3))

    data, options = tiny_data(64), {"mean": True, "batch_norm_batches": 8}
    weights = WeightRecorder()
    result = tiny_run([{"ema": options}, weights, order := Order()], model=model(), data=data)
    plain = tiny_run([{"ema": {"mean": True}}], model=model(), data=data)
    assert result.losses == plain.losses, "training has its own statistics"
    inputs = [data.tensors[0][ids] for ids in order.ids[:8]]
    batches = [batch @ result.weights["0.weight"].T + result.weights["0.bias"] for batch in inputs]
    mean = torch.stack([batch.mean(0) for batch in batches]).mean(0)
    variance = torch.stack([batch.var(0) for batch in batches]).mean(0)
    assert torch.allclose(result.weights["1.running_mean"], mean, atol=1e-5)
    assert torch.allclose(result.weights["1.running_var"], variance, atol=1e-5)
    assert not torch.allclose(plain.weights["1.running_mean"], mean, atol=1e-3)
    assert weights.evaluated[0]["1.num_batches_tracked"] == 8, "the statistics of an evaluation are estimated, too"
    assert weights.steps[-1]["1.num_batches_tracked"] == 16


class FrozenBody(nn.Module):
    """A model whose body stays in eval mode, as that of a detector."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16)).requires_grad_(False)
        self.body[1].running_mean.fill_(0.3)
        self.body.eval()
        self.head = nn.Sequential(nn.BatchNorm1d(16), nn.Linear(16, 3))

    def train(self, mode: bool = True) -> FrozenBody:
        super().train(mode)
        self.body.eval()
        return self

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(inputs))


def test_a_batch_norm_in_eval_mode_keeps_its_statistics(tiny_run):
    options = {"mean": True, "batch_norm_batches": 8}
    result = tiny_run([{"ema": options}], model=FrozenBody(), data=tiny_data(64))
    assert torch.equal(result.weights["body.1.running_mean"], torch.full((16,), 0.3))
    assert result.weights["head.0.num_batches_tracked"] == 8, "those that are trained are estimated"
