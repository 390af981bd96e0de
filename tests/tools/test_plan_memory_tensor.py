"""`fastloop plan --device-memory`: ``tensor-parallel`` holds and sends what torch's own division of the model does.

Modules:
    plugins/fastloop_plugins/strategies/_memory_context.py
    plugins/fastloop_plugins/strategies/_memory_tensor.py
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoint_helpers import write_rows
from scale_runs import LLAMA, tiny
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from fastloop import PluginError, RecipeError
from fastloop.testing import expect_problem
from fastloop_plugins.strategies.fsdp import FSDP
from fastloop_plugins.strategies.tensor_parallel import TensorParallel
from fastloop_tools.plan.memory.estimate import estimate

PROCESSES = 2
ROUNDS = {"all_reduce": 2, "allreduce_": 2, "all_gather_into_tensor": 1}
"""Collective -> how often a process sends (n - 1) / n of the tensor in a ring."""


class Collectives(TorchDispatchMode):
    """Adds up the bytes that a process sends."""

    sent = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        space, _, name = func.name().partition("::")
        if "c10d" in space and name in ROUNDS:
            size = result.nbytes if isinstance(result, torch.Tensor) else sum(tensor.nbytes for tensor in args[0])
            self.sent += ROUNDS[name] * size * (PROCESSES - 1) / PROCESSES
        return result


@pytest.fixture
def process_group() -> Iterator[None]:
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=PROCESSES)
    yield
    torch.distributed.destroy_process_group()


MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "vocabulary that is odd": {"vocab_size": 301},
    "tied": {"tie_word_embeddings": True},
    "norms of heads": {"model_type": "qwen3", "head_dim": 16},
}


@pytest.mark.slow
@pytest.mark.parametrize("changes", MODELS.values(), ids=MODELS.keys())
def test_a_share_holds_and_sends_the_bytes_of_torch(process_group, changes):
    config = AutoConfig.for_model(**LLAMA | {"vocab_size": 300} | changes)
    ids = torch.zeros(3, 16, dtype=torch.int64)
    with FakeTensorMode() as mode:
        fake = AutoModelForCausalLM.from_config(config)
        share = TensorParallel.divide_model(fake, PROCESSES, "no", "r.yaml")
        fake(input_ids=mode.from_tensor(ids), labels=mode.from_tensor(ids)).loss.backward()
    model = AutoModelForCausalLM.from_config(config)
    accelerator, recipe = SimpleNamespace(mixed_precision="no"), SimpleNamespace(where="r.yaml")
    run: Any = SimpleNamespace(recipe=recipe, accelerator=accelerator, device=torch.device("cpu"), world_size=PROCESSES)
    TensorParallel().before_prepare(run=run, model=model)
    with Collectives() as collectives:
        model(input_ids=ids, labels=ids).loss.backward()
    local = [part.to_local() if hasattr(part, "to_local") else part for part in model.parameters()]
    assert [part.shape for part in fake.parameters()] == [part.shape for part in local]
    assert share.sent == collectives.sent > 0


@pytest.mark.slow
def test_the_table_has_a_row_for_the_whole_batch(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_rows(("A", "B"))
    found = estimate(tiny("decoder", "ddp"), PROCESSES)
    rows = {(row.name, row.checkpointing): row for row in found.variants}
    row, again, ddp = rows["tensor-parallel", False], rows["tensor-parallel", True], rows["ddp", False]
    assert (row.samples, ddp.samples) == (8, 4)
    assert ddp.gradients / 2 < row.gradients < 0.7 * ddp.gradients  # norms and an odd vocabulary stay whole
    assert row.weights - row.gradients == ddp.weights - ddp.gradients > 0  # buffers
    assert row.optimizer == 2 * row.gradients
    assert ddp.activations < row.activations < 2 * ddp.activations
    assert again.activations < row.activations
    assert again.sent_bytes > row.sent_bytes > 0  # the recomputed forward is exchanged again
    assert ddp.flops < row.flops < 1.2 * ddp.flops  # half of the work on twice the samples, and the whole head


@pytest.mark.slow
@pytest.mark.parametrize(("options", "name"), [({}, "fsdp x tensor 2"), ({"shard_within": 2}, "hsdp x tensor 2")])
def test_a_row_of_a_mesh_is_the_share_of_a_process(process_group, tmp_path, monkeypatch, options, name):
    """Beside weights, it has the samples of two processes, and sends for both dimensions."""
    monkeypatch.chdir(tmp_path)
    write_rows(("A", "B"))
    mesh = {"fsdp": {"tensor": 2, **options}}
    rows = {row.name: row for row in estimate(tiny("decoder", mesh), 4).variants if not row.checkpointing}
    assert [name for name, row in rows.items() if row.listed] == [name]
    torch.distributed.destroy_process_group()
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**LLAMA | {"vocab_size": 301}))
    accelerator, recipe = SimpleNamespace(mixed_precision="no"), SimpleNamespace(where="r.yaml")
    run: Any = SimpleNamespace(recipe=recipe, accelerator=accelerator, device=torch.device("cpu"), world_size=4)
    FSDP(**mesh["fsdp"]).before_prepare(run=run, model=model)
    held = sum(part.to_local().nbytes for part in model.parameters())  # type: ignore[attr-defined]
    row = rows[name]
    assert row.gradients == pytest.approx(held, rel=0.05)
    assert row.samples == 2 * rows["ddp"].samples
    least = 2 * 0.5 * held * (1 if options else 0.5)  # a ring over two processes reduces the gradients
    assert row.sent_bytes > least


@pytest.mark.slow
def test_the_groups_of_a_mesh_divide_the_batch_as_in_a_run(tmp_path, monkeypatch):
    """Two groups of two processes share two samples, which four processes cannot."""
    monkeypatch.chdir(tmp_path)
    write_rows(("A", "B"))
    mesh = {"fsdp": {"tensor": 2}}
    found = estimate(tiny("decoder", mesh, batch_size=2), 4)
    rows = {row.name: row for row in found.variants if not row.checkpointing}
    assert (found.micro_batch_size, found.micro_steps, rows["fsdp x tensor 2"].samples) == (1, 1, 1)
    assert [name for name, row in rows.items() if row.listed] == ["fsdp x tensor 2"]
    assert not rows.keys() & {"ddp", "fsdp"}
    with expect_problem("not-divisible batch_size 3 2", RecipeError):
        estimate(tiny("decoder", mesh, batch_size=3), 4)
    with expect_problem("not-divisible 'fsdp' 2 3", PluginError):
        estimate(tiny("decoder", mesh, batch_size=3), 3)
    with expect_problem("not-divisible batch_size 2 4", RecipeError):
        estimate(tiny("decoder", "ddp", batch_size=2), 4)


@pytest.mark.slow
def test_a_model_that_the_processes_cannot_divide_has_no_row(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_rows(("A", "B"))
    assert "tensor-parallel" not in {row.name for row in estimate(tiny("decoder", "ddp"), 4).variants}
    with expect_problem("not-divisible plugins.tensor-parallel num_key_value_heads 2 4", PluginError):
        estimate(tiny("decoder", "tensor-parallel"), 4)


@pytest.mark.slow
def test_a_divided_sequence_needs_less_memory_and_more_traffic(tmp_path, monkeypatch):
    """One sample on four processes: each computes a quarter of its tokens."""
    monkeypatch.chdir(tmp_path)
    write_rows(("A", "B"))
    (whole,) = (row for row in estimate(tiny("decoder", "fsdp", batch_size=1), 1).variants if row.listed)
    estimated = estimate(tiny("decoder", "fsdp", "context-parallel", batch_size=1), 4)
    length = estimated.batch[0][1]
    divided = {row.name: row for row in estimated.variants if not row.checkpointing}
    found, ddp = divided["fsdp x context 4"], divided["ddp x context 4"]
    assert (found.listed, found.samples) == (True, 1)
    assert 0.2 * whole.activations < found.activations < 0.5 * whole.activations  # and all keys and values of a layer
    assert 0.2 * whole.flops < found.flops < 0.4 * whole.flops
    plain = next(row for row in estimate(tiny("decoder", "fsdp", batch_size=4), 4).variants if row.name == "ddp")
    keys = LLAMA["num_key_value_heads"] * 16 * 4 * length  # bytes of all keys of a layer, and of all values
    sent = LLAMA["num_hidden_layers"] * 2 * keys * (1 + 2) * 3 / 4  # gathered in forward, all-reduced in backward
    assert ddp.sent_bytes - plain.sent_bytes == pytest.approx(sent)
