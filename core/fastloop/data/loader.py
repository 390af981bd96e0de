"""Batches of one split from a ``DataLoader``."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler

from fastloop.data import iterables
from fastloop.data.datasets import Collate, MapReader
from fastloop.data.sampler import AnnouncedMicroBatches, MicroBatchIds, StepSampler
from fastloop.errors import CheckpointError, DataError, FastloopError, UsageError
from fastloop.problem import Problem, counted
from fastloop.runtime.forks import without_stdin
from fastloop.runtime.random_states import OwnGenerators
from fastloop.runtime.regions import region
from fastloop.runtime.tracebacks import user_line
from fastloop.settings import Settings
from fastloop.splits import TRAIN
from fastloop.state import Batch

log = logging.getLogger("fastloop")

MAX_WARNINGS = 10
"""Unreadable samples that a loader names in the log. A damaged folder would fill it."""


class Loader:
    """Batches of one split on this process, in host memory.

    Args:
        dataset: Map-style (``len`` and ``[]``) or iterable.
        collator: Makes the inputs of a micro-batch from the list of its samples.
        settings: The ``DataLoader`` and its workers, and what plugins have set, such as ``arrange``.
        batch_size: Samples of an optimizer step over all processes; in evaluation, of one micro-batch of every process.
        micro_batch_size: Samples of a micro-batch on one process.
        rank: Index of this process.
        world_size: Number of processes.
        seed: Decides the order of the samples. ``StepSampler`` and ``Stream`` also derive from it the seeds of workers,
            one for each micro-batch.
        shuffle: Whether each epoch has an order of its own. False in evaluation.
        pieces: See ``StepSampler``.
        split: Name of the split, for its worker settings and for messages.
        sampler: The user's sampler, or None. Its ``drop_last`` says whether to drop an incomplete last batch: one of
            ``batch_size`` samples in training, and of the sampler's own ``batch_size`` in evaluation. If its
            ``sampler`` can be called with an epoch, the call returns the ids of a map-style dataset in their order.
            None, or any other sampler: all samples in the default order.
        drop_last: Whether to drop an incomplete last batch without a sampler, too.
        own_generators: See ``Stream``.

    Raises:
        UsageError: No sample is left.

    Attributes:
        unreadable_ids: Ids of the samples that could not be read and were left out of their batches.
    """

    def __init__(
        self,
        dataset: Any,
        collator: Callable[[list[Any]], Any],
        settings: Settings,
        *,
        batch_size: int,
        micro_batch_size: int,
        rank: int,
        world_size: int,
        seed: int,
        shuffle: bool,
        pieces: int = 1,
        split: str = TRAIN,
        sampler: BatchSampler | None = None,
        drop_last: bool = False,
        own_generators: OwnGenerators | None = None,
    ) -> None:
        self.dataset = dataset
        self.unreadable_ids: set[int] = set()
        self.has_warned_of_length = False
        self.batch_size = batch_size
        self.micro_batch_size = micro_batch_size
        self.world_size = world_size
        self.micro_steps = batch_size // (micro_batch_size * world_size)
        # whether all processes have the same number of batches; a dataset that shards itself may give one of them more
        self.in_step = not getattr(dataset, "shards_itself", False)
        self.stream: Any = None  # for an iterable dataset
        self.sampler: StepSampler | None = None
        make_loader = _loader_maker(settings, split, collator, seed)
        drop_last = drop_last or (sampler is not None and sampler.drop_last)
        self.loader: DataLoader[Any]
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
            if drop_last:
                iterables.check_drop_last(split, dataset, shuffle)
            self.stream = iterables.Stream(
                dataset,
                micro_batch_size,
                rank,
                world_size,
                seed,
                batches_per_step=self.micro_steps * world_size if drop_last else 0,
                has_workers=bool(settings.of(split)["num_workers"]),
                collator=collator,
                own_generators=own_generators,
            )
            self.loader = make_loader(self.stream, batch_size=micro_batch_size)
            return
        order = _user_order(sampler)
        full_batch_size = 0
        if drop_last:
            full_batch_size = batch_size if shuffle or sampler is None else sampler.batch_size
        self.sampler = StepSampler(
            size=len(dataset if order is None else order),
            batch_size=batch_size,
            micro_batch_size=micro_batch_size,
            rank=rank,
            world_size=world_size,
            seed=seed,
            shuffle=shuffle,
            arrange=partial(settings.arrange, dataset) if settings.arrange is not None else None,
            split_step=partial(settings.split_step, dataset) if settings.split_step is not None else None,
            pieces=pieces,
            user_order=order,
            full_batch_size=full_batch_size,
            shuffle_block=settings.shuffle_block if shuffle else None,
        )
        if not self.sampler.size:
            raise UsageError(
                f"the {split} split: drop_last=True leaves no batch of its {counted(self.sampler.drawn, 'sample')}.",
                code="no-batch",
                remedy="Make the batch size smaller.",
            )
        reader = _make_reader(dataset, collator, settings, has_copies=world_size > 1)
        self.loader = make_loader(reader, batch_sampler=_announcing_sampler(self.sampler, dataset))

    @property
    def samples_per_epoch(self) -> int | None:
        """Samples per epoch; None for a dataset of unknown length."""
        if self.stream is not None and hasattr(self.dataset, "read_ranges"):
            return int(self.stream.size)
        return None if self.sampler is None else self.sampler.size

    def steps_per_epoch(self) -> int | None:
        """Optimizer steps per epoch; None for a dataset of unknown length."""
        samples = self.samples_per_epoch
        if samples is None and self.in_step and hasattr(self.dataset, "__len__"):
            samples = self.stream.size  # as the dataset states it: an epoch ends with its last sample
        return None if samples is None else math.ceil(samples / self.batch_size)

    def check_length(self, samples: int) -> None:
        """Warn once if an epoch had another number of samples than an iterable dataset states, or if a map-style
        dataset has another length than when the run was built. The schedule of the learning rate depends on the first
        length.

        Args:
            samples: Samples of a complete epoch, over all processes.
        """
        if self.sampler is not None:
            self._check_map_length(self.sampler)
            return
        if self.stream is None or self.samples_per_epoch is not None or self.steps_per_epoch() is None:
            return
        if samples != self.stream.size and not self.has_warned_of_length:
            self.has_warned_of_length = True
            log.warning(
                Problem(
                    f"{type(self.dataset).__name__} states a length of {self.stream.size}, and an epoch had "
                    f"{counted(samples, 'sample')}: schedules follow the stated length.",
                    code="wrong-length",
                    remedy="Correct its __len__, or remove it and set train.max_steps.",
                )
            )

    def _check_map_length(self, sampler: StepSampler) -> None:
        if self.has_warned_of_length or sampler.user_order is not None or len(self.dataset) == sampler.drawn:
            return
        self.has_warned_of_length = True
        log.warning(
            Problem(
                f"{type(self.dataset).__name__} has {counted(len(self.dataset), 'sample')}, and had {sampler.drawn} "
                "when the run was built: epochs still take those.",
                code="wrong-length",
                remedy="Give the dataset its full length from the start, or write an IterableDataset.",
            )
        )

    def batches(self, epoch: int = 0, start: int = 0) -> Iterator[Batch]:
        """The micro-batches of ``steps``."""
        return chain.from_iterable(self.steps(epoch, start))

    def steps(self, epoch: int = 0, start: int = 0) -> Iterator[list[Batch]]:
        """The micro-batches of each optimizer step of an epoch, without its first ``start`` samples.

        Raises:
            DataError: A sample could not be read or collated, or a worker died or hangs.
            CheckpointError: ``start`` is not 0, and the dataset shards itself, so fastloop does not know its order.
        """
        if start and getattr(self.dataset, "shards_itself", False):
            raise CheckpointError(
                f"{type(self.dataset).__name__} shards itself, so a run cannot resume {counted(start, 'sample')} into "
                "its epoch.",
                code="resume-impossible",
                remedy="Resume from a checkpoint of an epoch's end (train.save_every: epoch).",
            )
        if self.sampler is not None:
            self.sampler.set_position(epoch, start)
        elif self.stream is not None:
            self.stream.set_position(epoch, start)
        batches: Iterator[Batch] | None = None
        group: list[Batch] = []
        while True:
            try:
                with region("data"):
                    if batches is None:
                        with without_stdin():
                            batches = iter(self.loader)
                    batch = next(batches)
            except StopIteration:
                break
            except FastloopError:
                raise
            except Exception as error:
                raise DataError(explain_error(error), code="reading-failed") from error
            if batch.unreadable:
                self._report_unreadable(batch)
            group.append(batch)
            # the sampler marks the end of a step, whose number of micro-batches may vary; those of a stream are counted
            ends_step = batch.is_last_micro_batch if self.sampler is not None else len(group) == self.micro_steps
            if ends_step:
                yield group
                group = []
        if group:
            yield group

    def _report_unreadable(self, batch: Batch) -> None:
        """Log the samples of a batch that could not be read: each once, and the first ``MAX_WARNINGS`` that this loader
        reads."""
        for index, reason in batch.unreadable:
            if index in self.unreadable_ids:
                continue
            self.unreadable_ids.add(index)
            if len(self.unreadable_ids) <= MAX_WARNINGS:
                log.warning(
                    Problem(f"sample {index} cannot be read and is left out: {reason}.", code="sample-unreadable")
                )

    def forget_epoch(self) -> None:
        """Let the next micro-batch call the ``set_epoch`` of a map-style dataset: another loader has called it."""
        if self.sampler is not None:
            reader: Any = self.loader.dataset
            reader.epoch = None

    def close(self) -> None:
        """End the worker processes, or the thread that reads ahead."""
        if hasattr(self.loader, "close"):
            self.loader.close()


def _loader_maker(
    settings: Settings, split: str, collator: Callable[[list[Any]], Any], seed: int
) -> Callable[..., DataLoader[Any]]:
    """``DataLoader``, or the class of a plugin, with the settings that a split has for it."""
    reading = settings.of(split)
    arguments: dict[str, Any] = {
        "collate_fn": Collate(collator, in_one_copy=split == TRAIN),
        "num_workers": reading["num_workers"],
        "pin_memory": reading["pin_memory"],
        "generator": torch.Generator().manual_seed(seed),  # keep epochs from using the global state
    }
    if not reading["num_workers"]:
        return partial(settings.thread_loader_class or DataLoader, **arguments)
    arguments |= {name: reading[name] for name in settings.WORKERS}
    return partial(reading["loader_class"] or DataLoader, **arguments)


def _user_order(sampler: BatchSampler | None) -> Any:
    """The order of a user's sampler: epoch -> sample ids, such as a ``SamplerOrder``; None: the default order."""
    if sampler is not None and callable(sampler.sampler):
        return sampler.sampler
    return None


def _make_reader(dataset: Any, collator: Callable[[list[Any]], Any], settings: Settings, has_copies: bool) -> Any:
    """The reader of a map-style dataset: a ``MapReader``, or an object of the class that a plugin has set."""
    make = settings.reader_class or MapReader
    reader: Any = make(dataset)
    reader.collator = collator
    reader.has_copies = has_copies
    return reader


def _announcing_sampler(sampler: StepSampler, dataset: Any) -> Sampler[MicroBatchIds]:
    """The micro-batches of a sampler. If their order is random, a dataset with ``read_at_random`` gets each of them
    before it is read."""
    is_random = sampler.shuffle or sampler.arrange is not None or sampler.user_order is not None
    if not is_random or not hasattr(dataset, "read_at_random"):
        return sampler
    announce = dataset.read_at_random()
    return sampler if announce is None else AnnouncedMicroBatches(sampler, announce)


def explain_error(error: Exception) -> str:
    """Describe an error of reading, with the line of user code that raised it."""
    lines = str(error).strip().splitlines() or [""]  # a worker's error contains its traceback
    reason = lines[-1].removeprefix(f"{type(error).__name__}: ")
    place = user_line(error)
    where = f" ({place})" if place else ""
    return f"reading a batch failed: {type(error).__name__}: {reason}{where}"
