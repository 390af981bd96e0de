"""Measures whether the loss of a batch is the mean over its samples, which micro-batches, processes and the batches of
an evaluation rely on."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from fastloop import Problem
from fastloop_plugins.tasks.shared.collate import count_for_loss

if TYPE_CHECKING:
    from torch import nn

    from fastloop import Batch, Output, Run
    from fastloop.data import Loader

logger = logging.getLogger("fastloop")

MOST = 8
"""Micro-batches of the first step that are measured at most. One alone may have halves that happen to agree."""
TOLERANCE = 0.02
"""Relative difference of losses above which a warning follows. The rounding of bf16 is below 0.005."""


class ComputesLoss(Protocol):
    """A task whose loss depends on the model and the batch alone."""

    criterion: Any
    """The loss function; None: the model computes the loss."""

    def compute_loss(self, model: nn.Module, batch: Any) -> Output:
        """See the hook."""


@dataclass(frozen=True)
class MeasuredLoss:
    """The loss of a micro-batch.

    Attributes:
        whole: That of all samples.
        mean_of_halves: The mean of its halves' losses, weighted by their samples.
        samples: Number of samples.
    """

    whole: float
    mean_of_halves: float
    samples: int

    @property
    def is_mean(self) -> bool:
        """Whether both agree. A loss that is infinite compares with nothing."""
        if math.isinf(self.whole):
            return True
        return abs(self.whole - self.mean_of_halves) <= TOLERANCE * abs(self.whole)


def warn_of_other_means(run: Run, batches: list[Batch], task: ComputesLoss) -> None:
    """Compare the loss of some micro-batches with the mean loss of their halves, and warn if one differs. For example,
    a mean over the positions of a mask gives a micro-batch with few of them too much weight, and so does a mean by
    weights of classes.

    Nothing is measured if a step has one micro-batch on one process and each evaluation one batch, if a collator
    counted the targets, if another plugin computes the loss, if the loss of the same batch differs between two calls,
    or if the batch cannot be cut: a tensor has no dimension for its samples, or a strategy shards the weights.

    The model, the batches, the random states, and the generators that the model and the loss function keep stay as they
    were. Every process must call it. All of them compute the same number of losses, because a loss may exchange data.

    Args:
        task: The task. Its own method is called, because wrappers of the hook may count the calls.
    """
    implementations = run.plugins.manager.hook.compute_loss.get_hookimpls()
    for implementation in implementations:
        if implementation.plugin is not task and not implementation.wrapper:
            return
    if run.strategy.sets_precision:
        return  # only its wrapper casts the inputs, and a wrapper may exchange data, which not every process would do
    keys = _sizes_that_matter(run, batches, task)
    if not keys:
        return
    model = run.unwrap_model()
    for index in _measurable_indices(run, batches[:MOST]):
        of_processes = run.processes.all_gather_object(_measure(task, model, batches[index]))
        if None in of_processes:
            return
        for measured in of_processes:
            if not measured.is_mean:
                _warn(run, measured, keys)
                return


def _warn(run: Run, measured: MeasuredLoss, keys: list[str]) -> None:
    logger.warning(
        Problem(
            f"the loss of a micro-batch is not the mean over its samples: found {measured.whole:.4g} for "
            f"{measured.samples} samples, and {measured.mean_of_halves:.4g} as the mean of its halves. So results "
            f"depend on {', '.join(keys)} and the number of processes.",
            code="loss-not-a-mean",
            place=run.recipe.where,
            remedy=(
                "Return the mean of each sample's loss, or let the collator return a fastloop.Batch with "
                "the number of counted targets as loss_weight."
            ),
        )
    )


def _measurable_indices(run: Run, batches: list[Batch]) -> list[int]:
    """The indices of the micro-batches that every process can measure, up to the first one that cannot be cut. None, if
    a strategy shards the weights: then a parameter may be empty in one process alone."""
    own = set[int]()
    candidates = [] if _are_sharded(run.unwrap_model()) else batches
    for index, batch in enumerate(candidates):
        if batch.samples < 2 or batch.loss_weight != batch.samples:
            continue
        if not _can_cut(batch):
            break
        own.add(index)
    of_processes: list[set[int]] = run.processes.all_gather_object(own)
    return sorted(set.intersection(*of_processes))


def _are_sharded(model: nn.Module) -> bool:
    """Whether this process lacks a part of the weights. Other processes may have all of them."""
    from torch.distributed.tensor import DTensor

    return any(isinstance(parameter, DTensor) or not parameter.numel() for parameter in model.parameters())


def _sizes_that_matter(run: Run, batches: list[Batch], task: ComputesLoss) -> list[str]:
    """The keys of sizes that change results if the loss is not the mean over samples.

    Evaluations alone do not count for the losses of torch whose targets are counted: these are means.
    """
    keys = []
    if len(batches) > 1 or run.world_size > 1:
        keys.append("train.micro_batch_size")
    elif count_for_loss(task.criterion) is not None:
        return []
    if any(_has_several_batches(loader) for loader in run.eval_loaders.values()):
        keys.append("train.eval_batch_size")
    return keys


def _has_several_batches(loader: Loader) -> bool:
    """Whether an evaluation of this split reads more than one batch, as far as it is known before."""
    steps = loader.steps_per_epoch()
    return steps is None or steps > 1


def _measure(task: ComputesLoss, model: nn.Module, batch: Batch) -> MeasuredLoss | None:
    """The losses of a micro-batch and of its halves. None: they cannot be compared, because the loss differs between
    two calls, such as one with noise, or because one of the calls fails. A step that fails, too, reports its error.

    The three losses begin with the same random states: a loss that draws one branch for a whole batch draws the same.
    """
    from fastloop.probing import probing

    middle = batch.samples // 2
    try:
        with probing(model, task.criterion):
            whole = _compute(task, model, batch, 0, batch.samples)
            again = _compute(task, model, batch, 0, batch.samples)
        with probing(model, task.criterion):
            first = _compute(task, model, batch, 0, middle)
        with probing(model, task.criterion):
            second = _compute(task, model, batch, middle, batch.samples)
    except Exception:  # the states of this model cannot be read or restored
        return None
    if whole is None or first is None or second is None:
        return None
    if again != whole:  # also if both are NaN
        return None
    mean_of_halves = (first * middle + second * (batch.samples - middle)) / batch.samples
    return MeasuredLoss(whole, mean_of_halves, batch.samples)


def _compute(task: ComputesLoss, model: nn.Module, batch: Batch, start: int, stop: int) -> float | None:
    """The loss of samples ``start`` to ``stop``, without the last. None: the call fails, so that the next calls follow.

    The call gets a copy, because a model may write to its inputs, or take values out of a dict.
    """
    from torch.utils._pytree import tree_map

    try:
        inputs = tree_map(lambda tensor: tensor[start:stop].clone(), batch.inputs)
        return float(task.compute_loss(model, inputs).loss)
    except Exception:  # a loss may need a certain size of batches, or gradients
        return None


def _can_cut(batch: Batch) -> bool:
    """Whether each value of a batch is a tensor whose first dimension is that of the samples."""
    import torch
    from torch.utils._pytree import tree_leaves

    for value in tree_leaves(batch.inputs):
        if not isinstance(value, torch.Tensor) or not value.dim() or len(value) != batch.samples:
            return False
    return True
