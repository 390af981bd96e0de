"""Read the settings of a user's ``DataLoader``, and refuse those that fastloop cannot keep."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, Sampler, SequentialSampler

from fastloop.data.datasets import check_dataset
from fastloop.errors import UsageError
from fastloop_tools.trainer.batch_list import BatchList, kind_of_elements


@dataclass(frozen=True)
class UserLoader:
    """The settings of a user's ``DataLoader``. For a dataset without a loader, only ``dataset`` is set.

    Attributes:
        dataset: Map-style or iterable.
        collate_fn: The loader's collator.
        sampler: Order of samples, batch size and ``drop_last``.
        reading: ``Settings.READING`` fields.
    """

    dataset: Any
    collate_fn: Callable[[list[Any]], Any] | None = None
    sampler: BatchSampler | None = None
    reading: dict[str, Any] = field(default_factory=dict)


def read_loader(name: str, loader: Any, has_batch_size: bool) -> UserLoader:
    """Read the settings of a loader, a dataset or a list of batches.

    Args:
        name: Name of the argument, for messages: ``train_loader``.
        has_batch_size: Whether the user gave ``batch_size=``. Otherwise a list or iterable may hold batches.

    Raises:
        UsageError: fastloop cannot keep a setting; the message states what to do instead.
    """
    if not isinstance(loader, DataLoader):
        if not isinstance(loader, Dataset) and hasattr(loader, "dataset") and hasattr(loader, "batch_size"):
            raise UsageError(
                f"{name} is a {type(loader).__name__}.",
                code="wrong-type",
                expected="a torch.utils.data.DataLoader, or a dataset",
            )
        check_dataset(loader, name)
        return UserLoader(loader) if has_batch_size else _read_elements(name, loader)
    batches = _batch_sampler(name, loader)
    sampler: Any = batches.sampler
    if loader.generator is not None and getattr(sampler, "generator", None) is loader.generator:
        sampler = SharedGeneratorSampler(sampler, once=loader.persistent_workers)
    return UserLoader(
        loader.dataset,
        loader.collate_fn,
        BatchSampler(sampler, batches.batch_size, batches.drop_last),
        _reading(loader),
    )


def _batch_sampler(name: str, loader: DataLoader[Any]) -> BatchSampler:
    """The order of a loader's samples and their batches.

    Raises:
        UsageError: The loader does more than to cut an order of samples into batches.
    """
    kind = type(loader)
    if kind.__iter__ is not DataLoader.__iter__:
        raise UsageError(
            f"{kind.__name__} has an __iter__ of its own, which fastloop would not call: it reads the dataset itself.",
            code="wrong-dataset",
            place=name,
            remedy="Give a torch.utils.data.DataLoader. If Accelerate prepared it, give the loader before prepare().",
        )
    batches = loader.batch_sampler
    if batches is None:
        raise UsageError(
            f"{name} has batch_size=None: its dataset makes batches itself, and fastloop counts samples.",
            code="wrong-dataset",
            remedy="Give a dataset of samples and DataLoader(batch_size=...).",
        )
    if type(batches) is not BatchSampler:
        raise UsageError(
            f"the batch sampler {type(batches).__name__} is not kept: fastloop cuts an order of samples into batches "
            "itself, the same for any number of processes.",
            code="own-sampler",
            place=name,
            remedy="Give DataLoader(sampler=..., batch_size=...), or a plugin that arranges samples.",
        )
    if hasattr(batches.sampler, "num_replicas"):
        raise UsageError(
            f"{type(batches.sampler).__name__} shares samples between processes, which fastloop does itself.",
            code="own-sampler",
            place=name,
            remedy="Leave sampler= out, and set shuffle=True to shuffle.",
        )
    is_sharded = isinstance(loader.dataset, IterableDataset) and not getattr(loader.dataset, "shards_itself", False)
    if is_sharded and loader.worker_init_fn is not None:
        raise UsageError(
            f"worker_init_fn with {type(loader.dataset).__name__}, which is iterable: fastloop shares its samples "
            "between workers itself, and a function that does so too would lose some.",
            code="wrong-dataset",
            place=name,
            remedy="Remove it; or, if the dataset does the sharding alone, give it the attribute shards_itself = True.",
        )
    return batches


def _read_elements(name: str, dataset: Any) -> UserLoader:
    """A list of samples or of batches, or an iterable of samples.

    Raises:
        UsageError: An iterable gives batches, or the elements may be either.
    """
    is_list = isinstance(dataset, list | tuple)
    is_iterable = not isinstance(dataset, Dataset) and not hasattr(dataset, "__getitem__")
    if not is_list and not is_iterable:
        return UserLoader(dataset)
    first = next(iter(dataset), None)
    kind = kind_of_elements(first)
    if kind == "samples":
        return UserLoader(dataset)
    if kind == "unclear":
        raise UsageError(
            f"found a {type(dataset).__name__} whose elements may be samples or batches: their tensors have equal "
            "lengths.",
            code="wrong-dataset",
            place=name,
            remedy=(
                "If they are samples, give batch_size=. If they are batches, give DataLoader(TensorDataset(...), "
                "batch_size=...)."
            ),
        )
    if not is_list:
        raise UsageError(
            f"found a {type(dataset).__name__}, which gives batches, and fastloop cuts samples into batches itself.",
            code="wrong-dataset",
            place=name,
            remedy="Give list(...) of it, or a torch.utils.data.IterableDataset of samples and batch_size=.",
        )
    batches = BatchList(dataset, name)
    return UserLoader(batches, sampler=BatchSampler(SequentialSampler(batches), batches.batch_size, drop_last=False))


def _reading(loader: DataLoader[Any]) -> dict[str, Any]:
    """The loader's settings as ``Settings.READING`` fields."""
    fields: dict[str, Any] = {"num_workers": loader.num_workers}
    if loader.pin_memory:
        fields["pin_memory"] = True
    if loader.worker_init_fn is not None:
        fields["worker_init_fn"] = loader.worker_init_fn
    if loader.num_workers:
        from fastloop_plugins.data._watched_loader import WatchedLoader

        context = loader.multiprocessing_context
        fields |= {
            "persistent_workers": loader.persistent_workers,
            "prefetch_factor": loader.prefetch_factor,
            "timeout": loader.timeout,
            "multiprocessing_context": context and context.get_start_method(),
            "loader_class": WatchedLoader,
        }
    return fields


class SharedGeneratorSampler(Sampler[int]):
    """A sampler that shares its generator with its loader. The loader draws a seed for its workers from it before an
    epoch's order.

    Args:
        once: Whether the loader draws the seed only before its first epoch (persistent workers).
    """

    def __init__(self, sampler: Any, once: bool) -> None:
        self.user_sampler = sampler
        self.once = once
        self.epochs = 0

    def __len__(self) -> int:
        return len(self.user_sampler)

    def __iter__(self) -> Iterator[int]:
        if not (self.once and self.epochs):
            torch.empty((), dtype=torch.int64).random_(generator=self.user_sampler.generator)
        self.epochs += 1
        yield from self.user_sampler
