"""The loaders of a run: how a step is divided into micro-batches.

Modules:
    core/fastloop/data/loaders.py
"""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest

from fastloop import RecipeError
from fastloop.data.loaders import divide_step
from fastloop.recipe import make_recipe


def sizes(batch: int, device: int | None = None) -> Any:
    return make_recipe({"train": {"batch_size": batch, "micro_batch_size": device}})


@pytest.mark.parametrize(
    ("batch", "device", "world", "expected"),
    [
        (12, None, 1, (12, 1)),
        (12, None, 4, (3, 1)),
        (12, 3, 1, (3, 4)),
        (12, 3, 2, (3, 2)),
        (12, 3, 4, (3, 1)),
        (4, None, 4, (1, 1)),
    ],
)
def test_accumulation_follows_from_batch_size_and_processes(batch, device, world, expected):
    assert divide_step(sizes(batch, device), world) == expected


@pytest.mark.parametrize(
    ("batch", "device", "world", "found", "offered"),
    [
        (10, 4, 1, "4 (micro_batch_size) x 1 (processes)", "batch_size 8 or 12 or micro_batch_size 2 or 5"),
        (12, 4, 2, "4 (micro_batch_size) x 2 (processes)", "batch_size 8 or 16 or micro_batch_size 2 or 3"),
        (4, 8, 1, "8 (micro_batch_size) x 1 (processes)", "batch_size 8 or micro_batch_size 2 or 4"),
        (13, None, 4, "the 4 processes", "batch_size 12 or 16"),
        (3, None, 4, "the 4 processes", "batch_size 4"),
    ],
)
def test_sizes_that_do_not_divide_are_refused_with_the_nearest_that_do(batch, device, world, found, offered):
    with pytest.raises(RecipeError) as refused:
        divide_step(sizes(batch, device), world)
    assert (
        str(refused.value)
        == f"recipe: train.batch_size: {batch} is not a multiple of {found}. Nearest that are: {offered}."
    )


def test_suggested_batch_sizes_divide():
    for batch, device, world in itertools.product(range(1, 25), (None, 1, 2, 3, 5, 8), (1, 2, 3, 4)):
        try:
            micro, steps = divide_step(sizes(batch, device), world)
        except RecipeError as error:
            offered = str(error).partition("Nearest that are: ")[2]
            batches, _, devices = offered.partition(" or micro_batch_size ")
            assert batches
            for size in re.findall(r"\d+", batches):
                divide_step(sizes(int(size), device), world)
            for size in re.findall(r"\d+", devices):
                divide_step(sizes(batch, int(size)), world)
        else:
            assert micro * steps * world == batch
