"""Eval mode, and the results that ``loop.evaluation_loop`` collects. They stay on the device until the last batch."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple, SupportsFloat

import torch
from torch import Tensor, nn

from fastloop.errors import MetricError, UsageError
from fastloop.metric_states import align_states
from fastloop.problem import Problem, agree, counted
from fastloop.runtime.compiled_modules import COMPILED
from fastloop.splits import VALIDATION
from fastloop.undefined_metrics import ignored_target, misreads_nan, why_undefined

if TYPE_CHECKING:
    from torchmetrics import MetricCollection

    from fastloop.distributed.processes import Processes
    from fastloop.state import Output

log = logging.getLogger("fastloop")

BUFFER_BYTES = 64 * 2**20
"""Bytes of predictions and targets to collect before a metric update. Most evaluations need one update; large logits do
not fill the device."""
WRAPPED = ("module", COMPILED)
"""Attributes of DDP, DeepSpeed's engine and torch's compiled modules that hold the model inside."""


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put the model in eval mode inside the block, and restore the mode of each module afterwards.

    Args:
        model: As ``run.model``. Wrappers get the mode, too: DeepSpeed's engine passes it on, but does not keep it.
    """
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    for wrapper in _wrappers(model):
        wrapper.training = False
    try:
        yield
    finally:
        restore_modes(modes)


def restore_modes(modes: Sequence[tuple[nn.Module, bool]]) -> None:
    """Put each module back into train or eval mode.

    A class with a ``train`` of its own does more than to set the mode: LeViT drops the attention biases that it
    computed in eval mode, and a LoRA layer may take its update out of the weights. So its method is called.

    Args:
        modes: Modules, each before those that it holds, as in ``modules()``; and whether it was in train mode.
    """
    for module, training in modes:
        if module.training != training and type(module).train is not nn.Module.train:
            module.train(training)
    for module, training in modes:  # the methods also set the modes of the modules inside
        module.training = training


def keeping_casts(world_size: int) -> AbstractContextManager[None]:
    """Let the autocast regions inside keep their low-precision copies of the weights until the block ends.

    Autocast drops them when its outermost region ends, which is one forward pass: each batch would cast every weight
    again, up to a tenth of a prediction in bf16 on a CPU. Here, that region is the block, with the settings
    around it, so nothing is computed differently. The block must not change weights.

    Args:
        world_size: The number of processes. With several, this does nothing: a strategy may gather the weights anew.
    """
    if world_size > 1:
        return nullcontext()
    return torch.autocast("cpu", enabled=torch.is_autocast_enabled("cpu"))


def _wrappers(model: nn.Module) -> Iterator[nn.Module]:
    """The modules around the model as built, outermost first: for ``DDP(OptimizedModule(model))``, both."""
    children = dict(model.named_children())
    for name in WRAPPED:
        if name in children:
            yield model
            yield from _wrappers(children[name])


class LocalResults(NamedTuple):
    """The results of an evaluation on one process.

    Attributes:
        loss_sum: Sum of each batch's loss times its weight.
        weight: Sum of the weights.
        metrics: Metric -> its value.
    """

    loss_sum: float
    weight: float
    metrics: dict[str, float]


class EvaluationResults:
    """Losses and metrics of an evaluation on this process.

    Metrics are updated with the concatenated predictions of several batches. Torchmetrics guarantees the same result
    for any division into updates. Predictions that are not tensors, or whose shape beyond the first dimension changes,
    start a new update.

    Args:
        where: The recipe, for messages.
        split: The evaluated split, for messages.
        processes: The processes that share the split; None: this one evaluates all of it.

    Attributes:
        samples: The number of samples so far, on this process.

    Raises:
        MetricError: A metric failed, or its value is not one number.
        ProcessesDisagree: Torchmetrics cannot gather the states of a metric.
    """

    def __init__(
        self,
        metrics: MetricCollection | None,
        where: str = "recipe",
        split: str = VALIDATION,
        processes: Processes | None = None,
    ) -> None:
        self.metrics = metrics
        self.where = where
        self.split = split
        self.processes = processes
        self.newest: Output | None = None
        self.losses: list[Tensor] = []
        self.weights: list[float] = []
        self.waiting: list[tuple[Tensor, Tensor]] = []
        self.bytes = 0
        self.samples = 0
        # target that a metric ignores -> one number for each update: the rows of predictions that hold a NaN. Rows with
        # this target do not count.
        self.nan_rows: dict[int | None, list[Tensor]] = {}
        if metrics is not None:
            metrics.reset()
            self.nan_rows = {ignored_target(metric): [] for metric in metrics.values(copy_state=False)}

    def add(self, output: Output, weight: float, samples: int) -> None:
        """Add the output of a batch. Metrics ignore a batch without samples: its process only joined the collective
        operations."""
        self.newest = output
        self.samples += samples
        self.losses.append(output.loss.detach())
        self.weights.append(weight)
        if self.metrics is None or output.predictions is None or not samples:
            return
        pair = (output.predictions, output.targets)
        if self.waiting and _signature(*pair) != _signature(*self.waiting[0]):
            self._update()
        if _signature(*pair) is None:
            self._count_nan(*pair)
            self._measure(self.metrics.update, *pair)
            return
        assert output.targets is not None
        self.waiting.append((output.predictions, output.targets))
        self.bytes += output.predictions.nbytes + output.targets.nbytes
        if self.bytes >= BUFFER_BYTES:
            self._update()

    def _update(self) -> None:
        if self.waiting and self.metrics is not None:
            predictions = torch.cat([predictions for predictions, _ in self.waiting])
            targets = torch.cat([targets for _, targets in self.waiting])
            self._count_nan(predictions, targets)
            self._measure(self.metrics.update, predictions, targets)
        self.waiting = []
        self.bytes = 0

    def _count_nan(self, predictions: Any, targets: Any) -> None:
        """Count the rows of predictions, (rows,) or (rows, columns), that hold a NaN.

        Where metrics ignore a target, the rows with this target do not count, if there is one target for each row.
        Otherwise, and for predictions of other shapes, nothing is counted: metrics may ignore some positions.
        """
        if not isinstance(predictions, Tensor) or not predictions.is_floating_point():
            return
        if predictions.dim() not in (1, 2):
            return
        is_nan = predictions.isnan()
        if is_nan.dim() == 2:
            is_nan = is_nan.any(1)
        for ignored, counts in self.nan_rows.items():
            if ignored is None:
                counts.append(is_nan.sum())
            elif isinstance(targets, Tensor) and targets.shape == is_nan.shape:
                counts.append((is_nan & (targets != ignored)).sum())

    def _measure(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function of the metrics. Its error is raised as one that names the split."""
        try:
            return function(*arguments)
        except UsageError:
            raise
        except Exception as error:
            raise MetricError(
                f"a metric failed for {self.split}: {type(error).__name__}: {error}",
                self.newest,
                {},
                code="metric-failed",
                place=self.where,
            ) from error

    def read(self) -> LocalResults:
        """The results of this process. Torchmetrics reduces the metrics over processes. A metric that the split does
        not define, such as AUROC of one class, is NaN, with a warning.

        The host reads the device once, and with several processes once for each count of NaN. A metric may read it more
        often."""
        self._update()
        if self.metrics is not None and self.processes is not None:
            align_states(self.metrics, self.processes, self.where, self.split)
        nan_totals = self._sum_nan_rows()  # before the metrics, whose computation may fail on a single process
        with warnings.catch_warnings(record=True) as recorded:
            warnings.simplefilter("always")
            computed = self._compute()
        losses, metrics, nan_rows = self._read_device(computed, nan_totals)
        reasons = self._find_undefined(metrics, nan_rows)
        for name, reason in reasons.items():
            log.warning(
                Problem(
                    f"the metric {name!r} is NaN for {self.split}: {reason}.", code="undefined-metric", place=self.where
                )
            )
        if not reasons:  # the log explains it by the metric's name
            for warning in recorded:
                warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
        loss_sum = 0.0
        for loss, weight in zip(losses, self.weights, strict=True):
            if weight:  # a mean over no target is NaN
                loss_sum += loss * weight
        return LocalResults(loss_sum, sum(self.weights), metrics | dict.fromkeys(reasons, math.nan))

    def _compute(self) -> dict[str, Any]:
        """Metric -> its value, a number or a tensor with one element.

        Raises:
            MetricError: A metric failed, or its value is not one number.
        """
        if self.metrics is None:
            return {}
        values = {str(name): value for name, value in self._measure(self.metrics.compute).items()}
        for name, value in values.items():
            is_number = value.numel() == 1 if isinstance(value, Tensor) else isinstance(value, SupportsFloat)
            if not is_number:
                raise MetricError(
                    f"the metric {name!r} does not give one number for {self.split}.",
                    self.newest,
                    values,
                    code="metric-not-a-number",
                    place=self.where,
                )
        return values

    def _read_device(
        self, computed: Mapping[str, Any], nan_totals: Mapping[int | None, Tensor]
    ) -> tuple[list[float], dict[str, float], dict[int | None, int]]:
        """The loss of each batch, the values of the metrics, and the numbers of rows with NaN. Those on the device of
        the losses are read in one transfer: ``[loss, loss, loss, accuracy, f1, rows]``."""
        losses = torch.stack(self.losses) if self.losses else torch.zeros(0)
        wide = torch.float32 if losses.device.type == "mps" else torch.float64  # represents narrower dtypes exactly
        values = [*computed.values(), *nan_totals.values()]
        together = []
        for value in values:
            if _is_scalar_on(value, losses.device):
                together.append(value.to(wide)[None])
        transferred: list[float] = torch.cat([losses.to(wide), *together]).tolist()
        of_values = iter(transferred[len(self.losses) :])
        numbers = []
        for value in values:
            numbers.append(next(of_values) if _is_scalar_on(value, losses.device) else float(value))
        metrics = dict(zip(computed, numbers[: len(computed)], strict=True))
        nan_rows = {}
        for ignored, number in zip(nan_totals, numbers[len(computed) :], strict=True):
            nan_rows[ignored] = int(number)
        return transferred[: len(self.losses)], metrics, nan_rows

    def _sum_nan_rows(self) -> dict[int | None, Tensor]:
        """Target that metrics ignore -> the other rows of predictions that hold a NaN, on all processes. The values of
        metrics are those of all processes, too. With one process, the host does not wait for the device."""
        totals: dict[int | None, Tensor] = {}
        for ignored, counts in self.nan_rows.items():
            total = torch.stack(counts).sum() if counts else torch.tensor(0)
            if self.processes is not None and self.processes.world_size > 1:
                total = self.processes.all_reduce_sum(total.cpu())
            totals[ignored] = total
        return totals

    def _find_undefined(self, values: Mapping[str, float], nan_rows: Mapping[int | None, int]) -> dict[str, str]:
        """Metric -> why the split, or its predictions, do not define it.

        Args:
            nan_rows: Target that metrics ignore -> the other rows of predictions that hold a NaN, on all processes.
        """
        if self.metrics is None:
            return {}
        reasons = {
            name: "its computation does not give a number" for name, value in values.items() if math.isnan(value)
        }
        for name, metric in self.metrics.items(copy_state=False):
            if name in values and not math.isnan(values[name]):
                reason = self._measure(why_undefined, metric, values[name])
                count = nan_rows[ignored_target(metric)]
                if count and misreads_nan(metric):
                    reason = f"{counted(count, 'row')} of predictions {agree(count, 'holds', 'hold')} NaN"
                if reason is not None:
                    reasons[str(name)] = reason
        return reasons


def _is_scalar_on(value: Any, device: torch.device) -> bool:
    """Whether a value is a tensor without dimensions on a device."""
    return isinstance(value, Tensor) and value.dim() == 0 and value.device == device


def _signature(predictions: Any, targets: Any) -> tuple[Any, ...] | None:
    """Batches with equal signatures can be concatenated. None: the batch cannot be concatenated."""
    if not all(isinstance(value, Tensor) and value.dim() for value in (predictions, targets)):
        return None
    return tuple((value.shape[1:], value.dtype, value.device) for value in (predictions, targets))
