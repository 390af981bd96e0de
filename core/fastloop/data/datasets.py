"""Read map-style datasets by sample ids, and iterable datasets as sharded streams. The number of workers does not change the samples."""

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
from fastloop.data.seeding import IsolatedRandomState, seed_all
from fastloop.errors import DataError

FILLER_ATTEMPTS = 100
"""Samples to try as a filler if no sample of a micro-batch can be read."""


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


class Samples(list[Any]):
    """The samples of a micro-batch, with the fields of ``Batch`` that the collator does not know."""

    ids: tuple[int, ...] = ()
    is_last_micro_batch: bool = False
    unreadable: tuple[tuple[int, str], ...] = ()


class Numbered(tuple[int, Any]):
    """``(position, sample)`` of an iterable dataset."""


class Filler(list[Any]):
    """A sample with weight 0, for a process without a share of an epoch's last micro-step. That process must compute, too, because the
    others wait for its gradients."""


class MapReader(Dataset[Any]):
    """Reads a map-style dataset by micro-batch. A worker first seeds its random states with the micro-batch's seed, so that random numbers
    do not depend on the worker."""

    def __init__(self, dataset: Any, skip_unreadable: bool = False) -> None:
        self.dataset, self.skip_unreadable = dataset, skip_unreadable
        self.read: Callable[[list[int]], list[Any]] = getattr(dataset, "__getitems__", None) or self._read_each

    def _read_each(self, ids: list[int]) -> list[Any]:
        return [self.dataset[index] for index in ids]

    def __getitems__(self, micro_batch: MicroBatchIds) -> list[Any]:
        if get_worker_info() is not None:
            seed_all(micro_batch.seed)
        samples = self._skip_unreadable(micro_batch) if self.skip_unreadable else Samples(self.read(micro_batch))
        if not samples.unreadable:
            samples.ids = tuple(micro_batch)
        if micro_batch.is_filler:
            samples = Samples([samples[0] if isinstance(samples[0], Filler) else Filler(samples)])
        samples.is_last_micro_batch = micro_batch.is_last_micro_batch
        return samples

    def _skip_unreadable(self, micro_batch: MicroBatchIds) -> Samples:
        """The readable samples of a micro-batch, or a filler if none is readable."""
        with suppress(Exception):
            return Samples(self.read(micro_batch))
        samples = Samples()
        ids: list[int] = []  # a micro-batch may hold an id twice
        unreadable: list[tuple[int, str]] = []
        for index in micro_batch:
            try:
                (sample,) = self.read([index])
            except Exception as error:
                unreadable.append((index, f"{type(error).__name__}: {error}"))
            else:
                samples.append(sample)
                ids.append(index)
        samples.ids, samples.unreadable = tuple(ids), tuple(unreadable)
        for index in range(micro_batch[0] + 1, micro_batch[0] + FILLER_ATTEMPTS) if not ids else ():
            with suppress(Exception):
                samples.append(Filler(self.read([index % len(self.dataset)])))
                break
        if not samples:
            raise DataError(f"none of {FILLER_ATTEMPTS} samples from {micro_batch[0]} on can be read: {unreadable[0][1]}")
        return samples


class Stream(IterableDataset[Any]):
    """An iterable dataset, sharded so that each sample is read once, in the same batches for any number of workers.

    Process ``i % world_size`` reads micro-batch ``i``, and its workers take turns. The dataset sees no worker in ``get_worker_info()``, so
    that it does not shard its samples again. If it declares ``DatasetProtocol.shards_itself``, fastloop takes everything that it yields.
    Its random numbers are the same on every reader, with and without workers, and after each resume.

    Args:
        batch: Samples of a micro-batch.
        batches_per_step: Micro-batches of a step, over all processes, to drop an incomplete last step; 0: keep it.
    """

    def __init__(self, dataset: Any, batch: int, rank: int, world_size: int, seed: int, batches_per_step: int = 0) -> None:
        self.dataset, self.batch, self.rank, self.world_size, self.seed, self.batches_per_step = (
            dataset,
            batch,
            rank,
            world_size,
            seed,
            batches_per_step,
        )
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
        reader, readers = self.rank, self.world_size
        if info is not None:
            reader, readers = self.rank + self.world_size * info.id, self.world_size * info.num_workers
        isolated = IsolatedRandomState(hash((self.seed, epoch)) % 2**32)  # the same for all readers, which must agree on the order
        with isolated:
            samples = iter(self.dataset)
            deque(islice(samples, start), maxlen=0)
        pending: list[tuple[int, list[Any]]] = []  # this reader's micro-batches of a step that may be incomplete
        for number in count():
            with isolated:
                group = list(islice(samples, self.batch))
            if not group:
                break
            last = group[-1]
            if number % readers == reader:
                pending.append((start + number * self.batch, group))
            if self.batches_per_step and ((number + 1) % self.batches_per_step or len(group) < self.batch):
                continue
            for position, micro_batch in pending:
                if info is not None:  # make the collator's random numbers independent of the worker
                    seed_all(hash((self.seed, epoch, position)) % 2**32)
                yield from (Numbered(pair) for pair in enumerate(micro_batch, position))
            pending.clear()
        if not self.batches_per_step and any(filler % readers == reader for filler in range(number, number + -number % self.world_size)):
            yield Filler([last])


def fingerprint(dataset: Any) -> str:
    """The string that a resumed run compares: the number of samples, if known, and the dataset's ``DatasetProtocol.fingerprint``."""
    size = f"{len(dataset)} samples" if hasattr(dataset, "__len__") else ""
    own = getattr(dataset, "fingerprint", None)
    return f"{size} {own()}".strip() if callable(own) else size
