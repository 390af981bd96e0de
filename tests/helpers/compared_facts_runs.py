"""Runs on two processes that read data of their own: ``processes(2, all_of, CASES)``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from fastloop import FastloopError, Plugin, Trainer, hookimpl
from fastloop.distributed.ranks import rank, world_size

SAMPLES = 64


def sample(index: int) -> tuple[Tensor, Tensor]:
    """A sample whose target is its index."""
    inputs = torch.randn(8, generator=torch.Generator().manual_seed(index))
    return inputs, torch.tensor([float(index)])


class Whole(IterableDataset):
    """All samples, on each process."""

    def __iter__(self) -> Iterator[Any]:
        return (sample(index) for index in range(SAMPLES))


class Sharded(IterableDataset):
    """Each process has its own samples, and no attribute states it."""

    def __iter__(self) -> Iterator[Any]:
        return (sample(index) for index in range(rank(), SAMPLES, world_size()))


class Declared(Sharded):
    """The same, declared."""

    shards_itself = True


class Noisy(IterableDataset):
    """All samples, with other random numbers on each process, as the attribute states."""

    shards_itself = False

    def __iter__(self) -> Iterator[Any]:
        generator = torch.Generator().manual_seed(rank())
        for index in range(SAMPLES):
            inputs, target = sample(index)
            yield inputs + 0.1 * torch.randn(8, generator=generator), target


class Targets(Plugin):
    """Records the targets that this process trains on."""

    name = "targets"

    def __init__(self) -> None:
        super().__init__()
        self.trained: list[int] = []

    @hookimpl
    def before_step(self, batches: Any) -> None:
        for batch in batches:
            if batch.samples:
                self.trained += [int(value) for value in batch.inputs[1].flatten()]


DATASETS = {"whole": Whole, "sharded": Sharded, "declared": Declared, "noisy": Noisy}


def run(name: str, split: str, workers: int) -> dict[str, Any]:
    """Train an epoch with a dataset for one of the splits."""
    torch.manual_seed(0)
    targets = Targets()
    plugins: list[Any] = ["ddp", targets]
    if workers:
        plugins.append({"dataloader-workers": {"num_workers": workers}})
    data = {"train": Whole(), "validation": Whole()}
    data[split] = DATASETS[name]()
    usual = {"loss": nn.functional.mse_loss, "batch_size": 8, "epochs": 1, "device": "cpu", "save_every": None}
    try:
        trainer = Trainer(
            nn.Linear(8, 1), data["train"], data["validation"], plugins=plugins, output=f"{name}-{split}", **usual
        )
        trainer.fit()
    except FastloopError as error:
        return {"error": str(error), "class": type(error).__name__}
    return {"error": None, "trained": targets.trained}


def all_of(cases: list[tuple[str, str, int]]) -> list[dict[str, Any]]:
    """The result of each case, on this process."""
    return [run(*case) for case in cases]
