"""The processes that share the samples of a step, where others train on the same ones."""

from __future__ import annotations

from typing import Any

import torch

from fastloop.distributed.processes import Processes


def sharing(processes: int, step: int) -> int:
    """The number of processes that share the samples of a step.

    Args:
        processes: Number of processes of the run.
        step: Size of a group, as in ``Settings.processes_per_batch``.
    """
    return max(1, processes // (step or processes))


def take_every(processes: Processes, step: int) -> Processes:
    """The processes that stand at this one's place in groups of ``step`` consecutive ones. Every process must call it.

    Args:
        processes: All processes of the run.
        step: Size of a group, as in ``Settings.processes_per_batch``.
    """
    if step == 1 or processes.world_size == 1:
        return processes
    found = Processes()
    found.is_main = processes.is_main
    if 0 < step < processes.world_size:
        found.rank, found.world_size = processes.rank // step, sharing(processes.world_size, step)
        found.device_group = _divide(processes, step)
        found.host_group = found.device_group if processes.host_group is None else _divide(processes, step, "gloo")
    return found


def _divide(processes: Processes, step: int, backend: str | None = None) -> Any:
    """The process group of this process, of those for each place."""
    divide: Any = torch.distributed.new_subgroups_by_enumeration
    lines = [list(range(place, processes.world_size, step)) for place in range(step)]
    return divide(lines, timeout=processes._timeout, backend=backend)[0]
