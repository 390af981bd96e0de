"""Rank, world size and collective operations. They also work with one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fastloop.errors import ProcessLost

if TYPE_CHECKING:
    from accelerate import Accelerator


class Processes:
    """The processes of a run. With one process, every collective operation returns at once.

    Every process must call the collective operations (``barrier``, ``all_...``) in the same order.

    Attributes:
        rank: Index of this process, from 0.
        world_size: Number of processes.
        is_main: Whether this process writes files and logs: rank 0.
        host_group: The process group for CPU tensors and objects; None: the default group, or one process.
        device_group: The process group for tensors on the device; None: the default group.

    Args:
        timeout: How long a process waits for another; None: torch's default.
    """

    def __init__(self, accelerator: Accelerator | None = None, timeout: timedelta | None = None) -> None:
        self.rank = 0
        self.world_size = 1
        needs_group = False
        if accelerator is not None:
            self.rank = accelerator.process_index
            self.world_size = accelerator.num_processes
            needs_group = self.world_size > 1 and accelerator.device.type != "cpu"
        self.is_main = self.rank == 0
        self._timeout = timeout
        self.host_group: torch.distributed.ProcessGroup | None = self.new_host_group() if needs_group else None
        self.device_group: torch.distributed.ProcessGroup | None = None

    def new_host_group(self) -> torch.distributed.ProcessGroup:
        """A further group for CPU tensors and objects. Every process must call it."""
        group: torch.distributed.ProcessGroup = torch.distributed.new_group(timeout=self._timeout, backend="gloo")
        return group

    def barrier(self) -> None:
        """Wait until every process has called this."""
        if self.world_size > 1:
            torch.distributed.barrier(group=self.host_group)

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        """Sum a CPU tensor over all processes into a new tensor, without waiting for the device."""
        return self.start_all_reduce_sum(tensor)()

    def start_all_reduce_sum(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Start ``all_reduce_sum``. The returned function waits for the sum."""
        if self.world_size == 1:
            return lambda: tensor
        result = tensor.clone()
        work: torch.distributed.Work = torch.distributed.all_reduce(result, group=self.host_group, async_op=True)

        def wait() -> Tensor:
            work.wait()
            return result

        return wait

    def all_reduce_mean(self, tensor: Tensor) -> Tensor:
        """Average a device tensor over all processes, in place. The host does not wait."""
        if self.world_size > 1:
            torch.distributed.all_reduce(tensor, group=self.device_group)
            tensor /= self.world_size
        return tensor

    def broadcast(self, tensor: Tensor) -> None:
        """Overwrite a tensor by that of process 0, in place. It may be on the CPU or on the device."""
        if self.world_size > 1:
            group = self.host_group if tensor.device.type == "cpu" else self.device_group
            torch.distributed.broadcast(tensor, src=0, group=group)

    def all_gather_object(self, value: Any) -> list[Any]:
        """Gather the value of each process on every process, in order of rank. Values are pickled."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        torch.distributed.all_gather_object(values, value, group=self.host_group)
        return values

    def close(self) -> None:
        """Destroy the process group."""
        if self.world_size > 1:
            torch.distributed.destroy_process_group()

    @contextmanager
    def explain_lost_connection(self) -> Iterator[None]:
        """Raise ``ProcessLost`` if the connection to another process breaks."""
        try:
            yield
        except (RuntimeError, torch.distributed.DistError) as error:
            if self.world_size == 1 or not is_connection_error(error):
                raise
            timed_out = "timed out" in str(error).lower()
            why = "which did not respond in time (option timeout of the strategy)" if timed_out else "which ended first"
            raise ProcessLost(
                f"process {self.rank} of {self.world_size} lost the connection to another, {why}.",
                code="process-lost",
                remedy="Its output has the reason.",
            ) from error


def is_connection_error(error: Exception) -> bool:
    """Whether torch raised an error because it cannot reach another process. Gloo raises a ``RuntimeError``."""
    return isinstance(error, torch.distributed.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))
