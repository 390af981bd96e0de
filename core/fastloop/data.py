"""From datasets to the batches of a step: one order of samples for a seed, however many processes or workers read it.

The order of an epoch is ``torch.randperm(n, generator=manual_seed(seed + epoch))``. An optimizer step takes the next ``batch_size``
of it; its micro-steps and processes take consecutive shares, or the parts that a plugin splits it into. So the position in the data is
one number, the samples drawn in the epoch, and a resumed run starts there at once, whatever the number of processes was. Nothing here
draws from the global random state: dropout sees the same numbers with and without workers.
"""

from __future__ import annotations

import logging
import os
import random
import signal
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import count, islice
from multiprocessing import connection
from time import monotonic
from typing import Any

import numpy as np
import torch
from torch import _C, Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, get_worker_info
from torch.utils.data._utils import worker

from fastloop.errors import CheckpointError, DataError
from fastloop.state import Batch, DataLoaderDraft

log = logging.getLogger("fastloop")

ENDED = {
    "SIGKILL": "The system does that when memory runs out (dmesg tells): use fewer workers, or let them read less ahead.",
    "SIGBUS": "Shared memory is full: use fewer workers, or make /dev/shm larger.",
    "": "To see what happens in it, read the data in the training process (no workers).",
}
"""Signal -> what to do about a worker that it ended; none: any other end."""
LOOK = 5.0
"""Seconds between two looks at whether workers live, while a batch is waited for."""
ENDING = 5.0
"""Seconds that a worker gets to be over, once its connections are broken."""
NEARBY = 100
"""Samples that are tried for one to compute along with, where a whole micro-batch cannot be read."""
SAID = 10
"""Samples that could not be read which are named; the others are only counted."""


class Draw(list[int]):
    """The sample ids of one micro-batch, and what random numbers drawn while they are read in a worker are seeded with."""

    seed: int = 0
    fills: bool = False
    last: bool = False


class _Read(list[Any]):
    """Samples of a micro-batch, with their ids, and whether it is its step's last on this process."""

    ids: tuple[int, ...] = ()
    last: bool = False
    unreadable: tuple[tuple[int, str], ...] = ()


class _Numbered(tuple[int, Any]):
    """A sample of an iterable dataset, behind its position."""


class _Filler(list[Any]):
    """A sample that counts for nothing. A process that has no share of an epoch's last micro-step gets one: it computes along, since the
    others wait for its gradients."""


class StepSampler(Sampler[Draw]):
    """Sample ids of every micro-batch of this process, for the epoch ``epoch`` from ``start`` samples on.

    Args:
        size: Samples in the dataset.
        batch_size: Samples an optimizer step, over all processes.
        device_batch_size: Samples a micro-batch of one process.
        shuffle: Whether to permute; otherwise the ids count up.
        arrange: Gives ids another order; see ``DataLoaderDraft``, less its first argument.
        split: Makes micro-batches of a step's ids; see there too.
        pieces: How many further ones each of those is cut into.
    """

    def __init__(
        self,
        size: int,
        batch_size: int,
        device_batch_size: int,
        rank: int,
        world_size: int,
        seed: int,
        shuffle: bool,
        arrange: Callable[[list[int], int, torch.Generator | None], list[int]] | None = None,
        split: Callable[[list[int], int], list[list[int]]] | None = None,
        pieces: int = 1,
    ) -> None:
        self.size, self.batch_size, self.device_batch_size, self.arrange, self.split = size, batch_size, device_batch_size, arrange, split
        self.pieces = pieces
        self.rank, self.world_size, self.seed, self.shuffle = rank, world_size, seed, shuffle
        self.epoch = self.start = 0

    def order(self) -> list[int]:
        """All sample ids in this epoch's order."""
        generator = torch.Generator().manual_seed(self.seed + self.epoch) if self.shuffle else None
        ids = list(range(self.size)) if generator is None else torch.randperm(self.size, generator=generator).tolist()
        return ids if self.arrange is None else self.arrange(ids, self.batch_size, generator)

    def micro_batches(self, ids: list[int]) -> list[list[int]]:
        """A step's ids as micro-batches of all processes."""
        if self.split is not None:
            parts = [(part, -(-len(part) // self.pieces)) for part in self.split(ids, self.world_size)]
            return [part[first : first + size] for part, size in parts for first in range(0, len(part), size)]
        return [ids[first : first + self.device_batch_size] for first in range(0, len(ids), self.device_batch_size)]

    def __iter__(self) -> Iterator[Draw]:
        order = self.order()
        for start in range(self.start, self.size, self.batch_size):
            parts = self.micro_batches(order[start : start + self.batch_size])
            for first in range(0, len(parts), self.world_size):
                mine = first + self.rank
                draw = Draw(parts[mine] if mine < len(parts) else parts[first][:1])
                draw.fills, draw.last = mine >= len(parts), first + self.world_size >= len(parts)
                draw.seed = hash((self.seed, self.epoch, start + sum(map(len, parts[:mine])))) % 2**32
                yield draw


def _seed(seed: int) -> None:
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
            _seed(self.seed)
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


def _leave_signals(worker: int) -> None:
    """In a worker: what asks a run to end is for the process that it reads for, and often reaches a whole group or job of processes.
    SIGTERM counts only from that process, which ends its workers by it."""
    for number in (signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    if hasattr(signal, "sigwaitinfo"):  # Linux
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    while signal.sigwaitinfo([signal.SIGTERM]).si_pid != os.getppid():
        pass
    os._exit(0)


class _Samples(Dataset[Any]):
    """A map-style dataset read a draw at a time. In a worker, each draw seeds the random state: it does not matter which worker."""

    def __init__(self, dataset: Any, skip_unreadable: bool = False) -> None:
        self.dataset, self.skip_unreadable = dataset, skip_unreadable
        self.read: Callable[[list[int]], list[Any]] = getattr(dataset, "__getitems__", None) or self._one_by_one

    def _one_by_one(self, ids: list[int]) -> list[Any]:
        return [self.dataset[index] for index in ids]

    def __getitems__(self, draw: Draw) -> list[Any]:
        if get_worker_info() is not None:
            _seed(draw.seed)
        samples = self._readable(draw) if self.skip_unreadable else _Read(self.read(draw))
        if not samples.unreadable:
            samples.ids = tuple(draw)
        if draw.fills:
            samples = _Read([samples[0] if isinstance(samples[0], _Filler) else _Filler(samples)])
        samples.last = draw.last
        return samples

    def _readable(self, draw: Draw) -> _Read:
        """The samples of a draw without those that cannot be read; where none is left, one that counts for nothing."""
        with suppress(Exception):
            return _Read(self.read(draw))
        found, why = {}, {}
        for index in draw:
            try:
                (found[index],) = self.read([index])
            except Exception as error:
                why[index] = f"{type(error).__name__}: {error}"
        samples = _Read(found.values())
        samples.ids, samples.unreadable = tuple(found), tuple(why.items())
        for index in range(draw[0] + 1, draw[0] + NEARBY) if not found else ():
            with suppress(Exception):
                samples.append(_Filler(self.read([index % len(self.dataset)])))
                break
        if not samples:
            raise DataError(f"none of {NEARBY} samples from {draw[0]} on can be read: {why[draw[0]]}")
        return samples


class _Stream(IterableDataset[Any]):
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
                _seed(hash((self.seed, epoch, self.rank, info.id)) % 2**32)
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
                    _seed(hash((self.seed, epoch, start + number * self.batch)) % 2**32)
                yield from (_Numbered(pair) for pair in enumerate(group, start + number * self.batch))
        if any(filler % readers == mine for filler in range(number, number + -number % self.world_size)):
            yield _Filler([last])


class _Collate:
    """The task's collator; its result as a ``Batch`` that knows its number of samples."""

    def __init__(self, collator: Callable[[list[Any]], Any]) -> None:
        self.collator = collator

    def __call__(self, samples: list[Any]) -> Batch:
        fills = bool(samples) and isinstance(samples[0], _Filler)
        ids, last, unreadable = (samples.ids, samples.last, samples.unreadable) if isinstance(samples, _Read) else ((), False, ())
        if samples and isinstance(samples[0], _Numbered):
            ids, samples = tuple(number for number, _ in samples), [sample for _, sample in samples]
        result = self.collator(samples[0] if fills else samples)
        batch = result if isinstance(result, Batch) else Batch(result)
        batch.samples, batch.ids, batch.last, batch.unreadable = len(samples), ids, last, unreadable
        batch.weight = batch.weight or batch.samples
        if fills:
            batch.samples = batch.weight = batch.tokens = 0
        info = get_worker_info()
        batch.worker = info.id if info is not None else -1
        return batch


def fingerprint(dataset: Any) -> str:
    """What a dataset is known again by: how many samples it has, where that is known, and what its ``fingerprint()`` says."""
    size = f"{len(dataset)} samples" if hasattr(dataset, "__len__") else ""
    own = getattr(dataset, "fingerprint", None)
    return f"{size} {own()}".strip() if callable(own) else size


class Loader:
    """Batches of one split on this process, still on the host.

    Args:
        dataset: Map-style (``len`` and ``[]``) or iterable.
        batch_size: Samples an optimizer step, over all processes; for evaluation, what all processes hold at once.
        device_batch_size: Samples a micro-batch of one process.
        pieces: See ``StepSampler``.

    Attributes:
        unreadable: Samples that could not be read so far, and are not in their batches.
    """

    def __init__(
        self,
        dataset: Any,
        collator: Callable[[list[Any]], Any],
        draft: DataLoaderDraft,
        *,
        batch_size: int,
        device_batch_size: int,
        rank: int,
        world_size: int,
        seed: int,
        shuffle: bool,
        pieces: int = 1,
    ) -> None:
        self.dataset = dataset
        self.unreadable, self.timeout = 0, draft.timeout
        self.workers: list[Any] = []  # of the newest pass
        self.since = 0.0  # when a batch was asked for
        self.batch_size, self.device_batch_size, self.world_size = batch_size, device_batch_size, world_size
        self.micro_steps = batch_size // (device_batch_size * world_size)
        self.in_step = not getattr(dataset, "shards_itself", False)  # else processes may have different numbers of batches
        self.stream: _Stream | None = None
        self.sampler: StepSampler | None = None
        arguments: dict[str, Any] = {
            "collate_fn": _Collate(collator),
            "num_workers": draft.num_workers,
            "pin_memory": draft.pin_memory,
            "generator": torch.Generator().manual_seed(seed),  # else each epoch would draw from the global state
            "worker_init_fn": _leave_signals,
        }
        if draft.num_workers:
            arguments |= {
                "persistent_workers": draft.persistent_workers,
                "prefetch_factor": draft.prefetch_factor,
                "multiprocessing_context": draft.multiprocessing_context,
            }
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
            self.stream = _Stream(dataset, device_batch_size, rank, world_size, seed)
            self.loader: DataLoader[Any] = DataLoader(self.stream, batch_size=device_batch_size, **arguments)
        else:
            arrange = partial(draft.arrange, dataset) if draft.arrange is not None else None
            split = partial(draft.split, dataset) if draft.split is not None else None
            self.sampler = StepSampler(len(dataset), batch_size, device_batch_size, rank, world_size, seed, shuffle, arrange, split, pieces)
            self.loader = DataLoader(_Samples(dataset, draft.skip_unreadable), batch_sampler=self.sampler, **arguments)

    def steps_per_epoch(self) -> int | None:
        """Optimizer steps an epoch; None for a dataset of unknown length."""
        return None if self.sampler is None else -(-self.sampler.size // self.batch_size)

    def batches(self, epoch: int = 0, start: int = 0) -> Iterator[Batch]:
        """Micro-batches of an epoch, without its first ``start`` samples.

        Raises:
            DataError: A sample could not be read or collated, or a worker died or hangs.
            CheckpointError: ``start`` is inside an epoch of a dataset that shards itself, whose order is its own.
        """
        if start and getattr(self.dataset, "shards_itself", False):
            raise CheckpointError(
                f"{type(self.dataset).__name__} shards itself, so a run cannot go on {start} samples into its epoch. "
                "Resume from a checkpoint of an epoch's end (train.save_every: epoch)."
            )
        if self.sampler is not None:
            self.sampler.epoch, self.sampler.start = epoch, start
        elif self.stream is not None:
            self.stream.position[0], self.stream.position[1] = epoch, start
        batches: Iterator[Batch] | None = None
        while True:
            self.since = monotonic()
            try:
                if batches is None:
                    batches = self._begin()
                batch = self._next(batches)
            except StopIteration:
                return
            except DataError:
                raise
            except Exception as error:
                raise self._explain(error) from error
            for index, why in batch.unreadable:
                self.unreadable += 1
                if self.unreadable <= SAID:
                    log.warning("sample %d cannot be read and is left out: %s", index, why)
            yield batch

    def _begin(self) -> Iterator[Batch]:
        """A pass over the loader, which looks every few seconds whether its workers live: torch with a timeout does so at its end only."""
        batches: Any = iter(self.loader)
        self.workers = getattr(batches, "_workers", [])
        if self.workers and batches._worker_pids_set:
            _C._remove_worker_pids(id(batches))  # see ``_next``
            batches._worker_pids_set = False
        if self.workers and self.timeout and "_try_get_data" not in vars(batches):
            look: Any = weakref.WeakMethod(batches._try_get_data)  # a circle would keep the workers

            def within_timeout() -> tuple[bool, Any]:
                found: tuple[bool, Any] = look()(min(self.timeout, LOOK))
                if not found[0] and monotonic() - self.since > self.timeout:
                    raise DataError(
                        f"no batch in {self.timeout:g} seconds: a worker that reads data hangs, or the limit is too low for it."
                    )
                return found

            batches._try_get_data = within_timeout
        return iter(batches)

    def _next(self, batches: Iterator[Batch]) -> Batch:
        """The next micro-batch. Only here counts that a worker ended: torch's signal handler would raise wherever training is then, out of
        a save, with a lock held, or in a plugin that is blamed for it."""
        if not self.workers:
            return next(batches)
        _C._set_worker_pids(id(self), tuple(process.pid for process in self.workers))
        try:
            _C._error_if_any_worker_fails()  # before this
            return next(batches)
        finally:
            _C._remove_worker_pids(id(self))

    def _explain(self, error: Exception) -> DataError:
        said = str(error).strip().splitlines() or [""]
        if self.workers and isinstance(error, OSError | EOFError):  # one that ends breaks its connections, before it is over
            ending = connection.wait([process.sentinel for process in self.workers], ENDING)
            for process in self.workers:
                if process.sentinel in ending:
                    process.join(ENDING)  # else it may have no exit code yet
        ended = [(number, process) for number, process in enumerate(self.workers) if process.exitcode]
        if not ended:
            why = said[-1].removeprefix(f"{type(error).__name__}: ")  # a worker's ends with its traceback's last line
            return DataError(f"reading a batch failed: {type(error).__name__}: {why}")
        number, process = ended[0]
        name = signal.Signals(-process.exitcode).name if process.exitcode < 0 else ""
        how = f"was ended by {name}" if name else f"ended with exit code {process.exitcode}"
        return DataError(
            f"worker {number} of the {len(self.workers)} that read data (pid {process.pid}) {how}. "
            f"{ENDED.get(name, ENDED[''])} Go on from the newest checkpoint with --resume."
        )

    def close(self) -> None:
        """End the worker processes."""
        workers = getattr(self.loader, "_iterator", None)
        if workers is not None:
            workers._shutdown_workers()
            self.loader._iterator = None
        for process in self.workers:
            if process.exitcode is None:
                process.kill()  # it hangs, maybe in native code where it takes no signal: the interpreter's end would wait for it

    def steps(self, epoch: int = 0, start: int = 0) -> Iterator[list[Batch]]:
        """The same, grouped into the micro-batches of each optimizer step."""
        group: list[Batch] = []
        for batch in self.batches(epoch, start):
            group.append(batch)
            if batch.last or (self.sampler is None and len(group) == self.micro_steps):
                yield group
                group = []
        if group:
            yield group
