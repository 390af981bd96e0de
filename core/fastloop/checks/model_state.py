"""Checks that a checkpoint and an export can hold the state of the model: a state dict of tensors.

A module may return any value from ``get_extra_state``, such as a dict of settings. The run would otherwise end at its
first checkpoint, which may be after the last step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fastloop.errors import UsageError
from fastloop.plugins.plugin import hookimpl

if TYPE_CHECKING:
    from fastloop.run import Run


@hookimpl(trylast=True)
def check_run(run: Run) -> None:
    """Refuse a model whose state dict has a value that is no tensor.

    Raises:
        UsageError: It has one.
    """
    model = run.unwrap_model()
    for name, value in model.state_dict().items():
        if not isinstance(value, torch.Tensor):
            raise UsageError(
                code="invalid-state",
                place=f"{run.recipe.where}: no checkpoint can hold the state of the model",
                found=f"{name} of {type(model).__name__}, a {type(value).__name__}",
                expected="a tensor",
                remedy="Return a tensor from get_extra_state, or set the value in the module's constructor.",
            )
