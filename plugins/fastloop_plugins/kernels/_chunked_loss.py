"""Cross entropy of a language model's head, chunk by chunk: the logits of all tokens never exist at once."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from fastloop_plugins.text.next_token_loss import IGNORED

HAS_LIGER = find_spec("liger_kernel") is not None


class ChunkedLoss(torch.autograd.Function):
    """The mean cross entropy of the target tokens. The forward pass also computes the gradients, and keeps only these.

    Arguments of ``forward``:
        hidden: (N, d).
        weight: (rows, d).
        bias: (rows,), or None.
        targets: (N,) int64; -100 for a token without a loss.
        vocabulary: Tokens of the vocabulary; the rows after them have no probability.
        dtype: The dtype of matrix products. Losses, probabilities and sums are float32.
        chunk: Tokens of a chunk.
        differentiate: Whether gradients are needed.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        vocabulary: int,
        dtype: torch.dtype,
        chunk: int,
        differentiate: bool,
    ) -> Tensor:
        needed = [differentiate and need for need in ctx.needs_input_grad[:3]]
        gradients = [
            torch.zeros_like(hidden) if needed[0] else None,
            torch.zeros_like(weight, dtype=torch.float32) if needed[1] else None,
            torch.zeros_like(bias, dtype=torch.float32) if needed[2] and bias is not None else None,
        ]
        head, shift = weight.to(dtype), None if bias is None else bias.to(dtype)
        count, total = (targets != IGNORED).sum(), torch.zeros((), dtype=torch.float32, device=hidden.device)
        for start in range(0, len(hidden), chunk):
            states, wanted = hidden[start : start + chunk].to(dtype), targets[start : start + chunk]
            logits = linear(states, head, shift).float()
            logits[:, vocabulary:] = -torch.inf
            known, index = wanted != IGNORED, wanted.clamp(min=0)[:, None]
            norm = logits.logsumexp(1, keepdim=True)
            total += torch.where(known[:, None], norm - logits.gather(1, index), 0).sum()
            if not any(needed):
                continue
            slope = logits.sub_(norm).exp_()  # probabilities
            slope.scatter_add_(1, index, torch.full_like(norm, -1.0)).mul_((known / count)[:, None])
            if gradients[2] is not None:
                gradients[2] += slope.sum(0)
            slope = slope.to(dtype)
            if gradients[0] is not None:
                gradients[0][start : start + chunk] = slope @ head
            if gradients[1] is not None and dtype == torch.float32:
                gradients[1].addmm_(slope.t(), states)
            elif gradients[1] is not None:
                gradients[1] += slope.t() @ states
        ctx.save_for_backward(*gradients)
        return total / count

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, scale: Tensor) -> Any:
        found = [None if gradient is None else gradient * scale for gradient in ctx.saved_tensors]
        return *found, None, None, None, None, None


def chunked_loss(head: Any, hidden: Tensor, targets: Tensor, vocabulary: int | None, chunk: int) -> Tensor:
    """The mean cross entropy of ``targets`` (B, T), in the dtype of autocast.

    On CUDA, liger-kernel computes it, if that is installed and the head has no more rows than the vocabulary. In fp16,
    all products are float32: fp16 cannot hold gradients of a loss that is not scaled yet.

    Args:
        head: A linear layer.
        hidden: Its input, (B, T, d).
        vocabulary: Tokens of the vocabulary; None: one for each row of the head.
        chunk: Tokens of a chunk.
    """
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    states, wanted = hidden.flatten(0, -2), targets.flatten()
    if device == "cuda" and vocabulary is None and dtype != torch.float16 and HAS_LIGER:
        fused: Tensor = _liger_loss(head, states, wanted)
        return fused
    dtype = torch.float32 if dtype == torch.float16 else dtype
    rows, differentiate = vocabulary or len(head.weight), torch.is_grad_enabled()
    arguments = (states, head.weight, head.bias, wanted, rows, dtype, chunk, differentiate)
    with torch.autocast(device, enabled=False):
        loss: Tensor = ChunkedLoss.apply(*arguments)  # type: ignore[no-untyped-call]
    return loss


@torch.compiler.disable  # type: ignore[untyped-decorator] # it reads a number from the device
def _liger_loss(head: Any, states: Tensor, targets: Tensor) -> Tensor:
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    loss: Tensor = LigerFusedLinearCrossEntropyLoss(ignore_index=IGNORED)(head.weight, states, targets, head.bias)
    return loss
