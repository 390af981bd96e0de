"""Which parameters are frozen, and which modules are in train or eval mode, in a checkpoint.

A plugin may freeze layers in ``before_fit``, and unfreeze them in epoch 1. In a run that resumes in epoch 2,
``before_fit`` fires again, and epoch 1 does not: the layers would stay frozen. So ``resume`` restores what was frozen,
and the loop restores it after the hooks that fire again. The same holds for a plugin that puts batch norm in eval mode
in epoch 1.

Layers that the optimizer does not hold are no part of it: ``settings_record`` has the parameters that it holds. Modules
in the mode in which they were built are no part of it, either.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fastloop.evaluation_results import restore_modes
from fastloop.unstepped import by_module, list_modules

if TYPE_CHECKING:
    from torch import Tensor, nn

    from fastloop.run import Run

log = logging.getLogger("fastloop")


@dataclass(frozen=True)
class FrozenParts:
    """The frozen parts of a model at some step.

    Attributes:
        parameters: Names of the frozen parameters, of those that the optimizer holds.
        modes: Module -> whether it is in train mode, for each whose mode is another one than when the run was built.
            None: unknown, in a checkpoint of an early version.
    """

    parameters: list[str]
    modes: dict[str, bool] | None


def read_modes(model: nn.Module) -> dict[str, bool]:
    """Module -> whether it is in train mode."""
    return {name: module.training for name, module in model.named_modules()}


def frozen_parts(run: Run) -> FrozenParts:
    """The parts that are frozen now."""
    parameters = [name for name, parameter in held_parameters(run) if not parameter.requires_grad]
    modes = {}
    for name, training in read_modes(run.unwrap_model()).items():
        if training != run._built_modes.get(name, training):
            modes[name] = training
    return FrozenParts(parameters, modes)


def held_parameters(run: Run) -> Iterator[tuple[str, Tensor]]:
    """The parameters that the optimizer was built for, by name."""
    held = {name for name, _ in run.settings_record.parameters}
    for name, parameter in run.unwrap_model().named_parameters():
        if name in held:
            yield name, parameter


def restore_parameters(run: Run, frozen: list[str]) -> list[str]:
    """Freeze these parameters, and unfreeze the others that the optimizer holds. Returns the names of those changed."""
    changed = []
    for name, parameter in held_parameters(run):
        requires_grad = name not in frozen
        if parameter.requires_grad != requires_grad:
            parameter.requires_grad_(requires_grad)
            changed.append(name)
    return changed


def restore_module_modes(run: Run, modes: Mapping[str, bool]) -> list[str]:
    """Put each module in its mode: that of ``modes``, else the one in which it was built. Returns the names of those
    changed."""
    changed = []
    restored = []
    for name, module in run.unwrap_model().named_modules():
        built = run._built_modes.get(name, module.training)  # of a module that a plugin added since: its own
        training = modes.get(name, built)
        restored.append((module, training))
        if module.training != training:
            changed.append(name)
    if changed:
        restore_modes(restored)
    return changed


def restore_parts(run: Run, parts: FrozenParts, hook: str = "") -> None:
    """Freeze what was frozen, and nothing else.

    Args:
        hook: The hook that has changed it again, for the log; empty: none has.
    """
    parameters = restore_parameters(run, parts.parameters)
    modules = [] if parts.modes is None else restore_module_modes(run, parts.modes)
    if parameters and hook:
        log.info("requires_grad of %s stays as in the checkpoint: %s had changed it again", by_module(parameters), hook)
    if modules and hook:
        log.info(
            "the train or eval mode of %s stays as in the checkpoint: %s had changed it again",
            list_modules([name or "the model itself" for name in modules]),
            hook,
        )


def undo_changes(run: Run, hook: str) -> None:
    """Undo what a hook that fired again in a resumed run has frozen or unfrozen, and log it.

    Args:
        hook: Its name.
    """
    if run._frozen is not None:
        restore_parts(run, run._frozen, hook)
