"""Generators that a dataset keeps for itself: each worker and process has a copy, and none repeats another's."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, Subset

from fastloop import Plugin, Trainer, hookimpl
from fastloop.runtime.random_states import find_generators

SAMPLES = 24
DRAWS: dict[str, Callable[[Any], float]] = {
    "numpy": lambda generator: float(generator.random()),
    "numpy, old": lambda generator: float(generator.random_sample()),
    "torch": lambda generator: float(torch.rand((), generator=generator)),
    "python": lambda generator: generator.random(),
}
MADE: dict[str, Callable[[], Any]] = {
    "numpy": lambda: np.random.default_rng(0),
    "numpy, old": lambda: np.random.RandomState(0),
    "torch": lambda: torch.Generator().manual_seed(0),
    "python": lambda: random.Random(0),
}


class Noise:
    """A transform with a generator of its own."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.generator = MADE[kind]()

    def __call__(self) -> float:
        return DRAWS[self.kind](self.generator)


class Noisy(Dataset):
    """Samples with noise, which is their target."""

    def __init__(self, kind: str) -> None:
        self.transforms = [Noise(kind)]

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.full((1,), float(index)), torch.tensor([self.transforms[0]()], dtype=torch.float64)


class Draws(Plugin):
    """Records the noise of each sample."""

    name = "draws"

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[int, float] = {}

    @hookimpl
    def before_step(self, batches: Any) -> None:
        for batch in batches:
            inputs, targets = batch.inputs
            if batch.samples:
                self.seen |= dict(zip(inputs.flatten().int().tolist(), targets.flatten().tolist(), strict=True))


def noise(kind: str, workers: int, plugins: tuple[Any, ...] = ()) -> dict[int, float]:
    """The noise of each sample in an epoch."""
    draws = Draws()
    reading = [{"dataloader-workers": {"num_workers": workers}}] if workers else []
    usual = {"loss": lambda output, target: (output - target.float()).square().mean(), "batch_size": 4, "device": "cpu"}
    data = Subset(Noisy(kind), range(SAMPLES))
    Trainer(nn.Linear(1, 1), data, plugins=[draws, *reading, *plugins], epochs=1, output="run", **usual).fit()
    return draws.seen


@pytest.mark.parametrize("kind", MADE)
def test_the_generator_in_a_transform_is_found(kind):
    data = Subset(Noisy(kind), range(SAMPLES))
    assert find_generators(data) == [data.dataset.transforms[0].generator]


def test_the_generators_that_all_code_shares_are_not_found():
    class UsesModules(Noisy):
        def __init__(self) -> None:
            super().__init__("numpy")
            self.libraries = [np, np.random, random, torch]

    data = UsesModules()
    assert find_generators(data) == [data.transforms[0].generator]


@pytest.mark.parametrize("kind", ["numpy", pytest.param("torch", marks=pytest.mark.slow)])
def test_workers_draw_other_numbers_and_their_number_changes_none(kind):
    two = noise(kind, 2)
    assert len(set(two.values())) == SAMPLES
    assert noise(kind, 1) == two


def both(_: Any = None) -> dict[int, float]:
    return noise("numpy", 0, ("ddp",))


@pytest.mark.slow
def test_processes_draw_other_numbers(processes, tmp_path):
    drawn = [process.result for process in processes(2, both, folder=tmp_path)]
    values = [value for process in drawn for value in process.values()]
    assert len(set(values)) == len(values) == SAMPLES


def test_without_workers_the_numbers_are_those_of_the_generator():
    expected = np.random.default_rng(0)
    assert sorted(noise("numpy", 0).values()) == sorted(float(expected.random()) for _ in range(SAMPLES))
