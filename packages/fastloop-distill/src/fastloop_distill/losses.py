"""Losses between the outputs of a student and those of its teacher. They compute in the dtype of the outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, kl_div

from fastloop_distill.cache import Cache
from fastloop_distill.rows import IGNORED, Rows
from fastloop_distill.teacher import Teacher


def soft_loss(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """T^2 * KL(teacher || student) of logits (N, C) each, divided by T before the softmax; the mean over the rows.
    Hinton et al., 2015, https://arxiv.org/abs/1503.02531."""
    ours, theirs = ((logits / temperature).log_softmax(1) for logits in (student, teacher))
    return kl_div(ours, theirs, reduction="batchmean", log_target=True) * temperature**2


def states_loss(student: Tensor, teacher: Tensor, weights: Tensor, kind: str) -> Tensor:
    """Sum over the tokens of weight times distance of the hidden states, (N, D) each, weights (N,).

    Args:
        kind: ``mse``, the mean squared difference, or ``cosine``, 1 - cosine similarity: Jiao et al., 2020,
            https://arxiv.org/abs/1909.10351, and Sanh et al., 2019, https://arxiv.org/abs/1910.01108.
    """
    if kind == "cosine":
        return ((1 - cosine_similarity(student, teacher, dim=1)) * weights).sum()
    return ((student - teacher).square().mean(1) * weights).sum()


def compare(
    student: Any, batch: Mapping[str, Any], teacher: Teacher, cache: Cache, options: Any, pairs: Sequence[int]
) -> tuple[Tensor, Tensor | None]:
    """The soft loss of a batch, and its loss between hidden states or None: 0-dim, means like that of the task.

    Args:
        student: The output of the student for the batch.
        pairs: The teacher's layer for each one of the student.
    """
    rows, logits, with_states = Rows(batch), student.logits, options.states != "none"
    per_text, targets = logits.dim() == 2, batch.get("targets", batch.get("labels"))
    dtype = torch.promote_types(logits.dtype, torch.float32)
    if per_text and not with_states:
        theirs = cache.logits(rows, len(logits), teacher)
    else:
        output = teacher(rows.inputs, with_states)
        theirs = output.logits[: len(logits)] if per_text else rows.flat(output.logits)
    if not per_text:
        size, kept = min(logits.shape[-1], theirs.shape[-1]), targets.flatten() != IGNORED
        logits, theirs = logits.flatten(0, 1)[kept, :size], theirs[kept, :size]  # a vocabulary may be padded
    soft = soft_loss(logits.to(dtype), theirs.to(dtype), options.temperature)
    if not with_states:
        return soft, None
    weights, found = rows.weights(targets, per_text, dtype), []
    for ours, layer in zip(student.hidden_states[1:], pairs, strict=True):
        pair = (ours.flatten(0, 1).to(dtype), rows.flat(output.hidden_states[layer + 1]).to(dtype))
        found.append(states_loss(*pair, weights, options.states))
    return soft, torch.stack(found).mean()
