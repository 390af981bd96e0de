"""Memory and traffic of ``context-parallel``, by a model of fake tensors that computes the tokens of one process."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from fastloop_plugins.strategies._context_attention import NAME, SequenceSlices, attention, mask


class ContextShare(SequenceSlices):
    """The slices of the first process, which exchanges nothing.

    Args:
        model: The model of fake tensors whose forward takes ``targets``; see ``with_loss``.
        size: Number of processes that share a sequence.

    Attributes:
        sent: Bytes that the process has sent in rings: (n - 1) / n of gathered keys and values, and twice that of their
            gradients.
    """

    def __init__(self, model: Any, size: int) -> None:
        from fastloop_plugins.strategies.context_parallel import divide_forward

        super().__init__(size, 0, None)
        self.sent = 0.0
        AttentionInterface.register(NAME, partial(attention, self))
        AttentionMaskInterface.register(NAME, mask)
        model.set_attn_implementation(NAME)
        divide_forward(model, self)

    def gather(self, tensor: Tensor) -> Tensor:
        full = torch.cat([tensor] * self.size, 2)
        self._send(full.nbytes)
        if full.requires_grad:
            full.register_hook(lambda gradient: self._send(2 * gradient.nbytes))  # type: ignore[no-untyped-call]
        return full

    def _send(self, size: float) -> None:
        self.sent += size * (self.size - 1) / self.size
