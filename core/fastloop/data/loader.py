"""Batches of one split from a ``DataLoader``, with explained worker failures."""

from __future__ import annotations

import errno
import logging
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from multiprocessing import connection
from time import monotonic
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from fastloop.data import workers
from fastloop.data.datasets import Collate, MapReader, Stream
from fastloop.data.sampler import StepSampler
from fastloop.data.user_sampler import SamplerOrder, is_default_order
from fastloop.errors import CheckpointError, DataError, UsageError
from fastloop.runtime import platform_support
from fastloop.runtime.tracebacks import user_line
from fastloop.state import Batch, DataLoaderDraft

log = logging.getLogger("fastloop")

POLL_SECONDS = 5.0
"""Seconds between checks for dead workers while waiting for a batch."""
EXIT_SECONDS = 5.0
"""Seconds to wait for a worker's exit code after its connections broke."""
MAX_WARNINGS = 10
"""Unreadable samples that are logged; further ones are only counted."""


class Loader:
    """Batches of one split on this process, in host memory.

    Args:
        dataset: Map-style (``len`` and ``[]``) or iterable.
        batch_size: Samples of an optimizer step over all processes; in evaluation, of one micro-batch of every process.
        micro_batch_size: Samples of a micro-batch on one process.
        pieces: See ``StepSampler``.
        split: Name of the split, for its worker settings and for messages.
        sampler: The order of a map-style dataset, and whether to drop an incomplete last batch. A batch has ``batch_size`` samples in
            training and the sampler's ``batch_size`` in evaluation. None: all samples in the default order.

    Raises:
        UsageError: The sampler's order cannot be repeated, or no sample is left.

    Attributes:
        unreadable: Number of samples that could not be read and were left out of their batches.
    """

    def __init__(
        self,
        dataset: Any,
        collator: Callable[[list[Any]], Any],
        draft: DataLoaderDraft,
        *,
        batch_size: int,
        micro_batch_size: int,
        rank: int,
        world_size: int,
        seed: int,
        shuffle: bool,
        pieces: int = 1,
        split: str = "train",
        sampler: BatchSampler | None = None,
    ) -> None:
        self.dataset = dataset
        reading = draft.of(split)
        self.unreadable, self.timeout, self.kills = 0, reading["timeout"], platform_support.kills()
        self.workers: list[Any] = []
        self.waiting_since = 0.0
        self.batch_size, self.micro_batch_size, self.world_size = batch_size, micro_batch_size, world_size
        self.micro_steps = batch_size // (micro_batch_size * world_size)
        self.in_step = not getattr(dataset, "shards_itself", False)  # False: processes may have different numbers of batches
        self.stream: Stream | None = None
        self.sampler: StepSampler | None = None
        arguments: dict[str, Any] = {
            "collate_fn": Collate(collator),
            "num_workers": reading["num_workers"],
            "pin_memory": reading["pin_memory"],
            "generator": torch.Generator().manual_seed(seed),  # keep epochs from using the global state
            "worker_init_fn": partial(workers.start_worker, init=reading["worker_init_fn"]),
        }
        if reading["num_workers"]:
            arguments |= {name: reading[name] for name in ("persistent_workers", "prefetch_factor", "multiprocessing_context")}
        drop_last = sampler is not None and sampler.drop_last
        self.loader: DataLoader[Any]
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
            if drop_last and not (self.in_step and shuffle):
                kind = "is iterable and only evaluated" if self.in_step else "shards itself"
                raise UsageError(
                    f"the {split} split: drop_last=True for {type(dataset).__name__}, which {kind}: the samples dropped would depend on "
                    "the number of processes. Set drop_last=False, or let the dataset end earlier."
                )
            self.stream = Stream(dataset, micro_batch_size, rank, world_size, seed, self.micro_steps * world_size if drop_last else 0)
            if reading["num_workers"]:
                self.stream.position.share_memory_()  # type: ignore[no-untyped-call] # so that persistent workers see changes
            self.loader = DataLoader(self.stream, batch_size=micro_batch_size, **arguments)
            return
        order, dropped_batch = None, 0
        if sampler is not None:
            if not is_default_order(sampler.sampler, dataset, shuffle, draft.arrange is not None):
                order = SamplerOrder(sampler.sampler, split, seed)
            if drop_last:
                dropped_batch = batch_size if shuffle else sampler.batch_size
        arrange = partial(draft.arrange, dataset) if draft.arrange is not None else None
        divide = partial(draft.split, dataset) if draft.split is not None else None
        size = len(dataset) if order is None else order.size
        self.sampler = StepSampler(
            size, batch_size, micro_batch_size, rank, world_size, seed, shuffle, arrange, divide, pieces, order, dropped_batch
        )
        if not self.sampler.size:
            raise UsageError(
                f"the {split} split: drop_last=True leaves no batch of its {self.sampler.drawn} samples. Make the batch size smaller."
            )
        self.loader = DataLoader(MapReader(dataset, draft.skip_unreadable), batch_sampler=self.sampler, **arguments)

    @property
    def epoch_samples(self) -> int | None:
        """Samples per epoch; None for a dataset of unknown length."""
        if self.stream is not None and hasattr(self.dataset, "read_ranges"):
            return self.stream.size
        return None if self.sampler is None else self.sampler.size

    def steps_per_epoch(self) -> int | None:
        """Optimizer steps per epoch; None for a dataset of unknown length."""
        return None if self.epoch_samples is None else -(-self.epoch_samples // self.batch_size)

    def batches(self, epoch: int = 0, start: int = 0) -> Iterator[Batch]:
        """Micro-batches of an epoch, without its first ``start`` samples.

        Raises:
            DataError: A sample could not be read or collated, or a worker died or hangs.
            CheckpointError: ``start`` is not 0, and the dataset shards itself, so fastloop does not know its order.
        """
        if start and getattr(self.dataset, "shards_itself", False):
            raise CheckpointError(
                f"{type(self.dataset).__name__} shards itself, so a run cannot resume {start} samples into its epoch. "
                "Resume from a checkpoint of an epoch's end (train.save_every: epoch)."
            )
        if self.sampler is not None:
            self.sampler.epoch, self.sampler.start = epoch, start
        elif self.stream is not None:
            self.stream.position[0], self.stream.position[1] = epoch, start
        batches: Iterator[Batch] | None = None
        while True:
            self.waiting_since = monotonic()
            try:
                if batches is None:
                    batches = self._start_pass()
                batch = workers.next_batch(batches, self.workers) if self.workers else next(batches)
            except StopIteration:
                return
            except DataError:
                raise
            except Exception as error:
                raise self._explain(error) from error
            for index, reason in batch.unreadable:
                self.unreadable += 1
                if self.unreadable <= MAX_WARNINGS:
                    log.warning("sample %d cannot be read and is left out: %s", index, reason)
            yield batch

    def _start_pass(self) -> Iterator[Batch]:
        """Start a pass over the loader. With a timeout, torch notices a dead worker only at its end, so poll every ``POLL_SECONDS``."""
        batches: Any = iter(self.loader)
        self.workers = workers.watch(batches)
        if self.workers and self.timeout:
            workers.wait_in_turns(batches, min(self.timeout, POLL_SECONDS), self._check_timeout)
        return iter(batches)

    def _check_timeout(self) -> None:
        if monotonic() - self.waiting_since > self.timeout:
            raise DataError(f"no batch in {self.timeout:g} seconds: a worker that reads data hangs, or the limit is too low for it.")

    def _explain(self, error: Exception) -> DataError:
        if self.workers and isinstance(error, OSError | EOFError):  # a worker's connections break before it has an exit code
            ready = connection.wait([process.sentinel for process in self.workers], EXIT_SECONDS)
            for process in self.workers:
                if process.sentinel in ready:
                    process.join(EXIT_SECONDS)
        number, process = next(((number, process) for number, process in enumerate(self.workers) if process.exitcode), (0, None))
        if process is None:
            lines = str(error).strip().splitlines() or [""]  # a worker's error contains its traceback
            reason = lines[-1].removeprefix(f"{type(error).__name__}: ")
            place = user_line(error)
            is_full = "shared memory" in reason or (getattr(error, "errno", 0) == errno.ENOSPC and self.loader.num_workers)
            advice = f". {_shared_memory_advice()}" if is_full else ""
            return DataError(f"reading a batch failed: {type(error).__name__}: {reason}" + (f" ({place})" if place else "") + advice)
        name = signal.Signals(-process.exitcode).name if process.exitcode < 0 else ""
        cause = f"was ended by {name}" if name else f"ended with exit code {process.exitcode}"
        advice = _shared_memory_advice() if name == "SIGBUS" else "To debug it, read the data in the training process (num_workers: 0)."
        if name == "SIGKILL":
            advice = f"{platform_support.explain_kill(self.kills)} Use fewer workers, or let them read less ahead (prefetch_factor)."
        return DataError(
            f"worker {number} of the {len(self.workers)} that read data (pid {process.pid}) {cause}. "
            f"{advice} Continue from the newest checkpoint with --resume."
        )

    def close(self) -> None:
        """End the worker processes."""
        workers.shut_down(self.loader)
        for process in self.workers:
            if process.exitcode is None:
                process.kill()  # a hanging worker would block the exit of the interpreter

    def steps(self, epoch: int = 0, start: int = 0) -> Iterator[list[Batch]]:
        """``batches``, grouped into the micro-batches of each optimizer step."""
        group: list[Batch] = []
        for batch in self.batches(epoch, start):
            group.append(batch)
            if batch.is_last_micro_batch or (self.sampler is None and len(group) == self.micro_steps):
                yield group
                group = []
        if group:
            yield group


def _shared_memory_advice() -> str:
    """Advice for full shared memory, with its free space."""
    room = ""
    with suppress(OSError):
        usage = shutil.disk_usage("/dev/shm")  # only Linux has it
        room = f": {usage.free / 2**20:,.1f} of {usage.total / 2**20:,.1f} MiB of /dev/shm are free"
    return (
        f"Workers send batches through shared memory{room}. Make it larger (docker run --shm-size=8g), use fewer workers or a smaller "
        "prefetch_factor, or read the data in the training process (num_workers: 0)."
    )
