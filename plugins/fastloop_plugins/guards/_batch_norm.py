"""Warns of batch norm over a part of a step's samples, and evaluates with the statistics that are exported.

Part of every run, like the core's own implementations of hooks; no recipe names it.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm

from fastloop import hookimpl

if TYPE_CHECKING:
    from fastloop import Run

logger = logging.getLogger("fastloop")


def batch_norms(run: Run) -> list[BatchNorm]:
    """The model's layers of batch norm."""
    return [module for module in run.unwrap_model().modules() if isinstance(module, BatchNorm)]


@hookimpl(trylast=True)
def check_run(run: Run) -> None:
    """Log a warning if batch norm normalizes over a part of a step's samples, which changes what is trained."""
    norms = [module for module in batch_norms(run) if module.training]
    causes = []
    if run.settings.split is not None:
        causes.append(f"plugin {run.settings.writers['split']!r}, which splits steps")
    elif run.loaders.micro_steps > 1:
        causes.append("train.micro_batch_size")
    part = "micro-batch" if causes else "process"
    if run.loaders.processes.world_size > 1 and not all(isinstance(module, nn.SyncBatchNorm) for module in norms):
        causes.append("the number of processes")
    if norms and causes:
        logger.warning(
            "batch norm uses only the samples of its own %s, so results depend on %s", part, " and ".join(causes)
        )


@hookimpl(tryfirst=True)
def before_evaluate(run: Run) -> None:
    """Give every process the running statistics of the main one, which checkpoints and exported models hold."""
    for module in batch_norms(run) if run.world_size > 1 else ():
        for buffer in module.buffers():
            torch.distributed.broadcast(buffer, src=0)
