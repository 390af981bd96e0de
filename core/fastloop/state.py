"""The state of a run, and the data that tasks, the loop and plugins exchange."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

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
        samples: Samples trained on so far, over all processes, without those that the collator left out.
        tokens: Tokens trained on so far, without padding, over all processes. A task whose step computes others than
            those of its batches may add their number, over all processes, in ``train_step``.
        metrics: Split (``validation``, ``test``) -> its newest metrics.
        evaluated_at: Step of the newest evaluation on ``validation``; -1 before the first.
        best: ``{"step", "metric", "mode", "value", "path", "metrics"}`` of the best checkpoint, when a plugin keeps
            one. ``mode``: ``min`` or ``max``, the better values. ``metrics`` are all of its evaluation.
        model_step: The step whose weights the model has, once a plugin has put back others than the last ones.
        model_weights: The kind of the model's weights: ``trained``, or ``averaged`` while a plugin has put averages in
            their place.
        evaluate_requested: Whether an evaluation is requested and not yet done.
        save_requested: Whether a save is requested and not yet done.
        stop_reason: Why training ends early; None while it continues.
        left_out: ``[epoch, epoch_samples]`` at the beginning of each step to skip after a rollback.
        unreadable: Unreadable samples so far, over all processes, each counted once: rows that a task left out when it
            built its datasets, and the samples of ``unreadable_ids``.
        unreadable_ids: Ids of the training samples that could not be read so far, over all processes. Their batches do
            not contain them.
    """

    step: int = 0
    epoch: int = 0
    epoch_samples: int = 0
    samples: int = 0
    tokens: int = 0
    metrics: dict[str, dict[str, float]] = field(default_factory=dict)
    evaluated_at: int = -1
    best: dict[str, Any] | None = None
    model_step: int | None = None
    model_weights: str = "trained"
    evaluate_requested: bool = False
    stop_reason: str | None = None
    left_out: list[list[int]] = field(default_factory=list)
    unreadable: int = 0
    unreadable_ids: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.save_requested = False

    def request_stop(self, reason: str) -> None:
        """Stop training after this step; in ``before_fit``, before the first one. ``summary.json`` contains the first
        reason given.

        The run then evaluates and exports, and a resume does not train on. ``Run._handle_signal`` stops a run that a
        resume continues.
        """
        self.stop_reason = self.stop_reason or reason

    def request_evaluate(self) -> None:
        """Evaluate after this step; in ``before_fit``, before the first one."""
        self.evaluate_requested = True

    def request_save(self) -> None:
        """Save a checkpoint after this step (and after its evaluation, if any)."""
        self.save_requested = True

    def _is_step_left_out(self) -> bool:
        """Whether the next step failed before a rollback, so that its samples are skipped."""
        return [self.epoch, self.epoch_samples] in self.left_out

    def count_step(self, totals: BatchTotals) -> None:
        """Add a finished step to the counters."""
        self.step += 1
        self.samples += totals.samples
        self.tokens += totals.tokens
        self.epoch_samples += totals.drawn

    def count_unreadable(self, ids: Iterable[int]) -> None:
        """Add samples that could not be read, unless an earlier epoch has found them, too."""
        known = set(self.unreadable_ids)
        for index in ids:
            if index not in known:
                known.add(index)
                self.unreadable_ids.append(index)
                self.unreadable += 1

    def skip_samples(self, totals: BatchTotals) -> None:
        """Count samples as drawn in the current epoch."""
        self.epoch_samples += totals.drawn

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON values, for a checkpoint."""
        return asdict(self)

    def restore(self, values: Mapping[str, Any]) -> None:
        """Restore the values of ``to_dict`` from a checkpoint, and drop a request to save."""
        vars(self).update(vars(State(**values)))


@dataclass(slots=True)
class Batch:
    """One micro-batch. A collator may return one to set ``inputs``, ``loss_weight``, ``samples`` and ``tokens``. The
    loader sets the other fields.

    Attributes:
        inputs: The argument ``batch`` of ``compute_loss``: any nesting of tensors; a text task gives it
            ``attention_mask`` only if the batch has padding and the model reads a mask.
        loss_weight: Samples or target tokens that the loss is the mean over, or the sum of their weights. 0: none, so
            the batch is no part of its step's loss, and its own may be NaN. -1, the default: ``samples``.
        samples: Number of samples in ``inputs``. A collator may leave it at 0, the default: then the loader counts the
            samples that the collator was given. In a batch of the loader, 0 means that this process has no share of the
            micro-step. Its ``inputs`` then repeat a sample with ``loss_weight`` 0, because the others wait for its
            gradients.
        tokens: Number of tokens without padding. With 0, the default, ``tokens_per_second`` is 0 too.
        ids: Sample ids: indices of a map-style dataset, positions in an iterable one. One for each sample drawn.
        worker: Index of the worker that read it; -1: the process itself.
        is_last_micro_batch: Whether it is its step's last on this process. Only for map-style datasets.
        unreadable: ``(id, reason)`` of each sample that could not be read; see ``Settings.skip_unreadable``.
        stream_digest: Digest of the first sample that its reader found in an iterable dataset: the same for all readers
            of an epoch. Only in the reader's first batch; else empty.
        drawn: Number of samples that the collator was given. It may have left some out.
    """

    inputs: Any
    loss_weight: float = -1
    samples: int = 0
    tokens: int = 0
    ids: tuple[int, ...] = ()
    worker: int = -1
    is_last_micro_batch: bool = False
    unreadable: tuple[tuple[int, str], ...] = ()
    stream_digest: str = ""
    drawn: int = 0
    # whether ``pin_memory`` gathers the small tensors of ``inputs``, and the tensor that it gathers them in
    _in_one_copy: bool = field(default=False, init=False, repr=False, compare=False)
    _buffer: Tensor | None = field(default=None, init=False, repr=False, compare=False)

    def pin_memory(self) -> Batch:
        """Called by torch's DataLoader when ``pin_memory`` is on."""
        from torch.utils.data._utils.pin_memory import pin_memory

        from fastloop.runtime.device_copies import gather_small

        if self._in_one_copy:
            self.inputs, self._buffer = gather_small(self.inputs)
        # tensors in the buffer stay where they are
        self.inputs = pin_memory(self.inputs)  # type: ignore[no-untyped-call]
        return self


class BatchTotals(NamedTuple):
    """Sums over the micro-batches of a step; see ``Batch``.

    Attributes:
        weight: Sum of ``loss_weight``.
        samples: Number of samples.
        tokens: Number of tokens without padding.
        drawn: Number of samples that the step takes from the epoch: read by the collator, or unreadable.
        unreadable: Number of samples that could not be read.
    """

    weight: float
    samples: int
    tokens: int
    drawn: int
    unreadable: int

    @classmethod
    def read(cls, totals: Tensor) -> BatchTotals:
        """The totals in a tensor of shape (5,), float64."""
        weight, *counts = totals.tolist()
        return cls(weight, *map(int, counts))


@dataclass(slots=True)
class Output:
    """The result of a task for one batch.

    Attributes:
        loss: 0-dim tensor: the mean over the batch's ``loss_weight``.
        predictions: First argument of the metrics, of shape (N, ...): evaluation concatenates several batches. None
            without metrics.
        targets: Second argument of the metrics, of shape (N, ...).
    """

    loss: Tensor
    predictions: Tensor | None = None
    targets: Tensor | None = None
