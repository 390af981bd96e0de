"""Dropout on a CPU from a fast random generator, and attention that uses it.

Each mask element takes 15 random bits, so the rate is accurate to 1/65536. The bits come from numpy's SFC64. Each mask
seeds it with one number from torch's default generator. Masks are therefore independent between positions, layers,
steps and processes. A resumed run and recomputed activations draw the same masks.

It is no custom operator: inductor treats two calls with equal arguments as one, and would use one mask for both.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from fastloop_plugins.toolkit import transformers_model
from torch import Tensor
from torch.autograd.function import once_differentiable

from fastloop_cpu._native import operation

aten = torch.ops.aten

INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
LANES = 0x0001000100010001
"""The number with a one in each of the four 16-bit lanes of a 64-bit integer."""
BLOCKED = "fastloop_blocked"
"""Name of the attention with torch's own dropout in transformers' registry."""
LONGEST = 1024
"""Longest sequence, in tokens, whose attention probabilities are kept for backward without dropout: T x T numbers for
each head."""
PIECE = 2**21
"""Attention probabilities of one piece. They stay in a core's cache, where the same work is two to four times as
fast."""


def dropped(shape: Sequence[int], p: float, itemsize: int) -> Tensor:
    """Integers of ``itemsize`` bytes that are negative with probability ``p``: the sign bit marks a dropped element."""
    size = math.prod(shape)
    seed = int(torch.randint(2**63 - 1, ()))
    with operation("random_bits"):
        words = torch.from_numpy(np.random.SFC64(seed).random_raw(size // 4 + 1).view(np.int64))
    words &= 0x7FFF * LANES
    words += max(1, round(p * 0x8000)) * LANES  # carries into a lane's top bit, never into the next lane
    lanes = words.view(torch.int16)[:size].view(*shape)
    return lanes if itemsize == 2 else lanes.to(INTEGERS[itemsize])


def keep_mask(shape: Sequence[int], p: float, itemsize: int) -> Tensor:
    """All bits set with probability ``1 - p``, else none. ``x & mask`` is x for a kept element and exactly 0 for a
    dropped one."""
    mask = dropped(shape, p, itemsize)
    mask >>= 8 * itemsize - 1  # the sign, in all bits
    return mask.bitwise_not_()


def masked(tensor: Tensor, mask: Tensor) -> Tensor:
    """The tensor with zeros at the positions where the mask has no bits set."""
    return (tensor.view(mask.dtype) & mask).view(tensor.dtype)


class Dropout(torch.autograd.Function):
    """``tensor & mask`` times ``scale``. Backward applies the same function, so it can be differentiated, too."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, mask: Tensor, scale: float) -> Tensor:
        """Keep the elements whose bits are set in the mask, and scale them."""
        ctx.mask = mask
        ctx.scale = scale
        return masked(tensor, mask).mul_(scale)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        """Apply the same mask and scale to the gradient."""
        return Dropout.apply(gradient, ctx.mask, ctx.scale), None, None  # type: ignore[no-untyped-call]


class AttentionWithDropout(torch.autograd.Function):
    """softmax(q k^T scale + bias), dropout, times v, in pieces that fit a core's cache, with large matrix products.

    Shapes: query (B, H, T, D), key (B, H, S, D), value (B, H, S, E), bias (B or 1, H or 1, T or 1, S) or None; returns
    (B, H, T, E). Backward keeps one number for each of the B x H x T x S probabilities. It is negative if the
    probability is dropped.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float, p: float
    ) -> Tensor:
        """Compute piece by piece. A piece holds at most ``PIECE`` probabilities, or those of one head."""
        query = (query * scale).contiguous()
        key = key.contiguous()
        value = value.contiguous()
        batch, heads, length, _ = query.shape
        integers = INTEGERS[query.element_size()]
        probabilities = query.new_empty(batch, heads, length, key.shape[2])
        output = value.new_empty(batch, heads, length, value.shape[3])
        if bias is not None:
            bias = bias.expand(batch, heads, -1, -1)
        buffer = query.new_empty(0)
        for piece in pieces(probabilities):
            signed = probabilities[piece].flatten(0, 1)
            rows = output[piece].flatten(0, 1)
            scores = buffer.resize_(signed.shape)
            torch.bmm(query[piece].flatten(0, 1), key[piece].flatten(0, 1).transpose(1, 2), out=scores)
            if bias is not None:
                scores.view(probabilities[piece].shape).add_(bias[piece])
            aten._softmax.out(scores, -1, False, out=signed)
            kept = signed
            if p:  # a dropped probability gets a minus sign, and counts as 0
                sign_bit = torch.iinfo(integers).min
                is_dropped = dropped(signed.shape, p, signed.element_size())
                signed.view(integers).bitwise_or_(is_dropped.bitwise_and_(sign_bit))
                kept = torch.clamp(signed, min=0, out=scores)
            torch.bmm(kept, value[piece].flatten(0, 1), out=rows)
        ctx.save_for_backward(query, key, value, probabilities)
        ctx.scale = scale
        ctx.p = p
        return output.mul_(1 / (1 - p)) if p else output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None, None]:
        """Gradients of query, key and value."""
        query, key, value, probabilities = ctx.saved_tensors
        integers = INTEGERS[query.element_size()]
        gradient = (gradient * (1 / (1 - ctx.p))).contiguous()
        of_query = torch.empty_like(query)
        of_key = torch.empty_like(key)
        of_value = torch.empty_like(value)
        first = query.new_empty(0)
        second = query.new_empty(0)
        for piece in pieces(probabilities):
            signed = probabilities[piece].flatten(0, 1)
            outer = gradient[piece].flatten(0, 1)
            scores = first.resize_(signed.shape)
            buffer = second.resize_(signed.shape)
            kept = torch.clamp(signed, min=0, out=buffer) if ctx.p else signed
            torch.bmm(kept.transpose(1, 2), outer, out=of_value[piece].flatten(0, 1))
            torch.bmm(outer, value[piece].flatten(0, 1).transpose(1, 2), out=scores)
            if ctx.p:
                bits = signed.view(integers)
                mask = buffer.view(integers)
                torch.bitwise_right_shift(bits, 8 * bits.element_size() - 1, out=mask)
                scores.view(integers).bitwise_and_(mask.bitwise_not_())
                signed = torch.bitwise_and(bits, torch.iinfo(integers).max, out=mask).view(signed.dtype)
            aten._softmax_backward_data.out(scores, signed, -1, signed.dtype, grad_input=scores)
            torch.bmm(scores, key[piece].flatten(0, 1), out=of_query[piece].flatten(0, 1))
            torch.bmm(scores.transpose(1, 2), query[piece].flatten(0, 1), out=of_key[piece].flatten(0, 1))
        return of_query.mul_(ctx.scale), of_key, of_value, None, None, None


def pieces(probabilities: Tensor) -> Iterator[tuple[slice, slice]]:
    """Split batch and heads into pieces: several full samples, or some heads of one sample if heads are large."""
    batch, heads, length, others = probabilities.shape
    matrices = max(1, PIECE // max(length * others, 1))
    samples = max(1, matrices // heads)
    of_heads = min(matrices, heads)
    for sample in range(0, batch, samples):
        for head in range(0, heads, of_heads):
            yield slice(sample, min(sample + samples, batch)), slice(head, min(head + of_heads, heads))


@torch.compiler.disable  # type: ignore[untyped-decorator] # a compiler would take two masks of one shape for the same
def dropout(tensor: Tensor, p: float) -> Tensor:
    """Dropout of a tensor of any float dtype, 0 < p < 1."""
    mask = keep_mask(tensor.shape, p, tensor.element_size())
    result: Tensor = Dropout.apply(tensor, mask, 1 / (1 - p))  # type: ignore[no-untyped-call]
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
    """Attention in the form of transformers' attention functions: from (B, H, T, D) to (B, T, H, D).

    Calls transformers' ``sdpa`` for dropout without ``drops``; and for no dropout, if there are no gradients, sequences
    are too long to keep their probabilities, or a causal mask would mask half of the scores. It also calls it for a
    trained bias. Such a bias is ``position_bias`` (T5), or a mask with gradients (BEiT). Dropout draws the same masks
    with and without gradients, for tasks that compute a step's rows twice.
    """
    from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward

    causal = (
        attention_mask is None
        and query.shape[2] > 1
        and bool(kwargs.get("is_causal") or getattr(module, "is_causal", False))
    )
    long = query.shape[2] * key.shape[2] > LONGEST**2
    torchs = not drops if dropout else causal or long or not torch.is_grad_enabled()
    biased = kwargs.get("position_bias") is not None
    if attention_mask is not None and attention_mask.requires_grad:
        biased = True
    if torchs or biased:
        plain: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return plain
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        query = query.to(dtype)
        key = key.to(dtype)
        value = value.to(dtype)
    groups = query.shape[1] // key.shape[1]
    key = repeat_kv(key, groups)
    value = repeat_kv(value, groups)
    bias = None
    if causal:
        queries = query.shape[2]
        keys = key.shape[2]
        # 2 queries and 3 keys: [[1, 1, 0], [1, 1, 1]]
        attention_mask = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)[None, None]
    if attention_mask is not None:
        bias = attention_mask
        if attention_mask.dtype is torch.bool:
            bias = torch.zeros(attention_mask.shape, dtype=query.dtype).masked_fill_(
                ~attention_mask, torch.finfo(query.dtype).min
            )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    output: Tensor = AttentionWithDropout.apply(query, key, value, bias, scale, dropout)  # type: ignore[no-untyped-call]
    return output.transpose(1, 2).contiguous(), None


def use(model: Any, name: str, drops: bool) -> bool:
    """Set this module's attention on a transformers model; returns False if the model does not support ``sdpa``.

    Args:
        model: A module that contains a transformers model.
        name: Name to register the attention under in transformers.
        drops: Whether to draw the dropout masks here too.
    """
    inner = transformers_model(model)
    if inner is None or not getattr(inner, "_supports_sdpa", False):
        return False
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    AttentionInterface.register(name, partial(attention, drops=drops))
    AttentionMaskInterface.register(name, sdpa_mask)
    inner.set_attn_implementation(name)
    return True
