"""The memory of a GPU: real out-of-memory errors, and the peak that ``fastloop plan`` estimates."""

from __future__ import annotations

import json
import logging
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from training_runs import execute

from fastloop.lifecycle import build
from fastloop.plugins.resolve import resolve
from fastloop.recipe import make_recipe
from fastloop_tools.plan.memory.estimate import estimate

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]

MIB = 2**20


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def train(recipe: Any) -> list[float]:
    """The losses of each step."""
    execute(build(resolve(recipe)))
    lines = [json.loads(line) for line in Path(recipe.output, "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


@contextmanager
def limited(size: int) -> Any:
    """At most ``size`` more bytes of this process in the GPU's memory."""
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + size) / total)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


CONFIG = {
    "model_type": "llama",
    "hidden_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "intermediate_size": 1536,
    "max_position_embeddings": 512,
}


def wide(*plugins: Any, output: str = "run", batch_size: int = 32) -> Any:
    """A language model of 20M parameters, on blocks of 512 bytes."""
    rows = [{"text": f"{index} " + "some words and numbers " * 40} for index in range(batch_size * 4)]
    Path("long.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {"batch_size": batch_size, "lr": 1e-3, "log_every": 1, "save_every": None, "max_steps": 4}
    tree = {
        "model": {"config": CONFIG, "tokenizer": {"kind": "byte"}},
        "data": {"files": {"train": "long.jsonl"}, "max_length": 512},
        "train": settings | {"device": "auto"},
        "output": output,
        "plugins": ["causal-lm", *plugins, {"progress": False}],
    }
    return make_recipe(tree, Path("recipe.yaml"))


def test_micro_batches_are_halved_when_the_gpu_runs_out_of_memory(caplog: pytest.LogCaptureFixture) -> None:
    whole = train(wide())
    with limited(3000 * MIB), caplog.at_level(logging.WARNING):
        halved = train(wide("auto-micro-batch", output="halved"))
    assert any("do not fit into memory" in record.message for record in caplog.records)
    assert halved == pytest.approx(whole, rel=2e-3)
    assert list(Path("halved/out_of_memory").iterdir())


@pytest.mark.parametrize("plugins", [[], [{"activation-checkpointing": {}}]], ids=["plain", "checkpointing"])
def test_the_estimate_of_memory_is_near_the_peak(plugins: list[Any], record_property: Any) -> None:
    recipe = wide(*plugins)
    rows = [row for row in estimate(recipe, 1).variants if row.name == "ddp" and row.checkpointing == bool(plugins)]
    expected = rows[0]
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    train(recipe)
    peak = torch.cuda.max_memory_allocated() - before
    record_property("estimated_mib", expected.total / MIB)
    record_property("peak_mib", peak / MIB)
    print(f"estimated {expected.total / MIB:.0f} MiB, peak {peak / MIB:.0f} MiB")
    assert expected.total == pytest.approx(peak, rel=0.25)
