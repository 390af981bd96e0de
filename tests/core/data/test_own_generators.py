"""Generators that datasets and collators keep for themselves.

Each worker and process has a copy, none repeats another's, and a resumed run continues with their numbers.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset, default_collate

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


# -- collators ---------------------------------------------------------------------------------------------------------


class NoisyCollator:
    """Adds noise to each sample of a batch."""

    def __init__(self) -> None:
        self.generator = np.random.default_rng(0)

    def __call__(self, samples: list[tuple[Tensor, ...]]) -> tuple[Tensor, Tensor]:
        (inputs,) = default_collate(samples)
        return inputs, torch.from_numpy(self.generator.random((len(inputs), 1)))

    def collate(self, samples: list[tuple[Tensor, ...]]) -> tuple[Tensor, Tensor]:
        return self(samples)


def add_noise(collate: Callable[..., Any], samples: list[tuple[Tensor, ...]]) -> Any:
    return collate(samples)


def of_closure() -> Callable[..., Any]:
    collate = NoisyCollator()
    return lambda samples: collate(samples)


COLLATORS: dict[str, Callable[[], Callable[..., Any]]] = {
    "object": NoisyCollator,
    "method": lambda: NoisyCollator().collate,
    "partial": lambda: partial(add_noise, NoisyCollator()),
    "closure": of_closure,
}


@pytest.mark.parametrize("kind", COLLATORS)
def test_the_generator_of_a_collator_is_found(kind: str) -> None:
    assert len(find_generators(COLLATORS[kind]())) == 1


class Numbers(IterableDataset[Any]):
    """The numbers from 0 on, in order."""

    def __iter__(self) -> Iterator[tuple[Tensor]]:
        yield from ((torch.full((1,), float(index)),) for index in range(SAMPLES))


def mean_square(output: Tensor, target: Tensor) -> Tensor:
    return (output - target.float()).square().mean()


def train(data: Any, collate: Any = None, *, workers: int = 0, output: str = "run", **options: Any) -> list[Any]:
    """The inputs and targets of each step of two epochs, which has four samples."""
    steps = Steps(options.pop("stop", None))
    loader = DataLoader(data, batch_size=4, num_workers=workers, collate_fn=collate)
    options |= {"loss": mean_square, "epochs": 2, "evaluate_every": 2, "device": "cpu", "output": output}
    trainer = Trainer(nn.Linear(1, 1), loader, loader, plugins=[steps], **options)
    with nullcontext() if steps.stop is None else pytest.raises(KeyboardInterrupt):
        trainer.fit()
    return steps.seen


class Steps(Plugin):
    """Records the batches of each step, and ends the run after a step."""

    name = "steps"

    def __init__(self, stop: int | None) -> None:
        super().__init__()
        self.stop = stop
        self.seen: list[Any] = []

    @hookimpl
    def before_step(self, batches: Any) -> None:
        self.seen.append([tensor.flatten().tolist() for batch in batches for tensor in batch.inputs])

    @hookimpl
    def after_step(self, run: Any) -> None:
        if run.state.step == self.stop:
            run.signals.record("SIGINT")


@pytest.mark.parametrize("data", ["map-style", "iterable"])
def test_workers_draw_other_numbers_in_a_collator_and_their_number_changes_none(data: str) -> None:
    numbers: Any = Numbers() if data == "iterable" else TensorDataset(torch.arange(float(SAMPLES))[:, None])
    two = train(numbers, NoisyCollator(), workers=2)
    drawn = [number for _, targets in two for number in targets]
    assert len(set(drawn)) == len(drawn) == 2 * SAMPLES
    assert train(numbers, NoisyCollator(), workers=1) == two


# -- a resumed run -----------------------------------------------------------------------------------------------------


class Shuffled(IterableDataset[Any]):
    """Samples in an order that the dataset draws anew in each pass."""

    def __init__(self) -> None:
        self.generator = np.random.default_rng(0)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for index in self.generator.permutation(SAMPLES):
            yield torch.full((1,), float(index)), torch.zeros(1)


def data_of(case: str) -> tuple[Any, Any]:
    """The dataset and the collator of a case."""
    if case == "collator":
        return TensorDataset(torch.arange(float(SAMPLES))[:, None]), NoisyCollator()
    return (Shuffled() if case == "iterable" else Noisy(case)), None


@pytest.mark.parametrize("case", [*MADE, "collator", "iterable"])
def test_a_resumed_run_continues_in_the_middle_of_an_epoch(case: str) -> None:
    whole = train(*data_of(case), output="whole")
    stopped = train(*data_of(case), output="cut", stop=8)
    assert stopped == whole[:8]
    assert train(*data_of(case), output="cut", resume=True) == whole[8:]


def test_an_iterable_dataset_draws_an_order_for_each_epoch_with_any_number_of_workers() -> None:
    alone = train(Shuffled())
    first = [number for inputs, _ in alone[:6] for number in inputs]
    second = [number for inputs, _ in alone[6:] for number in inputs]
    assert first == np.random.default_rng(0).permutation(SAMPLES).tolist()
    assert sorted(second) == sorted(first)
    assert second != first
    assert train(Shuffled(), workers=2) == alone
