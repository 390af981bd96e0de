"""Layers divided over two processes train like whole ones, and resume in other layouts.

Modules:
    plugins/fastloop_plugins/strategies/_tensor_group.py
    plugins/fastloop_plugins/strategies/_tensor_plan.py
    plugins/fastloop_plugins/strategies/tensor_parallel.py
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from strategy_helpers import same, save_at_end
from strategy_runs import all_of

from fastloop import checkpoint
from fastloop.testing import LANGUAGE, ProcessResult
from fastloop.testing.tasks import write_texts

pytestmark = pytest.mark.slow

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 48,
}
TRAIN = {"batch_size": 8, "epochs": 3, "save_every": 4}


def run(
    name: str, *plugins: Any, resume: str | None = None, step: int = 4, config: Any = None, **more: Any
) -> dict[str, Any]:
    """A run for ``strategy_runs.py``; ``resume`` names the run that it resumes from, at ``step``."""
    recipe = {"model": {"config": LLAMA | (config or {}), "tokenizer": {"kind": "word"}}, "data": LANGUAGE["data"]}
    found = {"name": name, "recipe": recipe, "plugins": ["causal-lm", "lr-scheduler", *plugins], "train": TRAIN, **more}
    return found | ({"resume": f"{resume}/checkpoints/step-{step:08d}"} if resume else {})


QWEN = {"model_type": "qwen3", "head_dim": 4}
"""A model with norms of queries and keys, which each process applies to its heads."""
MIXTURE = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
TIED = {"tie_word_embeddings": True}
EVEN = {
    "recipe": {"model": {"config": LLAMA, "tokenizer": {"kind": "bpe", "vocab_size": 300}}, "data": LANGUAGE["data"]}
}
"""A vocabulary that two processes can divide."""
PLAIN = [
    run("plain"),
    run("plain vocabulary", **EVEN),
    run("plain tied", config=TIED),
    run("plain qwen", config=QWEN),
    run("plain unclipped", train=TRAIN | {"max_grad_norm": None}),
]
TWO = [
    run("tp", "tensor-parallel"),
    run("tp tied", "tensor-parallel", config=TIED),
    run("tp vocabulary", "tensor-parallel", **EVEN),
    run("tp accumulated", "tensor-parallel", train=TRAIN | {"micro_batch_size": 2}),
    run("tp qwen", "tensor-parallel", config=QWEN, train=TRAIN | {"micro_batch_size": 2}),
    run("tp mixture", "tensor-parallel", config=MIXTURE),
    run("tp unclipped", "tensor-parallel", train=TRAIN | {"max_grad_norm": None}),
    run("tp foreach", "tensor-parallel", train=TRAIN | {"optimizer": {"name": "AdamW", "foreach": True}}),
    run("tp bf16", "tensor-parallel", {"amp": {"dtype": "bf16"}}),
    run("tp recomputed", "tensor-parallel", "activation-checkpointing"),
    run("tp dropout", "tensor-parallel", config={"attention_dropout": 0.1}),
    run("tp to tp", "tensor-parallel", resume="tp"),
    run("plain to tp", "tensor-parallel", resume="plain"),
    run("tp to fsdp", "fsdp", resume="tp"),
    run("fsdp to tp", "tensor-parallel", resume="tp to fsdp", step=8),
    run("tp heads", "tensor-parallel", config={"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 24}),
    run("tp features", "tensor-parallel", config={"intermediate_size": 31}),
    {"name": "tp no plan", "plugins": ["tensor-parallel"], "model": "deep"},
]
AFTER = [run("tp to plain", resume="tp"), run("one tp", "tensor-parallel")]
save_at_end([PLAIN, TWO, AFTER], 12)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all runs are."""
    folder = tmp_path_factory.mktemp("tensor_parallel")
    write_texts(folder)
    return folder


@pytest.fixture(scope="module")
def ended(processes: Callable[..., list[ProcessResult]], folder: Path) -> list[list[ProcessResult]]:
    """The processes of each start."""
    return [processes(count, all_of, runs, folder=folder) for count, runs in ((1, PLAIN), (2, TWO), (1, AFTER))]


@pytest.fixture(scope="module")
def results(ended: list[list[ProcessResult]]) -> dict[str, dict[str, Any]]:
    """Results of the first processes, by name."""
    return {name: result for start in ended for name, result in start[0].result.items()}


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        *((name, "plain") for name in ("tp", "tp accumulated", "tp recomputed")),
        ("tp tied", "plain tied"),
        ("tp qwen", "plain qwen"),
        ("tp unclipped", "plain unclipped"),
    ],
)
def test_numbers_are_those_of_one_process(results, folder, name, plain):
    same(results[name], results[plain], 1e-5)
    assert len(results[plain]["losses"]) == 12
    assert results[plain]["losses"][-1] < 0.95 * results[plain]["losses"][0]
    weights, whole = (load_file(folder / run / "model" / "model.safetensors") for run in (name, plain))
    assert weights.keys() == whole.keys()
    assert all(torch.allclose(weights[key], whole[key], rtol=1e-4, atol=1e-5) for key in whole)


def test_a_divided_vocabulary_trains_like_a_whole_one(results):
    """Torch replicates the gradient of a divided embedding, which ``optimizer-check`` reads."""
    same(results["tp vocabulary"], results["plain vocabulary"], 1e-5)


def test_samples_of_a_step_are_counted_once(results):
    assert results["tp"]["summary"]["samples"] == results["plain"]["summary"]["samples"]


def test_each_process_holds_a_part_of_the_divided_layers(folder, results):
    metadata = list((folder / "tp/checkpoints/step-00000004/sharded").glob("*.safetensors"))
    shapes = {name: tensor.shape for path in metadata for name, tensor in load_file(path).items()}
    assert shapes["model.model.layers.0.mlp.up_proj.weight"] == (16, 16)
    assert shapes["model.model.layers.1.self_attn.o_proj.weight"] == (16, 8)
    model, _ = checkpoint.read(folder / "tp/checkpoints/step-00000004")
    assert model["model.layers.0.mlp.up_proj.weight"].shape == (32, 16)
    assert model["model.norm.weight"].shape == (16,)


def test_bf16_is_near_fp32(results):
    same(results["tp bf16"], results["plain"], 3e-2, keys=("losses", "metrics"))
    assert results["tp bf16"]["losses"] != pytest.approx(results["plain"]["losses"], rel=1e-6)


@pytest.mark.parametrize("name", ["tp to tp", "plain to tp", "tp to fsdp", "fsdp to tp", "tp to plain"])
def test_resume_under_another_strategy_and_number_of_processes(results, name):
    assert len(results[name]["losses"]) == (4 if name == "fsdp to tp" else 8)
    same(results[name], results["plain"], 1e-5)


def test_processes_draw_the_same_random_numbers(ended, results):
    """With dropout, too, whole weights stay equal: each process reports the same norms."""
    first, second = (process.result["tp dropout"] for process in ended[1])
    assert first["norms"] == second["norms"]
    assert first["losses"] != results["plain"]["losses"]


def test_in_one_process_the_strategy_changes_nothing(results):
    assert results["one tp"]["losses"] == results["plain"]["losses"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tp heads", "num_attention_heads of the model is 3, not a multiple of the 2 processes. Use fsdp or ddp."),
        (
            "tp features",
            "model.layers.0.mlp.gate_proj has 31 features, not a multiple of the 2 processes. Use fsdp or ddp.",
        ),
        (
            "tp mixture",
            "the plan of the model has 'moe_tp_experts' for model.layers.0.mlp.experts, a Qwen3MoeExperts. Use fsdp "
            "or ddp.",
        ),
        ("tp foreach", "train.optimizer.foreach: torch cannot step divided and whole weights together. Remove it."),
        ("tp no plan", "plugins.tensor-parallel: Deep has no plan (tp_plan of a transformers model). Use fsdp or ddp."),
    ],
)
def test_models_that_cannot_be_divided_are_refused(results, name, message):
    assert results[name]["error"].endswith(message)
