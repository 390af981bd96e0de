"""The wrapper that ``torch.compile(module)`` returns: it holds the module under a name of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

COMPILED = "_orig_mod"
"""The wrapper's name for the module inside, and so a part of the names of its weights:
``bert._orig_mod.pooler.weight``."""


def is_compiled(module: nn.Module) -> bool:
    """Whether a module is such a wrapper."""
    return COMPILED in dict(module.named_children())


def without_compiled(name: str) -> str:
    """The name of a weight without the wrappers: ``bert.pooler.weight`` for ``bert._orig_mod.pooler.weight``."""
    return name.replace(f"{COMPILED}.", "")
