"""Weights of the processes of a run: of each one, and their mean. Every process must call these functions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastloop import Run
    from torch import Tensor


def mean(run: Run) -> dict[str, Tensor]:
    """The mean of weights and float buffers over the processes, as new tensors. Other buffers are those of this
    process."""
    own = {name: tensor.clone() for name, tensor in run.unwrap_model().state_dict().items()}
    return {
        name: run.processes.all_reduce_mean(tensor) if tensor.is_floating_point() else tensor
        for name, tensor in own.items()
    }


def average(run: Run) -> None:
    """Replace the weights of each process by their mean."""
    run.unwrap_model().load_state_dict(mean(run))


@contextmanager
def averaged(run: Run) -> Iterator[None]:
    """Use the mean inside the block, and restore the weights of each process afterwards."""
    own = {name: tensor.clone() for name, tensor in run.unwrap_model().state_dict().items()}
    try:
        average(run)
        yield
    finally:
        run.unwrap_model().load_state_dict(own)


def gather(run: Run) -> list[Any]:
    """Weights and optimizer state of each process, in order of rank, on the CPU."""
    from accelerate.utils import send_to_device

    return run.processes.all_gather_object(
        send_to_device((run.unwrap_model().state_dict(), run.optimizer.state_dict()), "cpu")
    )


def restore(run: Run, processes: list[Any]) -> None:
    """Load the part of this process from the result of ``gather``. On another number of processes, all keep the
    averaged weights and the main process's optimizer state, which the core has loaded."""
    if len(processes) == run.world_size:
        weights, optimizer = processes[run.rank]
        run.unwrap_model().load_state_dict(weights)
        run.optimizer.load_state_dict(optimizer)
