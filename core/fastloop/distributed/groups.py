"""Groups of processes that train on the same samples, and the processes that share the samples of a step."""

from __future__ import annotations

from typing import Any

import torch

from fastloop.distributed.processes import Processes
from fastloop.errors import PluginError
from fastloop.recipe import Recipe
from fastloop.settings import Settings


def check_groups(recipe: Recipe, settings: Settings, processes: int) -> None:
    """Check that the processes of a run form whole groups of ``settings.processes_per_batch``.

    Raises:
        PluginError: They do not.
    """
    size = settings.processes_per_batch
    if 0 < size < processes and processes % size:
        raise PluginError(
            f"plugin {settings.writers['processes_per_batch']!r} needs groups of {size} processes, and {processes} "
            f"are not a multiple of {size}.",
            code="not-divisible",
            place=recipe.where,
            remedy=f"Start {processes // size * size} or {(processes // size + 1) * size}.",
        )


def count_sharing(processes: int, step: int) -> int:
    """The number of processes that share the samples of a step.

    Args:
        processes: Number of processes of the run.
        step: Size of a group, as in ``Settings.processes_per_batch``; 0: all processes are one group.
    """
    group = step or processes
    return max(1, processes // group)


def take_every(processes: Processes, step: int) -> Processes:
    """The processes that stand at this one's place in groups of ``step`` consecutive ones. Every process must call it.

    With 6 processes in groups of 2, these are the groups (0, 1), (2, 3), (4, 5). Process 3 gets the processes 1, 3 and
    5, of which it is the second: they share the samples of a step.

    Args:
        processes: All processes of the run.
        step: Size of a group, as in ``Settings.processes_per_batch``.
    """
    if step == 1 or processes.world_size == 1:
        return processes
    selected = Processes()
    selected.is_main = processes.is_main
    if 0 < step < processes.world_size:
        selected.rank = processes.rank // step
        selected.world_size = count_sharing(processes.world_size, step)
        selected.device_group = _divide(processes, step)
        if processes.host_group is None:
            selected.host_group = selected.device_group
        else:
            selected.host_group = _divide(processes, step, "gloo")
    return selected


def _divide(processes: Processes, step: int, backend: str | None = None) -> Any:
    """The process group of this process. With 6 processes and ``step`` 2, the groups are (0, 2, 4) and (1, 3, 5)."""
    divide: Any = torch.distributed.new_subgroups_by_enumeration
    places = [list(range(place, processes.world_size, step)) for place in range(step)]
    own_group, _ = divide(places, timeout=processes._timeout, backend=backend)
    return own_group
