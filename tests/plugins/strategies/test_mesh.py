"""``fsdp`` with divided layers, on a mesh of two by two processes, trains like one process and resumes elsewhere.

Modules:
    core/fastloop/distributed/groups.py
    plugins/fastloop_plugins/strategies/_fsdp_meshes.py
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from strategy_helpers import of_this_form, same, save_at_end
from strategy_runs import all_of
from test_tensor_parallel import EVEN, LLAMA, MIXTURE, QWEN, TIED, TRAIN, run

from fastloop.testing import ProcessResult
from fastloop.testing.tasks import TEXTS, write_texts

pytestmark = pytest.mark.slow

MESH = {"fsdp": {"tensor": 2}}
COPIES = {"fsdp": {"tensor": 2, "shard_within": 2}}
"""Two whole copies of the model, each divided over two processes."""
LORA = {"lora": {"target_modules": "all-linear"}}
SHORT = TRAIN | {"epochs": 2}
EXPERTS = MIXTURE | {"num_experts": 3}
"""Fewer experts than processes: ``fsdp`` divides each of them."""
CLASSES = {"model": {"config": LLAMA, "tokenizer": {"kind": "word"}}, "data": TEXTS["data"]}


def classify(name: str, *plugins: Any) -> dict[str, Any]:
    """A run of text classification, whose metrics count samples."""
    return {"name": name, "recipe": CLASSES, "plugins": ["text-classification", *plugins], "train": SHORT}


LONG_ONLY = {"plain tied", "mesh tied", "plain ema", "mesh ema", "mesh to fsdp", "fsdp to mesh"}
"""Runs of the long form: ``test_tensor_parallel.py`` divides tied weights, ``test_plugins_on_two_processes.py``
compares `ema` under ``fsdp``, and other runs resume on a mesh and from one."""
chosen = partial(of_this_form, long_only=LONG_ONLY)
PLAIN = [
    run("plain"),
    run("plain qwen", config=QWEN, train=SHORT),
    run("plain tied", config=TIED, train=SHORT | {"max_grad_norm": None}),
    run("plain lora", LORA, train=SHORT),
    run("plain experts", config=EXPERTS, train=SHORT),
    run("plain ema", "ema", train=SHORT, **EVEN),
    classify("plain classes"),
]
FOUR = [
    run("mesh", MESH, "checkpoint-best", "async-save", train=TRAIN | {"micro_batch_size": 2}),
    run("mesh qwen", MESH, "activation-checkpointing", config=QWEN, train=SHORT | {"micro_batch_size": 2}),
    run("mesh tied", MESH, "packing", config=TIED, train=SHORT | {"max_grad_norm": None}),
    run("mesh lora", COPIES, LORA, train=SHORT),
    run("mesh experts", "fsdp", config=EXPERTS, train=SHORT),
    run("mesh ema", MESH, "ema", train=SHORT, **EVEN),
    classify("mesh classes", MESH),
    run("mesh to copies", COPIES, resume="mesh"),
    run("plain to mesh", MESH, resume="plain"),
    run("mesh to fsdp", "fsdp", resume="mesh"),
    run("fsdp to mesh", MESH, resume="mesh to fsdp", step=8),
    run("sharded heads", {"fsdp": {"tensor": 4}}),
    run("mesh in a mesh", {"fsdp": {"tensor": 4, "shard_within": 2}}),
    run("mesh of the main process", {"fsdp": {"tensor": 2, "meta_device": True}}),
    run("mesh with an audit", MESH, "sample-audit"),
    run("mesh with a fused loss", MESH, "fused-loss"),
]
AFTER = [
    run("mesh to plain", resume="mesh"),
    run("experts to plain", resume="mesh experts", config=EXPERTS, train=SHORT),
]
THREE = [run("uneven mesh", MESH)]
STARTS = [(1, chosen(PLAIN)), (4, chosen(FOUR)), (1, AFTER), (3, THREE)]
"""Number of processes, and the runs of one start."""
save_at_end([PLAIN, FOUR, AFTER], 12)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all runs are."""
    folder = tmp_path_factory.mktemp("mesh")
    write_texts(folder)
    return folder


@pytest.fixture(scope="module")
def results(processes: Callable[..., list[ProcessResult]], folder: Path) -> dict[str, dict[str, Any]]:
    """Results of the first processes, by name."""
    starts = [processes(count, all_of, runs, folder=folder) for count, runs in STARTS]
    return {name: result for start in starts for name, result in start[0].result.items()}


COMPARED = ["mesh", "mesh qwen", "mesh tied", "mesh lora", "mesh ema", "mesh classes", "mesh experts"]


@pytest.mark.parametrize("kind", [name.removeprefix("mesh") for name in chosen(COMPARED)])
def test_numbers_are_those_of_one_process(results, folder, kind):
    mesh, plain = results[f"mesh{kind}"], results[f"plain{kind}"]
    same(mesh, plain, 1e-5)
    assert plain["losses"][-1] < 0.99 * plain["losses"][0]
    assert mesh["summary"]["samples"] == plain["summary"]["samples"]
    weights, whole = (load_file(folder / f"{run}{kind}" / "model" / "model.safetensors") for run in ("mesh", "plain"))
    assert weights.keys() == whole.keys()
    assert all(torch.allclose(weights[key], whole[key], rtol=1e-4, atol=1e-5) for key in whole)


@pytest.mark.parametrize(
    "name", chosen(["mesh to copies", "plain to mesh", "mesh to fsdp", "fsdp to mesh", "mesh to plain"])
)
def test_resume_on_another_mesh(results, name):
    assert len(results[name]["losses"]) == (4 if name == "fsdp to mesh" else 8)
    same(results[name], results["plain"], 1e-5)


def test_experts_resume_on_one_process(results):
    same(results["experts to plain"], results["plain experts"], 1e-5)


def stored(checkpoint: Path) -> tuple[int, dict[str, Any]]:
    """The number of files with shards, and the shapes that they hold."""
    files = list((checkpoint / "sharded").glob("*.safetensors"))
    return len(files), {name: tensor.shape for path in files for name, tensor in load_file(path).items()}


def test_each_process_holds_a_part_of_its_part(folder, results):
    files, shapes = stored(folder / "mesh/checkpoints/step-00000004")
    assert files == 4
    assert shapes["model.model.layers.0.mlp.up_proj.weight"] == (8, 16)  # of (32, 16)
    assert shapes["model.model.layers.1.self_attn.o_proj.weight"] == (8, 8)  # of (16, 16)
    _, shapes = stored(folder / "mesh lora/checkpoints/step-00000008")
    layer = "model.base_model.model.model.layers.1.self_attn.o_proj"
    assert shapes[f"{layer}.base_layer.weight"] == (16, 8)
    assert shapes[f"{layer}.lora_A.default.weight"] == (8, 8)
    _, shapes = stored(folder / "mesh experts/checkpoints/step-00000004")
    assert shapes["model.model.layers.0.mlp.experts.down_proj"] == (3, 4, 8)  # of (3, 16, 8)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("sharded heads", "num_key_value_heads of the model is 2, not a multiple of the 4 processes. Use fsdp or ddp."),
        (
            "mesh in a mesh",
            "plugins.fsdp.shard_within: 2 processes are not a multiple of the 4 of plugins.fsdp.tensor.",
        ),
        (
            "mesh of the main process",
            "plugins.fsdp.tensor: needs the full model in each process. Set plugins.fsdp.meta_device: false.",
        ),
        (
            "mesh with an audit",
            "plugins 'fsdp' and 'sample-audit' exclude each other: it counts each sample once, and here several "
            "processes train on it. Remove one of them.",
        ),
        (
            "mesh with a fused loss",
            "plugins 'fsdp' and 'fused-loss' exclude each other: it needs all rows of the head, which the processes "
            "divide. Remove one of them.",
        ),
        (
            "uneven mesh",
            "plugin 'fsdp' needs groups of 2 processes, and 3 are not a multiple of 2. Start 2 or 4.",
        ),
    ],
)
def test_meshes_that_do_not_fit_are_refused(results, name, message):
    assert results[name]["error"].endswith(message)
