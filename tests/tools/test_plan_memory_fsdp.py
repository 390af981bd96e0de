"""`fastloop plan --device-memory`: the memory of ``fsdp`` is that of torch's own tracker for the plugin's sharding.

Modules:
    plugins/fastloop_plugins/strategies/_memory_fsdp.py
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import TensorDataset

from fastloop.distributed.processes import Processes
from fastloop.recipe import make_recipe
from fastloop_plugins.strategies.fsdp import FSDP
from fastloop_tools.plan.memory.estimate import estimate

PROCESSES = 8


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.wide, self.back = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.back(self.wide(self.norm(hidden)).relu())


class Net(nn.Module):
    """An embedding and a head outside the repeated blocks."""

    def __init__(self, width: int = 64, words: int = 4000, layers: int = 4) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(words, width), nn.Linear(width, words)
        self.blocks = nn.ModuleList([Block(width) for _ in range(layers)])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.words(ids)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden.mean(1)).clone()  # fsdp warns about a view


def data(words: int = 4000) -> dict[str, Any]:
    ids = torch.randint(words, (64, 8), generator=torch.Generator().manual_seed(0))
    return {"train": TensorDataset(ids, ids[:, 0])}


@pytest.fixture(autouse=True)
def process_group() -> Iterator[None]:
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=PROCESSES)
    yield
    torch.distributed.destroy_process_group()


def track(model: nn.Module, options: dict[str, Any], precision: str, samples: int) -> int:
    """The most bytes of a process in a step, by torch's tracker."""
    accelerator = SimpleNamespace(mixed_precision=precision, prepare_model=lambda model, evaluation_mode: model)
    run: Any = SimpleNamespace(
        recipe=SimpleNamespace(where="r.yaml"), accelerator=accelerator, device=torch.device("cpu")
    )
    run.processes, run.updates, run.rank = Processes(), 0, 0
    run.world_size, run.is_main = PROCESSES, True
    FSDP(**options).before_prepare(run=run, model=model)
    optimizer = torch.optim.AdamW(model.parameters())
    inputs, targets = data(model.words.num_embeddings)["train"][:samples]
    tracker = FSDPMemTracker(model, optimizer)  # type: ignore[no-untyped-call]
    tracker.track_inputs((inputs, targets))
    with tracker:
        for _ in range(2):  # the second step finds the optimizer's state
            tracker.reset_mod_stats()
            with nullcontext() if precision == "no" else torch.autocast("cpu", torch.bfloat16):
                loss = nn.functional.cross_entropy(model(inputs).float(), targets)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
    (found,) = tracker.get_tracker_snapshot("peak").values()
    return int(found["Total"])


SIZES = {"outside": {}, "blocks": {"width": 128, "words": 100, "layers": 6}, "no blocks": {"layers": 1}}
CASES = (
    [(sizes, {}, "no") for sizes in SIZES]
    + [(sizes, {}, "bf16") for sizes in SIZES]
    + [("blocks", {"reshard_after_forward": False}, "no")]
)


@pytest.mark.slow
@pytest.mark.parametrize(("sizes", "options", "precision"), CASES)
def test_the_estimate_is_that_of_torchs_tracker(sizes, options, precision):
    arguments: dict[str, int] = SIZES[sizes]
    data_arguments = {"words": arguments["words"]} if "words" in arguments else {}
    tree = {
        "model": {"module": "test_plan_memory_fsdp:Net", "arguments": arguments},
        "data": {"module": "test_plan_memory_fsdp:data", "arguments": data_arguments},
        "train": {"batch_size": 16, "device": "cpu"},
        "plugins": [
            {"module": {"loss": "cross_entropy"}},
            {"fsdp": options},
            *([{"amp": {"dtype": "bf16"}}] if precision != "no" else []),
        ],
    }
    found = estimate(make_recipe(tree, Path("r.yaml")), PROCESSES)
    (row,) = [variant for variant in found.variants if variant.listed]
    tracked = track(Net(**arguments), options, precision, samples=found.micro_batch_size)
    assert row.name == "fsdp"
    assert 0.99 * tracked < row.total < 1.3 * tracked
