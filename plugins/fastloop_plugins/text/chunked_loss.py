"""Cross entropy of a language model's head, chunk by chunk: the logits of all tokens never exist at once.

``torch.nn.functional.linear_cross_entropy`` of torch 2.13 computes the same in chunks, and does not replace this module
yet. With 512 states of 256 numbers, 49,152 tokens and two CPU cores, it holds half of the memory, 50 MiB instead of 98,
and takes 18 times as long. In bfloat16 it also sums the loss in bfloat16: 10.5 instead of 10.958.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from fastloop_plugins._targets import IGNORED

HAS_LIGER = find_spec("liger_kernel") is not None


@dataclass
class Chunking:
    """How a head is computed in chunks.

    Attributes:
        vocabulary: Tokens of the vocabulary; the rows of the head after them have no probability.
        dtype: The dtype of matrix products. Losses, probabilities and sums are float32.
        tokens: Tokens of a chunk.
        temperature: Divides the logits.
    """

    vocabulary: int
    dtype: torch.dtype
    tokens: int
    temperature: float = 1.0


SUMMED_TOKENS = 1024
"""Tokens whose gradient of the weight is added at once, at most, in a smaller dtype than float32: each sum reads and
writes as many numbers as the weight has."""
SUMMED_CHUNKS = 8
"""Chunks of these tokens at most: their probabilities are held until then."""


class ChunkedHead:
    """Logits of some tokens, and the sums of gradients over the chunks.

    Args:
        hidden: (N, d).
        weight: (rows, d).
        bias: (rows,), or None.
        needed: Which of the three get a gradient.
    """

    def __init__(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, chunking: Chunking, needed: list[bool]
    ) -> None:
        self.hidden = hidden
        self.chunking = chunking
        self.weight = weight.to(chunking.dtype)
        self.bias = None if bias is None else bias.to(chunking.dtype)
        self.hidden_gradient = torch.zeros_like(hidden) if needed[0] else None
        self.weight_gradient = torch.zeros_like(weight, dtype=torch.float32) if needed[1] else None
        self.bias_gradient = torch.zeros_like(bias, dtype=torch.float32) if needed[2] and bias is not None else None
        self.group = chunking.tokens
        if needed[1] and chunking.dtype != torch.float32:
            self.group *= max(1, min(SUMMED_CHUNKS, SUMMED_TOKENS // chunking.tokens))
        self.slopes: list[Tensor] = []
        self.scales: list[Tensor] = []

    def chunks(self) -> list[slice]:
        """The tokens of each chunk."""
        size = self.chunking.tokens
        return [slice(start, min(start + size, len(self.hidden))) for start in range(0, len(self.hidden), size)]

    def logits(self, chunk: slice) -> Tensor:
        """Logits, (tokens, rows) float32, which the caller may overwrite."""
        logits = linear(self.hidden[chunk].to(self.chunking.dtype), self.weight, self.bias).float()
        if self.chunking.temperature != 1:
            logits /= self.chunking.temperature
        logits[:, self.chunking.vocabulary :] = -torch.inf
        return logits

    def add_gradients(self, chunk: slice, probabilities: Tensor, targets: Tensor, scale: Tensor) -> None:
        """Add the gradients of cross entropy. Call it for every chunk, in order.

        Args:
            probabilities: The softmax of ``logits``. They are overwritten.
            targets: (tokens,) int64, none below 0.
            scale: The gradient of each token's loss, (tokens,).
        """
        scale = (scale / self.chunking.temperature)[:, None]
        probabilities.scatter_add_(1, targets[:, None], torch.full_like(scale, -1.0))
        # The scale multiplies (tokens, d) numbers of each product instead of (tokens, rows).
        if self.bias_gradient is not None:
            self.bias_gradient += (scale.t() @ probabilities)[0]
        slopes = probabilities.to(self.chunking.dtype)
        if self.hidden_gradient is not None:
            self.hidden_gradient[chunk] = (slopes @ self.weight) * scale
        if self.weight_gradient is not None:
            self.slopes.append(slopes)
            self.scales.append(scale)
            if chunk.stop % self.group == 0 or chunk.stop == len(self.hidden):
                self.add_weight_gradient(chunk.stop)

    def add_weight_gradient(self, stop: int) -> None:
        """Add the gradient of the weight for the group of chunks that ends at token ``stop``."""
        assert self.weight_gradient is not None
        slopes = self.slopes[0] if len(self.slopes) == 1 else torch.cat(self.slopes)
        scales = torch.cat(self.scales)
        self.slopes.clear()
        self.scales.clear()
        states = (self.hidden[stop - len(slopes) : stop] * scales).to(self.chunking.dtype)
        if self.chunking.dtype == torch.float32:
            self.weight_gradient.addmm_(slopes.t(), states)
        else:
            self.weight_gradient += slopes.t() @ states

    def gradients(self) -> list[Tensor | None]:
        """Those of hidden states, weight and bias."""
        return [self.hidden_gradient, self.weight_gradient, self.bias_gradient]


class ChunkedLoss(torch.autograd.Function):
    """The mean cross entropy of the target tokens. The forward pass also computes the gradients, and keeps only these.

    Arguments of ``forward``:
        hidden: (N, d).
        weight: (rows, d).
        bias: (rows,), or None.
        targets: (N,) int64; -100 for a token without a loss.
        chunking: See ``Chunking``.
        differentiate: Whether gradients are needed.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        chunking: Chunking,
        differentiate: bool,
    ) -> Tensor:
        needed = [differentiate and need for need in ctx.needs_input_grad[:3]]
        head = ChunkedHead(hidden, weight, bias, chunking, needed)
        count = (targets != IGNORED).sum()
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        for chunk in head.chunks():
            known = targets[chunk] != IGNORED
            tokens = targets[chunk].clamp(min=0)
            scores = head.logits(chunk).log_softmax(1)
            total -= torch.where(known[:, None], scores.gather(1, tokens[:, None]), 0).sum()
            if any(needed):
                head.add_gradients(chunk, scores.exp_(), tokens, known / count)
            del scores  # before the logits of the next chunk exist
        ctx.save_for_backward(*head.gradients())
        return total / count

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, scale: Tensor) -> Any:
        gradients = [None if gradient is None else gradient * scale for gradient in ctx.saved_tensors]
        return *gradients, None, None, None


class ChunkedTokenLosses(torch.autograd.Function):
    """The cross entropy of each target token, (N,) float32; 0 for a token without a loss.

    The backward pass computes the logits again: only then are the gradients of the losses known. The arguments are
    those of ``ChunkedLoss``.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, chunking: Chunking
    ) -> Tensor:
        head = ChunkedHead(hidden, weight, bias, chunking, [False] * 3)
        norms = torch.zeros(len(hidden), dtype=torch.float32, device=hidden.device)
        losses = torch.zeros_like(norms)
        for chunk in head.chunks():
            logits = head.logits(chunk)
            known = targets[chunk] != IGNORED
            tokens = targets[chunk].clamp(min=0)
            norm = logits.logsumexp(1)
            norms[chunk] = norm
            losses[chunk] = torch.where(known, norm - logits.gather(1, tokens[:, None])[:, 0], 0)
        ctx.save_for_backward(hidden, weight, bias, targets, norms)
        ctx.chunking = chunking
        return losses

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, scale: Tensor) -> Any:
        hidden, weight, bias, targets, norms = ctx.saved_tensors
        with torch.autocast(hidden.device.type, enabled=False):
            head = ChunkedHead(hidden, weight, bias, ctx.chunking, ctx.needs_input_grad[:3])
            for chunk in head.chunks():
                own = torch.where(targets[chunk] != IGNORED, scale[chunk], 0)
                norm = norms[chunk][:, None]
                tokens = targets[chunk].clamp(min=0)
                head.add_gradients(chunk, head.logits(chunk).sub_(norm).exp_(), tokens, own)
        return *head.gradients(), None, None


def computing_dtype(hidden: Tensor) -> torch.dtype:
    """The dtype of autocast, or that of hidden states without it."""
    device = hidden.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype


def chunked_loss(head: Any, hidden: Tensor, targets: Tensor, vocabulary: int | None, chunk: int) -> Tensor:
    """The mean cross entropy of ``targets``, in the dtype of autocast.

    On CUDA, liger-kernel computes it, if that is installed and the head has no more rows than the vocabulary. In fp16,
    all products are float32: fp16 cannot hold gradients of a loss that is not scaled yet.

    Args:
        head: A linear layer.
        hidden: Its input, (..., d).
        targets: (...) int64; -100 for a token without a loss.
        vocabulary: Tokens of the vocabulary; None: one for each row of the head.
        chunk: Tokens of a chunk.
    """
    device = hidden.device.type
    dtype = computing_dtype(hidden)
    states = hidden.flatten(0, -2)
    tokens = targets.flatten()
    if device == "cuda" and vocabulary is None and dtype != torch.float16 and HAS_LIGER:
        fused: Tensor = _liger_loss(head, states, tokens)
        return fused
    dtype = torch.float32 if dtype == torch.float16 else dtype
    chunking = Chunking(vocabulary or len(head.weight), dtype, chunk)
    arguments = (states, head.weight, head.bias, tokens, chunking, torch.is_grad_enabled())
    with torch.autocast(device, enabled=False):
        loss: Tensor = ChunkedLoss.apply(*arguments)  # type: ignore[no-untyped-call]
    return loss


@torch.compiler.disable  # type: ignore[untyped-decorator] # each number of tokens would need its own graph
def chunked_token_losses(
    head: Any, hidden: Tensor, targets: Tensor, vocabulary: int | None, chunk: int, temperature: float = 1.0
) -> Tensor:
    """The cross entropy of each of ``targets``, (N,) float32, in the dtype of autocast. 0 for a target of -100.

    Args:
        head: A linear layer.
        hidden: Its input, (N, d).
        targets: (N,) int64.
        vocabulary: Tokens of the vocabulary; None: one for each row of the head.
        chunk: Tokens of a chunk.
        temperature: Divides the logits.
    """
    dtype = computing_dtype(hidden)
    dtype = torch.float32 if dtype == torch.float16 else dtype
    chunking = Chunking(vocabulary or len(head.weight), dtype, chunk, temperature)
    with torch.autocast(hidden.device.type, enabled=False):
        losses: Tensor = ChunkedTokenLosses.apply(  # type: ignore[no-untyped-call]
            hidden, head.weight, head.bias, targets, chunking
        )
    return losses


@torch.compiler.disable  # type: ignore[untyped-decorator] # it reads a number from the device
def _liger_loss(head: Any, states: Tensor, targets: Tensor) -> Tensor:
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    loss: Tensor = LigerFusedLinearCrossEntropyLoss(ignore_index=IGNORED)(head.weight, states, targets, head.bias)
    return loss
