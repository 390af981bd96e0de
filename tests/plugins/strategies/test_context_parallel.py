"""Sequences divided over processes train like whole ones.

Modules:
    plugins/fastloop_plugins/strategies/_context_attention.py
    plugins/fastloop_plugins/strategies/context_parallel.py
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
from test_tensor_parallel import QWEN, TRAIN, run
from torch import nn
from transformers.utils import ModelOutput

from fastloop.testing import ProcessResult
from fastloop.testing.tasks import write_texts
from fastloop_plugins.strategies._context_attention import SequenceSlices
from fastloop_plugins.strategies.context_parallel import divide_forward
from fastloop_plugins.text.next_token_loss import add_loss

CONTEXT = "context-parallel"
GROUPS = {"context-parallel": {"size": 2}}
SHORT = TRAIN | {"epochs": 2}
WINDOW = {"model_type": "mistral", "sliding_window": 5}
PLAIN = [
    run("plain"),
    run("plain qwen", config=QWEN, train=SHORT),
    run("plain window", config=WINDOW, train=SHORT),
    run("plain packed", "packing", train=SHORT),
]
FOUR = [
    run("context", "fsdp", CONTEXT),
    run("context qwen", "ddp", GROUPS, "activation-checkpointing", config=QWEN, train=SHORT | {"micro_batch_size": 2}),
    run("context window", {"fsdp": {"shard_within": 2}}, GROUPS, config=WINDOW, train=SHORT),
    run("context packed", "ddp", "packing", GROUPS, "fused-loss", train=SHORT),
    run("plain to context", "fsdp", GROUPS, resume="plain"),
    run("context and tensor", {"fsdp": {"tensor": 2}}, GROUPS),
]
AFTER = [run("context to plain", resume="context")]
save_at_end([PLAIN, FOUR, AFTER], 12)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all runs are."""
    folder = tmp_path_factory.mktemp("context")
    write_texts(folder)
    return folder


@pytest.fixture(scope="module")
def results(processes: Callable[..., list[ProcessResult]], folder: Path) -> dict[str, dict[str, Any]]:
    """Results of the first processes, by name."""
    starts = [processes(count, all_of, runs, folder=folder) for count, runs in ((1, PLAIN), (4, FOUR), (1, AFTER))]
    return {name: result for start in starts for name, result in start[0].result.items()}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["", " qwen", " window", " packed"])
def test_numbers_are_those_of_whole_sequences(results, folder, kind):
    context, plain = results[f"context{kind}"], results[f"plain{kind}"]
    same(context, plain, 1e-5)
    assert plain["losses"][-1] < 0.99 * plain["losses"][0]
    assert context["summary"]["samples"] == plain["summary"]["samples"]
    weights, whole = (load_file(folder / f"{run}{kind}/model/model.safetensors") for run in ("context", "plain"))
    assert all(torch.allclose(weights[key], whole[key], rtol=1e-4, atol=1e-5) for key in whole)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain to context", "context to plain"])
def test_resume_on_another_number_of_processes(results, name):
    assert len(results[name]["losses"]) == 8
    same(results[name], results["plain"], 1e-5)


@pytest.mark.slow
def test_two_plugins_that_divide_the_processes_are_refused(results):
    assert "processes_per_batch" in results["context and tensor"]["error"]


class Bigrams(nn.Module):
    """Predicts a token from the one before, without attention."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(9, 9, dtype=torch.float64)

    def forward(self, input_ids: Any, **unused: Any) -> Any:
        return ModelOutput(logits=self.table(input_ids))


@pytest.mark.parametrize("first", [0, 3, 9])
def test_the_shares_of_the_processes_add_up(first):
    """Only the tokens after ``first`` have a loss, so one process may have none."""
    ids, targets = torch.randint(9, (2, 2, 10), generator=torch.Generator().manual_seed(1))
    targets[:, :first] = -100
    whole = Bigrams()
    whole.table.weight.grad = torch.zeros_like(whole.table.weight)
    torch.nn.functional.cross_entropy(whole(ids)["logits"].flatten(0, 1), targets.flatten()).backward()
    losses, gradient = [], torch.zeros_like(whole.table.weight)
    for rank in range(2):
        model: Any = Bigrams()
        add_loss(model)
        divide_forward(model, SequenceSlices(2, rank, None))
        loss = model(ids, targets).loss
        loss.backward()
        losses.append(float(loss.detach()))
        gradient += model.table.weight.grad / 2  # processes average
    expected = torch.nn.functional.cross_entropy(whole(ids)["logits"].flatten(0, 1).float(), targets.flatten())
    assert sum(losses) / 2 == pytest.approx(float(expected.detach()), rel=1e-6)
    torch.testing.assert_close(gradient, whole.table.weight.grad, rtol=1e-5, atol=1e-7)
