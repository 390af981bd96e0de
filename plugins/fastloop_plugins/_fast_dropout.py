"""Dropout on a CPU from a fast generator, and attention with it.

A mask is made of 15 random bits an element, so the rate is kept to 1/65536. The bits are those of numpy's SFC64, which is seeded for each
mask by one number from torch's own generator. So masks are independent between positions, layers, steps and processes, a resumed run draws
what it would have drawn, and what is computed again in backward draws the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
LANES = 0x0001000100010001
"""The number with a one in each of the four 16-bit lanes of a 64-bit integer."""


def keep_mask(shape: Sequence[int], p: float, itemsize: int) -> Tensor:
    """All bits set with probability ``1 - p``, else none: an integer tensor whose elements are of ``itemsize`` bytes.

    ``x & mask``, on the integers that x is stored as, is x where it is kept and exactly 0 elsewhere.
    """
    seed = int(torch.randint(2**63 - 1, ()))
    size = math.prod(shape)
    words = torch.from_numpy(np.random.SFC64(seed).random_raw(size // 4 + 1).view(np.int64))
    words &= 0x7FFF * LANES
    words += (0x8000 - max(1, round(p * 0x8000))) * LANES  # carries into a lane's top bit where it is kept, and never beyond
    lanes = words.view(torch.int16)[:size].view(*shape)
    lanes >>= 15  # the sign, in all bits
    return lanes if itemsize == 2 else lanes.to(INTEGERS[itemsize])


def masked(tensor: Tensor, mask: Tensor) -> Tensor:
    """Zero where the mask has no bits."""
    return (tensor.view(mask.dtype) & mask).view(tensor.dtype)


class Dropout(torch.autograd.Function):
    """Like ``torch.nn.functional.dropout``."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, p: float) -> Tensor:
        """Keep with probability ``1 - p``, and scale what is kept."""
        ctx.mask, ctx.scale = keep_mask(tensor.shape, p, tensor.element_size()), 1 / (1 - p)
        return masked(tensor, ctx.mask).mul_(ctx.scale)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """The same for the gradient."""
        return masked(gradient, ctx.mask).mul_(ctx.scale), None


class Attention(torch.autograd.Function):
    """softmax(q k^T scale + bias), dropout, times v: whole products on the matrix unit, and a mask of bits.

    Shapes: query (B, H, T, D), key and value (B, H, S, D), bias (B or 1, H or 1, T or 1, S) or None; gives (B, H, T, D).
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float, p: float) -> Tensor:
        """Keeps the probabilities before and after dropout, and the mask."""
        with torch.autocast("cpu", enabled=False):  # the inputs are in its dtype already, and a softmax in fp32 would be twice the bytes
            scores = torch.matmul(query * scale, key.transpose(-1, -2))
            if bias is not None:
                scores += bias
            probabilities = torch.softmax(scores, -1)
            mask = keep_mask(probabilities.shape, p, probabilities.element_size())
            kept = masked(probabilities, mask)
            output = torch.matmul(kept, value)
        ctx.save_for_backward(query, key, value, probabilities, kept, mask)
        ctx.scale, ctx.rescale = scale, 1 / (1 - p)
        return output.mul_(ctx.rescale)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None, None]:
        """Of query, key and value."""
        query, key, value, probabilities, kept, mask = ctx.saved_tensors
        gradient = gradient * ctx.rescale
        of_value = torch.matmul(kept.transpose(-1, -2), gradient)
        of_scores = masked(torch.matmul(gradient, value.transpose(-1, -2)), mask)
        of_scores = torch._softmax_backward_data(of_scores, probabilities, -1, probabilities.dtype).mul_(ctx.scale)
        return torch.matmul(of_scores, key), torch.matmul(of_scores.transpose(-1, -2), query), of_value, None, None, None


@torch.compiler.disable  # type: ignore[untyped-decorator] # a compiler would take two masks of one shape for the same
def dropout(tensor: Tensor, p: float) -> Tensor:
    """Dropout of a tensor of any float dtype, 0 < p < 1."""
    result: Tensor = Dropout.apply(tensor, p)  # type: ignore[no-untyped-call]
    return result


@torch.compiler.disable  # type: ignore[untyped-decorator]
def attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """In the form of transformers' attention functions: (B, H, T, D) to (B, T, H, D). Without dropout it is ``sdpa``."""
    from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward

    if not dropout or not torch.is_grad_enabled():
        plain: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return plain
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    groups = query.shape[1] // key.shape[1]
    key, value = repeat_kv(key, groups), repeat_kv(value, groups)
    bias = None
    if attention_mask is None and query.shape[2] > 1 and (kwargs.get("is_causal") or getattr(module, "is_causal", False)):
        attention_mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril(key.shape[2] - query.shape[2])[None, None]
    if attention_mask is not None:
        bias = attention_mask
        if attention_mask.dtype is torch.bool:
            bias = torch.zeros(attention_mask.shape, dtype=query.dtype).masked_fill_(~attention_mask, torch.finfo(query.dtype).min)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    output: Tensor = Attention.apply(query, key, value, bias, scale, dropout)  # type: ignore[no-untyped-call]
    return output.transpose(1, 2).contiguous(), None
