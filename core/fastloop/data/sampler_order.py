"""The order of a sampler that is not ours, as a function of seed and epoch: a run can resume in it, on any number of processes."""

from __future__ import annotations

import copy
import operator
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import RandomSampler, Sampler, SequentialSampler

from fastloop.data.seeding import Alone
from fastloop.errors import DataError, UsageError

CONTAINERS = (list, tuple, dict, set, str, range, Tensor, np.ndarray)
"""Types of a sampler's own state, which is copied. Other attributes with a length and items are datasets, which are not."""


class SeededWorkers(Sampler[int]):
    """A sampler that shares its generator with its loader, which draws a seed for its workers from it before an epoch's order.

    Args:
        once: Whether the loader does so before its first epoch alone, as it does with persistent workers.
    """

    def __init__(self, sampler: Any, once: bool) -> None:
        self.sampler, self.once = sampler, once
        self.epochs = 0

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[int]:
        if not (self.once and self.epochs):
            torch.empty((), dtype=torch.int64).random_(generator=self.sampler.generator)
        self.epochs += 1
        yield from self.sampler


class SamplerOrder:
    """Sample ids that a sampler gives in an epoch.

    Each epoch iterates a copy of the sampler once, as a ``DataLoader`` does, after ``set_epoch`` where it has one. An epoch that is behind
    starts again from the sampler as it was given, so a generator of its own draws the same numbers. What the sampler draws from the global
    generators of torch, numpy and ``random`` is seeded by the seed and the epoch.

    Args:
        sampler: Iterable with a length.
        split: For messages.

    Attributes:
        name: The sampler's class.
        size: Samples an epoch.

    Raises:
        UsageError: It has no length, cannot be copied, gives no ids, or does not give the same order twice.
    """

    def __init__(self, sampler: Any, split: str, seed: int) -> None:
        inner = sampler.sampler if isinstance(sampler, SeededWorkers) else sampler
        self.name = type(inner).__name__
        self.where = f"the {split} split's sampler ({self.name})"
        self.seed, self.given = seed, sampler
        try:
            self.size = len(sampler)
        except (TypeError, NotImplementedError):
            raise UsageError(f"{self.where} has no length, so the steps of an epoch are not known. Give it a __len__.") from None
        self.start = self._copy(sampler)
        self.sampler, self.next = self._copy(self.start), 0
        self.newest: tuple[int, list[int]] = (-1, [])
        try:
            first = self(0)
            self.newest, self.sampler, self.next = (-1, []), self._copy(self.start), 0
            again = self(0)
        except DataError as error:
            raise UsageError(str(error)) from None
        if first != again:
            raise UsageError(
                f"{self.where} gives another order each time, so a run could not resume in it. "
                "Draw from torch, numpy, random or a generator that the sampler holds, and from nothing else."
            )

    def __call__(self, epoch: int) -> list[int]:
        """The ids of an epoch.

        Raises:
            DataError: They are not as many as before, or the sampler that was given has changed since.
        """
        if epoch == self.newest[0]:
            return self.newest[1]
        if epoch < self.next:
            self.sampler, self.next = self._copy(self.start), 0
        while self.next <= epoch:
            ids = self._draw(self.next)
            self.next += 1
        self.newest = epoch, ids
        return ids

    def _draw(self, epoch: int) -> list[int]:
        if changed := self._changed():
            raise DataError(
                f"{self.where}: its {changed} was changed during training, which a resumed run could not repeat. "
                "Let the sampler's order follow from the epoch alone: give it a set_epoch(epoch)."
            )
        with Alone(hash((self.seed, epoch)) % 2**32):
            if hasattr(self.sampler, "set_epoch"):
                self.sampler.set_epoch(epoch)
            found = list(islice(iter(self.sampler), self.size + 1))
        if len(found) != self.size:
            count = f"more than {self.size}" if len(found) > self.size else str(len(found))
            raise DataError(f"{self.where} gave {count} samples in epoch {epoch}, and its length is {self.size}. Make them the same.")
        try:
            return [operator.index(index) for index in found]
        except TypeError:
            wrong = next(index for index in found if not hasattr(index, "__index__"))
            raise UsageError(f"{self.where} gave {wrong!r}, expected indices of samples: whole numbers.") from None

    def _copy(self, sampler: Any) -> Any:
        datasets = {id(value): value for value in _datasets(sampler)}
        try:
            return copy.deepcopy(sampler, datasets)
        except Exception as error:
            raise UsageError(
                f"{self.where} cannot be copied, so a run could not resume in its order: {type(error).__name__}: {error}. "
                "Keep open files, locks and the like out of it."
            ) from error

    def _changed(self) -> str:
        """An attribute of the sampler that is no longer as it was given; that of ``set_epoch`` aside."""
        given, start = (inner.sampler if isinstance(inner, SeededWorkers) else inner for inner in (self.given, self.start))
        for name, value in getattr(given, "__dict__", {}).items():
            before: Any = getattr(start, name, None)
            if isinstance(value, Tensor):
                same = isinstance(before, Tensor) and torch.equal(value, before)
            elif isinstance(value, np.ndarray):
                same = np.array_equal(value, before)
            else:
                same = not isinstance(value, bool | int | float | str) or value == before
            if not same and name != "epoch":
                return str(name)
        return ""


def is_our_order(sampler: Any, dataset: Any, shuffle: bool, arranged: bool) -> bool:
    """Whether a sampler asks for no more than our own order gives: to train, any permutation of the dataset; to evaluate, its own order.

    Args:
        arranged: A plugin arranges the samples, so to train the dataset's own order is not kept either way.
    """
    if not shuffle or arranged:
        own = type(sampler) is SequentialSampler and len(sampler) == len(dataset)
        if own or not shuffle:
            return own
    plain = type(sampler) is RandomSampler and sampler.generator is None and not sampler.replacement
    return plain and len(sampler) == len(sampler.data_source) == len(dataset)


def _datasets(sampler: Any) -> Iterator[Any]:
    """What a sampler, and samplers inside it, refer to and do not own: it is not copied."""
    for value in getattr(sampler, "__dict__", {}).values():
        if isinstance(value, Sampler):
            yield from _datasets(value)
        elif hasattr(value, "__getitem__") and hasattr(value, "__len__") and not isinstance(value, CONTAINERS):
            yield value
