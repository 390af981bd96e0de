"""Measures whether the loss of a batch is the mean over its samples, which micro-batches and processes rely on."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Protocol

from fastloop import Problem
from fastloop.runtime.random_states import preserve_random_states

if TYPE_CHECKING:
    from torch import nn

    from fastloop import Batch, Output, Run

logger = logging.getLogger("fastloop")

MOST = 8
"""Micro-batches of the first step that are measured at most. One alone may have halves that happen to agree."""
TOLERANCE = 0.02
"""Relative difference of losses above which a warning follows. The rounding of bf16 is below 0.005."""


class ComputesLoss(Protocol):
    """A task whose loss depends on the model and the batch alone."""

    def compute_loss(self, model: nn.Module, batch: Any) -> Output:
        """See the hook."""


def warn_of_other_means(run: Run, batches: list[Batch], task: ComputesLoss) -> None:
    """Compare the loss of some micro-batches with the mean loss of their halves, and warn if one differs. For example,
    a mean over the positions of a mask gives a micro-batch with few of them too much weight, and so does a mean by
    weights of classes.

    Nothing is measured if a step has one micro-batch on one process, if a collator counted the targets, if another
    plugin computes the loss, or if the batch cannot be cut: a tensor has no dimension for its samples, or a strategy
    shards the weights.

    Args:
        task: The task. Its own method is called, because wrappers of the hook may count the calls.
    """
    import torch
    from torch.distributed.tensor import DTensor

    from fastloop.probing import probing

    implementations = run.plugins.manager.hook.compute_loss.get_hookimpls()
    for implementation in implementations:
        if implementation.plugin is not task and not implementation.wrapper:
            return
    if run.strategy.sets_precision:
        return  # only its wrapper casts the inputs, and a wrapper may exchange data, which not every process would do
    if len(batches) == 1 and run.world_size == 1:
        return
    model = run.unwrap_model()
    if any(isinstance(parameter, DTensor) or not parameter.numel() for parameter in model.parameters()):
        return
    for batch in batches[:MOST]:
        if batch.samples < 2 or batch.loss_weight != batch.samples:
            continue
        middle = batch.samples // 2
        halves = _cut(batch.inputs, batch.samples, middle)
        if halves is None:
            return
        with preserve_random_states(), probing(model), torch.no_grad():
            whole = float(task.compute_loss(model, batch.inputs).loss)
            first, second = (float(task.compute_loss(model, half).loss) for half in halves)
        mean = (first * middle + second * (batch.samples - middle)) / batch.samples
        if abs(whole - mean) <= TOLERANCE * abs(whole):
            continue
        logger.warning(
            Problem(
                f"the loss of a micro-batch is not the mean over its samples: found {whole:.4g} for "
                f"{batch.samples} samples, and {mean:.4g} as the mean of its halves. So results depend on "
                "train.micro_batch_size and the number of processes.",
                code="loss-not-a-mean",
                place=run.recipe.where,
                remedy=(
                    "Return the mean of each sample's loss, or let the collator return a fastloop.Batch with "
                    "the number of counted targets as loss_weight."
                ),
            )
        )
        return


def _cut(inputs: Any, samples: int, middle: int) -> tuple[Any, Any] | None:
    """Cut the tensors of a batch after sample ``middle``. None: one of its values has no dimension of the samples."""
    import torch
    from torch.utils._pytree import tree_flatten, tree_unflatten

    values, structure = tree_flatten(inputs)
    first = []
    second = []
    for value in values:
        if not isinstance(value, torch.Tensor) or not value.dim() or len(value) != samples:
            return None
        first.append(value[:middle])
        second.append(value[middle:])
    return tree_unflatten(first, structure), tree_unflatten(second, structure)
