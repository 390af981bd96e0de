"""Without plugins, fastloop is bitwise equal to a hand-written loop."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fastloop.plugins.installed import installed, load
from fastloop.testing import tiny_data, tiny_model


def plain_loop(
    epochs: int,
    batch_size: int,
    micro: int,
    lr: float = 1e-2,
    seed: int = 123,
    clip: float | None = None,
    build: Callable[[], nn.Module] = tiny_model,
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The loop a person would write: AdamW, shuffled by ``seed + epoch``, a step's gradient the mean over its
    samples. It evaluates after each epoch."""
    data, model = tiny_data(), build()
    inputs, targets = data.tensors
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    torch.manual_seed(seed)
    losses = []
    for epoch in range(epochs):
        model.train()
        order = torch.randperm(len(data), generator=torch.Generator().manual_seed(seed + epoch))
        for step in order.split(batch_size):
            total = 0.0
            for ids in step.split(micro):
                loss = nn.functional.cross_entropy(model(inputs[ids]), targets[ids])
                if len(ids) != len(step):
                    loss = loss * (len(ids) / len(step))
                loss.backward()
                total += loss.detach()
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(total.item())
        evaluation_loss(model)
    model.train()
    return losses, model.state_dict()


@torch.no_grad()
def evaluation_loss(model: nn.Module) -> float:
    """The loss of the validation split of ``tiny_run``, in eval mode."""
    inputs, targets = tiny_data(32, seed=1).tensors
    return nn.functional.cross_entropy(model.eval()(inputs), targets).item()


@pytest.mark.parametrize(("micro", "clip"), [(8, None), (2, None), (8, 0.1)], ids=["whole", "accumulated", "clipped"])
def test_losses_and_weights_equal_plain_loop(tiny_run, micro, clip):
    losses, weights = plain_loop(epochs=3, batch_size=8, micro=micro, clip=clip)
    result = tiny_run(epochs=3, micro_batch_size=micro, max_grad_norm=clip)
    assert result.losses == losses
    assert all(torch.equal(result.weights[name], weights[name]) for name in weights)
    assert sum(losses[-9:]) < 0.9 * sum(losses[:9])  # nine steps an epoch: it learns


class FrozenStatistics(nn.Sequential):
    """Keeps its batch norm in eval mode, as models for detection do."""

    def train(self, mode: bool = True) -> FrozenStatistics:
        super().train(mode)
        self[1].eval()
        return self


class CachedBias(nn.Linear):
    """Computes its bias once in eval mode, as LeViT does with the biases of its attention."""

    cached: Tensor | None = None

    def train(self, mode: bool = True) -> CachedBias:
        if mode:
            self.cached = None
        return super().train(mode)

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            return nn.functional.linear(inputs, self.weight, 2 * self.bias)
        if self.cached is None:
            self.cached = 2 * self.bias.detach()
        return nn.functional.linear(inputs, self.weight, self.cached)


class MergedUpdate(nn.Linear):
    """Adds its update to the weights in eval mode, as layers of loralib do."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.update = nn.Parameter(torch.full_like(self.weight, 0.125))

    def train(self, mode: bool = True) -> MergedUpdate:
        if mode != self.training:
            self.weight.data += self.update.data if self.training else -self.update.data
        return super().train(mode)

    def forward(self, inputs: Tensor) -> Tensor:
        weight = self.weight + self.update if self.training else self.weight
        return nn.functional.linear(inputs, weight, self.bias)


OWN_TRAIN: dict[str, Callable[[], nn.Module]] = {
    "frozen statistics": lambda: FrozenStatistics(nn.Linear(8, 16), nn.BatchNorm1d(16), *tiny_model()[1:]),
    "a cache of eval mode": lambda: nn.Sequential(*tiny_model()[:3], CachedBias(16, 3)),
    "weights merged in eval mode": lambda: nn.Sequential(*tiny_model()[:3], MergedUpdate(16, 3)),
}
"""Name -> a model whose ``train`` does more than to set the mode."""


@pytest.mark.parametrize("case", OWN_TRAIN)
def test_a_train_method_of_the_model_is_called_as_in_a_plain_loop(tiny_run, case):
    losses, weights = plain_loop(epochs=3, batch_size=8, micro=8, build=seeded(OWN_TRAIN[case]))
    result = tiny_run(epochs=3, model=seeded(OWN_TRAIN[case])(), device="cpu")
    assert result.losses == losses
    result.model.train()
    assert all(torch.equal(value, weights[name]) for name, value in result.model.state_dict().items())
    assert result.summary["validation"]["loss"] == pytest.approx(evaluation_loss(result.model), rel=1e-6)


def seeded(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """``build`` with the same random numbers in each call."""

    def call() -> nn.Module:
        torch.manual_seed(2)
        return build()

    return call


EXACT = [name for name in installed() if load(name).numerics == "bitwise" and load(name).slot != "task"]


def test_bitwise_plugins_together_equal_plain_loop(tiny_run):
    losses, _ = plain_loop(epochs=3, batch_size=8, micro=8)
    options = {"dataloader-workers": {"num_workers": 1}, "remote-output": {"url": "uploads"}}
    assert tiny_run([{name: options[name]} if name in options else name for name in EXACT], epochs=3).losses == losses
    assert {"checkpoint-best", "dataloader-workers", "log", "progress"} <= set(EXACT)
