"""Attention over a row of sequences by torch's FlashAttention kernel for sequences of any length.

``torch.nn.attention.varlen.varlen_attn`` wraps the same operator without dropout, so this module calls the operator
itself: ``torch.ops.aten._flash_attention_forward``. It takes dropout, and torch derives its backward.

The kernel requires fp16 or bf16, compute capability 8.0 or newer, and int32 sequence ends. Head sizes are multiples of
8 and at most 256, and the number of query heads is a multiple of that of key heads. Source: ``mha_varlen_fwd`` and
``mha_varlen_bwd`` in torch's ``flash_api.cpp``.

Uncovered tokens: the kernel writes only tokens that belong to a sequence, up to ``max_length`` in each, and leaves the
rest of its output uninitialised. ``PackedCollator`` therefore makes the padding at a row's end the last sequence. That
sequence may be empty: the kernel's blocks return at once for no queries, and its backward writes zeros for keys that no
query reads.

Dropout: the operator draws a seed and an offset from CUDA's default generator (``philox_cuda_state``) and returns them
on the device for backward. While a CUDA graph is captured, both are pointers that each replay advances, so replays drop
other elements. The rate is rounded to 1/256, as in torch's ``scaled_dot_product_attention``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fastloop import PluginError

if TYPE_CHECKING:
    from fastloop import Run

NAME = "fastloop_varlen"
"""Name of ``attention`` in transformers' registry."""


def missing(device: torch.device, dtype: torch.dtype, head_size: int | None) -> str | None:
    """Why the kernel cannot compute attention here; None: it can.

    Tests on a CPU replace this function, and register CPU kernels for the operators.

    Args:
        head_size: Features of a head; None: the model's config gives no single size.
    """
    if device.type != "cuda":
        return f"the device is {device.type}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"the precision is {dtype}"
    if head_size is None or head_size % 8 or head_size > 256:
        return f"heads have size {head_size}"
    if torch.cuda.get_device_capability(device) < (8, 0) or not torch.backends.cuda.is_flash_attention_available():
        return "torch has no FlashAttention kernel for this GPU"
    return None


def computing_dtype(run: Run, model: nn.Module) -> torch.dtype:
    """The dtype that attention computes in."""
    precision = run.accelerator.mixed_precision
    if precision == "no":
        return next(model.parameters()).dtype
    return torch.float16 if precision == "fp16" else torch.bfloat16  # under fp8 attention is bf16


def head_size(config: Any) -> int | None:
    """Features of an attention head, for a transformers config. None if it gives no single size, such as Swin's, which
    is one per stage."""
    try:
        size, width, heads = (
            getattr(config, name, None) for name in ("head_dim", "hidden_size", "num_attention_heads")
        )
    except RuntimeError:  # transformers' error for an attribute that differs between layers, as in Gemma 4
        return None
    if not size and isinstance(width, int) and isinstance(heads, int):
        size = width // heads
    return size if isinstance(size, int) else None


def attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int = 0,
    max_length_k: int = 0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention inside each sequence of a row, in the form of transformers' attention functions.

    Args:
        query: (1, query heads, query tokens, head size).
        key: (1, key heads, tokens, head size), where query heads are a multiple of key heads.
        value: Of key's shape. Query and key are cast to its dtype, since rotary embeddings return float32 under
            autocast.
        cu_seq_lens_q: (sequences + 1,), int32: 0, then each sequence's end among the queries. The padding of a row is
            one of these sequences. None: the batch is one plain sequence.
        cu_seq_lens_k: Likewise for the keys.
        max_length_q: The most queries of a sequence.
        max_length_k: The most keys of a sequence.

    Returns:
        (1, query tokens, query heads, head size) of value's dtype, and None for the weights.

    Raises:
        PluginError: A padded batch of several sequences. Transformers gives no mask to an attention without a
            registered mask function.
    """
    if cu_seq_lens_q is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        if query.shape[0] > 1:
            raise PluginError(
                f"the model got a padded batch of {query.shape[0]} sequences, and it computes packed rows only.",
                code="padded-batch",
                place="plugin 'packing'",
                remedy="Give it one sequence at a time, or remove packing.",
            )
        plain: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **kwargs
        )
        return plain
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    output: Tensor = torch.ops.aten._flash_attention_forward(
        query[0].transpose(0, 1).to(value.dtype),
        key[0].transpose(0, 1).to(value.dtype),
        value[0].transpose(0, 1),
        cu_seq_lens_q,
        cu_seq_lens_k,
        max_length_q,
        max_length_k,
        dropout,
        causal,
        False,
        scale=scaling,
    )[0]
    return output[None], None


def register() -> str:
    """Add ``attention`` to transformers' registry and return its name.

    No mask function is registered: transformers then skips its search for packed sequences, which reads a number from
    the device.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attention)
    return NAME
