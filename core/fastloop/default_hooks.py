"""The core's implementations of *first* hooks that need no file of their own; ``core_modules`` lists the others.

``hookspecs`` declares all hooks. A hook without a default needs nothing here. ``trylast``: the result of any plugin
takes precedence.
"""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fastloop.checkpoint import saving
from fastloop.errors import SaveError
from fastloop.plugins.plugin import hookimpl

if TYPE_CHECKING:
    from fastloop.run import Run


@hookimpl(trylast=True)
def build_collator(run: Run) -> Any:
    """Torch's ``default_collate``, which stacks tensors and numbers."""
    return torch.utils.data.default_collate


@hookimpl(trylast=True)
def write_checkpoint(run: Run, folder: Path, model: dict[str, torch.Tensor], state: dict[str, Any]) -> Future[None]:
    """Write before training continues."""
    future: Future[None] = Future()
    try:
        saving.write(run, folder, model, state)
        future.set_result(None)
    except SaveError as error:
        future.set_exception(error)
    return future
