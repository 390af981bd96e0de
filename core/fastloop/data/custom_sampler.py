"""A sampler from ``build_sampler``: its order as a function of seed and epoch.

It is the sampler of a plugin, or of a ``DataLoader`` that a user gave to ``Trainer``. A run can resume in its order on
any number of processes. ``StepSampler`` draws the order of a run without such a sampler.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Generator, Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, IterableDataset, RandomSampler, Sampler, SequentialSampler

from fastloop.data.iterables import IsolatedRandomState
from fastloop.errors import DataError, UsageError
from fastloop.plugins.plugin import hookimpl
from fastloop.problem import clause, counted
from fastloop.splits import TRAIN

if TYPE_CHECKING:
    from fastloop.run import Run

CONTAINERS = (list, tuple, dict, set, str, range, Tensor, np.ndarray)
"""Types of a sampler's state, which is copied with it. Other attributes with a length and items are datasets, which are
not copied."""


@hookimpl(wrapper=True)
def build_sampler(run: Run, split: str) -> Generator[None, BatchSampler | None, BatchSampler | None]:
    """Replace the sampler of a map-style dataset by one with the same order that can resume.

    A sampler with the default order remains, as ``StepSampler`` draws that order.

    Raises:
        UsageError: A run could not resume in the sampler's order; see ``SamplerOrder``.
    """
    sampler = yield
    dataset = run.datasets[split]
    if sampler is None or isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        return sampler
    trains = split == TRAIN and run.recipe.inference is None
    settings = run.settings
    if is_default_order(sampler.sampler, dataset, trains, settings.arrange is not None):
        return sampler
    return BatchSampler(
        SamplerOrder(sampler.sampler, split, run.recipe.train.seed), sampler.batch_size, sampler.drop_last
    )


class SamplerOrder(Sampler[int]):
    """The sample ids that a sampler returns in each epoch.

    Each epoch calls ``set_epoch``, if it exists, and iterates a copy of the sampler once, like a ``DataLoader``. An
    earlier epoch is repeated with a new copy, so that the sampler's generator draws the same numbers. The seed and the
    epoch seed the global generators.

    Args:
        sampler: Iterable with a length. If it wraps the sampler of a user, it has that one as ``user_sampler``.
        split: Name of the split, for messages.

    Attributes:
        name: Name of the sampler's class.
        size: Samples per epoch.

    Raises:
        UsageError: The sampler has no length, cannot be copied, returns no ids, or returns another order the second
            time.
    """

    def __init__(self, sampler: Any, split: str, seed: int) -> None:
        inner = getattr(sampler, "user_sampler", sampler)
        self.name = type(inner).__name__
        self.where = f"the {split} split's sampler ({self.name})"
        self.seed = seed
        self.original = sampler
        try:
            self.size = len(sampler)
        except (TypeError, NotImplementedError):
            raise UsageError(
                f"{self.where} has no length, so the steps of an epoch are not known.",
                code="no-length",
                remedy="Give it a __len__.",
            ) from None
        self.initial = self._copy(sampler)  # as it was before the first epoch
        self.sampler = self._copy(self.initial)
        self.next_epoch = 0
        self.newest_epoch = -1
        self.newest_ids: list[int] = []
        try:
            first = self(0)
            self.newest_epoch = -1  # forget epoch 0, to draw it again
            again = self(0)
        except DataError as error:
            raise UsageError(str(error), code="random-order") from None
        if first != again:
            raise UsageError(
                f"{self.where} gives another order each time, so a run could not resume in it.",
                code="random-order",
                remedy="Draw from torch, numpy, random or a generator that the sampler holds, and from nothing else.",
            )

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        return iter(self(0))

    def __call__(self, epoch: int) -> list[int]:
        """The ids of an epoch.

        Raises:
            DataError: The number of ids differs from the sampler's length, or the original sampler was changed.
        """
        if epoch == self.newest_epoch:
            return self.newest_ids
        if epoch < self.next_epoch:
            self.sampler = self._copy(self.initial)
            self.next_epoch = 0
        while self.next_epoch <= epoch:
            ids = self._iterate(self.next_epoch)
            self.next_epoch += 1
        self.newest_epoch = epoch
        self.newest_ids = ids
        return ids

    def _iterate(self, epoch: int) -> list[int]:
        attribute = self._changed_attribute()
        if attribute:
            raise DataError(
                f"its {attribute} was changed during training, which a resumed run could not repeat.",
                code="sampler-changed",
                place=self.where,
                remedy="Let the sampler's order follow from the epoch alone: give it a set_epoch(epoch).",
            )
        with IsolatedRandomState(hash((self.seed, epoch)) % 2**32):
            if hasattr(self.sampler, "set_epoch"):
                self.sampler.set_epoch(epoch)
            ids = list(islice(iter(self.sampler), self.size + 1))
        if len(ids) != self.size:
            count = counted(len(ids), "sample")
            if len(ids) > self.size:
                count = f"more than {counted(self.size, 'sample')}"
            raise DataError(
                f"{self.where} gave {count} in epoch {epoch}, and its length is {self.size}.",
                code="wrong-length",
                remedy="Make them the same.",
            )
        try:
            return [operator.index(index) for index in ids]
        except TypeError:
            wrong = next(index for index in ids if not hasattr(index, "__index__"))
            raise UsageError(
                f"{self.where} gave {wrong!r}, expected indices of samples: integers.", code="wrong-index"
            ) from None

    def _copy(self, sampler: Any) -> Any:
        # deepcopy takes what its memo has instead of copying it
        datasets = {id(value): value for value in _datasets(sampler)}
        try:
            return copy.deepcopy(sampler, datasets)
        except Exception as error:
            raise UsageError(
                f"{self.where} cannot be copied, so a run could not resume in its order: {type(error).__name__}: "
                f"{clause(error)}. It must not hold open files or locks.",
                code="not-copyable",
            ) from error

    def _changed_attribute(self) -> str:
        """Name of an attribute that was changed on the original sampler, except ``epoch``; empty: none."""
        original = getattr(self.original, "user_sampler", self.original)
        initial = getattr(self.initial, "user_sampler", self.initial)
        for name, value in getattr(original, "__dict__", {}).items():
            if name != "epoch" and not _is_unchanged(value, getattr(initial, name, None)):
                return str(name)
        return ""


def _is_unchanged(value: Any, before: Any) -> bool:
    """Whether a tensor, array, number or text equals the one before. Other values are not compared."""
    if isinstance(value, Tensor):
        return isinstance(before, Tensor) and torch.equal(value, before)
    if isinstance(value, np.ndarray):
        return np.array_equal(value, before)
    if isinstance(value, bool | int | float | str):
        return bool(value == before)
    return True


def is_default_order(sampler: Any, dataset: Any, shuffle: bool, arranged: bool) -> bool:
    """Whether the default order can replace a sampler: any permutation of the dataset in training, the dataset's order
    in evaluation.

    Args:
        arranged: A plugin arranges the samples, so training does not keep the dataset's order in any case.
    """
    is_sequential = type(sampler) is SequentialSampler and len(sampler) == len(dataset)
    if not shuffle:
        return is_sequential
    if arranged and is_sequential:
        return True
    is_plain = type(sampler) is RandomSampler and sampler.generator is None and not sampler.replacement
    return is_plain and len(sampler) == len(sampler.data_source) == len(dataset)


def _datasets(sampler: Any) -> Iterator[Any]:
    """The datasets that a sampler and its inner samplers refer to."""
    for value in getattr(sampler, "__dict__", {}).values():
        if isinstance(value, Sampler):
            yield from _datasets(value)
        elif hasattr(value, "__getitem__") and hasattr(value, "__len__") and not isinstance(value, CONTAINERS):
            yield value
