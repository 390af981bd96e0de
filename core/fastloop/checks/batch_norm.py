"""Warns of batch norm over a part of a step's samples, and refuses it over one sample."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm

from fastloop.data.sampler import MicroBatchIds
from fastloop.errors import RecipeError
from fastloop.plugins.plugin import hookimpl
from fastloop.probing import probing, reshard
from fastloop.problem import Problem
from fastloop.runtime.random_states import preserve_random_states

if TYPE_CHECKING:
    from fastloop.run import Run

logger = logging.getLogger("fastloop")

TORCH_NEEDS_TWO = "Expected more than 1 value per channel"
"""The beginning of torch's error for batch norm over one value."""


def batch_norms(run: Run) -> list[BatchNorm]:
    """The model's layers of batch norm."""
    return [module for module in run.unwrap_model().modules() if isinstance(module, BatchNorm)]


@hookimpl(trylast=True)
def check_run(run: Run) -> None:
    """Log a warning if batch norm normalizes over a part of a step's samples, which changes what is trained.

    Raises:
        RecipeError: A process computes a sample alone, from which this model's batch norm cannot compute a variance.
    """
    norms = [module for module in batch_norms(run) if module.training]
    causes = []
    if run.settings.split_step is not None:
        causes.append(f"plugin {run.settings.writers['split_step']!r}, which splits steps")
    elif run.loaders.micro_steps > 1:
        causes.append("train.micro_batch_size")
    part = "micro-batch" if causes else "process"
    if run.loaders.processes.world_size > 1 and not all(isinstance(module, nn.SyncBatchNorm) for module in norms):
        causes.append("the number of processes")
    if norms and causes:
        logger.warning(
            Problem(
                f"batch norm uses only the samples of its own {part}, so results depend on {' and '.join(causes)}.",
                code="batch-dependent",
            )
        )
    if norms and _has_lone_sample(run) and _fails_on_one_sample(run, norms):
        _refuse_lone_sample(run)


@hookimpl(tryfirst=True)
def recover(run: Run, error: Exception, split: str | None) -> None:
    """Explain the error of a sample that batch norm got alone in training. ``check_run`` does not know the steps of a
    stream, of a plugin that splits them, and of a collator that leaves samples out.

    Raises:
        RecipeError: The error is torch's for batch norm over one sample.
    """
    if split is None and str(error).startswith(TORCH_NEEDS_TWO):
        raise RecipeError(
            f"step {run.state.step + 1} computes one sample alone, and the model's batch norm needs two samples at "
            "once.",
            code="single-sample",
            place=f"{run.recipe.where}: train.batch_size",
            remedy=(
                "If an epoch's last step has too few, set train.drop_last: true to leave it out. Otherwise use larger "
                "micro-batches."
            ),
        ) from error


def _has_lone_sample(run: Run) -> bool:
    """Whether a process computes one sample alone in a step that the run reaches. Only for a map-style dataset whose
    steps no plugin splits.

    With 60 samples, batches of 8 and micro-batches of 4, the last step has one micro-batch of 4. With two processes,
    the second one repeats its first sample, alone.
    """
    sampler = run.train_loader.sampler
    processes = run.loaders.processes.world_size
    if sampler is None or run.settings.split_step is not None:
        return False
    last_step = sampler.size % sampler.batch_size
    epoch_ends = run.total_steps is None or run.total_steps >= (run.train_loader.steps_per_epoch() or 0)
    if sampler.micro_batch_size == 1:
        return True
    if not last_step or not epoch_ends:
        return False
    micro_batches = math.ceil(last_step / sampler.micro_batch_size)
    some_process_repeats = micro_batches % processes != 0
    return some_process_repeats or last_step % sampler.micro_batch_size == 1


def _fails_on_one_sample(run: Run, norms: list[BatchNorm]) -> bool:
    """Try the loss of one sample with batch norm in train mode. The model and the random states stay as they were.

    Other errors are left to the run, which reports them where they belong."""
    sampler = run.train_loader.sampler
    loader = run.train_loader.loader
    assert sampler is not None
    reader: Any = loader.dataset
    problem = ""
    try:
        states = preserve_random_states(own=run.loaders.own_generators)
        with states, probing(run.unwrap_model()), run.scalars.paused():
            samples = reader.__getitems__(MicroBatchIds(sampler.order()[:1]))
            ((batch,),) = run.to_device([[loader.collate_fn(samples)]])
            for module in norms:
                module.train()
            run.hooks.compute_loss(run=run, model=run.model, batch=batch.inputs)
    except Exception as error:
        problem = str(error)
    reshard(run.model)
    return problem.startswith(TORCH_NEEDS_TWO)


def _refuse_lone_sample(run: Run) -> None:
    train = run.recipe.train
    sampler = run.train_loader.sampler
    processes = run.loaders.processes.world_size
    assert sampler is not None
    if sampler.micro_batch_size == 1:
        raise RecipeError(
            "found 1, and the model's batch norm needs two samples at once.",
            code="single-sample",
            place=f"{run.recipe.where}: train.micro_batch_size",
            remedy="Use micro-batches of two samples or more.",
        )
    rest = sampler.size % sampler.batch_size
    shared = f", in micro-batches of {sampler.micro_batch_size} on {processes} processes" if processes > 1 else ""
    raise RecipeError(
        f"{sampler.size} samples in batches of {train.batch_size}{shared}, leave {rest} for an epoch's last step, and "
        "a process computes one of them alone. The model's batch norm needs two samples at once.",
        code="single-sample",
        place=f"{run.recipe.where}: train.batch_size",
        remedy="Set train.drop_last: true to leave these out, or use another batch size.",
    )
