"""The state of a run, and the data that tasks, the loop and plugins exchange."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import Generator, Tensor
    from torch.optim import Optimizer
    from torch.utils.data import DataLoader, Dataset

    class RunOptimizer(Optimizer):
        """The type of ``run.optimizer``. Take one by its name only where ``build_optimizer`` returned a dict."""

        def __getitem__(self, name: str) -> Optimizer: ...


INTERRUPTED = "interrupted"
"""Start of the ``stop_reason`` of a run that a signal stopped; the signal's name follows."""


@dataclass
class State:
    """Counters, metrics and requests. A checkpoint holds everything except the request to save.

    Attributes:
        step: Optimizer steps done.
        epoch: Epochs completed.
        epoch_samples: Samples drawn in the current epoch, over all processes.
        samples: Samples trained on so far, over all processes.
        tokens: Tokens trained on so far, without padding, over all processes; 0 if the task does not count them.
        metrics: Split (``validation``, ``test``) -> its newest metrics.
        evaluated_at: Step of the newest evaluation on ``validation``; -1 before the first.
        best: ``{"step", "metric", "value", "path"}`` of the best checkpoint, when a plugin keeps one.
        evaluate_requested: Whether an evaluation is requested and not yet done.
        save_requested: Whether a save is requested and not yet done.
        stop_reason: Why training ends early; None while it continues.
        left_out: ``[epoch, epoch_samples]`` at the beginning of each step to skip, because it failed and the run was
            rolled back.
        unreadable: Samples so far that could not be read, over all processes. Their batches do not contain them.
    """

    step: int = 0
    epoch: int = 0
    epoch_samples: int = 0
    samples: int = 0
    tokens: int = 0
    metrics: dict[str, dict[str, float]] = field(default_factory=dict)
    evaluated_at: int = -1
    best: dict[str, Any] | None = None
    evaluate_requested: bool = False
    stop_reason: str | None = None
    left_out: list[list[int]] = field(default_factory=list)
    unreadable: int = 0

    def __post_init__(self) -> None:
        self.save_requested = False

    def request_stop(self, reason: str) -> None:
        """Stop training after this step. ``summary.json`` contains the first reason given."""
        self.stop_reason = self.stop_reason or reason

    def request_evaluate(self) -> None:
        """Evaluate after this step."""
        self.evaluate_requested = True

    def request_save(self) -> None:
        """Save a checkpoint after this step (and after its evaluation, if any)."""
        self.save_requested = True

    def count_step(self, totals: BatchTotals) -> None:
        """Add a finished step to the counters."""
        self.step += 1
        self.samples += totals.samples
        self.tokens += totals.tokens
        self.unreadable += totals.unreadable
        self.skip_samples(totals)

    def skip_samples(self, totals: BatchTotals) -> None:
        """Count samples as drawn in the current epoch."""
        self.epoch_samples += totals.samples + totals.unreadable

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON values, for a checkpoint."""
        return asdict(self)

    def restore(self, values: Mapping[str, Any]) -> None:
        """Restore the values of ``to_dict`` from a checkpoint, and drop a request to save."""
        vars(self).update(vars(State(**values)))


@dataclass(slots=True)
class Batch:
    """One micro-batch. A collator may return one to set ``inputs``, ``loss_weight`` and ``tokens``. The loader sets the
    other fields.

    Attributes:
        inputs: The argument ``batch`` of ``compute_loss``: any nesting of tensors.
        loss_weight: Samples or target tokens that the loss is the mean over, or the sum of their weights; weights
            accumulated micro-batches. 0: ``samples``.
        samples: Number of samples.
        tokens: Number of tokens without padding. With 0, the default, ``tokens_per_second`` is 0 too.
        ids: Sample ids: indices of a map-style dataset, positions in an iterable one.
        worker: Index of the worker that read it; -1: the process itself.
        is_last_micro_batch: Whether it is its step's last on this process. Only for map-style datasets.
        unreadable: ``(id, reason)`` of each sample that could not be read; see ``DataLoaderDraft.skip_unreadable``.
    """

    inputs: Any
    loss_weight: float = 0
    samples: int = 0
    tokens: int = 0
    ids: tuple[int, ...] = ()
    worker: int = -1
    is_last_micro_batch: bool = False
    unreadable: tuple[tuple[int, str], ...] = ()

    def pin_memory(self) -> Batch:
        """Called by torch's DataLoader when ``pin_memory`` is on."""
        from torch.utils.data._utils.pin_memory import pin_memory

        self.inputs = pin_memory(self.inputs)  # type: ignore[no-untyped-call]
        return self


class BatchTotals(NamedTuple):
    """Sums over the micro-batches of a step; see ``Batch``.

    Attributes:
        weight: Sum of ``loss_weight``.
        samples: Number of samples.
        tokens: Number of tokens without padding.
        unreadable: Number of samples that could not be read.
    """

    weight: float
    samples: int
    tokens: int
    unreadable: int

    @classmethod
    def of(cls, batches: Iterable[Batch]) -> BatchTotals:
        """Sum the given micro-batches, on this process."""
        counts = [(batch.loss_weight, batch.samples, batch.tokens, len(batch.unreadable)) for batch in batches]
        return cls(*map(sum, zip(*counts, strict=True)))

    @classmethod
    def read(cls, totals: Tensor) -> BatchTotals:
        """The totals in a tensor of shape (4,), float64."""
        weight, *counts = totals.tolist()
        return cls(weight, *map(int, counts))


@dataclass(slots=True)
class Output:
    """The result of a task for one batch.

    Attributes:
        loss: 0-dim tensor: the mean over the batch's ``loss_weight``.
        predictions: First argument of the metrics, of shape (N, ...): evaluation concatenates several batches along the
            first dimension before it updates a metric. None without metrics.
        targets: Second argument of the metrics, of shape (N, ...).
    """

    loss: Tensor
    predictions: Tensor | None = None
    targets: Tensor | None = None


class Draft:
    """Typed settings that plugins fill in before the core builds the real object. Two plugins must not set the same
    field. Mappings merge: there, two plugins must not set the same key.

    Args:
        defaults: Values of fields that the core derives from the machine, before any plugin writes.

    Attributes:
        writers: Field -> name of the plugin that set it.
    """

    def __init__(self, **defaults: Any) -> None:
        self.__dict__.update(defaults, _writer="", _where="", _written={}, writers={})

    def __setattr__(self, name: str, value: Any) -> None:
        from fastloop.errors import PluginError, did_you_mean

        fields = [key for cls in type(self).__mro__ for key in getattr(cls, "__annotations__", {})]
        if name not in fields:
            raise PluginError(
                f"{self._writer}: {type(self).__name__} has no field {name!r}.{did_you_mean(name, fields)}"
            )
        is_mapping = isinstance(value, Mapping)
        parts = {f"{name}[{key!r}]": item for key, item in value.items()} if is_mapping else {name: value}
        for field_name, part in parts.items():
            writer = self.writers.setdefault(field_name, self._writer)
            if writer != self._writer:
                raise PluginError(
                    f"{self._where}plugins {writer!r} and {self._writer!r} both set "
                    f"{type(self).__name__}.{field_name}. Remove one of them."
                )
            self._written[field_name] = part
        self.__dict__[name] = {**getattr(self, name), **value} if is_mapping else value

    def written_by(self, plugin: str) -> dict[str, Any]:
        """Field -> value, for the fields that one plugin set. A key of a mapping counts as a field:
        ``arguments['fused']``."""
        return {name: self._written[name] for name, writer in self.writers.items() if writer == plugin}

    _writer: str
    _where: str
    _written: dict[str, Any]
    writers: dict[str, str]


class AcceleratorDraft(Draft):
    """Arguments of Accelerate's ``Accelerator``. Handlers have the names of its attributes."""

    mixed_precision: str = "no"
    """``no``, ``bf16`` or ``fp16``."""
    ddp_handler: Any = None
    """``DistributedDataParallelKwargs``."""
    scaler_handler: Any = None
    """``GradScalerKwargs``."""
    init_handler: Any = None
    """``InitProcessGroupKwargs``."""
    timeout: float | None = None
    """Seconds that a process waits for another in an exchange, before the run ends with an error; None: torch's
    default."""

    def handlers(self) -> list[Any]:
        """The handlers that are set."""
        return [value for name, value in vars(self).items() if name.endswith("_handler")]


class DataLoaderDraft(Draft):
    """How batches are loaded."""

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
    """Put batches into page-locked memory, so that copies to the device do not block. Works without workers, too. True
    on CUDA."""
    timeout: float = 0.0
    """Seconds to wait for a batch before the run ends with an error; 0: no limit."""
    multiprocessing_context: str | None = None
    """``fork``, ``spawn`` or ``forkserver``; None: the platform's default."""
    worker_init_fn: Callable[[int], None] | None = None
    """Called in each worker with its number, before it reads."""
    pad_to_multiple_of: int | None = None
    """Tasks pad lengths to a multiple of this many tokens, so that shapes are few. The recipe's
    ``data.pad_to_multiple_of``; a plugin may set a default for it. None: lengths are not padded further."""
    arrange: Callable[[Any, list[int], int, Generator | None], list[int]] | None = None
    """``arrange(dataset, ids, batch_size, generator)`` returns ``ids`` in the order of training, the same on all
    processes. In training, ``ids`` have a random order, and ``generator`` supplies more random numbers. In evaluation,
    ``ids`` are sorted and ``generator`` is None. Each optimizer step takes the next ``batch_size`` samples; its
    processes and micro-steps take consecutive shares of them."""
    skip_unreadable: bool = False
    """Leave an unreadable sample of a map-style dataset out of its batch, instead of ending the run. Tasks also skip
    rows that they cannot read."""
    reader_class: Callable[[Any], Dataset[Any]] | None = None
    """Class of the dataset that a loader reads a map-style dataset through: a subclass of ``MapReader``. None:
    ``MapReader`` itself. ``skip-unreadable`` sets one that leaves unreadable samples out."""
    placing: Callable[[Iterable[list[Batch]], Callable[[list[Batch]], list[Batch]]], Iterable[list[Batch]]] | None = (
        None
    )
    """``placing(steps, place)`` yields the batches of ``steps`` on the device; ``place`` moves one step. None: move
    each step when the loop needs it."""
    split: Callable[[Any, list[int], int], list[list[int]]] | None = None
    """``split(dataset, ids, processes)`` divides a step's sample ids into micro-batches, instead of shares of
    ``micro_batch_size``. It must return every id once, and the same result on all processes. In each micro-step, every
    process takes the next micro-batch. Also used for evaluation."""

    same_batches: bool = False
    """All processes train on all samples of a step, because each computes a part of one model."""

    WORKERS = ("persistent_workers", "prefetch_factor", "timeout", "multiprocessing_context", "worker_init_fn")
    """Fields that are arguments of a loader with workers."""

    READING = ("num_workers", "pin_memory", "loader_class", *WORKERS)
    """Fields that may differ between splits."""

    def __init__(self, **defaults: Any) -> None:
        super().__init__(**defaults)
        self.__dict__["suggested"] = {}

    def suggest(self, split: str, **values: Any) -> None:
        """Suggest ``READING`` fields for one split. A plugin that sets such a field overrides it for every split, in
        any order. The draft's own fields have the values for ``train``."""
        self.suggested[split] = values
        if split == "train":
            self.__dict__.update({name: value for name, value in values.items() if name not in self.writers})

    def of(self, split: str) -> dict[str, Any]:
        """The final ``READING`` fields of one split."""
        suggested = {name: value for name, value in self.suggested.get(split, {}).items() if name not in self.writers}
        return {name: getattr(self, name) for name in self.READING} | suggested

    suggested: dict[str, dict[str, Any]]
    """Split -> the values that ``suggest`` set for it."""


class OptimizerDraft(Draft):
    """Arguments of the optimizer, in addition to the recipe's ``lr`` and ``weight_decay``. It starts with those in
    ``train.optimizer``, which plugins cannot change."""

    arguments: Mapping[str, Any] = MappingProxyType({})  # read-only, because all runs share this default
    """Additional keyword arguments of the optimizer's class, such as ``fused``."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(arguments=MappingProxyType(arguments))
        self.writers.update({f"arguments[{name!r}]": "train.optimizer" for name in arguments})
