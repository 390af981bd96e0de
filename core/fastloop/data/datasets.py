"""How a dataset is read: a draw at a time, or as a stream that is shared out. The same samples for any number of workers."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count, islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, get_worker_info
from torch.utils.data._utils import worker

from fastloop.data.sampler import Draw
from fastloop.errors import DataError

NEARBY = 100
"""Samples that are tried for one to compute along with, where a whole micro-batch cannot be read."""


class Read(list[Any]):
    """Samples of a micro-batch, with their ids, and whether it is its step's last on this process."""

    ids: tuple[int, ...] = ()
    last: bool = False
    unreadable: tuple[tuple[int, str], ...] = ()


class Numbered(tuple[int, Any]):
    """A sample of an iterable dataset, behind its position."""


class Filler(list[Any]):
    """A sample that counts for nothing. A process that has no share of an epoch's last micro-step gets one: it computes along, since the
    others wait for its gradients."""


def seed_all(seed: int) -> None:
    """Seed what datasets draw from. The generators of other devices are left alone: they are the training's."""
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)


class _Alone:
    """While inside, a stream sees no worker, and draws from random generators of its own, which go on where they were at the next entry.

    So what it draws does not depend on what training drew, and is drawn again when a resumed run skips to its place.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.inside: tuple[Any, Any, Tensor] | None = None

    def __enter__(self) -> None:
        self.info, worker._worker_info = worker._worker_info, None
        self.outside = self._states()
        if self.inside is None:
            seed_all(self.seed)
        else:
            self._restore(self.inside)

    def __exit__(self, *error: object) -> None:
        self.inside = self._states()
        self._restore(self.outside)
        worker._worker_info = self.info

    @staticmethod
    def _states() -> tuple[Any, Any, Tensor]:
        return random.getstate(), np.random.get_state(), torch.get_rng_state()

    @staticmethod
    def _restore(states: tuple[Any, Any, Tensor]) -> None:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


class Samples(Dataset[Any]):
    """A map-style dataset read a draw at a time. In a worker, each draw seeds the random state: it does not matter which worker."""

    def __init__(self, dataset: Any, skip_unreadable: bool = False) -> None:
        self.dataset, self.skip_unreadable = dataset, skip_unreadable
        self.read: Callable[[list[int]], list[Any]] = getattr(dataset, "__getitems__", None) or self._one_by_one

    def _one_by_one(self, ids: list[int]) -> list[Any]:
        return [self.dataset[index] for index in ids]

    def __getitems__(self, draw: Draw) -> list[Any]:
        if get_worker_info() is not None:
            seed_all(draw.seed)
        samples = self._readable(draw) if self.skip_unreadable else Read(self.read(draw))
        if not samples.unreadable:
            samples.ids = tuple(draw)
        if draw.fills:
            samples = Read([samples[0] if isinstance(samples[0], Filler) else Filler(samples)])
        samples.last = draw.last
        return samples

    def _readable(self, draw: Draw) -> Read:
        """The samples of a draw without those that cannot be read; where none is left, one that counts for nothing."""
        with suppress(Exception):
            return Read(self.read(draw))
        found, why = {}, {}
        for index in draw:
            try:
                (found[index],) = self.read([index])
            except Exception as error:
                why[index] = f"{type(error).__name__}: {error}"
        samples = Read(found.values())
        samples.ids, samples.unreadable = tuple(found), tuple(why.items())
        for index in range(draw[0] + 1, draw[0] + NEARBY) if not found else ():
            with suppress(Exception):
                samples.append(Filler(self.read([index % len(self.dataset)])))
                break
        if not samples:
            raise DataError(f"none of {NEARBY} samples from {draw[0]} on can be read: {why[draw[0]]}")
        return samples


class Stream(IterableDataset[Any]):
    """An iterable dataset shared out so that each sample comes once, in the same batches for any number of workers.

    Micro-batch ``i`` is read by process ``i % world_size`` and, there, by the worker whose turn it is. The dataset itself is
    iterated as if it were alone: one that shards by ``get_worker_info()`` must not do so a second time, unless it has the
    attribute ``shards_itself = True``, and then all it yields is taken. What it draws at random is the same for every reader, with
    and without workers, and at every resume.
    """

    def __init__(self, dataset: Any, batch: int, rank: int, world_size: int, seed: int) -> None:
        self.dataset, self.batch, self.rank, self.world_size, self.seed = dataset, batch, rank, world_size, seed
        self.position: Tensor = torch.zeros(2, dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call] # epoch, start: persistent workers see changes

    def __iter__(self) -> Iterator[Any]:
        epoch, start = self.position.tolist()
        info = get_worker_info()
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)
        if getattr(self.dataset, "shards_itself", False):
            if info is not None:
                seed_all(hash((self.seed, epoch, self.rank, info.id)) % 2**32)
            yield from self.dataset
            return
        mine, readers = self.rank, self.world_size
        if info is not None:
            mine, readers = self.rank + self.world_size * info.id, self.world_size * info.num_workers
        alone = _Alone(hash((self.seed, epoch)) % 2**32)  # every reader's is the same: they must agree on the order
        with alone:
            samples = iter(self.dataset)
            deque(islice(samples, start), maxlen=0)
        for number in count():
            with alone:
                group = list(islice(samples, self.batch))
            if not group:
                break
            last = group[-1]
            if number % readers == mine:
                if info is not None:  # what the collator draws does not depend on the worker either
                    seed_all(hash((self.seed, epoch, start + number * self.batch)) % 2**32)
                yield from (Numbered(pair) for pair in enumerate(group, start + number * self.batch))
        if any(filler % readers == mine for filler in range(number, number + -number % self.world_size)):
            yield Filler([last])


def fingerprint(dataset: Any) -> str:
    """What a dataset is known again by: how many samples it has, where that is known, and what its ``fingerprint()`` says."""
    size = f"{len(dataset)} samples" if hasattr(dataset, "__len__") else ""
    own = getattr(dataset, "fingerprint", None)
    return f"{size} {own()}".strip() if callable(own) else size
