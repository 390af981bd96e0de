"""Refusal of runs that divide a step's rows, if the loss compares them with each other.

A row of such a loss is compared with the other rows of its optimizer step. If the step were divided into micro-batches,
or shared by processes, each part would have fewer negatives, and the loss would silently depend on the memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastloop import RecipeError, UsageError

if TYPE_CHECKING:
    from fastloop import Run

REASON = "compares the rows of an optimizer step with each other, so each part of a step would give another loss"


def check_recipe(recipe: Any, plugins: Any, loss: str) -> None:
    """Raise an error if the recipe divides steps into micro-batches.

    Raises:
        RecipeError: It sets ``train.micro_batch_size``, or has the plugin ``auto-micro-batch``.
    """
    train = recipe.train
    if recipe.inference is not None:
        return
    if train.micro_batch_size is not None and train.micro_batch_size < train.batch_size:
        raise RecipeError(
            f"{recipe.where}: train.micro_batch_size: found {train.micro_batch_size}, expected train.batch_size "
            f"({train.batch_size}): the loss {loss} {REASON}. Leave it out, or set loss to cosine or triplet."
        )
    if "auto-micro-batch" in plugins.names():
        raise RecipeError(
            f"{recipe.where}: plugins: found auto-micro-batch, and the loss {loss} {REASON}. Remove auto-micro-batch, "
            "or set loss to cosine or triplet."
        )


def check_run(run: Run, loss: str) -> None:
    """Raise an error if several processes or micro-batches share a step.

    Raises:
        UsageError: They do.
    """
    if run.world_size > 1:
        raise UsageError(
            f"embedding: found {run.world_size} processes, expected one: the loss {loss} {REASON}. Start one process, "
            "or set loss to cosine or triplet."
        )
    if run.loaders.micro_steps > 1:
        raise UsageError(
            f"embedding: found {run.loaders.micro_steps} micro-batches in a step, expected one: the loss {loss} "
            f"{REASON}. Remove the plugin that divides steps, or set loss to cosine or triplet."
        )
