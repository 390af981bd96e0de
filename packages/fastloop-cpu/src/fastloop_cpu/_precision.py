"""The precision that kernels for CPUs need, and the message of a plugin without effect."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastloop import Problem

if TYPE_CHECKING:
    from fastloop import Plugin, Recipe, Run


def computes_in_bf16(recipe: Recipe) -> bool:
    """Whether a run of this recipe computes in bf16 on a CPU that multiplies it fast."""
    amp = recipe.plugins.get("amp", False)
    return amp is not False and amp.get("dtype", "auto") in ("auto", "bf16")


def report_no_effect(plugin: Plugin, run: Run, message: str) -> None:
    """Log that a plugin changes nothing: a warning if the user asked for it.

    The recipe in a run folder lists the plugins that were selected for the training. They may have no effect in a
    prediction, or without the precision that `--without amp` leaves out.
    """
    recipe = run.recipe
    if plugin.name in recipe.selected or recipe.inference is not None or recipe.leaves_out("amp"):
        plugin.log.info("%s", message)
    else:
        plugin.log.warning(Problem(message, code="no-effect"))
