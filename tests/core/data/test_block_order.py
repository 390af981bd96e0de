"""``data.shuffle_block``: samples come in random order by blocks, with the promises of the order of a whole epoch.

Modules:
    core/fastloop/data/block_order.py
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from interrupted_runs import MODULE, Case, check_interrupted
from torch.utils.data import IterableDataset, TensorDataset

from fastloop import CheckpointError, PluginError, RecipeError, Settings
from fastloop.data import Loader, StepSampler
from fastloop.data.block_order import MIXED_BLOCKS, draw_block_order
from fastloop.lifecycle import build
from fastloop.plugins.plugin import Plugin, hookimpl
from fastloop.plugins.resolve import resolve
from fastloop.recipe import make_recipe
from fastloop.testing import expect_problem

SIZES = st.integers(1, 300)
BLOCKS = st.integers(1, 40)
SPLITS = [(8, 8, 1), (8, 2, 1), (8, 4, 2), (8, 2, 4), (6, 1, 3)]
"""Batch size, micro-batch size and number of processes."""


def draw(size: int, block: int, seed: int = 0) -> list[int]:
    return draw_block_order(size, block, torch.Generator().manual_seed(seed)).tolist()


def read_by_steps(size: int, block: int, split: tuple[int, int, int], epoch: int = 0, start: int = 0) -> list[int]:
    """The ids in the order in which a run uses them: micro-step by micro-step, process by process."""
    batch, micro_batch, world = split
    by_process = []
    for rank in range(world):
        sampler = StepSampler(size, batch, micro_batch, rank, world, 123, True, shuffle_block=block)
        sampler.set_position(epoch, start)
        by_process.append(list(sampler))
    ids = []
    for micro_step in zip(*by_process, strict=True):
        for micro_batch_ids in micro_step:
            if not micro_batch_ids.is_filler:
                ids += micro_batch_ids
    return ids


@given(SIZES, BLOCKS, st.integers(0, 5))
def test_an_epoch_has_each_sample_once(size, block, seed):
    assert sorted(draw(size, block, seed)) == list(range(size))


@given(SIZES, BLOCKS, st.integers(0, 5))
def test_a_block_is_read_while_few_others_are(size, block, seed):
    places: dict[int, list[int]] = {}
    for place, index in enumerate(draw(size, block, seed)):
        places.setdefault(index // block, []).append(place)
    for of_block in places.values():
        assert max(of_block) - min(of_block) < MIXED_BLOCKS * block


def test_samples_of_neighboring_blocks_are_mixed_and_epochs_differ():
    block = 32
    ids = draw(4096, block)
    assert len({index // block for index in ids[:64]}) > MIXED_BLOCKS / 2
    assert ids != draw(4096, block, seed=1)
    assert {index // block for index in ids[:512]} != {index // block for index in draw(4096, block, seed=1)[:512]}


@given(SIZES, BLOCKS, st.sampled_from(SPLITS), st.integers(0, 2))
def test_every_number_of_processes_has_the_same_order(size, block, split, epoch):
    expected = draw(size, block, 123 + epoch)
    assert read_by_steps(size, block, split, epoch) == expected


@given(st.integers(1, 80), BLOCKS, st.sampled_from(SPLITS), st.sampled_from(SPLITS[:4]))
def test_a_start_at_each_step_gives_the_rest_on_another_number_of_processes(size, block, before, after):
    whole = read_by_steps(size, block, before, epoch=1)
    for start in range(0, size, before[0]):
        assert read_by_steps(size, block, after, epoch=1, start=start) == whole[start:]


def test_batches_of_all_epochs_are_full_with_drop_last():
    sampler = StepSampler(67, 8, 8, 0, 1, 5, True, full_batch_size=8, shuffle_block=16)
    for epoch in range(3):
        sampler.set_position(epoch, 0)
        batches = list(sampler)
        assert [len(ids) for ids in batches] == [8] * 8
        assert len({index for ids in batches for index in ids}) == 64


def test_the_default_order_is_the_permutation_of_the_epoch():
    sampler = StepSampler(67, 8, 8, 0, 1, 5, True)
    assert list(sampler.order(2)) == torch.randperm(67, generator=torch.Generator().manual_seed(7)).tolist()
    assert sampler.fingerprint() == ""
    in_blocks = StepSampler(67, 8, 8, 0, 1, 5, True, shuffle_block=16)
    assert in_blocks.fingerprint() != StepSampler(67, 8, 8, 0, 1, 5, True, shuffle_block=17).fingerprint() != ""
    evaluated = StepSampler(67, 8, 8, 0, 1, 5, False, shuffle_block=16)
    assert list(evaluated.order()) == list(range(67))
    assert evaluated.fingerprint() == ""


# -- reading ahead -----------------------------------------------------------------------------------------------------


class OnDisk(TensorDataset):
    """Records the samples that are announced and read."""

    def __init__(self, size: int) -> None:
        super().__init__(torch.arange(size))
        self.announced: list[list[int]] = []
        self.read = set[int]()

    def read_at_random(self) -> Callable[[Sequence[int]], None]:
        return lambda ids: self.announced.append(list(ids))

    def __getitems__(self, ids: Sequence[int]) -> list[Any]:
        for index in ids:
            assert any(index in block for block in self.announced)
            self.read.add(index)
        return [self.tensors[0][index] for index in ids]


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("start", [0, 400])
def test_each_process_announces_whole_blocks_once_and_before_they_are_read(world, start):
    size, block = 1000, 32
    read = set[int]()
    for rank in range(world):
        dataset = OnDisk(size)
        loader = Loader(
            dataset, torch.stack, Settings(shuffle_block=block), batch_size=8, micro_batch_size=4,
            rank=rank, world_size=world, seed=3, shuffle=True,
        )  # fmt: skip
        for batch in loader.batches(epoch=1, start=start):
            read.update(batch.ids)
        firsts = [ids[0] for ids in dataset.announced]
        assert len(set(firsts)) == len(firsts)
        for ids in dataset.announced:
            assert ids == list(range(ids[0] // block * block, min(ids[0] // block * block + block, size)))
    assert len(read) == size - start


# -- runs --------------------------------------------------------------------------------------------------------------


def in_blocks(block: int, **data: Any) -> dict[str, Any]:
    """The sections of a run whose data have a block size."""
    return MODULE | {"data": {**MODULE["data"], "shuffle_block": block, **data}}


@pytest.mark.parametrize("step", [3, 8, 11])
def test_a_run_that_is_interrupted_ends_with_the_same_numbers(step):
    check_interrupted(Case(task=in_blocks(16)), "limit", step)


def test_a_resumed_run_cannot_change_the_blocks():
    Case(task=in_blocks(16)).fit("run", max_steps=2, save_every=2)
    for other in (MODULE, in_blocks(32)):
        with expect_problem("resume-differs data shuffle_block 16", CheckpointError):
            Case(task=other).fit("run", resume=True)


class Task(Plugin):
    """A task on numbers, which it also arranges, if ``settings`` has a function for it."""

    name = "numbers"
    slot = "task"

    def __init__(self, dataset: Any, **settings: Any) -> None:
        super().__init__()
        self.dataset = dataset
        self.settings = settings

    @hookimpl
    def configure(self) -> dict[str, Any]:
        return self.settings

    @hookimpl
    def build_datasets(self) -> dict[str, Any]:
        return {"train": self.dataset}

    @hookimpl
    def build_model(self) -> Any:
        return torch.nn.Linear(1, 1)


class WithSampler(Task):
    """A task whose samples come in an order of its own."""

    @hookimpl
    def build_sampler(self) -> Any:
        order = torch.utils.data.SubsetRandomSampler([0, 1, 2], torch.Generator().manual_seed(1))
        return torch.utils.data.BatchSampler(order, 8, False)


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return islice(iter(lambda: torch.zeros(1), None), 100)


NUMBERS = TensorDataset(torch.zeros(64, 1))


@pytest.mark.parametrize(
    ("task", "error"),
    [
        (Task(NUMBERS, arrange=lambda dataset, ids, size, generator: ids[::-1]), PluginError),
        (WithSampler(NUMBERS), RecipeError),
        (Task(Endless()), RecipeError),
    ],
    ids=["a plugin that arranges", "a sampler", "an iterable dataset"],
)
def test_another_order_is_refused(task, error):
    tree = {"data": {"shuffle_block": 16}, "train": {"device": "cpu", "epochs": 1, "max_steps": 1}, "output": "run"}
    tree |= {"plugins": [{"log": False}, {"progress": False}]}
    with expect_problem("exclusive-options recipe.yaml data.shuffle_block", error):
        build(resolve(make_recipe(tree, Path("recipe.yaml")), objects=[task]))
