"""The settings of a run that plugins change in ``configure``: precision, processes, loading of batches, optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from fastloop.errors import PluginError, did_you_mean
from fastloop.runtime.hardware import this_machine

if TYPE_CHECKING:
    from torch import Generator
    from torch.utils.data import DataLoader, Dataset

    from fastloop.plugins.plugin import Plugin
    from fastloop.recipe import Recipe
    from fastloop.state import Batch


@dataclass(frozen=True)
class Settings:
    """Typed settings. Plugins set some in ``configure``, where the object holds the values so far.

    Handlers have the names of attributes of Accelerate's ``Accelerator``.
    """

    mixed_precision: str = "no"
    """``no``, ``bf16`` or ``fp16``."""
    ddp_handler: Any = None
    """``DistributedDataParallelKwargs``."""
    scaler_handler: Any = None
    """``GradScalerKwargs``."""
    init_handler: Any = None
    """``InitProcessGroupKwargs``."""
    process_timeout: float | None = None
    """Seconds that a process waits for another in an exchange; None: torch's default."""
    num_workers: int = 0
    """Worker processes of a loader; 0: the process reads its batches itself."""
    loader_class: type[DataLoader[Any]] | None = None
    """Class of loaders with workers; its ``close()`` ends them. None: torch's. ``dataloader-workers`` sets one that
    explains why a worker ended."""
    thread_loader_class: type[DataLoader[Any]] | None = None
    """Class of loaders without workers; its ``close()`` ends what it started. None: torch's. ``device-prefetch`` sets
    one that reads the next batches in a thread."""
    persistent_workers: bool = False
    """Keep the worker processes between epochs."""
    prefetch_factor: int | None = None
    """Batches that a worker reads ahead; None: torch's default."""
    pin_memory: bool = False
    """Put batches into page-locked memory. Works without workers, too. True on CUDA."""
    timeout: float = 0.0
    """Seconds to wait for a batch of a worker before the run ends with an error; 0: no limit. The name is that of
    ``DataLoader``'s argument."""
    multiprocessing_context: str | None = None
    """``fork``, ``spawn`` or ``forkserver``; None: the platform's default."""
    worker_init_fn: Callable[[int], None] | None = None
    """Called in each worker with its number, before it reads."""
    by_split: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: MappingProxyType({}))
    """Split -> ``READING`` fields for it. A plugin that sets such a field for all splits overrides it, in any order.
    The fields of this object have the values for ``train``; ``of`` returns those of a split."""
    pad_to_multiple_of: int | None = None
    """Tasks of texts pad lengths to a multiple of this many tokens, except prompts to continue. With `module`, it only
    says to which multiple the user's collator pads. The recipe's ``data.pad_to_multiple_of``; a plugin may set a
    default for it. None: lengths are not padded further."""
    arrange: Callable[[Any, list[int], int, Generator | None], list[int]] | None = None
    """``arrange(dataset, ids, batch_size, generator)`` returns ``ids`` in the order in which a run reads them, the same
    on all processes. In training, ``ids`` have a random order, and ``generator`` supplies more random numbers. In
    evaluation, ``ids`` are sorted and ``generator`` is None. Each optimizer step takes the next ``batch_size``
    samples; its processes and micro-steps take consecutive shares of them."""
    shuffle_block: int | None = None
    """The recipe's ``data.shuffle_block``: training shuffles blocks of this many consecutive samples, and the samples
    of 16 blocks at a time. None: an epoch is shuffled as a whole."""
    skip_unreadable: bool = False
    """Leave unreadable samples out, instead of ending the run. Tasks also skip rows that they cannot read."""
    reader_class: Callable[[Any], Dataset[Any]] | None = None
    """Subclass of ``MapReader``, through which a loader reads a map-style dataset. None: ``MapReader`` itself.
    ``skip-unreadable`` sets one that leaves unreadable samples out."""
    placing: Callable[[Iterable[list[Batch]], Callable[[list[Batch]], list[Batch]]], Iterable[list[Batch]]] | None = (
        None
    )
    """``placing(steps, place)`` yields the batches of ``steps`` on the device; ``place`` moves one step. None: move
    each step when the loop needs it."""
    split_step: Callable[[Any, list[int], int], list[list[int]]] | None = None
    """``split_step(dataset, ids, processes)`` divides a step's sample ids into micro-batches. It must return every id
    once, and the same result on all processes. In each micro-step, every process takes the next micro-batch. Also used
    for evaluation."""
    max_evaluation_batches: int | None = None
    """Batches of an evaluation at most, on each process; None: all."""
    only_checks: bool = False
    """The run only checks that a recipe works, and nobody keeps its numbers: its samples may be the first ones of the
    data. ``--fast-dev-run`` sets it."""
    processes_per_batch: int = 1
    """This many consecutive processes train on the same samples; 0: all processes. If there are fewer, all of them."""
    optimizer: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    """Arguments of the optimizer's class beside ``lr`` and ``weight_decay``, such as ``fused``. It starts with those in
    ``train.optimizer``, which plugins cannot change."""
    writers: dict[str, str] = field(default_factory=dict)
    """Field, or key such as ``optimizer['fused']`` -> name of the plugin that set it."""

    WORKERS = ("persistent_workers", "prefetch_factor", "timeout", "multiprocessing_context", "worker_init_fn")
    """Fields that are arguments of a loader with workers."""

    READING = ("num_workers", "pin_memory", "loader_class", *WORKERS)
    """Fields that may differ between splits."""

    def of(self, split: str) -> dict[str, Any]:
        """The ``READING`` fields of one split."""
        own = {name: value for name, value in self.by_split.get(split, {}).items() if name not in self.writers}
        return {name: getattr(self, name) for name in self.READING} | own


def merge_settings(recipe: Recipe, plugins: Iterable[tuple[Plugin, Callable[..., Any]]]) -> Settings:
    """Collect the settings of plugins. Mappings merge by key.

    Args:
        plugins: Each plugin with the function that calls its ``configure``, in call order.

    Raises:
        PluginError: A plugin returned no mapping, an unknown name or a value of another type, or two set the same field
            or key.
    """
    given = recipe.train.optimizer_arguments
    settings = Settings(
        pin_memory=this_machine(recipe.train.device).device == "cuda",
        pad_to_multiple_of=recipe.data.get("pad_to_multiple_of"),
        shuffle_block=recipe.data.get("shuffle_block"),
        optimizer=MappingProxyType(given),
        writers={f"optimizer[{key!r}]": "train.optimizer" for key in given},
    )
    fields = vars(settings)  # plugins may keep the object, and cannot assign to it
    names = fields.keys() - {"writers"}
    for plugin, call in plugins:
        changes = call(recipe=recipe, settings=settings)
        if changes is None:
            changes = {}
        where = f"{recipe.where}: plugin {plugin.name!r}: configure returned"
        for name, value in _check_mapping(changes, where).items():
            _check_setting(name, value, names, where)
            before = fields[name]
            if isinstance(before, Mapping):
                written = [f"{name}[{key!r}]" for key in _check_mapping(value, f"{where} {name}:")]
                fields[name] = MappingProxyType({**before, **value})
            else:
                written = [name]
                fields[name] = value
            for part in written:
                writer = settings.writers.setdefault(part, plugin.name)
                if writer != plugin.name:
                    raise PluginError(
                        f"plugins {writer!r} and {plugin.name!r} both set {part}.",
                        code="conflicting-values",
                        place=recipe.where,
                        remedy="Remove one of them.",
                    )
        fields.update(settings.of("train"))
    if settings.shuffle_block is not None and settings.arrange is not None and recipe.inference is None:
        raise PluginError(
            f"plugin {settings.writers['arrange']!r} arranges the samples of an epoch, so they are not read in blocks.",
            code="exclusive-options",
            place=f"{recipe.where}: data.shuffle_block",
            remedy="Remove one of them.",
        )
    return settings


SIMPLE_TYPES: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "int": (int,),
    "float": (float, int),
    "bool": (bool,),
    "None": (type(None),),
}
"""Types of fields that can be checked, as their annotations name them."""


def _check_setting(name: str, value: Any, names: Collection[str], where: str) -> None:
    """Check that a setting exists, and that a value has its type.

    Args:
        names: Those of all settings.
        where: The beginning of the message.

    Raises:
        PluginError: The name is unknown, or the type is another one.
    """
    if name not in names:
        raise PluginError(
            f"{where} {name!r}, which is no field of Settings.",
            code="unknown-setting",
            remedy=did_you_mean(name, names),
        )
    if not _has_type(value, name):
        expected = Settings.__annotations__[name]
        raise PluginError(
            f"{where} {name}: {value!r}, a {type(value).__name__}, expected {expected}.", code="wrong-type"
        )


def _has_type(value: Any, name: str) -> bool:
    """Whether a value has the type of a field. NaN is no value of any field. Objects and functions are not checked."""
    names = str(Settings.__annotations__[name]).split(" | ")
    if not set(names) <= SIMPLE_TYPES.keys():
        return True
    if isinstance(value, bool):
        return "bool" in names
    if isinstance(value, float) and math.isnan(value):
        return False
    return any(isinstance(value, SIMPLE_TYPES[kind]) for kind in names)


def _check_mapping(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise PluginError(
            f"{where} a {type(value).__name__}, expected a mapping. docs/loop.md describes the hook.",
            code="wrong-result",
        )
    return value
