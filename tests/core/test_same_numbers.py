"""Without plugins, fastloop is bitwise equal to a hand-written loop."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fastloop.plugins.installed import installed, load
from fastloop.testing import tiny_data, tiny_model


def plain_loop(
    epochs: int, batch_size: int, micro: int, lr: float = 1e-2, seed: int = 123, clip: float | None = None
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The loop a person would write: AdamW, shuffled by ``seed + epoch``, a step's gradient the mean over its
    samples."""
    data, model = tiny_data(), tiny_model()
    inputs, targets = data.tensors
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    torch.manual_seed(seed)
    model.train()
    losses = []
    for epoch in range(epochs):
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
    return losses, model.state_dict()


@pytest.mark.parametrize(("micro", "clip"), [(8, None), (2, None), (8, 0.1)], ids=["whole", "accumulated", "clipped"])
def test_losses_and_weights_equal_plain_loop(tiny_run, micro, clip):
    losses, weights = plain_loop(epochs=3, batch_size=8, micro=micro, clip=clip)
    result = tiny_run(epochs=3, micro_batch_size=micro, max_grad_norm=clip)
    assert result.losses == losses
    assert all(torch.equal(result.weights[name], weights[name]) for name in weights)
    assert sum(losses[-9:]) < 0.9 * sum(losses[:9])  # nine steps an epoch: it learns


EXACT = [name for name in installed() if load(name).numerics == "bitwise" and load(name).slot != "task"]


def test_bitwise_plugins_together_equal_plain_loop(tiny_run):
    losses, _ = plain_loop(epochs=3, batch_size=8, micro=8)
    options = {"dataloader-workers": {"num_workers": 1}, "remote-output": {"url": "uploads"}}
    assert tiny_run([{name: options[name]} if name in options else name for name in EXACT], epochs=3).losses == losses
    assert {"checkpoint-best", "dataloader-workers", "log", "progress"} <= set(EXACT)
