"""Read iterable datasets as sharded streams. The number of workers does not change the samples, unless a dataset shards
itself."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from itertools import count, islice
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info
from torch.utils.data._utils import worker as torch_worker  # a test looks for its private name

from fastloop.data.datasets import FillerCandidates, Numbered
from fastloop.data.digests import sample_digest
from fastloop.errors import UsageError
from fastloop.runtime.random_states import (
    OwnGenerators,
    RandomGenerator,
    cpu_random_states,
    find_generators,
    restore_random_states,
    seed_all,
    seed_generators,
)


class IsolatedRandomState:
    """A context with its own random states, in which ``get_worker_info()`` is None. Each entry continues with the
    states of the last exit.

    The random numbers inside do not depend on training. They repeat when a resumed run skips to its position.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.inner: dict[str, Any] | None = None
        self.info: Any  # of the data worker, and the random states outside, while the context is entered
        self.outer: dict[str, Any]

    def __enter__(self) -> None:
        self.info = torch_worker._worker_info
        torch_worker._worker_info = None
        self.outer = cpu_random_states()
        if self.inner is None:
            seed_all(self.seed)
        else:
            restore_random_states(self.inner)

    def __exit__(self, *error: object) -> None:
        self.inner = cpu_random_states()
        restore_random_states(self.outer)
        torch_worker._worker_info = self.info


class Stream(IterableDataset[Any]):
    """An iterable dataset, sharded: one reader yields each sample. A reader is a worker, or a process without workers.

    A dataset is read in one of three ways:

    - with ``read_ranges``, by position: a reader reads only its own samples;
    - with ``shards_itself``, as it chooses: ``DatasetProtocol.shards_itself`` says what it must do;
    - otherwise, as a whole: every reader iterates all samples, and drops those of the other readers.

    The first and the third give the same batches for any number of workers: process ``i % world_size`` reads
    micro-batch ``i``, and its workers take turns.

    In the third, ``get_worker_info()`` is None inside the dataset, so that it does not shard its samples again. Its
    random numbers are the same on every reader and after each resume, also those of generators that it keeps for
    itself.

    Args:
        collator: Collates the samples of each micro-batch.
        own_generators: Those of the dataset. None: they have not drawn a number yet.
        batch: Samples of a micro-batch.
        batches_per_step: Micro-batches of a step, over all processes, to drop an incomplete last step; 0: keep it.
        has_workers: Whether workers read it. Persistent ones must see changes of the position.
    """

    def __init__(
        self,
        dataset: Any,
        batch: int,
        rank: int,
        world_size: int,
        seed: int,
        batches_per_step: int = 0,
        has_workers: bool = False,
        collator: Any = None,
        own_generators: OwnGenerators | None = None,
    ) -> None:
        self.dataset = dataset
        self.collator = collator
        self.own_generators = OwnGenerators(dataset) if own_generators is None else own_generators
        self._collator_generators: list[RandomGenerator] | None = None  # of this process's copy
        self.batch = batch
        self.batches_per_step = batches_per_step
        self.rank = rank
        self.world_size = world_size
        self.seed = seed
        self._position = torch.zeros(2, dtype=torch.int64)  # epoch and start
        if has_workers:
            self._position.share_memory_()  # type: ignore[no-untyped-call]

    def set_position(self, epoch: int, start: int) -> None:
        """Let ``__iter__`` begin in an epoch, after its first ``start`` samples, in each process that reads this
        stream.

        For a dataset with ``shards_itself``, ``start`` must be 0: ``Loader.steps`` refuses others.
        """
        self._position[0] = epoch
        self._position[1] = start

    @property
    def compares_samples(self) -> bool:
        """Whether several processes compare the first sample. A dataset that sets ``shards_itself`` states what it
        gives them."""
        return self.world_size > 1 and not hasattr(self.dataset, "shards_itself")

    @property
    def size(self) -> int:
        """Samples per epoch of a dataset with a length, without an incomplete last step if that is dropped."""
        step = self.batch * self.batches_per_step
        return len(self.dataset) // step * step if step else len(self.dataset)

    def __iter__(self) -> Iterator[Any]:
        epoch, start = self._position.tolist()
        info = get_worker_info()
        shards_itself = getattr(self.dataset, "shards_itself", False)
        if not shards_itself and not hasattr(self.dataset, "read_ranges"):
            # the same for all readers, which must agree on the order; set_epoch may seed them in another way
            self.own_generators.start_epoch(epoch, self.seed)
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)
        if shards_itself:  # its own generators keep their states, see ``DatasetProtocol.shards_itself``
            if info is not None:
                seed_all(hash((self.seed, epoch, self.rank, info.id)) % 2**32)
            yield from self.dataset
            return
        # on 2 processes with 3 workers each, process 1 has the readers 1, 3 and 5 of 6
        worker = 0 if info is None else info.id
        workers = 1 if info is None else info.num_workers
        reader = self.rank + self.world_size * worker
        readers = self.world_size * workers
        if hasattr(self.dataset, "read_ranges"):
            yield from self._read_ranges(epoch, start, reader, readers)
            return
        yield from self._share_out(epoch, start, reader, readers)

    def _share_out(self, epoch: int, start: int, reader: int, readers: int) -> Iterator[Any]:
        """The samples of this reader's micro-batches, from a dataset that every reader iterates as a whole.

        Reader 1 of 2 has the micro-batches 1, 3, 5 and so on. If an incomplete last step is dropped, and a step has 4
        micro-batches, it yields 1 and 3 once micro-batch 3 was read in full.

        Args:
            reader: Index of this reader among those of all processes.
            readers: Number of readers.
        """
        # the same for all readers, which must agree on the order
        isolated = IsolatedRandomState(hash((self.seed, epoch)) % 2**32)
        with isolated:
            samples = iter(self.dataset)
            deque(islice(samples, start), maxlen=0)  # read the samples before ``start``, and drop them
        pending: list[tuple[int, list[Any]]] = []  # this reader's micro-batches of a step that may be incomplete
        last_group: list[Any] = []
        # The digest of the dataset's first sample. The first item that this reader yields, a sample or a filler, has it
        # as its ``stream_digest``; the other items have "".
        digest = ""
        for number in count():
            with isolated:
                group = list(islice(samples, self.batch))
            if not group:
                micro_batches = number
                break
            if number == 0 and self.compares_samples:
                digest = sample_digest(group[0])
            last_group = group
            if number % readers == reader:
                pending.append((start + number * self.batch, group))
            if self.batches_per_step > 0:
                ends_step = len(group) == self.batch and (number + 1) % self.batches_per_step == 0
                if not ends_step:
                    continue
            for position, micro_batch in pending:
                self._seed_collator(epoch, position)
                for pair in enumerate(micro_batch, position):
                    numbered = Numbered(pair)
                    numbered.stream_digest = digest
                    yield numbered
                    digest = ""
            pending.clear()
        if not self.batches_per_step and self._needs_filler(micro_batches, reader, readers):
            filler = FillerCandidates(reversed(last_group))
            filler.stream_digest = digest
            yield filler

    def _read_ranges(self, epoch: int, start: int, reader: int, readers: int) -> Iterator[Any]:
        """The samples of this reader's micro-batches, from a dataset that reads them by position."""
        end = self.size
        own = range(start, end, self.batch)[reader::readers]
        ranges = (range(first, min(first + self.batch, end)) for first in own)
        for position, samples in zip(own, self.dataset.read_ranges(epoch, ranges), strict=True):
            self._seed_collator(epoch, position)
            yield from map(Numbered, samples)
        micro_batches = math.ceil((end - start) / self.batch)
        if self._needs_filler(micro_batches, reader, readers):
            first_range = range(start, min(start + self.batch, end))
            for samples in self.dataset.read_ranges(epoch, [first_range]):
                yield FillerCandidates(sample for _, sample in samples)

    def _seed_collator(self, epoch: int, position: int) -> None:
        """Make the random numbers of the collator independent of the worker and the process that read a micro-batch."""
        seed = hash((self.seed, epoch, position)) % 2**32
        in_worker = get_worker_info() is not None
        if in_worker:
            seed_all(seed)
        if in_worker or self.world_size > 1:
            if self._collator_generators is None:
                self._collator_generators = find_generators(self.collator)
            seed_generators(self._collator_generators, seed)

    def _needs_filler(self, micro_batches: int, reader: int, readers: int) -> bool:
        """Whether this reader yields a filler, because its process has no share of the epoch's last micro-step.

        With 5 micro-batches on 3 processes, processes 0 and 1 have two of them, and process 2 has one. The filler takes
        the place of a sixth micro-batch, so the reader yields it whose turn that would be.
        """
        missing = -micro_batches % self.world_size  # 1 for 5 micro-batches on 3 processes
        places = range(micro_batches, micro_batches + missing)
        return any(place % readers == reader for place in places)


def check_drop_last(split: str, dataset: Any, shuffle: bool) -> None:
    """Check that the incomplete last step of an iterable dataset can be dropped.

    Raises:
        UsageError: The samples dropped would depend on the number of processes.
    """
    shards = getattr(dataset, "shards_itself", False)
    if shards or not shuffle:
        kind = "shards itself" if shards else "is iterable and only evaluated"
        raise UsageError(
            f"the {split} split: drop_last=True for {type(dataset).__name__}, which {kind}: the samples dropped would "
            "depend on the number of processes.",
            code="no-drop-last",
            remedy="Set drop_last=False, or let the dataset end earlier.",
        )
