"""Read map-style datasets by sample ids, read iterable datasets as sharded streams, and collate samples into ``Batch``.

The number of workers does not change the samples.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count, islice
from typing import Any, Protocol

import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from fastloop.data.sampler import MicroBatchIds
from fastloop.data.seeding import IsolatedRandomState, seed_all
from fastloop.state import Batch


class DatasetProtocol(Protocol):
    """Optional members of datasets from ``build_datasets`` or ``Trainer``, beside torch's own. Nothing needs to inherit
    from this class."""

    lengths: Sequence[int]
    """Map-style: tokens of each sample. Plugins that group or pack samples use it; without it, they read every sample
    to measure its ``input_ids``, or do without."""

    deterministic: bool
    """Map-style: True if a sample follows from its index alone: reading it draws no random numbers, changes nothing,
    and may happen in another thread. A collator may have the same attribute, with regard to its samples. If both are
    true, ``device-prefetch`` reads ahead. Default: False."""

    shards_itself: bool
    """Iterable: True if ``__iter__`` yields only the share of the process and worker that calls it. fastloop then takes
    every sample it yields, evaluates without a count of batches common to all processes, and resumes only at an epoch's
    end. Default: False. Then ``__iter__`` must yield all samples in every process and worker, and fastloop shares them
    out."""

    def set_epoch(self, epoch: int) -> None:
        """Iterable: called with the epoch's index, from 0, in each process and worker before ``__iter__``, to shuffle
        by it."""

    def read_ranges(self, epoch: int, ranges: Iterable[range]) -> Iterator[Sequence[tuple[int, Any]]]:
        """Iterable with a length: for each range of positions in the order of ``epoch``, ``(sample id, sample)`` of
        each position.

        Called instead of ``__iter__``. Each process and worker passes the positions of its own micro-batches,
        increasing. A resumed run passes only later positions, so nothing else has to be read. The order must depend on
        nothing but the epoch.
        """
        ...

    def fingerprint(self) -> str:
        """A short string that changes when the samples do, such as a hash. A checkpoint contains it and the number of
        samples.

        If either differs when a run resumes, ``train.on_data_change`` applies.
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
    """A sample with weight 0, for a process without a share of an epoch's last micro-step. That process must compute,
    too, because the others wait for its gradients."""


class MapReader(Dataset[Any]):
    """Reads a map-style dataset by micro-batch. A worker first seeds its random states with the micro-batch's seed, so
    that random numbers do not depend on the worker."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self.read: Callable[[list[int]], list[Any]] = getattr(dataset, "__getitems__", None) or self._read_each

    def _read_each(self, ids: list[int]) -> list[Any]:
        return [self.dataset[index] for index in ids]

    def __getitems__(self, micro_batch: MicroBatchIds) -> list[Any]:
        if get_worker_info() is not None:
            seed_all(micro_batch.seed)
        samples = self.read_samples(micro_batch)
        if not samples.unreadable:
            samples.ids = tuple(micro_batch)
        if micro_batch.is_filler:
            samples = Samples([samples[0] if isinstance(samples[0], Filler) else Filler(samples)])
        samples.is_last_micro_batch = micro_batch.is_last_micro_batch
        return samples

    def read_samples(self, micro_batch: list[int]) -> Samples:
        """The samples of a micro-batch. A subclass may return others, with ``unreadable`` and their ``ids`` set."""
        return Samples(self.read(micro_batch))


class Stream(IterableDataset[Any]):
    """An iterable dataset, sharded so that each sample is read once, in the same batches for any number of workers.

    Process ``i % world_size`` reads micro-batch ``i``, and its workers take turns. Inside the dataset,
    ``get_worker_info()`` is None, so that it does not shard its samples again. Its random numbers are the same on every
    reader and after each resume.

    Args:
        batch: Samples of a micro-batch.
        batches_per_step: Micro-batches of a step, over all processes, to drop an incomplete last step; 0: keep it.
    """

    def __init__(
        self, dataset: Any, batch: int, rank: int, world_size: int, seed: int, batches_per_step: int = 0
    ) -> None:
        self.dataset, self.batch, self.batches_per_step = dataset, batch, batches_per_step
        self.rank, self.world_size, self.seed = rank, world_size, seed
        self.position = torch.zeros(2, dtype=torch.int64)  # epoch and start

    @property
    def size(self) -> int:
        """Samples per epoch of a dataset with a length, without an incomplete last step if that is dropped."""
        step = self.batch * self.batches_per_step
        return len(self.dataset) // step * step if step else len(self.dataset)

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
        if hasattr(self.dataset, "read_ranges"):
            yield from self._read_ranges(epoch, start, reader, readers)
            return
        # the same for all readers, which must agree on the order
        isolated = IsolatedRandomState(hash((self.seed, epoch)) % 2**32)
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
        if not self.batches_per_step and any(
            filler % readers == reader for filler in range(number, number + -number % self.world_size)
        ):
            yield Filler([last])

    def _read_ranges(self, epoch: int, start: int, reader: int, readers: int) -> Iterator[Any]:
        """The samples of this reader's micro-batches, from a dataset that reads them by position."""
        end = self.size
        own = range(start, end, self.batch)[reader::readers]
        ranges = (range(first, min(first + self.batch, end)) for first in own)
        for position, samples in zip(own, self.dataset.read_ranges(epoch, ranges), strict=True):
            if get_worker_info() is not None:  # make the collator's random numbers independent of the worker
                seed_all(hash((self.seed, epoch, position)) % 2**32)
            yield from map(Numbered, samples)
        number = -(-(end - start) // self.batch)
        if any(filler % readers == reader for filler in range(number, number + -number % self.world_size)):
            yield from (
                Filler([sample]) for ((_, sample),) in self.dataset.read_ranges(epoch, [range(start, start + 1)])
            )


class Collate:
    """Collates samples with the task's collator, and sets the fields of ``Batch`` that the loader is responsible
    for."""

    def __init__(self, collator: Callable[[list[Any]], Any]) -> None:
        self.collator = collator

    def __call__(self, samples: list[Any]) -> Batch:
        read = samples if isinstance(samples, Samples) else Samples()
        ids, first = read.ids, next(iter(samples), None)
        if isinstance(first, Numbered):
            ids, samples = tuple(position for position, _ in samples), [sample for _, sample in samples]
        result = self.collator(first if isinstance(first, Filler) else samples)
        batch = result if isinstance(result, Batch) else Batch(result)
        batch.samples, batch.ids, batch.is_last_micro_batch, batch.unreadable = (
            len(samples),
            ids,
            read.is_last_micro_batch,
            read.unreadable,
        )
        batch.loss_weight = batch.loss_weight or batch.samples
        if isinstance(first, Filler):
            batch.samples = batch.loss_weight = batch.tokens = 0
        info = get_worker_info()
        batch.worker = info.id if info is not None else -1
        return batch


def fingerprint(dataset: Any) -> str:
    """The number of samples, if known, and the dataset's ``DatasetProtocol.fingerprint``."""
    size = f"{len(dataset)} samples" if hasattr(dataset, "__len__") else ""
    own = getattr(dataset, "fingerprint", None)
    return f"{size} {own()}".strip() if callable(own) else size
