"""Losses between the outputs of a student and those of its teacher. They compute in the dtype of the outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, kl_div

from fastloop_distill.cache import Cache
from fastloop_distill.rows import IGNORED, TeacherRows
from fastloop_distill.teacher import Teacher


def soft_loss(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """T^2 * KL(teacher || student) of logits (N, C) each, divided by T before the softmax; the mean over the rows.
    Hinton et al., 2015, https://arxiv.org/abs/1503.02531."""
    of_student = (student / temperature).log_softmax(1)
    of_teacher = (teacher / temperature).log_softmax(1)
    return kl_div(of_student, of_teacher, reduction="batchmean", log_target=True) * temperature**2


def distances(student: Tensor, teacher: Tensor, kind: str) -> Tensor:
    """Distances of hidden states, (N, D) each: (N,).

    Args:
        kind: ``mse``, the mean squared difference, or ``cosine``, 1 - cosine similarity: Jiao et al., 2020,
            https://arxiv.org/abs/1909.10351, and Sanh et al., 2019, https://arxiv.org/abs/1910.01108.
    """
    if kind == "cosine":
        return 1 - cosine_similarity(student, teacher, dim=1)
    return (student - teacher).square().mean(1)


def compare(
    student: Any, batch: Mapping[str, Any], teacher: Teacher, cache: Cache, options: Any, pairs: Sequence[int]
) -> tuple[Tensor, Tensor | None]:
    """The soft loss of a batch, and its loss between hidden states or None: 0-dim, means like that of the task.

    Args:
        student: The output of the student for the batch.
        pairs: The teacher's layer for each one of the student.
    """
    rows = TeacherRows(batch)
    logits = student.logits
    with_states = options.states != "none"
    per_text = logits.dim() == 2
    targets = batch.get("targets", batch.get("labels"))
    dtype = torch.promote_types(logits.dtype, torch.float32)
    output: Any = None  # of the teacher; the cache may have the logits of a text, and only them
    if with_states or not per_text:
        output = teacher(rows.inputs, with_states)
    if output is None:
        teacher_logits = cache.logits(rows, len(logits), teacher)
    elif per_text:
        teacher_logits = output.logits
    else:
        size = min(logits.shape[-1], output.logits.shape[-1])
        has_loss = targets.flatten() != IGNORED
        # one may be padded
        logits = logits.flatten(0, 1)[has_loss, :size]
        teacher_logits = rows.flat(output.logits)[has_loss, :size]
    soft = soft_loss(logits.to(dtype), teacher_logits.to(dtype), options.temperature)
    if not with_states:
        return soft, None
    of_layers: list[Tensor] = []
    for own, layer in zip(student.hidden_states[1:], pairs, strict=True):  # hidden_states[0] are the embeddings
        of_teacher = output.hidden_states[layer + 1]
        of_layers.append(distances(own.flatten(0, 1).to(dtype), of_teacher.flatten(0, 1).to(dtype), options.states))
    return soft, torch.stack(of_layers).mean(0) @ rows.weights(targets, per_text, dtype)
