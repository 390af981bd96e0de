"""Losses. Each equals the loss of Sentence Transformers of the same name, in value and gradient.

Those of embeddings take the vectors of each column of texts, (N, D) each, and the scores of the rows, (N,) or None.
Those of rerankers take scores of the documents of each query.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def compute(vectors: Sequence[Tensor], scores: Any, options: Any) -> Tensor:
    """Compute the loss of embeddings that ``options.loss`` names, with ``temperature`` and ``margin`` of them.

    ``cosine`` is the mean squared difference between the cosine similarity of each row and its score. ``triplet`` is
    the mean over rows of max(0, distance to the second text - distance to the third + margin), Euclidean distances:
    Schroff et al., 2015, https://arxiv.org/abs/1503.03832.
    """
    if options.loss == "cosine":
        similar = functional.cosine_similarity(*vectors)
        return functional.mse_loss(similar, scores.to(similar.dtype))
    if options.loss == "cosent":
        return cosent(vectors, scores, options.temperature)
    if options.loss == "triplet":
        return functional.triplet_margin_loss(*vectors, margin=options.margin, eps=0)
    return multiple_negatives(vectors, options.temperature)


def multiple_negatives(vectors: Sequence[Tensor], temperature: float) -> Tensor:
    """Cross entropy of the cosine similarities of each first text with all others, where that of its row is right.
    Columns after the second are hard negatives. Henderson et al., 2017, https://arxiv.org/abs/1705.00652."""
    first, *others = (functional.normalize(column) for column in vectors)
    similar, own = first @ torch.cat(others).T, torch.arange(len(first), device=first.device)
    return functional.cross_entropy(similar / temperature, own)


def cosent(vectors: Sequence[Tensor], scores: Tensor, temperature: float) -> Tensor:
    """log(1 + sum exp((similarity of row i - that of row j) / temperature)) over rows i, j with a smaller score of i:
    Su, 2022, https://kexue.fm/archives/8847."""
    similar = functional.cosine_similarity(*vectors) / temperature
    differences = (similar[:, None] - similar)[scores[:, None] < scores]
    return functional.pad(differences, (1, 0)).logsumexp(0)


def truncate(vectors: Sequence[Tensor], size: int) -> list[Tensor]:
    """The first ``size`` numbers of each vector, as vectors of length 1, for a loss that is summed over several sizes
    (Matryoshka): Kusupati et al., 2022, https://arxiv.org/abs/2205.13147."""
    return [functional.normalize(column[:, :size]) for column in vectors]


def compute_of_lists(scores: Tensor, labels: Tensor, options: Any) -> Tensor:
    """Compute the loss of rerankers that ``options.loss`` names, with ``temperature``, from scores and labels of the
    documents of each query, (queries, documents) each. NaN as a label: there is no document.

    ``list_net`` is the mean cross entropy between the softmax of the labels of each query and that of its scores:
    Cao et al., 2007, https://doi.org/10.1145/1273496.1273513.
    """
    labels = labels.to(scores.dtype)
    if options.loss == "binary":
        return functional.binary_cross_entropy_with_logits(scores, labels)
    if options.loss == "list_net":
        absent, lowest = labels.isnan(), torch.finfo(scores.dtype).min  # -inf would give 0 * inf
        wanted = labels.masked_fill(absent, lowest).softmax(1)
        return functional.cross_entropy(scores.masked_fill(absent, lowest), wanted)
    first = torch.zeros(len(scores), dtype=torch.int64, device=scores.device)
    return functional.cross_entropy(scores.sigmoid() / options.temperature, first)
