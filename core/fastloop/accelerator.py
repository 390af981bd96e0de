"""The finished draft -> one Accelerate ``Accelerator``, and the arithmetic of batch sizes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastloop.errors import PluginError, RecipeError
from fastloop.machine import this_machine
from fastloop.recipe import Recipe
from fastloop.state import AcceleratorDraft

if TYPE_CHECKING:
    from accelerate import Accelerator

    from fastloop.registry import Resolution


def build_accelerator(recipe: Recipe, resolution: Resolution) -> Accelerator:
    """Ask the plugins, then build. Accelerate reads the launcher's environment (ranks, addresses) itself.

    Raises:
        PluginError: Several processes were started and no plugin fills the slot ``strategy``.
    """
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, PartialState

    draft: AcceleratorDraft = resolution.draft("configure_accelerator", AcceleratorDraft())
    cpu = this_machine(recipe.train.device).device == "cpu"  # said outright: else Accelerate would not join processes on CPUs
    if AcceleratorState._shared_state and AcceleratorState().mixed_precision != draft.mixed_precision:
        AcceleratorState._reset_state(reset_partial_state=False)  # an earlier run of this process had another precision
    processes = PartialState(cpu=cpu).num_processes
    if processes > 1 and not any(plugin.slot == "strategy" for plugin in resolution.plugins):
        raise PluginError(f"{recipe.where}: started with {processes} processes, but no plugin fills the slot 'strategy', which joins them.")
    return Accelerator(mixed_precision=draft.mixed_precision, cpu=cpu, kwargs_handlers=draft.handlers())


def micro_batches(recipe: Recipe, world_size: int) -> tuple[int, int]:
    """``(device_batch_size, micro-steps an optimizer step)`` for a number of processes.

    Raises:
        RecipeError: The sizes do not divide; names the nearest that do.
    """
    train = recipe.train
    device = train.device_batch_size or max(1, train.batch_size // world_size)
    if train.batch_size % (device * world_size) == 0:
        return device, train.batch_size // (device * world_size)
    given = train.device_batch_size is not None
    share = f"{device} (device_batch_size) x {world_size} (processes)" if given else f"the {world_size} processes"
    unit = device * world_size if given else world_size
    near = sorted({size for size in (train.batch_size // unit * unit, -(-train.batch_size // unit) * unit) if size})
    fits = [size for size in range(1, train.batch_size + 1) if train.batch_size % (size * world_size) == 0]
    sizes = sorted(sorted(fits, key=lambda size: abs(size - device))[:2])
    hint = f" or device_batch_size {' or '.join(map(str, sizes))}" if sizes else ""
    raise RecipeError(
        f"{recipe.where}: train.batch_size: {train.batch_size} is not a multiple of {share}. "
        f"Nearest that are: batch_size {' or '.join(map(str, near))}{hint}."
    )
