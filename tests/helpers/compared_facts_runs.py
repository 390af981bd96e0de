"""Runs on two processes that read data, or train weights, of their own: ``processes(2, all_of, CASES)``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

from fastloop import FastloopError, Plugin, Strategy, Trainer, hookimpl
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


class Uneven(IterableDataset):
    """Process 0 has 41 samples, and the other has 23."""

    shards_itself = True

    def __iter__(self) -> Iterator[Any]:
        share = range(41) if rank() == 0 else range(41, SAMPLES)
        return (sample(index) for index in share)


class Empty(Declared):
    """The other process has no sample."""

    def __iter__(self) -> Iterator[Any]:
        return super().__iter__() if rank() == 0 else iter(())


class Rows(Dataset):
    """The samples, by index."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return sample(index)


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


DATASETS = {"whole": Whole, "sharded": Sharded, "declared": Declared, "noisy": Noisy, "uneven": Uneven, "empty": Empty}


def run(name: str, split: str, workers: int) -> dict[str, Any]:
    """Train an epoch with a dataset for one of the splits."""
    torch.manual_seed(0)
    targets = Targets()
    plugins: list[Any] = ["ddp", targets]
    if workers:
        plugins.append({"dataloader-workers": {"num_workers": workers}})
    data = {"train": Whole(), "validation": Whole()}
    data[split] = DATASETS[name]()
    usual = {
        "loss": nn.functional.mse_loss,
        "batch_size": 8,
        "micro_batch_size": 2,
        "epochs": 1,
        "device": "cpu",
        "save_every": None,
    }
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


OTHER_KEYS: dict[str, Any] = {
    "batch_size": 12,
    "epochs": 1,
    "evaluate_every": 2,
    "log_every": 1,
    "lr": 0.5,
    "max_grad_norm": 1.0,
    "max_steps": 1,
    "save_every": 1,
    "seed": 1,
}
"""Key of ``train`` -> its value on process 1 alone."""


def train_with_other_keys() -> dict[str, str]:
    """Train once for each of ``OTHER_KEYS``, which has another value on process 1. Returns key -> error."""
    errors = {}
    for key, value in OTHER_KEYS.items():
        settings: dict[str, Any] = {"epochs": 2, "batch_size": 8, "micro_batch_size": 2, "save_every": None}
        if rank() == 1:
            settings[key] = value
        try:
            Trainer(
                nn.Linear(8, 1),
                Rows(),
                Rows(),
                loss=nn.functional.mse_loss,
                plugins=["ddp"],
                output=f"other-{key}",
                device="cpu",
                **settings,
            ).fit()
        except FastloopError as error:
            errors[key] = str(error)
    return errors


class Alone(Strategy):
    """Each process steps by its own gradients."""

    name = "alone"

    def prepare(self, run: Any, model: nn.Module, optimizer: Any) -> Any:
        return model, optimizer


class DeclaredAlone(Alone):
    """The same, declared."""

    keeps_weights_equal = False


class AveragedWeights(Alone):
    """Each process steps by its own gradients, and then averages its weights with the others."""

    @hookimpl
    def after_step(self, run: Any) -> None:
        for weight in run.model.parameters():
            run.processes.all_reduce_mean(weight.detach())


class Rounded(Strategy):
    """Averages gradients, and rounds the first weight in another way on process 1."""

    name = "rounded"

    @hookimpl
    def after_step(self, run: Any) -> None:
        if run.processes.rank == 1:
            weight = next(run.model.parameters()).detach()
            weight.copy_(torch.nextafter(weight, weight + 1))


class OwnNoise(Plugin):
    """Adds other noise to the gradients on each process, after their average."""

    name = "own-noise"

    @hookimpl
    def before_optimizer_step(self, run: Any) -> None:
        generator = torch.Generator().manual_seed(run.processes.rank)
        for weight in run.model.parameters():
            if weight.grad is not None:
                weight.grad += torch.randn(weight.shape, generator=generator)


class FrozenLayer(Plugin):
    """Freezes the first layer."""

    name = "frozen-layer"

    @hookimpl
    def before_prepare(self, model: nn.Module) -> None:
        next(model.children()).requires_grad_(False)


WEIGHT_CASES: dict[str, tuple[list[Any], int]] = {
    "alone": ([Alone()], 3),
    "alone, one step": ([Alone()], 1),
    "alone, frozen": ([Alone(), FrozenLayer()], 3),
    "own noise": (["ddp", OwnNoise()], 3),
    "declared": ([DeclaredAlone()], 3),
    "averaged": ([AveragedWeights()], 3),
    "rounded": ([Rounded()], 3),
    "ddp": (["ddp"], 3),
    "ddp, one step": (["ddp"], 1),
    "ddp, frozen": (["ddp", FrozenLayer()], 3),
    "fsdp": (["fsdp"], 3),
}
"""Case -> the plugins and the steps of a run."""


def train_case(name: str) -> str | None:
    """Train a model of two layers as in a case. Returns the error."""
    torch.manual_seed(0)
    plugins, steps = WEIGHT_CASES[name]
    usual: dict[str, Any] = {"loss": nn.functional.mse_loss, "batch_size": 8, "device": "cpu", "save_every": None}
    samples = [sample(index) for index in range(SAMPLES)]
    model = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 1))
    try:
        Trainer(model, samples, plugins=plugins, max_steps=steps, output=name, **usual).fit()
    except FastloopError as error:
        return str(error)
    return None


def train_weight_cases(names: list[str]) -> dict[str, str | None]:
    """Case -> its error on this process."""
    return {name: train_case(name) for name in names}
