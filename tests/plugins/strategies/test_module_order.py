"""A module that a forward pass leaves out is called in its place, without effect on the numbers.

Modules:
    plugins/fastloop_plugins/strategies/_module_order.py
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from fastloop import PluginError
from fastloop.distributed.processes import Processes
from fastloop.testing import expect_problem
from fastloop_plugins.strategies._module_order import ModuleOrder


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.linear(self.norm(hidden)).tanh()  # not as they are listed


class Chosen(nn.Module):
    """Calls the layers that ``use`` lists."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers, self.head = nn.ModuleList([Layer() for _ in range(4)]), nn.Linear(4, 2)
        self.use: tuple[int, ...] = (0, 1, 2, 3)

    def forward(self, hidden: torch.Tensor) -> dict[str, torch.Tensor]:
        for index in self.use:
            hidden = self.layers[index](hidden)
        return {"logits": self.head(hidden)}


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    """One process that forms a group."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def watched(strict: bool = False) -> tuple[Chosen, ModuleOrder, list[str]]:
    """A model, its order, and the hooks that run: modules before their forward, ``-`` and the module before its
    backward."""
    model, seen = Chosen(), []  # type: ignore[var-annotated]
    run: Any = SimpleNamespace(processes=Processes(), device=torch.device("cpu"), updates=0, rank=0, world_size=1)
    run.recipe = SimpleNamespace(where="recipe.yaml")

    def record(name: str, module: nn.Module) -> None:
        def watch(module: nn.Module, args: Any, output: torch.Tensor) -> None:
            if output.requires_grad:
                output.register_hook(lambda _: seen.append(f"-{name}"))

        module.register_forward_pre_hook(lambda module, args: seen.append(name))
        module.register_forward_hook(watch)

    for name, module in model.named_modules():
        if isinstance(module, Layer | nn.Linear | nn.LayerNorm):
            record(name.removeprefix("layers."), module)
    return model, ModuleOrder(run, model, model.modules(), "Use ddp.", strict), seen


def step(model: Chosen, order: ModuleOrder, use: tuple[int, ...]) -> list[torch.Tensor | None]:
    """The gradients of one batch."""
    order.restart()
    model.use = use
    model.zero_grad()
    model(torch.ones(3, 4))["logits"].square().sum().backward()
    return [None if parameter.grad is None else parameter.grad.clone() for parameter in model.parameters()]


def layer(index: int) -> list[str]:
    return [f"{index}", f"{index}.norm", f"{index}.linear"]


FORWARD = [*layer(0), *layer(1), *layer(2), *layer(3), "head"]
BACKWARD = [
    "-head",
    "-3",
    "-3.linear",
    "-3.norm",
    "-2",
    "-2.linear",
    "-2.norm",
    "-1",
    "-1.linear",
    "-1.norm",
    "-0",
    "-0.linear",
    "-0.norm",
]


@pytest.mark.parametrize("use", [(0, 1, 2, 3), (0, 3), (1, 2), (2,)])
def test_every_pass_runs_the_hooks_of_the_first_one_and_gives_its_own_gradients(use):
    model, order, seen = watched()
    step(model, order, (0, 1, 2, 3))
    seen.clear()
    gradients = step(model, order, use)
    assert seen[: len(FORWARD)] == FORWARD
    assert seen[len(FORWARD) :] == BACKWARD
    expected = step(Chosen(), order, use)
    for ours, theirs in zip(gradients, expected, strict=True):
        assert (ours is None) == (theirs is None)
        assert ours is None or ours.equal(theirs)


def test_a_layer_that_the_first_pass_left_out_may_be_called_later():
    model, order, seen = watched()
    step(model, order, (0, 3))
    seen.clear()
    step(model, order, (0, 2))
    assert seen[: len(FORWARD)] == FORWARD


def test_another_order_is_refused_with_the_module_before_its_hooks_run():
    model, order, seen = watched()
    step(model, order, (0, 1, 2, 3))
    seen.clear()
    with pytest.raises(PluginError) as error:
        step(model, order, (1, 0))
    assert str(error.value).startswith(
        "recipe.yaml: process 0 of 1 called 'layers.0' where no process did in its first forward pass."
    )
    assert str(error.value).endswith("Use ddp.")
    assert seen == [*layer(0), *layer(1)]


def test_a_module_that_is_left_out_is_refused_where_no_process_may_take_part():
    model, order, seen = watched(strict=True)
    step(model, order, (0, 1, 3))
    seen.clear()
    with expect_problem("modules-differ recipe.yaml: process 0 1 'layers.1'", PluginError):
        step(model, order, (0, 3))
    assert seen == layer(0)


def test_evaluation_has_an_order_of_its_own():
    model, order, seen = watched()
    step(model, order, (0, 1, 2, 3))
    seen.clear()
    order.restart()
    model.use = (1, 0, 1)
    with torch.no_grad():
        model.eval()(torch.ones(3, 4))
    assert seen == [*layer(1), *layer(0), *layer(1), "head"]
