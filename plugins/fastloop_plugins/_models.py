"""Models as plugins find them: inside wrappers of other plugins and of strategies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn


def transformers_model(model: nn.Module) -> Any:
    """The outermost transformers model in ``model``, whatever wraps it; None if there is none."""
    return next((module for module in model.modules() if hasattr(module, "set_attn_implementation")), None)
