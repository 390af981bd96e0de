"""How a dataset is read: a draw at a time, or as a stream that is shared out. The same samples for any number of workers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import count, islice
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from fastloop.data.sampler import MicroBatchIds
from fastloop.data.seeding import Alone, seed_all
from fastloop.errors import DataError

NEARBY = 100
"""Samples that are tried for one to compute along with, where a whole micro-batch cannot be read."""


class DatasetProtocol(Protocol):
    """The members that a dataset may have beside torch's own. All are optional, and nothing needs to inherit from this class.

    fastloop looks for each of them on the datasets that ``build_datasets`` returns and on those given to ``Trainer``.
    """

    lengths: Sequence[int]
    """Map-style: the number of tokens of each sample, indexed as the dataset is. Plugins that group or pack samples use
    it. Without it, they read every sample to measure its ``input_ids``, or do without."""

    shards_itself: bool
    """Iterable: True if ``__iter__`` yields only the share of the process and worker that calls it. fastloop then takes every sample it
    yields, evaluates without a count of batches common to all processes, and resumes only at an epoch's end. Default: False, and fastloop
    shares the samples out; then ``__iter__`` must yield all samples in every process and worker."""

    def set_epoch(self, epoch: int) -> None:
        """Iterable: called with the epoch's index, from 0, in each process and worker before ``__iter__``, to shuffle by it."""

    def fingerprint(self) -> str:
        """A short string that changes when the samples do, such as a hash. It is part of a checkpoint, next to the number of samples.

        A resumed run compares both with the checkpoint's, and acts on a difference as ``train.on_data_change`` has it. Without this method
        it compares only the number of samples. Resume is the only use: processes of one run do not compare their fingerprints.
        """
        ...


class Read(list[Any]):
    """Samples of a micro-batch, with their ids, and whether it is its step's last on this process."""

    ids: tuple[int, ...] = ()
    is_last_micro_batch: bool = False
    unreadable: tuple[tuple[int, str], ...] = ()


class Numbered(tuple[int, Any]):
    """A sample of an iterable dataset, behind its position."""


class Filler(list[Any]):
    """A sample that counts for nothing. A process that has no share of an epoch's last micro-step gets one: it computes along, since the
    others wait for its gradients."""


class Samples(Dataset[Any]):
    """A map-style dataset read a draw at a time. In a worker, each draw seeds the random state: it does not matter which worker."""

    def __init__(self, dataset: Any, skip_unreadable: bool = False) -> None:
        self.dataset, self.skip_unreadable = dataset, skip_unreadable
        self.read: Callable[[list[int]], list[Any]] = getattr(dataset, "__getitems__", None) or self._one_by_one

    def _one_by_one(self, ids: list[int]) -> list[Any]:
        return [self.dataset[index] for index in ids]

    def __getitems__(self, draw: MicroBatchIds) -> list[Any]:
        if get_worker_info() is not None:
            seed_all(draw.seed)
        samples = self._readable(draw) if self.skip_unreadable else Read(self.read(draw))
        if not samples.unreadable:
            samples.ids = tuple(draw)
        if draw.fills:
            samples = Read([samples[0] if isinstance(samples[0], Filler) else Filler(samples)])
        samples.is_last_micro_batch = draw.is_last_micro_batch
        return samples

    def _readable(self, draw: MicroBatchIds) -> Read:
        """The samples of a draw without those that cannot be read; where none is left, one that counts for nothing."""
        with suppress(Exception):
            return Read(self.read(draw))
        samples = Read()
        ids: list[int] = []  # a draw may hold an id twice
        unreadable: list[tuple[int, str]] = []
        for index in draw:
            try:
                (sample,) = self.read([index])
            except Exception as error:
                unreadable.append((index, f"{type(error).__name__}: {error}"))
            else:
                samples.append(sample)
                ids.append(index)
        samples.ids, samples.unreadable = tuple(ids), tuple(unreadable)
        for index in range(draw[0] + 1, draw[0] + NEARBY) if not ids else ():
            with suppress(Exception):
                samples.append(Filler(self.read([index % len(self.dataset)])))
                break
        if not samples:
            raise DataError(f"none of {NEARBY} samples from {draw[0]} on can be read: {unreadable[0][1]}")
        return samples


class Stream(IterableDataset[Any]):
    """An iterable dataset shared out so that each sample comes once, in the same batches for any number of workers.

    Micro-batch ``i`` is read by process ``i % world_size`` and, there, by the worker whose turn it is. The dataset itself is
    iterated as if it were alone, unless it declares ``DatasetProtocol.shards_itself``. What it draws at random is the same for every
    reader, with and without workers, and at every resume.

    Args:
        batch: Samples a micro-batch.
        whole: Micro-batches of a step, over all processes, to leave out a last step that is not full; 0: take what there is.
    """

    def __init__(self, dataset: Any, batch: int, rank: int, world_size: int, seed: int, whole: int = 0) -> None:
        self.dataset, self.batch, self.rank, self.world_size, self.seed, self.whole = dataset, batch, rank, world_size, seed, whole
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
        alone = Alone(hash((self.seed, epoch)) % 2**32)  # every reader's is the same: they must agree on the order
        with alone:
            samples = iter(self.dataset)
            deque(islice(samples, start), maxlen=0)
        held: list[tuple[int, list[Any]]] = []  # this reader's micro-batches of a step that may turn out not to be full
        for number in count():
            with alone:
                group = list(islice(samples, self.batch))
            if not group:
                break
            last = group[-1]
            if number % readers == mine:
                held.append((start + number * self.batch, group))
            if self.whole and ((number + 1) % self.whole or len(group) < self.batch):
                continue
            for position, mine_now in held:
                if info is not None:  # what the collator draws does not depend on the worker either
                    seed_all(hash((self.seed, epoch, position)) % 2**32)
                yield from (Numbered(pair) for pair in enumerate(mine_now, position))
            held.clear()
        if not self.whole and any(filler % readers == mine for filler in range(number, number + -number % self.world_size)):
            yield Filler([last])


def fingerprint(dataset: Any) -> str:
    """What a resumed run compares: the number of samples, if the dataset has a length, and its ``DatasetProtocol.fingerprint``."""
    size = f"{len(dataset)} samples" if hasattr(dataset, "__len__") else ""
    own = getattr(dataset, "fingerprint", None)
    return f"{size} {own()}".strip() if callable(own) else size
