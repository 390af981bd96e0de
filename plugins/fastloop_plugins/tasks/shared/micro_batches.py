"""Measures whether the loss of a batch is the mean over its samples, which micro-batches, processes and the batches of
an evaluation rely on."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, Any

from fastloop import Problem
from fastloop.runtime.random_states import preserve_random_states

if TYPE_CHECKING:
    from pluggy import HookImpl
    from torch import nn

    from fastloop import Batch, Plugin, Run
    from fastloop.data.loader import Loader

logger = logging.getLogger("fastloop")

MOST = 8
"""Micro-batches of the first step that are measured at most. One alone may have halves that happen to agree."""
TOLERANCE = 0.02
"""Relative difference of losses above which a warning follows. The rounding of bf16 is below 0.005."""


def warn_of_other_means(run: Run, batches: list[Batch], task: Plugin) -> None:
    """Compare the loss of some micro-batches with the mean loss of their halves, and warn if one differs. For example,
    a mean over the positions of a mask gives a micro-batch with few of them too much weight, and so does a mean by
    weights of classes.

    Nothing is measured if a step has one micro-batch on one process and each evaluation one batch, if a collator
    counted the targets, if another plugin computes the loss, or if the batch cannot be cut: a tensor has no dimension
    for its samples, or a strategy shards the weights.

    Args:
        task: The task. Its own implementation of the hook is called, because wrappers of the hook may count the calls.
    """
    from torch.distributed.tensor import DTensor

    from fastloop.probing import probing

    own: HookImpl | None = None
    for implementation in run.plugins.manager.hook.compute_loss.get_hookimpls():
        if implementation.wrapper:
            continue
        if implementation.plugin is not task:
            return
        own = implementation
    if own is None:
        return
    if run.strategy.sets_precision:
        return  # only its wrapper casts the inputs, and a wrapper may exchange data, which not every process would do
    keys = []
    if len(batches) > 1 or run.world_size > 1:
        keys.append("train.micro_batch_size")
    if any(_has_several_batches(loader) for loader in run.eval_loaders.values()):
        keys.append("train.eval_batch_size")
    if not keys:
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
        with preserve_random_states(), probing(model):
            whole = _loss(own, run, model, batch.inputs)
            first = _loss(own, run, model, halves[0])
            second = _loss(own, run, model, halves[1])
        mean = (first * middle + second * (batch.samples - middle)) / batch.samples
        if math.isnan(whole - mean) or abs(whole - mean) <= TOLERANCE * abs(whole):
            continue
        logger.warning(
            Problem(
                f"the loss of a micro-batch is not the mean over its samples: found {whole:.4g} for "
                f"{batch.samples} samples, and {mean:.4g} as the mean of its halves. So results depend on "
                f"{', '.join(keys)} and the number of processes.",
                code="loss-not-a-mean",
                place=run.recipe.where,
                remedy=(
                    "Return the mean of each sample's loss, or let the collator return a fastloop.Batch with "
                    "the number of counted targets as loss_weight."
                ),
            )
        )
        return


def _loss(implementation: HookImpl, run: Run, model: nn.Module, inputs: Any) -> float:
    """The loss by one implementation of the hook. NaN, which compares with nothing, if it returns none: the run refuses
    that in its place."""
    arguments = {"run": run, "model": model, "batch": inputs}
    output: Any = implementation.function(*(arguments[name] for name in implementation.argnames))
    return math.nan if output is None else float(output.loss)


def _has_several_batches(loader: Loader) -> bool:
    """Whether an evaluation of this split reads more than one batch, as far as it is known before."""
    steps = loader.steps_per_epoch()
    return steps is None or steps > 1


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
