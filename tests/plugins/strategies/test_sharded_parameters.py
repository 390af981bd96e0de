"""fsdp and tensor-parallel refuse indivisible parameters, before training. A fake process group stands for two.

Modules:
    plugins/fastloop_plugins/strategies/_sharded_parameters.py
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from fastloop import PluginError
from fastloop.distributed.processes import Processes
from fastloop.optimizers.several import Optimizers
from fastloop.testing import expect_problem
from fastloop_plugins.kernels.fused_optimizer import FUSED, FUSED_ON_SHARDS
from fastloop_plugins.strategies._sharded_parameters import try_step
from fastloop_plugins.strategies.fsdp import FSDP

REFUSED = ("Adafactor", "Rprop")
STEPPED = ("AdamW", "SGD", "Adam", "Adamax", "ASGD", "Adadelta", "Adagrad", "NAdam", "RAdam", "RMSprop")


@pytest.fixture(autouse=True)
def process_group() -> Iterator[None]:
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    torch.distributed.destroy_process_group()


def run_of(precision: str = "no") -> Any:
    accelerator = SimpleNamespace(mixed_precision=precision, prepare_model=lambda model, evaluation_mode: model)
    recipe = SimpleNamespace(where="r.yaml")
    shared = {"processes": Processes(), "updates": 0, "rank": 0}
    return SimpleNamespace(
        recipe=recipe, accelerator=accelerator, device=torch.device("cpu"), world_size=2, is_main=True, **shared
    )


def sharded(model: nn.Module, precision: str = "no") -> nn.Module:
    FSDP().before_prepare(run=run_of(precision), model=model)
    return model


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 2))


@pytest.mark.parametrize("name", REFUSED)
def test_an_optimizer_that_cannot_step_shards_is_refused(name):
    model = sharded(net())
    optimizer = getattr(torch.optim, name)(model.parameters())
    with expect_problem(f"unsupported-optimizer r.yaml train.optimizer AdamW {name}", PluginError):
        FSDP().prepare(run=run_of(), model=model, optimizer=optimizer)
    with expect_problem(f"unsupported-optimizer {name}", PluginError):
        try_step(Optimizers({"one": optimizer}, "r.yaml"), "r.yaml")


@pytest.mark.parametrize("name", FUSED)
def test_a_fused_kernel_steps_shards_or_the_remedy_does(name):
    """The remedy of the error is to step the optimizer without the kernel, which must then work."""
    model = sharded(net())
    kind = getattr(torch.optim, name)
    if name in FUSED_ON_SHARDS:
        try_step(kind(model.parameters(), fused=True), "r.yaml")
        return
    with pytest.raises(PluginError) as caught:
        try_step(kind(model.parameters(), fused=True), "r.yaml")
    assert caught.value.problem.remedy is not None
    assert "fused-optimizer.implementation" in caught.value.problem.remedy
    try_step(kind(model.parameters(), foreach=True), "r.yaml")


@pytest.mark.parametrize("name", STEPPED)
def test_a_trial_changes_neither_weights_nor_state_nor_hooks(name):
    model = sharded(net())
    optimizer = getattr(torch.optim, name)(model.parameters())
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)  # replaces optimizer.step
    stepped: list[Any] = []
    optimizer.register_step_pre_hook(lambda *arguments: stepped.append(arguments))
    before = [parameter.to_local().clone() for parameter in model.parameters() if isinstance(parameter, DTensor)]
    state, random = {key: dict(value) for key, value in optimizer.state.items()}, torch.get_rng_state()
    FSDP().prepare(run=run_of(), model=model, optimizer=optimizer)
    assert not stepped
    assert {key: dict(value) for key, value in optimizer.state.items()} == state  # Adagrad makes it when it is built
    assert len(optimizer.param_groups[0]["params"]) == len(before) == 6
    assert all(parameter.to_local().equal(old) for parameter, old in zip(model.parameters(), before, strict=True))
    assert torch.get_rng_state().equal(random)


def test_an_optimizer_that_fails_elsewhere_is_left_to_the_run():
    class Counts(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            raise RuntimeError("aten: this is not about divided tensors")

    try_step(Counts(sharded(net()).parameters()), "r.yaml")


def test_parameters_without_dimensions_are_refused():
    model = net()
    model.scale = nn.Parameter(torch.tensor(1.0))
    with expect_problem("unsupported-parameters r.yaml plugins.fsdp", PluginError):
        sharded(model)


class Final(nn.Module):
    """A norm outside the repeated blocks, as in GPT-2 and ViT."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])
        self.norm = norm

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.norm(hidden)


@pytest.mark.parametrize(
    "norm",
    [
        nn.LayerNorm(4),
        nn.BatchNorm1d(4),
        nn.BatchNorm1d(4, track_running_stats=False),
        nn.SyncBatchNorm(4).eval(),
    ],
    ids=["layer norm", "batch norm", "batch norm without statistics", "sync batch norm"],
)
def test_a_norm_after_the_blocks_works_in_bf16_on_a_cpu(norm):
    model = sharded(Final(norm), "bf16")
    with torch.autocast("cpu", torch.bfloat16):
        model(torch.randn(3, 4)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
