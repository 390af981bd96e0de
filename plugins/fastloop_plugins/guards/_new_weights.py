"""Warns of weights that keep random values: the pretrained model lacks them, and nothing trains them."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from fastloop import Problem
from fastloop.problem import agree, counted
from fastloop_plugins._names import list_names
from fastloop_plugins.training._patterns import parameters_by_name

if TYPE_CHECKING:
    from fastloop import Run

logger = logging.getLogger("fastloop")

LISTED = 8
"""Names in the warning at most."""


def report_frozen(run: Run) -> None:
    """Log the names of the weights of ``run.new_weights`` that a plugin has frozen."""
    parameters = parameters_by_name(run.unwrap_model())
    frozen = []
    for name in sorted(run.new_weights):
        if name in parameters and not parameters[name].requires_grad:
            frozen.append(name)
    if not frozen:
        return
    logger.warning(
        Problem(
            f"{counted(len(frozen), 'frozen weight')} {agree(len(frozen), 'keeps', 'keep')} random values, because the "
            f"pretrained model lacks {agree(len(frozen), 'it', 'them')}: {list_names(frozen, LISTED)}.",
            code="random-weights-frozen",
            remedy=("Train them (plugins.lora.modules_to_save, plugins.freeze.match), or load them (model.weights)."),
        )
    )
