"""Loaders as users write them, and what ``Trainer`` reads of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
)
from torch.utils.data import WeightedRandomSampler as Weighted

from fastloop import Plugin, Trainer, hookimpl
from fastloop.testing import tiny_data, tiny_model

QUIET: list[Any] = [{"log": False}, {"progress": False}]
SIZE = 21


class Ids(Plugin):
    """Records the sample ids of each step: ``steps``."""

    name = "ids"

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[list[int]] = []

    @hookimpl
    def before_step(self, batches: Any) -> None:
        self.steps.append([index for batch in batches for index in batch.ids])


class Numbers(Dataset[int]):
    """Its samples are their ids: with it a plain ``DataLoader`` shows the batches that are expected."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> int:
        return index


class EveryOther(Sampler[int]):
    """Goes by the epoch, as samplers with ``set_epoch`` do."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 10

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.epoch % 2, 20, 2))


class Rotating(Sampler[int]):
    """Counts its own epochs, in a way that nobody can look up."""

    def __init__(self) -> None:
        self.state = {"turn": 0}

    def __len__(self) -> int:
        return SIZE

    def __iter__(self) -> Iterator[int]:
        turn = self.state["turn"]
        self.state["turn"] += 1
        return ((index + 5 * turn) % SIZE for index in range(SIZE))


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(7)


WEIGHTS = [1.0 + index % 3 for index in range(SIZE)]
LOADERS: dict[str, Callable[..., DataLoader[Any]]] = {
    "shuffle=False": lambda data: DataLoader(data, batch_size=4),
    "drop_last": lambda data: DataLoader(data, batch_size=4, drop_last=True),
    "a list as sampler": lambda data: DataLoader(data, batch_size=4, sampler=[3, 1, 4, 1, 5, 9, 2, 6]),
    "sequential over fewer": lambda data: DataLoader(data, batch_size=4, sampler=SequentialSampler(range(10))),
    "shuffle, generator": lambda data: DataLoader(data, batch_size=4, shuffle=True, generator=seeded()),
    "shuffle, generator, workers": lambda data: DataLoader(
        data, batch_size=4, shuffle=True, generator=seeded(), num_workers=1, persistent_workers=True
    ),
    "replacement": lambda data: DataLoader(
        data, 4, sampler=RandomSampler(data, replacement=True, num_samples=30, generator=seeded())
    ),
    "weighted": lambda data: DataLoader(
        data, batch_size=4, sampler=Weighted(WEIGHTS, 17, generator=seeded()), drop_last=True
    ),
    "subset": lambda data: DataLoader(
        data, batch_size=4, sampler=SubsetRandomSampler([2, 3, 5, 7, 11, 13], generator=seeded())
    ),
    "BatchSampler": lambda data: DataLoader(
        data, batch_sampler=BatchSampler(SequentialSampler(data), 5, drop_last=True)
    ),
    "set_epoch": lambda data: DataLoader(data, batch_size=4, sampler=EveryOther()),
    "with a state": lambda data: DataLoader(data, batch_size=4, sampler=Rotating()),
}


def expected(name: str, epochs: int) -> list[list[int]]:
    """The batches that the loader itself gives, epoch after epoch."""
    loader = LOADERS[name](Numbers())
    batches = []
    for epoch in range(epochs):
        if hasattr(loader.sampler, "set_epoch"):
            loader.sampler.set_epoch(epoch)
        batches += [batch.tolist() for batch in loader]
    return batches


def train(loader: Any, *evaluated: Any, plugins: Any = (), **settings: Any) -> tuple[list[list[int]], Trainer]:
    """The sample ids of each step, and the trainer when it is done."""
    ids = Ids()
    defaults = {"epochs": 3, "lr": 1e-2, "loss": nn.functional.cross_entropy, "output": "run", "device": "cpu"}
    trainer = Trainer(tiny_model(), loader, *evaluated, plugins=[*QUIET, ids, *plugins], **defaults | settings)
    trainer.fit()
    return ids.steps, trainer


def of_processes(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Runs on this process of several: the ids that it read, and the weights after."""
    results = []
    for spec in runs:
        found, trainer = train(LOADERS[spec["loader"]](tiny_data(SIZE)), plugins=["ddp"], **spec["settings"])
        weights = {name: tensor.tolist() for name, tensor in trainer.run.full_state_dict().items()}
        results.append({"ids": found, "weights": weights})
    return results
