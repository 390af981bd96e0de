"""Attention over rows of sequences on a CPU, by the kernel in ``cpu_attention.c``."""

from __future__ import annotations

import ctypes
import os
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fastloop_cpu._native import KernelUnavailable, draw_dropout, load, operation, unavailable_kernels

SOURCE = Path(__file__).with_name("cpu_attention.c")
PRODUCTS = {
    "multiply": "_ZN2at6native7cpublas6brgemmEllllllbPKN3c108BFloat16ES5_Pfb",
    "release": "_ZN2at6native7cpublas14brgemm_releaseEb",
}
"""Functions of torch that the kernel calls: ``brgemm`` and ``brgemm_release`` of ATen/native/CPUBlas.h in torch 2.6 and
later. oneDNN compiles a product for this processor, with AMX if there is AMX."""
ISA_LIMITS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
"""Environment variables that limit oneDNN's instructions. Its products would end the process if it may not use bf16."""
HEAD_SIZES = (32, 64, 128)
"""Features of a head that the kernel is compiled for."""


class View(ctypes.Structure):
    """A tensor of shape (tokens, heads, head size) with contiguous features: its address, and two strides in
    elements."""

    _fields_ = (("data", ctypes.c_void_p), ("token", ctypes.c_int64), ("head", ctypes.c_int64))


class Row(ctypes.Structure):
    """Arguments of the kernel: ``struct row`` in the C file."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("sequences", "heads", "key_heads")),
        *((name, ctypes.c_void_p) for name in ("query_ends", "key_ends")),
        *(
            (name, View)
            for name in ("query", "key", "value", "output", "output_grad", "query_grad", "key_grad", "value_grad")
        ),
        ("log_sums", ctypes.c_void_p),
        ("scale", ctypes.c_float),
        ("drop", ctypes.c_uint32),
        ("seed", ctypes.c_uint64),
        *((name, ctypes.c_int32) for name in ("causal", "threads")),
        *((name, ctypes.c_void_p) for name in ("multiply", "release")),
    )


def unavailable() -> str | None:
    """Why the kernel cannot run on this machine; None: it can, and is compiled."""
    reason = unavailable_kernels(SOURCE)
    if reason:
        return reason
    limit = next((name for name in ISA_LIMITS if name in os.environ), None)
    if limit:
        return f"{limit} may forbid oneDNN the instructions that it needs"
    try:
        products()
    except KernelUnavailable as error:
        return str(error)
    return None


@cache
def products() -> dict[str, int]:
    """The addresses of ``PRODUCTS``, after a first product with the right result.

    Raises:
        KernelUnavailable: This torch has no such functions, or they compute something else.
    """
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).with_name("lib") / "libtorch_cpu.so"))
        multiply, release = (getattr(library, symbol) for symbol in PRODUCTS.values())
    except (OSError, AttributeError):
        raise KernelUnavailable(f"torch {torch.__version__} does not export oneDNN's products") from None
    first, second = (torch.arange(tokens * 64).remainder(7).view(tokens, 64).bfloat16() for tokens in (16, 64))
    pairs = second.view(32, 2, 64).transpose(1, 2).contiguous()
    result = torch.empty(16, 64, dtype=torch.float32)
    sizes = (16, 64, 64, 64, 64, 64)
    tensors = (first, pairs, result)
    multiply.argtypes = [ctypes.c_int64] * 6 + [ctypes.c_bool] + [ctypes.c_void_p] * 3 + [ctypes.c_bool]
    multiply(*sizes, False, *(tensor.data_ptr() for tensor in tensors), True)
    release(ctypes.c_bool(True))
    with torch.autocast("cpu", enabled=False):  # the first call may be in a forward pass, whose products are in bf16
        expected = first.float() @ second.float()
    if not torch.equal(result, expected):
        raise KernelUnavailable(f"a product of oneDNN in torch {torch.__version__} is wrong")
    return {
        name: ctypes.cast(function, ctypes.c_void_p).value or 0
        for name, function in zip(PRODUCTS, (multiply, release), strict=True)
    }


def check(ends: tuple[Tensor, Tensor], tensors: dict[str, Tensor], log_sums: Tensor) -> None:
    """Raise an error for arguments with which the kernel would read or write outside of a tensor, or leave output
    unwritten.

    Args:
        ends: Ends of the sequences among queries and among keys, int32 of shape (sequences + 1,).
        tensors: Name -> bf16 of shape (tokens, heads, head size), with contiguous features.
        log_sums: float32 of shape (queries, heads).

    Raises:
        ValueError: Names the argument, with what was found and expected.
    """
    query = tensors["query"]
    key = tensors["key"]
    for name, tensor in tensors.items():
        shape = (key if name.startswith(("key", "value")) else query).shape
        kind = (tensor.dtype, tensor.device.type, tensor.dim(), tensor.stride()[-1:])
        if kind != (torch.bfloat16, "cpu", 3, (1,)) or tensor.shape != shape:
            expected = f"bf16 on the CPU of shape {tuple(shape)} with contiguous features"
            raise ValueError(f"cpu-attention: {name}: found {_describe(tensor)}, expected {expected}.")
    _, heads, size = query.shape
    _, key_heads, key_size = key.shape
    if size not in HEAD_SIZES or key_size != size or not key_heads or heads % key_heads:
        expected = f"heads of one size ({', '.join(map(str, HEAD_SIZES))}), and a multiple of the key's"
        raise ValueError(
            f"cpu-attention: found {heads} heads of {size} and {key_heads} of {key_size}, expected {expected}."
        )
    if log_sums.dtype is not torch.float32 or log_sums.shape != query.shape[:2] or not log_sums.is_contiguous():
        raise ValueError(
            f"cpu-attention: log_sums: found {_describe(log_sums)}, expected float32 of {tuple(query.shape[:2])}."
        )
    for end, tokens in zip(ends, (len(query), len(key)), strict=True):
        numbers = end.tolist()
        rises = numbers[:1] == [0] and numbers[-1] == tokens and numbers == sorted(numbers)
        if end.dtype is not torch.int32 or not end.is_contiguous() or not rises or len(numbers) != len(ends[0]):
            expected = f"int32 that rises from 0 to {tokens}, {len(ends[0])} numbers"
            raise ValueError(f"cpu-attention: ends of sequences: found {end.dtype} {numbers}, expected {expected}.")


def _describe(tensor: Tensor) -> str:
    return f"{tensor.dtype} on {tensor.device.type} of shape {tuple(tensor.shape)} and strides {tensor.stride()}"


def call(
    name: str, ends: tuple[Tensor, Tensor], tensors: dict[str, Tensor], log_sums: Tensor, options: dict[str, Any]
) -> None:
    """Call a function of the kernel with tensors of shape (tokens, heads, head size), and the ends of their sequences.

    Raises:
        ValueError: See ``check``.
        MemoryError: There is no memory for the longest sequence.
    """
    check(ends, tensors, log_sums)
    query = tensors["query"]
    key = tensors["key"]
    views = {name: View(tensor.data_ptr(), tensor.stride(0), tensor.stride(1)) for name, tensor in tensors.items()}
    row = Row(
        sequences=len(ends[0]) - 1,
        heads=query.shape[1],
        key_heads=key.shape[1],
        query_ends=ends[0].data_ptr(),
        key_ends=ends[1].data_ptr(),
        log_sums=log_sums.data_ptr(),
        threads=torch.get_num_threads(),
        **products(),
        **views,
        **options,
    )
    with operation(name):
        failed = getattr(load(SOURCE), name)(ctypes.byref(row), query.shape[2])
    if failed:
        raise MemoryError(f"cpu-attention: no memory for sequences of {int(ends[1].diff().max())} tokens")


class RowAttention(torch.autograd.Function):
    """softmax(q k^T scale), dropout, times v, inside each sequence of a row.

    Shapes: query (queries, heads, head size), key and value (keys, key heads, head size), bf16; returns query's shape.
    ``ends`` are two int32 tensors of shape (sequences + 1,), for queries and for keys: 0, then the end of each
    sequence. Backward keeps the output and one float32 for each query and head. Other shapes raise a ``ValueError``;
    see ``check``.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        ends: tuple[Tensor, Tensor],
        scale: float,
        p: float,
        causal: bool,
    ) -> Tensor:
        """Draw a seed for the dropout masks from torch's default generator, and compute."""
        query, key, value = (
            tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in (query, key, value)
        )
        output = torch.empty(query.shape, dtype=query.dtype)
        log_sums = torch.empty(query.shape[:2], dtype=torch.float32)
        ctx.ends = ends
        ctx.options = {"scale": scale, "causal": causal, **draw_dropout(p)}
        call(
            "attention_forward",
            ends,
            {"query": query, "key": key, "value": value, "output": output},
            log_sums,
            ctx.options,
        )
        ctx.save_for_backward(query, key, value, output, log_sums)
        return output

    @staticmethod
    @once_differentiable  # autograd does not see the kernel: a second derivative would lack terms
    def backward(ctx: Any, output_grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of query, key and value, with the same masks."""
        query, key, value, output, log_sums = ctx.saved_tensors
        tensors = {
            "query": query,
            "key": key,
            "value": value,
            "output": output,
            "output_grad": output_grad.contiguous(),
        }
        query_grad = torch.empty(query.shape, dtype=torch.bfloat16)
        key_grad = torch.empty(key.shape, dtype=torch.bfloat16)
        value_grad = torch.empty(value.shape, dtype=torch.bfloat16)
        tensors |= {"query_grad": query_grad, "key_grad": key_grad, "value_grad": value_grad}
        call("attention_backward", ctx.ends, tensors, log_sums, ctx.options)
        return query_grad, key_grad, value_grad, None, None, None, None


@torch.compiler.disable  # type: ignore[untyped-decorator] # a compiler cannot follow a call through ctypes
def attention(
    previous: str,
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    packed: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention in the form of transformers' attention functions: from (B, H, T, D) to (B, T, H, D).

    Calls the implementation ``previous`` for batches that the kernel does not compute: with a mask, in another
    precision, on a device, or with heads of other sizes, such as values that are smaller than keys.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        query = query.to(dtype)
        key = key.to(dtype)
        value = value.to(dtype)
    queries = query.shape[2]
    keys = key.shape[2]
    has_known_size = query.shape[3] == key.shape[3] and key.shape[3] in HEAD_SIZES
    fits = has_known_size and key.shape == value.shape and query.shape[1] % key.shape[1] == 0
    is_bf16 = query.dtype == key.dtype == value.dtype == torch.bfloat16
    attends_all = attention_mask is None and kwargs.get("sliding_window") is None and "position_bias" not in kwargs
    has_rows = packed is not None or queries in (1, keys)
    if not (fits and is_bf16 and query.device.type == "cpu" and attends_all and has_rows):
        if packed is not None:
            kwargs["packed"] = packed
        by_previous: tuple[Tensor, None] = ALL_ATTENTION_FUNCTIONS[previous](
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return by_previous
    causal = queries == keys and queries > 1 and bool(kwargs.get("is_causal") or getattr(module, "is_causal", False))
    lengths = [keys] * len(key) if packed is None else packed.lengths
    of_keys = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    of_queries = of_keys
    if queries != keys:  # one query for each sequence, and none for the padding at a row's end
        of_queries = torch.arange(len(lengths) + 1, dtype=torch.int32).clamp_(max=len(query) * queries)
    rows = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    output: Tensor = RowAttention.apply(*rows, (of_queries, of_keys), scale, dropout, causal)  # type: ignore[no-untyped-call]
    return output.view(len(query), queries, *output.shape[1:]), None


def use(model: Any, name: str) -> None:
    """Set the kernel as the attention of a transformers model, with the model's current implementation for other
    batches."""
    from transformers import AttentionInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface

    previous = model.config._attn_implementation
    AttentionInterface.register(name, partial(attention, previous))
    AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[previous])
    model.set_attn_implementation(name)
