"""The samples that a run of few steps reads are known before its datasets are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from fastloop import Output, Plugin, hookimpl
from fastloop.lifecycle import execute, open_run
from fastloop.plugins.resolve import resolve
from fastloop.recipe import make_recipe

TOTAL = 50


class Numbers(Plugin):
    """A task on ``TOTAL`` samples, which asks for those that the run reads, and notes those that it did read."""

    name = "numbers"

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.settings = settings
        self.expected: dict[str, list[int] | None] = {}
        self.read: dict[str, list[int]] = {"train": [], "validation": []}

    @hookimpl
    def configure(self) -> dict[str, Any]:
        return self.settings

    @hookimpl
    def build_datasets(self, run: Any) -> dict[str, Any]:
        for split in self.read:
            ids = run.loaders.find_samples_to_read(split, TOTAL)
            self.expected[split] = None if ids is None else ids.tolist()
        return {split: TensorDataset(torch.arange(TOTAL).float()[:, None]) for split in self.read}

    @hookimpl
    def build_model(self) -> Any:
        return torch.nn.Linear(1, 1)

    @hookimpl
    def compute_loss(self, run: Any, model: Any, batch: Any) -> Any:
        split = "train" if model.training else "validation"
        self.read[split] += batch[0].flatten().int().tolist()
        return Output(model(batch[0]).mean())


def train(task: Numbers, **options: Any) -> None:
    tree = {"train": {"batch_size": 8, "device": "cpu", "lr": 1e-9, **options}, "output": "run"}
    tree["plugins"] = [{"log": False}, {"progress": False}, {"module": False}]
    with open_run(resolve(make_recipe(tree), objects=[task])) as run:
        task.read = {split: [] for split in task.read}  # without those of checks
        execute(run)


@pytest.mark.parametrize("block", [None, 2])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("micro_batch_size", [8, 2])
def test_they_are_those_that_it_then_reads(micro_batch_size, drop_last, block):
    task = Numbers(max_evaluation_batches=2, shuffle_block=block)
    train(task, max_steps=3, micro_batch_size=micro_batch_size, eval_batch_size=4, drop_last=drop_last)
    assert task.expected["train"] == task.read["train"]
    assert len(task.read["train"]) == 3 * 8
    assert task.expected["validation"] == task.read["validation"] == list(range(8))


@pytest.mark.parametrize(
    ("options", "settings"),
    [
        ({"epochs": 1}, {}),
        ({"max_steps": 7}, {}),
        ({"max_steps": 7, "drop_last": True}, {}),
        ({"max_steps": 2}, {"arrange": lambda dataset, ids, size, generator: ids[::-1]}),
        ({"max_steps": 2}, {"split_step": lambda dataset, ids, processes: [ids]}),
    ],
    ids=["no limit", "more than an epoch", "a second epoch", "another order", "other micro-batches"],
)
def test_they_are_unknown_if_the_run_may_read_all(options, settings):
    task = Numbers(**settings)
    train(task, **options)
    assert task.expected == {"train": None, "validation": None}
