"""A warning if batch norm normalizes over a part of a step's samples, which changes what is trained."""

from __future__ import annotations

import logging

from torch import nn

from fastloop import Run, hookimpl

log = logging.getLogger("fastloop")


@hookimpl
def check_run(run: Run) -> None:
    """Log the warning."""
    norms = [
        module
        for module in run.unwrap_model().modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training
    ]
    causes = []
    if run.settings.split is not None:
        causes.append(f"plugin {run.settings.writers['split']!r}, which splits steps")
    elif run.loaders.micro_steps > 1:
        causes.append("train.micro_batch_size")
    part = "micro-batch" if causes else "process"
    if run.loaders.processes.world_size > 1 and not all(isinstance(module, nn.SyncBatchNorm) for module in norms):
        causes.append("the number of processes")
    if norms and causes:
        log.warning(
            "batch norm uses only the samples of its own %s, so results depend on %s", part, " and ".join(causes)
        )
