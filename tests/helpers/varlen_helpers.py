"""CPU kernels for torch's varlen FlashAttention operators, so that tests run what calls them.

Torch itself has them on CUDA alone."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from fastloop_plugins.data import _varlen


def probabilities(query: Tensor, key: Tensor, scale: float, causal: bool) -> Tensor:
    """Softmax of one sequence's scores, (heads, queries, keys). Causality is aligned at the last token."""
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    if causal:
        seen = torch.ones(scores.shape[1:], dtype=torch.bool).tril(scores.shape[2] - scores.shape[1])
        scores = scores.masked_fill(~seen, -math.inf)
    return scores.softmax(-1)


def parts(
    query: Tensor, key: Tensor, ends_q: Tensor, ends_k: Tensor, max_q: int, max_k: int, p: float, seed: int
) -> Iterator[Any]:
    """Each sequence's queries and keys, cut at the maxima as the kernel's grid is, and dropout's factor for each
    probability."""
    generator = torch.Generator().manual_seed(seed)
    for first_q, last_q, first_k, last_k in zip(ends_q[:-1], ends_q[1:], ends_k[:-1], ends_k[1:], strict=True):
        queries = slice(int(first_q), min(int(last_q), int(first_q) + max_q))
        keys = slice(int(first_k), min(int(last_k), int(first_k) + max_k))
        size = (query.shape[1], queries.stop - queries.start, keys.stop - keys.start)
        yield queries, keys, (torch.rand(size, generator=generator, dtype=torch.double) >= p) / (1 - p)


def check(query: Tensor, key: Tensor, value: Tensor, *ends: Tensor) -> None:
    """The checks of torch's flash_api.cpp that do not concern the device."""
    assert query.dtype == key.dtype == value.dtype
    assert query.dim() == key.dim() == value.dim() == 3
    assert key.shape == value.shape
    assert query.shape[1] % key.shape[1] == query.shape[2] % 8 == 0
    assert query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
    for numbers, tensor in zip(ends, (query, key), strict=True):
        assert numbers.dtype == torch.int32
        assert numbers.is_contiguous()
        assert numbers[-1] <= len(tensor)


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ends_q: Tensor,
    ends_k: Tensor,
    max_q: int,
    max_k: int,
    p: float,
    causal: bool,
    debug: bool,
    *,
    scale: float | None = None,
    **windows: Any,
) -> tuple[Tensor, ...]:
    """In float64. Tokens outside all sequences stay NaN; the kernel does not write them."""
    check(query, key, value, ends_q, ends_k)
    seed = int(torch.randint(2**31, ())) if p else 0
    output = torch.full_like(query, math.nan)
    groups = query.shape[1] // key.shape[1]
    scale = scale or query.shape[-1] ** -0.5
    for queries, keys, keep in parts(query, key, ends_q, ends_k, max_q, max_k, p, seed):
        q, k, v = (
            query[queries].double(),
            *(tensor[keys].double().repeat_interleave(groups, 1) for tensor in (key, value)),
        )
        output[queries] = torch.einsum("hqk,khd->qhd", probabilities(q, k, scale, causal) * keep, v).to(query.dtype)
    state = torch.tensor([seed, 0], dtype=torch.uint64)
    return (
        output,
        torch.empty(query.shape[1], query.shape[0]),
        state,
        torch.empty((), dtype=torch.uint64),
        query.new_empty(0),
    )


def backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    logsumexp: Tensor,
    ends_q: Tensor,
    ends_k: Tensor,
    max_q: int,
    max_k: int,
    p: float,
    causal: bool,
    state: Tensor,
    unused: Tensor,
    *,
    scale: float | None = None,
    **windows: Any,
) -> tuple[Tensor, ...]:
    """Gradients of query, key and value, with the dropout that ``state`` stands for."""
    check(query, key, value, ends_q, ends_k)
    assert logsumexp.shape == (query.shape[1], query.shape[0])
    results = tuple(torch.full_like(tensor, math.nan) for tensor in (query, key, value))
    groups = query.shape[1] // key.shape[1]
    scale = scale or query.shape[-1] ** -0.5
    for queries, keys, keep in parts(query, key, ends_q, ends_k, max_q, max_k, p, int(state[0])):
        q, k, v = (
            query[queries].double(),
            *(tensor[keys].double().repeat_interleave(groups, 1) for tensor in (key, value)),
        )
        of_output = gradient[queries].double()
        found = probabilities(q, k, scale, causal)
        of_found = torch.einsum("qhd,khd->hqk", of_output, v) * keep
        of_scores = found * (of_found - (of_found * found).sum(-1, keepdim=True)) * scale
        of_key = torch.einsum("hqk,qhd->khd", of_scores, q)
        of_value = torch.einsum("hqk,qhd->khd", found * keep, of_output)
        results[0][queries] = torch.einsum("hqk,khd->qhd", of_scores, k).to(query.dtype)
        for result, expanded in zip(results[1:], (of_key, of_value), strict=True):
            result[keys] = expanded.unflatten(1, (-1, groups)).sum(2).to(result.dtype)
    return results


@contextmanager
def kernels_on_cpu(patch: pytest.MonkeyPatch) -> Iterator[None]:
    """While inside, ``packing`` takes the operator on a CPU, in any precision."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", forward, "CPU")
    library.impl("_flash_attention_backward", backward, "CPU")
    patch.setattr(_varlen, "missing", lambda device, dtype, head_size: None)
    try:
        yield
    finally:
        library._destroy()
