"""The datasets of a run and their loaders, by split."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from torch.utils.data import BatchSampler, IterableDataset

from fastloop.data.datasets import check_dataset, fingerprint
from fastloop.data.loader import Loader
from fastloop.data.sampler import StepSampler
from fastloop.errors import RecipeError
from fastloop.runtime.random_states import OwnGenerators, RandomGenerator, find_generators
from fastloop.splits import TRAIN

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fastloop.distributed.processes import Processes
    from fastloop.recipe import Recipe
    from fastloop.settings import Settings


class MicroBatches(NamedTuple):
    """The micro-batches of an optimizer step on one process.

    Attributes:
        size: Samples of each of them.
        steps: Their number. All processes compute one of theirs in each micro-step.
    """

    size: int
    steps: int


def divide_step(recipe: Recipe, world_size: int) -> MicroBatches:
    """Divide the samples of an optimizer step: size x steps x processes is ``train.batch_size``.

    Raises:
        RecipeError: The sizes do not divide; names the nearest that do.
    """
    train = recipe.train
    size = train.micro_batch_size or max(1, train.batch_size // world_size)
    if recipe.inference is not None:
        return MicroBatches(size, 1)
    samples_of_micro_step = size * world_size
    if train.batch_size % samples_of_micro_step == 0:
        return MicroBatches(size, train.batch_size // samples_of_micro_step)
    if train.micro_batch_size is not None:
        unit = samples_of_micro_step
        factors = f"{size} (micro_batch_size) x {world_size} (processes)"
    else:
        unit = world_size
        factors = f"the {world_size} processes"
    nearest = f"batch_size {' or '.join(map(str, _multiples_around(train.batch_size, unit)))}"
    sizes = _micro_batch_sizes(train.batch_size, world_size, size)
    if sizes:
        nearest += f" or micro_batch_size {' or '.join(map(str, sizes))}"
    raise RecipeError(
        f"{train.batch_size} is not a multiple of {factors}. Nearest that are: {nearest}.",
        code="not-divisible",
        place=f"{recipe.where}: train.batch_size",
    )


def _multiples_around(batch_size: int, unit: int) -> list[int]:
    """The multiples of ``unit`` below and above a batch size: 32 and 7 give 28 and 35."""
    below = batch_size // unit * unit
    return [below, below + unit] if below else [unit]


def _micro_batch_sizes(batch_size: int, world_size: int, wanted: int) -> list[int]:
    """The two sizes of micro-batches nearest to ``wanted`` that divide a batch size: for a batch of 32 on one process,
    7 is near to 4 and 8."""
    fits = [size for size in range(1, batch_size + 1) if batch_size % (size * world_size) == 0]
    nearest = sorted(fits, key=lambda size: abs(size - wanted))[:2]
    return sorted(nearest)


class Loaders:
    """Datasets and loaders by split. ``lifecycle`` fills ``samplers`` and ``collators``, and then calls ``build``.

    Attributes:
        datasets: Split -> dataset.
        samplers: Split -> its ``BatchSampler``, or None for fastloop's default order.
        collators: Split -> collator.
        processes: The processes that share the samples of a step.
        train: Loader of the training split.
        evaluation: Split -> loader, for all other splits.
        micro_batch_size: Samples of a training micro-batch on one process.
        micro_steps: Micro-batches of an optimizer step on one process.
    """

    def __init__(self, recipe: Recipe, settings: Settings, processes: Processes, micro_batches: MicroBatches) -> None:
        self._recipe = recipe
        self._settings = settings
        self.processes = processes
        self.micro_batch_size: int = micro_batches.size
        self.micro_steps: int = micro_batches.steps
        self.datasets: dict[str, Any] = {}
        self.samplers: dict[str, BatchSampler | None] = {}
        self.collators: dict[str, Any] = {}
        self.train: Loader
        self.evaluation: dict[str, Loader] = {}
        self._orders: dict[str, str] = {}  # split -> fingerprint of its order; empty: the default order
        self._own_by_split: dict[str, OwnGenerators] = {}
        self._own_generators: list[RandomGenerator] | None = None

    @property
    def first_split(self) -> str:
        """``train``, or the only split of a run that does not train."""
        return TRAIN if self._recipe.inference is None else self._recipe.inference.split

    def set_datasets(self, datasets: Mapping[str, Any]) -> None:
        """Set the datasets of all splits.

        Raises:
            RecipeError: A split is empty.
            UsageError: A split is an iterator or a loader.
        """
        for split, dataset in datasets.items():
            check_dataset(dataset, f"{self._recipe.where}: data: the {split} split")
            if not isinstance(dataset, IterableDataset) and hasattr(dataset, "__len__") and len(dataset) == 0:
                raise RecipeError(
                    f"the {split} split is empty.",
                    code="empty-split",
                    place=f"{self._recipe.where}: data",
                    expected="at least one sample",
                )
        self.datasets = dict(datasets)
        for split, dataset in self.datasets.items():
            self._own_by_split[split] = OwnGenerators(dataset)

    @property
    def own_generators(self) -> list[RandomGenerator]:
        """The generators that datasets and collators keep for themselves. A checkpoint has their states: without
        workers, on one process, nothing seeds them."""
        if self._own_generators is None:
            self._own_generators = find_generators(*self.datasets.values(), *self.collators.values())
        return self._own_generators

    @property
    def stream_generators(self) -> dict[str, OwnGenerators]:
        """Split -> the generators of its dataset, for iterable ones. A checkpoint has their first states, with which a
        resumed run reads the first epoch and evaluates."""
        streams = {}
        for split, loader in self._all.items():
            if loader.stream is not None:
                streams[split] = self._own_by_split[split]
        return streams

    def build(self) -> None:
        """Build the loader of each split.

        Raises:
            UsageError: A split has no sample left.
        """
        if self._recipe.inference is None:
            self.train = self._build_loader(TRAIN, self.micro_batch_size)
            self._refuse_block_order()
        for split in self.datasets:
            if self._trains_on(split):
                continue
            sampler = self.samplers[split]
            default = self.micro_batch_size if sampler is None else sampler.batch_size
            self.evaluation[split] = self._build_loader(split, self._recipe.train.eval_batch_size or default)
        self._orders = dict.fromkeys(self.datasets, "")  # empty: the default order
        for split, loader in self._all.items():
            if loader.sampler is not None:
                self._orders[split] = loader.sampler.fingerprint()

    def _refuse_block_order(self) -> None:
        """Raise an error for ``data.shuffle_block`` if something else orders the samples of training."""
        if self._settings.shuffle_block is None:
            return
        sampler = self.train.sampler
        if sampler is not None and sampler.user_order is None:
            return
        problem = "the train split has a sampler, which orders its samples"
        if sampler is None:
            problem = f"{type(self.train.dataset).__name__} is iterable, with its own order"
        raise RecipeError(
            f"{problem}.",
            code="exclusive-options",
            place=f"{self._recipe.where}: data.shuffle_block",
            remedy="Remove the option.",
        )

    def count_samples_to_read(self, split: str) -> int | None:
        """The samples that the run reads of a split at most; None: neither ``train.max_steps`` nor
        ``Settings.max_evaluation_batches`` limits them."""
        train = self._recipe.train
        if self._trains_on(split):
            return None if train.max_steps is None else train.max_steps * train.batch_size
        batches = self._settings.max_evaluation_batches
        size = (train.eval_batch_size or self.micro_batch_size) * self.processes.world_size
        return None if batches is None else batches * size

    def find_samples_to_read(self, split: str, total: int) -> NDArray[np.int64] | None:
        """The samples that the run reads of a map-style split in the default order, if ``count_samples_to_read`` is
        less than an epoch. A task can call this before it builds the dataset, to prepare only these samples.

        The run may still read others: a plugin may replace the order.

        Args:
            total: Samples of the split.

        Returns:
            Their ids, (samples,) int64, in the order of reading. None: all samples, or a plugin arranges them by more
            than their number.
        """
        count = self.count_samples_to_read(split)
        if count is None or self._settings.arrange is not None or self._settings.split_step is not None:
            return None
        train = self._recipe.train
        trains = self._trains_on(split)
        sampler = StepSampler(
            size=total,
            batch_size=count,
            micro_batch_size=count,
            rank=0,
            world_size=1,
            seed=train.seed,
            shuffle=trains,
            full_batch_size=train.batch_size if trains and train.drop_last else 0,
            shuffle_block=self._settings.shuffle_block if trains else None,
        )
        if count >= sampler.size:
            return None
        return np.array(sampler.order(0)[:count], np.int64)

    def set_micro_batch_size(self, split: str, size: int, pieces: int = 1) -> None:
        """Change the size of a split's micro-batches. The samples of each step stay the same.

        Args:
            size: Samples of a micro-batch on one process.
            pieces: Number of micro-batches to cut each micro-batch of ``Settings.split_step`` into.
        """
        before = self.train if split == TRAIN else self.evaluation[split]
        before.close()
        loader = self._build_loader(split, size, pieces)
        if split == TRAIN:
            self.train = loader
            self.micro_batch_size = size
            self.micro_steps = loader.micro_steps
        else:
            self.evaluation[split] = loader

    def copy_train(self) -> Loader:
        """Build another loader of the training split. The one of the loop keeps its place."""
        return self._build_loader(TRAIN, self.micro_batch_size, getattr(self.train.sampler, "pieces", 1))

    def replace(self, split: str, dataset: Any) -> Loader:
        """Build the loader of another dataset for an evaluated split."""
        if split in self.evaluation:
            self.evaluation[split].close()
        self.datasets[split] = dataset
        self._own_by_split[split] = OwnGenerators(dataset)
        self._own_generators = None
        self.samplers[split] = None
        self.evaluation[split] = self._build_loader(split, self._recipe.train.eval_batch_size or self.micro_batch_size)
        return self.evaluation[split]

    def close(self) -> None:
        """End the worker processes and threads of every loader."""
        for loader in self._all.values():
            loader.close()

    @property
    def _all(self) -> dict[str, Loader]:
        if self._recipe.inference is not None:
            return self.evaluation
        return {TRAIN: self.train, **self.evaluation}

    def _trains_on(self, split: str) -> bool:
        return split == TRAIN and self._recipe.inference is None

    @cached_property
    def fingerprints(self) -> dict[str, str]:
        """Split -> a string that changes with its samples and their order, for checkpoints."""
        strings = {}
        for split, dataset in self.datasets.items():
            strings[split] = f"{fingerprint(dataset)} {self._orders[split]}".strip()
        return strings

    def _build_loader(self, split: str, size: int, pieces: int = 1) -> Loader:
        """Build the loader of a split.

        Args:
            size: Samples of a micro-batch on one process.
            pieces: See ``set_micro_batch_size``.
        """
        train = self._recipe.train
        trains = self._trains_on(split)
        return Loader(
            self.datasets[split],
            self.collators[split],
            self._settings,
            batch_size=train.batch_size if trains else size * self.processes.world_size,
            micro_batch_size=size,
            pieces=pieces,
            rank=self.processes.rank,
            world_size=self.processes.world_size,
            seed=train.seed,
            shuffle=trains,
            split=split,
            sampler=self.samplers[split],
            drop_last=trains and train.drop_last,
            own_generators=self._own_by_split[split],
        )
