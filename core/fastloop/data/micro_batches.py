"""The arithmetic of batch sizes: batch size = micro-batch size x processes x micro-steps."""

from __future__ import annotations

from fastloop.errors import RecipeError
from fastloop.recipe import Recipe


def micro_batches(recipe: Recipe, world_size: int) -> tuple[int, int]:
    """``(micro_batch_size, micro-steps an optimizer step)`` for a number of processes.

    Raises:
        RecipeError: The sizes do not divide; names the nearest that do.
    """
    train = recipe.train
    device = train.micro_batch_size or max(1, train.batch_size // world_size)
    if train.batch_size % (device * world_size) == 0:
        return device, train.batch_size // (device * world_size)
    given = train.micro_batch_size is not None
    share = f"{device} (micro_batch_size) x {world_size} (processes)" if given else f"the {world_size} processes"
    unit = device * world_size if given else world_size
    near = sorted({size for size in (train.batch_size // unit * unit, -(-train.batch_size // unit) * unit) if size})
    fits = [size for size in range(1, train.batch_size + 1) if train.batch_size % (size * world_size) == 0]
    sizes = sorted(sorted(fits, key=lambda size: abs(size - device))[:2])
    hint = f" or micro_batch_size {' or '.join(map(str, sizes))}" if sizes else ""
    raise RecipeError(
        f"{recipe.where}: train.batch_size: {train.batch_size} is not a multiple of {share}. "
        f"Nearest that are: batch_size {' or '.join(map(str, near))}{hint}."
    )
