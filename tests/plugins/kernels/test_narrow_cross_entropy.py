"""Cross entropy of logits in 16 bits: the losses and gradients of a float32 copy, which never exists as a whole.

Modules:
    plugins/fastloop_plugins/text/narrow_cross_entropy.py
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from test_fused_loss import MODELS, Keep, LiveBytes, _rows, check_same, trained
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.nn import functional

from fastloop_plugins.kernels.target_logits import TargetLogits
from fastloop_plugins.precision.amp import Amp
from fastloop_plugins.text import narrow_cross_entropy
from fastloop_plugins.text.next_token_loss import Reduction, cross_entropy

__all__ = ["_rows"]  # a fixture of every test
VOCABULARY = 50


def wide_cross_entropy(logits: Tensor, targets: Tensor, reduction: Reduction, temperature: float) -> Tensor:
    """The same loss from a float32 copy of all logits."""
    wide = logits.float() / temperature
    return functional.cross_entropy(wide, targets, ignore_index=-100, reduction=reduction)


def loss_and_gradient(compute: Any, logits: Tensor, targets: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    """The loss, and the gradient of a sum in which each loss has a weight."""
    rows = logits.clone().requires_grad_()
    loss = compute(rows[:, :VOCABULARY], targets, *options)
    weights = torch.linspace(0.5, 2, loss.numel()).view_as(loss)
    (loss * weights).sum().backward()
    assert rows.grad is not None
    return loss.detach(), rows.grad


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of four tokens: 23 tokens have six, and the last one is shorter."""
    monkeypatch.setattr(narrow_cross_entropy, "CACHED_LOGITS", 4 * VOCABULARY)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_losses_and_gradients_are_those_of_a_float32_copy(dtype, reduction, temperature):
    torch.manual_seed(0)
    logits = (4 * torch.randn(23, VOCABULARY + 6)).to(dtype)  # the head has more rows than the vocabulary
    logits[3, 5] = -torch.inf
    targets = torch.randint(6, VOCABULARY, (23,))
    targets[[0, 7, 22]] = -100
    found, gradient = loss_and_gradient(cross_entropy, logits, targets, reduction, temperature)
    expected, wide_gradient = loss_and_gradient(wide_cross_entropy, logits, targets, reduction, temperature)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    assert gradient.dtype == dtype
    # one rounding to the dtype: neighboring numbers differ by at most 2 * eps
    torch.testing.assert_close(gradient, wide_gradient, rtol=2 * torch.finfo(dtype).eps, atol=1e-7)
    assert not gradient[[0, 7, 22]].any()
    assert not gradient[:, VOCABULARY:].any()


def test_a_sure_prediction_keeps_its_small_loss():
    logits = torch.full((1, VOCABULARY), 100.0, dtype=torch.bfloat16)
    logits[0, 3] = 110
    loss = cross_entropy(logits, torch.tensor([3]), "mean", 1.0)
    assert loss.item() == pytest.approx(math.log1p((VOCABULARY - 1) * math.exp(-10)), rel=2e-4)


def test_without_any_target_the_mean_is_nan_as_that_of_torch():
    logits = torch.randn(3, VOCABULARY).bfloat16()
    targets = torch.full((3,), -100)
    assert cross_entropy(logits, targets, "mean", 1.0).isnan()
    assert wide_cross_entropy(logits, targets, "mean", 1.0).isnan()
    assert not cross_entropy(logits, targets, "none", 1.0).any()


def test_no_float32_copy_of_all_logits_exists():
    logits = torch.randn(300, 50_257).bfloat16().requires_grad_()
    targets = torch.randint(50_257, (300,))
    size = logits.numel() * logits.element_size()
    with LiveBytes() as memory:
        cross_entropy(logits, targets, "mean", 1.0).backward()
    assert memory.peak < 1.5 * size  # the gradient, and a block
    with LiveBytes() as memory:
        wide_cross_entropy(logits, targets, "mean", 1.0).backward()
    assert memory.peak > 5 * size


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """This process alone."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


def test_logits_of_several_processes_stay_with_torch(mesh):
    torch.manual_seed(0)
    logits = torch.randn(6, VOCABULARY).bfloat16()
    targets = torch.randint(VOCABULARY, (6,))
    whole = distribute_tensor(logits, mesh, [Replicate()])
    found = cross_entropy(whole, distribute_tensor(targets, mesh, [Replicate()]), "mean", 1.0)
    assert isinstance(found, DTensor)
    assert found.full_tensor().item() == pytest.approx(cross_entropy(logits, targets, "mean", 1.0).item(), rel=1e-6)


@pytest.mark.parametrize("chosen", [False, True], ids=["all tokens", "target-logits"])
def test_training_in_bf16_has_the_losses_of_a_float32_copy(chosen, monkeypatch):
    plugins = [TargetLogits] * chosen
    calls = []

    def copied(*arguments: Any) -> Tensor:
        calls.append(arguments)
        return wide_cross_entropy(*arguments)

    def run() -> tuple[Keep, dict[str, float]]:
        return trained(MODELS["tied"], Amp(dtype="bf16"), *[plugin() for plugin in plugins], epochs=3)

    narrow, found = run()
    monkeypatch.setattr(narrow_cross_entropy, "narrow_cross_entropy", copied)
    wide, expected = run()
    assert calls
    assert len(narrow.losses) == 6
    check_same(wide, narrow, 1e-3, 1e-4)
    assert found == pytest.approx(expected, rel=1e-3)
