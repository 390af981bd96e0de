"""Sample ids: every sample exactly once an epoch, in one order, for any number of processes.

Modules:
    core/fastloop/data/sampler.py
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fastloop.data import StepSampler

SIZES = [1, 3, 7, 8, 16, 23, 67]
SPLITS = [
    (8, 8, 1),
    (8, 2, 1),
    (8, 4, 2),
    (8, 2, 2),
    (8, 1, 4),
    (8, 2, 4),
    (6, 1, 3),
    (1, 1, 1),
    (100, 25, 4),
]
"""Batch size, micro-batch size and number of processes."""


def samplers(
    size: int, split: tuple[int, int, int], epoch: int = 0, start: int = 0, shuffle: bool = True
) -> list[list[Any]]:
    """The draws of every process."""
    batch, device_batch, world = split
    draws = []
    for rank in range(world):
        sampler = StepSampler(size, batch, device_batch, rank, world, 123, shuffle)
        sampler.set_position(epoch, start)
        draws.append(list(sampler))
    return draws


def ledger(draws: list[list[Any]]) -> list[int]:
    """All ids that count, in the order in which the run uses them: micro-step by micro-step, process by process."""
    return [
        index for micro_step in zip(*draws, strict=True) for draw in micro_step if not draw.is_filler for index in draw
    ]


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_each_sample_is_drawn_exactly_once_an_epoch_in_the_same_order(split):
    for size in SIZES:
        for epoch in (0, 1):
            drawn = ledger(samplers(size, split, epoch))
            assert sorted(drawn) == list(range(size))
            assert drawn == torch.randperm(size, generator=torch.Generator().manual_seed(123 + epoch)).tolist()
        assert ledger(samplers(size, split, shuffle=False)) == list(range(size))


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_a_start_inside_the_epoch_gives_the_rest_of_its_order(split):
    for size in SIZES:
        whole = ledger(samplers(size, split, epoch=3))
        for start in range(0, size, split[0]):
            assert ledger(samplers(size, split, epoch=3, start=start)) == whole[start:]


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_processes_take_the_same_number_of_micro_steps_and_each_has_something_to_compute(split):
    for size in SIZES:
        draws = samplers(size, split)
        assert len({len(draw) for draw in draws}) == 1
        assert all(draw for process in draws for draw in process)
        assert all(len(draw) <= split[1] for process in draws for draw in process)


def test_resume_with_another_number_of_processes():
    first = ledger([draws[:3] for draws in samplers(67, (8, 4, 2))])  # three steps of two processes
    assert first + ledger(samplers(67, (8, 2, 4), start=24)) == ledger(samplers(67, (8, 8, 1)))
