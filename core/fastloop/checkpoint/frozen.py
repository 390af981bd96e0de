"""Which parameters of the optimizer are frozen, in a checkpoint.

A plugin may freeze layers in ``before_fit``, and unfreeze them in epoch 1. In a run that resumes in epoch 2,
``before_fit`` fires again, and epoch 1 does not: the layers would stay frozen. So ``resume`` restores which parameters
were frozen, and the loop restores it after the hooks that fire again. Layers that the optimizer does not hold are no
part of it: ``settings_record`` has the parameters that it holds.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING

from fastloop.unstepped import by_module

if TYPE_CHECKING:
    from torch import Tensor

    from fastloop.run import Run

log = logging.getLogger("fastloop")


def held_parameters(run: Run) -> Iterator[tuple[str, Tensor]]:
    """The parameters that the optimizer was built for, by name."""
    held = {name for name, _ in run.settings_record.parameters}
    for name, parameter in run.unwrap_model().named_parameters():
        if name in held:
            yield name, parameter


def frozen_parameters(run: Run) -> list[str]:
    """The names of those that are frozen now."""
    return [name for name, parameter in held_parameters(run) if not parameter.requires_grad]


def restore_frozen(run: Run, frozen: list[str]) -> list[str]:
    """Freeze these parameters, and unfreeze the others that the optimizer holds. Returns the names of those changed."""
    changed = []
    for name, parameter in held_parameters(run):
        requires_grad = name not in frozen
        if parameter.requires_grad != requires_grad:
            parameter.requires_grad_(requires_grad)
            changed.append(name)
    return changed


def undo_changes(run: Run, hook: str) -> None:
    """Undo what a hook that fired again in a resumed run has frozen or unfrozen, and log it.

    Args:
        hook: Its name.
    """
    if run._frozen is None:
        return
    changed = restore_frozen(run, run._frozen)
    if changed:
        log.info("requires_grad of %s stays as in the checkpoint: %s had changed it again", by_module(changed), hook)
