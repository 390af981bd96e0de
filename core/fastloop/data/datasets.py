"""Read map-style datasets by sample ids, and collate samples into ``Batch``.

The number of workers does not change the samples. ``iterables`` reads iterable ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from operator import getitem
from typing import Any, Protocol

from torch.utils.data import DataLoader, Dataset, get_worker_info

from fastloop.data.sampler import MicroBatchIds
from fastloop.errors import UsageError
from fastloop.runtime.random_states import (
    RandomGenerator,
    find_generators,
    preserve_random_states,
    seed_all,
    seed_generators,
)
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

    def read_at_random(self) -> Callable[[Sequence[int]], None] | None:
        """Map-style, of samples on a disk: called once for each loader that reads samples in random order, before its
        workers start. Returns a function that gets the sample ids of each micro-batch, some micro-batches before it is
        read, to begin reading them from the disk; it must not wait. With ``data.shuffle_block``, it gets the ids of
        each block once, before its first sample is read. None: there is nothing to read ahead."""
        ...

    def as_split(self, split: str) -> Any:
        """Map-style: these samples as ``split`` has them: with the random changes of ``train``, or without. `folds`
        calls it, because it trains and validates on samples of both splits."""
        ...

    shards_itself: bool
    """Iterable: True if ``__iter__`` yields only the share of the process and worker that calls it. fastloop then takes
    every sample it yields, and resumes only at an epoch's end. Shares may differ in size, but none that is trained may
    be empty: a process whose share has ended takes part in the steps of the others. Default: False. Then ``__iter__``
    must yield all samples in every process and worker, and fastloop shares them out. Several processes compare the
    first sample, unless the dataset sets this attribute to False itself.

    If True, fastloop seeds no generator that the dataset keeps. Each process and worker has a copy of it in the same
    state, so that all take their shares of the same order: ``self.generator.permutation(n)[worker::workers]``.

    - Without workers, the copy continues from epoch to epoch, and in a resumed run.
    - With workers, each epoch copies the dataset of the main process, whose generator has not drawn. So every epoch has
      the same numbers, unless ``set_epoch`` seeds the generator. Persistent workers continue, until a run resumes.
    - For numbers that differ between workers, such as noise, draw from the global generators of torch, NumPy and
      Python, which fastloop seeds in each worker and epoch."""

    def set_epoch(self, epoch: int) -> None:
        """Called with the epoch's index, from 0, in each process and worker.

        Iterable: before ``__iter__``, to shuffle by it. Map-style: in training, before the first sample of an epoch is
        read, such as to change the samples by it. A resumed run calls it, too, but it then changes no random states.
        """

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


class MicroBatchSamples(list[Any]):
    """The samples of a micro-batch, with the fields of ``Batch`` that the collator does not know."""

    ids: tuple[int, ...] = ()
    is_last_micro_batch: bool = False
    unreadable: tuple[tuple[int, str], ...] = ()


class Numbered(tuple[int, Any]):
    """``(position, sample)`` of an iterable dataset."""

    stream_digest: str = ""


class FillerCandidates(list[Any]):
    """Samples of which one is computed with weight 0, on a process without a share of a micro-step: the last micro-step
    of a step may have fewer micro-batches than processes, and samples may be unreadable. That process must compute,
    too, because the others wait for its gradients. It takes the first sample that the collator does not leave out."""

    stream_digest: str = ""


class MapReader(Dataset[Any]):
    """Reads a map-style dataset by micro-batch. A worker first seeds its random states with the micro-batch's seed, so
    that random numbers do not depend on the worker. It also seeds the generators that the dataset and the collator keep
    for themselves: each worker and process has a copy of them, which would draw the same numbers.

    Attributes:
        collator: Collates the samples afterwards, in the same process.
        has_copies: Whether other processes read the dataset, too. Its own generators are then seeded without workers,
            as well.
        epoch: The epoch of the dataset's last ``set_epoch``; None: there was none, or another reader has called it.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self.collator: Any = None
        self.has_copies = False
        self.epoch: int | None = None
        self._generators: list[RandomGenerator] | None = None  # of this process's copy
        read_together = getattr(dataset, "__getitems__", None)
        read_one_by_one = partial(map, partial(getitem, dataset))  # can be pickled, for workers that are spawned
        self.read: Callable[[list[int]], Iterable[Any]] = read_together or read_one_by_one

    def __getitems__(self, micro_batch: MicroBatchIds) -> list[Any]:
        if micro_batch.epoch != self.epoch:
            self._set_epoch(micro_batch)
        in_worker = get_worker_info() is not None
        if in_worker:
            seed_all(micro_batch.seed)
        if in_worker or self.has_copies:
            if self._generators is None:
                self._generators = find_generators(self.dataset, self.collator)
            seed_generators(self._generators, micro_batch.seed)
        try:
            samples = MicroBatchSamples(self.read(micro_batch))
        except Exception:
            samples = self.read_each(micro_batch)
        if not samples.unreadable:
            samples.ids = tuple(micro_batch)
        if micro_batch.is_filler:
            filler = samples[0]
            if not isinstance(filler, FillerCandidates):  # ``read_each`` returns one if no sample is readable
                filler = FillerCandidates(samples)
            samples = MicroBatchSamples([filler])  # the process that trains on the samples has their ids
        samples.is_last_micro_batch = micro_batch.is_last_micro_batch
        return samples

    def _set_epoch(self, micro_batch: MicroBatchIds) -> None:
        """Call the dataset's ``set_epoch`` before the first micro-batch of an epoch. In the middle of an epoch, as in a
        resumed run, the random states stay those of that place, also if ``set_epoch`` seeds them."""
        self.epoch = micro_batch.epoch
        if self.epoch is None or not hasattr(self.dataset, "set_epoch"):
            return
        generators = find_generators(self.dataset, self.collator)
        with preserve_random_states(enabled=not micro_batch.is_of_first_step, own=generators):
            self.dataset.set_epoch(self.epoch)

    def read_each(self, micro_batch: list[int]) -> MicroBatchSamples:
        """Called after an error of reading, which it raises. A subclass may return other samples instead, with
        ``unreadable`` and their ``ids`` set."""
        raise


class Collate:
    """Collates samples with the task's collator, and sets the fields of ``Batch`` that the loader is responsible
    for.

    Args:
        in_one_copy: Whether one copy takes the small tensors of a batch to the device. A tensor that is kept then keeps
            the others, too, so batches of an evaluation, whose targets are kept for the metrics, are copied apart.
    """

    def __init__(self, collator: Callable[[list[Any]], Any], in_one_copy: bool = False) -> None:
        self.collator = collator
        self.in_one_copy = in_one_copy

    def __call__(self, samples: list[Any]) -> Batch:
        read = samples if isinstance(samples, MicroBatchSamples) else MicroBatchSamples()
        ids = read.ids
        first = next(iter(samples), None)
        if isinstance(first, Numbered):
            ids = tuple(position for position, _ in samples)
            samples = [sample for _, sample in samples]
        if isinstance(first, FillerCandidates):
            batch = self._collate_filler(first)
            batch.samples = 0
            batch.drawn = 0
            batch.tokens = 0
            batch.loss_weight = 0
        else:
            batch = self._collate(samples)
        batch.ids = ids
        batch._in_one_copy = self.in_one_copy
        batch.is_last_micro_batch = read.is_last_micro_batch
        batch.unreadable = read.unreadable
        batch.stream_digest = getattr(first, "stream_digest", "")
        info = get_worker_info()
        batch.worker = info.id if info is not None else -1
        return batch

    def _collate(self, samples: list[Any]) -> Batch:
        result = self.collator(samples)
        batch = result if isinstance(result, Batch) else Batch(result)
        batch.drawn = len(samples)
        batch.samples = batch.samples or batch.drawn
        if batch.loss_weight < 0:
            batch.loss_weight = batch.samples
        return batch

    def _collate_filler(self, candidates: FillerCandidates) -> Batch:
        """Collate the first sample that can be collated alone: a collator fails if it leaves out the only one."""
        for sample in candidates[:-1]:
            with suppress(Exception):
                return self._collate([sample])
        return self._collate(candidates[-1:])


def check_dataset(dataset: Any, place: str) -> None:
    """Check that a dataset can be read again in each epoch and evaluation.

    Args:
        place: The key or argument that it was given as, for messages.

    Raises:
        UsageError: It is an iterator, or a loader.
    """
    kind = type(dataset).__name__
    if isinstance(dataset, DataLoader):
        raise UsageError(
            code="wrong-dataset",
            place=place,
            found=f"a {kind}, which makes batches itself",
            expected=(
                "its dataset: train.batch_size, train.eval_batch_size and the plugin dataloader-workers set what a "
                "DataLoader takes"
            ),
        )
    if isinstance(dataset, Iterator) and not isinstance(dataset, Dataset):
        raise UsageError(
            code="wrong-dataset",
            place=place,
            found=f"a {kind}, which can be read once: later epochs and evaluations would find it empty",
            expected=(
                "a dataset that begins again: make a list of it, or write a class derived from "
                "torch.utils.data.IterableDataset with a method __iter__ that yields the samples"
            ),
        )


def fingerprint(dataset: Any) -> str:
    """The number of samples, if known, and the dataset's ``DatasetProtocol.fingerprint``: ``1200 samples 5ab0``."""
    # an identity, and no message: checkpoints store this text, and a resumed run compares it
    size = f"{len(dataset)} samples" if hasattr(dataset, "__len__") else ""
    own = getattr(dataset, "fingerprint", None)
    return f"{size} {own()}".strip() if callable(own) else size
