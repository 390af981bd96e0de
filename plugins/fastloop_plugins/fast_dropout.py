"""Dropout of the same distribution from a faster generator, for training on a CPU.

    plugins:
      - fast-dropout

Torch draws one number after the other for a mask on a CPU, and leaves its fast attention kernel when attention probabilities are dropped.
Here masks come from a generator twenty times as fast, and attention with dropout is computed by products on the matrix unit. Rate, scale
and independence are those of ``nn.Dropout``; the numbers drawn are others, as with another seed. Evaluation is left alone. On other devices
it does nothing: there dropout is cheap. ``compile`` ends a graph at each mask: the two together gain little.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Any

from fastloop import Plugin, hookimpl

if TYPE_CHECKING:
    from torch import Tensor, nn

    from fastloop import Run

logger = logging.getLogger("fastloop")

NAME = "fast_dropout"
"""What transformers knows the attention by."""


class FastDropout(Plugin):
    """``nn.Dropout`` and the dropout of transformers' attention, on a CPU."""

    name = "fast-dropout"
    parity = "reassociated"
    runs_before = ("activation-checkpointing", "slot:strategy", "compile")
    runs_after = ("attention",)
    configures = "draws dropout masks from a faster generator"

    @hookimpl
    def before_prepare(self, run: Run, model: nn.Module) -> None:
        from torch import nn

        if run.device.type != "cpu":
            logger.warning("fast-dropout: this run is on %s, where dropout is cheap: it does nothing", run.device.type)
            return
        found = [module for module in model.modules() if type(module) is nn.Dropout]
        for module in found:
            module.forward = partial(drop, module, module.forward)  # type: ignore[method-assign]
        attention = self.attend(model)
        if not found and not attention:
            logger.warning("fast-dropout: %s has no dropout: there is nothing to make faster", type(model).__name__)

    @staticmethod
    def attend(model: nn.Module) -> bool:
        """Have transformers' attention computed here; whether it is transformers'."""
        found: Any = next((module for module in model.modules() if hasattr(module, "set_attn_implementation")), None)
        if found is None or found.config._attn_implementation not in ("sdpa", "eager") or not getattr(found, "_supports_sdpa", False):
            return False
        from transformers import AttentionInterface
        from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

        from fastloop_plugins._fast_dropout import attention

        AttentionInterface.register(NAME, attention)
        AttentionMaskInterface.register(NAME, sdpa_mask)
        found.set_attn_implementation(NAME)
        return True


def drop(module: nn.Dropout, torchs: Any, tensor: Tensor) -> Tensor:
    """The forward of an ``nn.Dropout``."""
    from fastloop_plugins._fast_dropout import dropout

    if not module.training or not 0 < module.p < 1 or tensor.device.type != "cpu" or not tensor.is_floating_point():
        kept: Tensor = torchs(tensor)
        return kept
    masked: Tensor = dropout(tensor, module.p)
    return masked
