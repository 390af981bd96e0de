"""Keeps the weights of convolutions in channels-last order, which convolution kernels are fastest in.

    plugins:
      - channels-last

Activations follow the weights' order. For models with 2-d or 3-d convolutions; with ``amp`` on CUDA it gains the most.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from fastloop import Plugin, hookimpl

if TYPE_CHECKING:
    from torch import nn

logger = logging.getLogger("fastloop")


class ChannelsLast(Plugin):
    """``torch.channels_last`` for every weight of four dimensions, ``channels_last_3d`` for five."""

    name = "channels-last"
    parity = "reassociated"
    runs_before = ("compile",)
    conflicts = {"fsdp": "torch's fully_shard takes contiguous weights only."}
    configures = "keeps convolutions channels-last"

    @hookimpl
    def before_prepare(self, model: nn.Module) -> None:
        import torch

        formats = {4: torch.channels_last, 5: torch.channels_last_3d}
        found = [weight for weight in model.parameters() if weight.ndim in formats]
        for weight in found:
            weight.data = weight.data.contiguous(memory_format=formats[weight.ndim])
        if not found:
            logger.warning("channels-last: %s has no weight of 4 or 5 dimensions: there is nothing to reorder", type(model).__name__)
