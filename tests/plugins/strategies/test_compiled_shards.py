"""compile with fsdp: each sharded block is one graph, and its weights are gathered outside of it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from strategy_helpers import COMPILER
from torch import nn
from torchmetrics.classification import MulticlassAccuracy

from fastloop.testing import find_problems, tiny_data
from fastloop_plugins.kernels.compile import Compile, sharded_modules

pytestmark = COMPILER

BLOCKS = {
    "the repeated blocks": (
        {},
        3,
    ),  # to train the first one, whose inputs need no gradient, and the others; to evaluate
    "the whole model": ({"blocks": ["Deep"]}, 2),
    "nested": ({"blocks": ["Block", "Linear"]}, 5),  # two sizes of Linear
}
"""Options of fsdp, and the number of graphs of all modules that it shards."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs + self.linear(inputs).tanh()


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(8, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            inputs = block(inputs)
        return self.head(inputs)


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One process that forms a group: fsdp runs the same hooks as with several."""
    settings = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    settings["LOCAL_WORLD_SIZE"] = "1"  # so that it is restored: accelerate sets it
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch._dynamo.reset()
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("regional", [False, True])
@pytest.mark.parametrize(("options", "graphs"), BLOCKS.values(), ids=BLOCKS)
@pytest.mark.usefixtures("group")
def test_no_graph_breaks_and_the_numbers_stay(tiny_run, options, graphs, regional):
    compiling = Compile(backend="eager", fullgraph=True, on_failure="error", cache=False, regional=regional)
    data = tiny_data(64)
    fsdp = {"fsdp": options}
    plain = tiny_run([fsdp], model=Deep(), data=data, epochs=1)
    result = tiny_run([fsdp, compiling], model=Deep(), data=data, epochs=1)
    counts = result.summary["compile"]
    assert counts["graph_breaks"] == 0
    assert counts["graphs"] == graphs
    assert result.losses == pytest.approx(plain.losses, rel=1e-5)
    assert set(result.weights) == set(Deep().state_dict())


@pytest.mark.usefixtures("group")
def test_the_innermost_sharded_modules_are_compiled(tiny_run):
    model = Deep()
    tiny_run([{"fsdp": {"blocks": ["Block", "Linear"]}}], model=model, epochs=1)
    names = [name for name, module in model.named_modules() if module in sharded_modules(model)]
    assert names == ["blocks.0.linear", "blocks.1.linear", "blocks.2.linear", "head"]


@pytest.mark.parametrize(("mode", "expected"), [("reduce-overhead", "default"), ("default", "default")])
@pytest.mark.usefixtures("group")
def test_no_cuda_graphs_of_weights_that_move(tiny_run, caplog, mode, expected):
    compiling: Any = Compile(mode=mode, backend="eager", cache=False)
    with caplog.at_level(logging.WARNING, "fastloop"):
        tiny_run(["fsdp", compiling], model=Deep(), epochs=1)
    assert compiling.used_mode == expected
    assert not compiling.records
    assert bool(find_problems(caplog, "no-cuda-graphs reduce-overhead fsdp")) is (mode == "reduce-overhead")


@pytest.mark.usefixtures("group")
def test_weights_are_sharded_again_after_the_metrics_were_tried_in_one_process(tiny_run):
    metrics = {"accuracy": MulticlassAccuracy(3, average="micro")}
    summary = tiny_run(["fsdp"], model=Deep(), epochs=1, metrics=metrics).summary
    assert 0 <= summary["validation"]["accuracy"] <= 1
