"""Dropout on a CPU from a fast generator, and attention with it.

A mask is made of 15 random bits an element, so the rate is kept to 1/65536. The bits are those of numpy's SFC64, which is seeded for each
mask by one number from torch's own generator. So masks are independent between positions, layers, steps and processes, a resumed run draws
what it would have drawn, and what is computed again in backward draws the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastloop_plugins._models import transformers_model

aten = torch.ops.aten

INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
LANES = 0x0001000100010001
"""The number with a one in each of the four 16-bit lanes of a 64-bit integer."""
BLOCKED = "fastloop_blocked"
"""What transformers knows the attention by, where dropout is torch's."""
LONGEST = 1024
"""Tokens of a sequence whose attention probabilities are kept for backward without dropout: T x T numbers for each head."""
PIECE = 2**21
"""Attention probabilities that are worked on at once: they stay in a core's cache, where the same work is two to four times as fast."""


def dropped(shape: Sequence[int], p: float, itemsize: int) -> Tensor:
    """Integers of ``itemsize`` bytes, negative with probability ``p``: their top bit says that an element is dropped."""
    size, seed = math.prod(shape), int(torch.randint(2**63 - 1, ()))
    words = torch.from_numpy(np.random.SFC64(seed).random_raw(size // 4 + 1).view(np.int64))
    words &= 0x7FFF * LANES
    words += max(1, round(p * 0x8000)) * LANES  # carries into a lane's top bit, and never beyond
    lanes = words.view(torch.int16)[:size].view(*shape)
    return lanes if itemsize == 2 else lanes.to(INTEGERS[itemsize])


def keep_mask(shape: Sequence[int], p: float, itemsize: int) -> Tensor:
    """All bits set with probability ``1 - p``, else none: ``x & mask`` is x where it is kept and exactly 0 elsewhere."""
    mask = dropped(shape, p, itemsize)
    mask >>= 8 * itemsize - 1  # the sign, in all bits
    return mask.bitwise_not_()


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
    """softmax(q k^T scale + bias), dropout, times v, in pieces that fit a core's cache, by whole products on the matrix unit.

    Shapes: query (B, H, T, D), key and value (B, H, S, D), bias (B or 1, H or 1, T or 1, S) or None; gives (B, H, T, D). What is kept for
    backward is one number for each of the B x H x T x S probabilities: negative where it is dropped.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float, p: float) -> Tensor:
        """The probabilities of a piece are never larger than ``PIECE``, or one head's."""
        query, key, value = (query * scale).contiguous(), key.contiguous(), value.contiguous()
        batch, heads, length, _ = query.shape
        integers = INTEGERS[query.element_size()]
        probabilities, output = query.new_empty(batch, heads, length, key.shape[2]), torch.empty_like(query)
        if bias is not None:
            bias = bias.expand(batch, heads, -1, -1)
        buffer = query.new_empty(0)
        for piece in pieces(probabilities):
            kept, found = probabilities[piece].flatten(0, 1), output[piece].flatten(0, 1)
            scores = buffer.resize_(kept.shape)
            torch.bmm(query[piece].flatten(0, 1), key[piece].flatten(0, 1).transpose(1, 2), out=scores)
            if bias is not None:
                scores.view(probabilities[piece].shape).add_(bias[piece])
            aten._softmax.out(scores, -1, False, out=kept)
            if p:
                of_sign = torch.iinfo(integers).min
                kept.view(integers).bitwise_or_(dropped(kept.shape, p, kept.element_size()).bitwise_and_(of_sign))
                kept = torch.clamp(kept, min=0, out=scores)
            torch.bmm(kept, value[piece].flatten(0, 1), out=found)
        ctx.save_for_backward(query, key, value, probabilities)
        ctx.scale, ctx.p = scale, p
        return output.mul_(1 / (1 - p)) if p else output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None, None]:
        """Of query, key and value."""
        query, key, value, probabilities = ctx.saved_tensors
        integers = INTEGERS[query.element_size()]
        gradient = (gradient * (1 / (1 - ctx.p))).contiguous()
        of_query, of_key, of_value = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
        first, second = query.new_empty(0), query.new_empty(0)
        for piece in pieces(probabilities):
            signed, outer = probabilities[piece].flatten(0, 1), gradient[piece].flatten(0, 1)
            scores, other = first.resize_(signed.shape), second.resize_(signed.shape)
            kept = torch.clamp(signed, min=0, out=other) if ctx.p else signed
            torch.bmm(kept.transpose(1, 2), outer, out=of_value[piece].flatten(0, 1))
            torch.bmm(outer, value[piece].flatten(0, 1).transpose(1, 2), out=scores)
            if ctx.p:
                bits, mask = signed.view(integers), other.view(integers)
                torch.bitwise_right_shift(bits, 8 * bits.element_size() - 1, out=mask)
                scores.view(integers).bitwise_and_(mask.bitwise_not_())
                signed = torch.bitwise_and(bits, torch.iinfo(integers).max, out=mask).view(signed.dtype)
            aten._softmax_backward_data.out(scores, signed, -1, signed.dtype, grad_input=scores)
            torch.bmm(scores, key[piece].flatten(0, 1), out=of_query[piece].flatten(0, 1))
            torch.bmm(scores.transpose(1, 2), query[piece].flatten(0, 1), out=of_key[piece].flatten(0, 1))
        return of_query.mul_(ctx.scale), of_key, of_value, None, None, None


def pieces(probabilities: Tensor) -> Iterator[tuple[slice, slice]]:
    """Shares of the batch and the heads: some samples whole, or some heads of a sample where these are large."""
    batch, heads, length, others = probabilities.shape
    matrices = max(1, PIECE // max(length * others, 1))
    samples, of_heads = max(1, matrices // heads), min(matrices, heads)
    for sample in range(0, batch, samples):
        for head in range(0, heads, of_heads):
            yield slice(sample, min(sample + samples, batch)), slice(head, min(head + of_heads, heads))


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
    drops: bool = True,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """In the form of transformers' attention functions: (B, H, T, D) to (B, T, H, D).

    Where nothing is trained, where half of the scores would be masked, or for sequences so long that their probabilities are better not
    kept, it is ``sdpa``; so it is for dropout without ``drops``.
    """
    from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward

    causal = attention_mask is None and query.shape[2] > 1 and bool(kwargs.get("is_causal") or getattr(module, "is_causal", False))
    torchs = not drops if dropout else causal or query.shape[2] * key.shape[2] > LONGEST**2
    if torchs or not torch.is_grad_enabled():
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
    if causal:
        attention_mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril(key.shape[2] - query.shape[2])[None, None]
    if attention_mask is not None:
        bias = attention_mask
        if attention_mask.dtype is torch.bool:
            bias = torch.zeros(attention_mask.shape, dtype=query.dtype).masked_fill_(~attention_mask, torch.finfo(query.dtype).min)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    output: Tensor = Attention.apply(query, key, value, bias, scale, dropout)  # type: ignore[no-untyped-call]
    return output.transpose(1, 2).contiguous(), None


def use(model: Any, name: str, drops: bool) -> bool:
    """Have a transformers model's attention computed here, where it could be torch's; whether it is so now.

    Args:
        name: What transformers is to know it by.
        drops: Whether dropout is drawn here too.
    """
    found = transformers_model(model)
    if found is None or not getattr(found, "_supports_sdpa", False):
        return False
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    AttentionInterface.register(name, partial(attention, drops=drops))
    AttentionMaskInterface.register(name, sdpa_mask)
    found.set_attn_implementation(name)
    return True
