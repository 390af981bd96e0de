"""Shared by tests of `fastloop plan --device-memory` and benchmarks/scale.py: runs with measured memory and traffic.

``Encoder`` is the model of benchmarks/strategies.py, so that its counts of the loopback interface are counts of this
model.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from checkpoint_helpers import BERT, text_recipe
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import TensorDataset
from training_runs import execute

from fastloop import Plugin, hookimpl
from fastloop.cli import launch
from fastloop.lifecycle import build
from fastloop.plugins.resolve import resolve
from fastloop.recipe import Recipe, make_recipe

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from strategies import BATCH, BLOCKS, COUNTED, LENGTH, WIDTH, WORDS, held_bytes, loopback_bytes

ARMS: dict[str, dict[str, Any]] = {"ddp": {"ddp": {}}, "fsdp": {"fsdp": {}}} | {
    f"zero-{stage}": {"deepspeed": {"stage": stage}} for stage in range(4)
}


LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
ENCODER = BERT | {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3}
MODELS = {"encoder": ("text-classification", ENCODER, {"label": "label"}), "decoder": ("causal-lm", LLAMA, {})}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.first = nn.LayerNorm(WIDTH)
        self.second = nn.LayerNorm(WIDTH)
        self.wide = nn.Linear(WIDTH, 4 * WIDTH)
        self.back = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        inner = self.first(hidden)
        hidden = hidden + self.attention(inner, inner, inner, need_weights=False)[0]
        return hidden + self.back(nn.functional.gelu(self.wide(self.second(hidden))))


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
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
    """Counts the bytes of a process: between steps, before the optimizer steps, and sent over loopback by all
    processes."""

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
    """Train an arm on this process of several. Returns the largest bytes over the processes, and the wire if ``steps``
    suffice."""
    if arm.startswith("zero") and "RANK" not in os.environ:  # DeepSpeed needs a launcher
        os.environ.update(launch.process_variables(0, 1, "127.0.0.1", str(launch.free_port())))
    counter = Counter()
    with tempfile.TemporaryDirectory() as folder:
        loaded = recipe(ARMS[arm], output=f"{folder}/run", max_steps=steps)
        resolved = resolve(loaded)
        run = build(resolved, [counter])
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
    from fastloop_tools.plan.memory.estimate import estimate

    with tempfile.TemporaryDirectory() as folder:
        found = estimate(recipe(output=f"{folder}/run"), processes)
    return {
        variant.name: json.loads(json.dumps(vars(variant))) for variant in found.variants if not variant.checkpointing
    }


def tiny(kind: str, *plugins: Any, **train: Any) -> Recipe:
    task, config, data = MODELS[kind]
    return text_recipe(task, {"config": config}, data | {"padding": "max_length"}, plugins=plugins, **train)


def saved_by_a_real_step(recipe: Recipe) -> int:
    """Bytes of the distinct storages that autograd saves in a real forward, by their addresses, without weights and
    inputs."""
    run = build(resolve(recipe))
    inputs = next(iter(run.train_loader.batches())).inputs
    known = [
        *run.model.parameters(),
        *run.model.buffers(),
        *(leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)),
    ]
    skipped = {tensor.untyped_storage().data_ptr() for tensor in known}
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = run.hooks.compute_loss(run=run, model=run.model, batch=inputs).loss
    sizes = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in saved}
    loss.backward()
    return sum(size for address, size in sizes.items() if address not in skipped)


def distinct_bytes(tensors: Iterable[Any]) -> int:
    """Bytes of the distinct storages of local shards. The gradients of a block are parts of one storage."""
    storages = [tensor.to_local().untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages if storage.nbytes()}.values())


def sharding_of_torch(world_size: int) -> dict[str, float]:
    """The bytes of rank 0 of ``world_size`` in one process: the plugin's own code, on torch's process group that
    exchanges nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from fastloop_plugins.strategies.fsdp import FSDP

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        model: Any = Encoder()
        accelerator = SimpleNamespace(mixed_precision="no", prepare_model=lambda model, evaluation_mode: model)
        run: Any = SimpleNamespace(
            recipe=SimpleNamespace(where="recipe"),
            accelerator=accelerator,
            processes=SimpleNamespace(all_reduce_mean=lambda tensor: tensor, host_group=None),
            device=torch.device("cpu"),
            world_size=world_size,
            is_main=True,
            updates=0,
        )
        plugin = FSDP()
        plugin.before_prepare(run=run, model=model)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        plugin.prepare(run=run, model=model, optimizer=optimizer)
        ids = torch.zeros(2, LENGTH, dtype=torch.int64)
        with Collectives(world_size) as sent:
            model(ids).sum().backward()
        gradients = distinct_bytes(parameter.grad for parameter in model.parameters())
        optimizer.step()
        state = distinct_bytes(value for values in optimizer.state.values() for value in values.values() if value.dim())
        return {
            "weights": distinct_bytes(model.parameters()),
            "gradients": gradients,
            "optimizer": state,
            "sent_bytes": sent.bytes,
        }
    finally:
        torch.distributed.destroy_process_group()


class Collectives(TorchDispatchMode):
    """Adds up the bytes that a process sends in ring all-gathers and reduce-scatters: each sends n - 1 shards."""

    def __init__(self, processes: int) -> None:
        super().__init__()
        self.processes = processes
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        if "allreduce" in name:
            assert [tensor.numel() for tensor in args[0]] == [1], (
                "in the first forward pass, processes agree on the order of modules"
            )
        elif name.startswith("c10d::"):
            assert "_allgather_base_" in name or "_reduce_scatter_base_" in name, name
            self.bytes += min(args[0].nbytes, args[1].nbytes) * (self.processes - 1)
        return func(*args, **(kwargs or {}))
