"""Checks that every process draws the samples in the same order, for samplers and arrangements of users and plugins.

A run with one process, or in fastloop's default order, needs no check.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastloop.errors import UsageError
from fastloop.plugins.plugin import hookimpl
from fastloop.splits import TRAIN

if TYPE_CHECKING:
    from fastloop.run import Run


@hookimpl(trylast=True)
def check_run(run: Run) -> None:
    """Compare the evaluated splits. They have one order."""
    orders = {}
    for split, loader in run.eval_loaders.items():
        if loader.sampler is not None:
            orders[split] = loader.sampler.fingerprint()
    compare_orders(run, orders)


@hookimpl(trylast=True)
def before_epoch(run: Run) -> None:
    """Compare the training split in this epoch."""
    sampler = run.train_loader.sampler
    if sampler is not None and run.loaders.processes.world_size > 1:
        compare_orders(run, {TRAIN: sampler.fingerprint(run.state.epoch)}, f" in epoch {run.state.epoch}")


def compare_orders(run: Run, own: dict[str, str], when: str = "") -> None:
    """Compare the fingerprints of splits over the processes. Every process must call it.

    Raises:
        UsageError: The processes have different orders.
    """
    orders = run.loaders.processes.all_gather_object(own)
    for split in own:
        if len({order[split] for order in orders}) > 1:
            raise UsageError(
                f"the {split} split's sampler gives another order on each process{when}. It must not depend on the "
                "process: not on its rank, nor on the order of a set of strings (PYTHONHASHSEED).",
                code="random-order",
            )
