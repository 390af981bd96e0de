"""Shared by the tests of `fastloop plan --device-memory` and benchmarks/scale.py: runs whose memory and traffic are measured.

``Encoder`` is the model of benchmarks/strategies.py, so that its counts of the loopback interface are counts of this model.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from fastloop import Plugin, hookimpl
from fastloop.cli import launch
from fastloop.hooks import PluginSet
from fastloop.lifecycle import build, execute
from fastloop.recipe import Recipe, make_recipe
from fastloop.registry import resolve

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from strategies import BATCH, BLOCKS, COUNTED, LENGTH, WIDTH, WORDS, held_bytes, loopback_bytes  # noqa: E402

ARMS: dict[str, dict[str, Any]] = {"ddp": {"ddp": {}}, "fsdp": {"fsdp": {}}} | {
    f"zero-{stage}": {"deepspeed": {"stage": stage}} for stage in range(4)
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.wide, self.back = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        inner = self.first(hidden)
        hidden = hidden + self.attention(inner, inner, inner, need_weights=False)[0]
        return hidden + self.back(nn.functional.gelu(self.wide(self.second(hidden))))


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(BLOCKS)])
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.words(ids) + self.places.weight
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(hidden.mean(1))
        return logits


def data() -> dict[str, Any]:
    ids = torch.randint(WORDS, (32 * BATCH, LENGTH), generator=torch.Generator().manual_seed(0))
    return {"train": TensorDataset(ids, ids[:, 0] % 4)}


def recipe(*plugins: Any, output: str = "run", **train: Any) -> Recipe:
    """The recipe of ``Encoder`` with further plugins."""
    settings = {"batch_size": BATCH, "lr": 1e-3, "max_grad_norm": 1.0, "device": "cpu", "epochs": 1, "save_every": None}
    tree = {
        "model": {"module": "scale_runs:Encoder"},
        "data": {"module": "scale_runs:data"},
        "train": settings | train,
        "plugins": [{"module": {"loss": "cross_entropy"}}, {"log": False}, {"progress": False}, *plugins],
        "output": output,
    }
    return make_recipe(tree, Path("recipe.yaml"))


class Counter(Plugin):
    """Counts the bytes of a process: between steps, before the optimizer steps, and sent over loopback by all processes."""

    name = "counter"

    def __init__(self) -> None:
        super().__init__()
        self.between = self.stepping = 0
        self.wire: list[int] = []

    @hookimpl
    def before_optimizer_step(self, run: Any) -> None:
        if run.state.step == 5:  # all state is allocated, and nothing of the first steps is left
            self.stepping = held_bytes()

    @hookimpl
    def after_step(self, run: Any) -> None:
        if run.state.step == 5:
            self.between = held_bytes()
        if run.state.step in COUNTED:
            run.processes.barrier()
            self.wire.append(loopback_bytes())
            run.processes.barrier()


def measured(arm: str, steps: int = 7) -> dict[str, Any]:
    """Train an arm on this process of several. Returns the largest bytes over the processes, and the wire if ``steps`` suffice."""
    if arm.startswith("zero") and "RANK" not in os.environ:  # DeepSpeed needs a launcher
        os.environ.update(launch.member(0, 1, "127.0.0.1", str(launch.free_port())))
    counter = Counter()
    with tempfile.TemporaryDirectory() as folder:
        loaded = recipe(ARMS[arm], output=f"{folder}/run", max_steps=steps)
        resolution = resolve(loaded)
        run = build(loaded, PluginSet([*resolution.plugins, counter], resolution.reasons))
        execute(run)
        found = run.processes.all_gather_object((counter.between, counter.stepping))
        run.processes.barrier()
    result: dict[str, Any] = {"arm": arm, "processes": run.world_size}
    result |= {"between": max(between for between, _ in found), "stepping": max(stepping for _, stepping in found)}
    if len(counter.wire) == 2:
        result["wire"] = (counter.wire[1] - counter.wire[0]) / (COUNTED[1] - COUNTED[0]) / run.world_size
    return result


@cache
def predicted(processes: int) -> dict[str, dict[str, Any]]:
    """Arm -> its estimate on CPUs, as JSON values."""
    from fastloop_tools.scale.estimate import estimate

    with tempfile.TemporaryDirectory() as folder:
        found = estimate(recipe(output=f"{folder}/run"), processes)
    return {variant.name: json.loads(json.dumps(vars(variant))) for variant in found.variants if not variant.checkpointing}
