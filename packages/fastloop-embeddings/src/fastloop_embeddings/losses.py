"""Losses. Each equals the loss of Sentence Transformers of the same name, in value and gradient.

Those of embeddings take the vectors of each column of texts, (N, D) each, and the scores of the rows, (N,) or None.
Those of rerankers take scores of the documents of each query.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.linalg import vector_norm
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, mse_loss, normalize, pad


def compute(vectors: Sequence[Tensor], scores: Any, options: Any) -> Tensor:
    """Compute the loss of embeddings that ``options.loss`` names, with ``temperature`` and ``margin`` of them."""
    if options.loss == "cosine":
        return cosine(vectors, scores)
    if options.loss == "cosent":
        return cosent(vectors, scores, options.temperature)
    if options.loss == "triplet":
        return triplet(vectors, options.margin)
    return multiple_negatives(vectors, options.temperature)


def multiple_negatives(vectors: Sequence[Tensor], temperature: float) -> Tensor:
    """Cross entropy of the cosine similarities of each first text with all others, where that of its row is right.
    Columns after the second are hard negatives. Henderson et al., 2017, https://arxiv.org/abs/1705.00652."""
    first, *others = (normalize(column) for column in vectors)
    return cross_entropy(first @ torch.cat(others).T / temperature, torch.arange(len(first), device=first.device))


def cosent(vectors: Sequence[Tensor], scores: Tensor, temperature: float) -> Tensor:
    """log(1 + sum exp((similarity of row i - that of row j) / temperature)) over rows i, j with a smaller score of i:
    Su, 2022, https://kexue.fm/archives/8847."""
    similar = cosine_similarities(vectors) / temperature
    differences = (similar[:, None] - similar)[scores[:, None] < scores]
    return pad(differences, (1, 0)).logsumexp(0)


def cosine(vectors: Sequence[Tensor], scores: Tensor) -> Tensor:
    """Mean squared difference between the cosine similarity of each row and its score."""
    similar = cosine_similarities(vectors)
    return mse_loss(similar, scores.to(similar.dtype))


def triplet(vectors: Sequence[Tensor], margin: float) -> Tensor:
    """Mean over rows of max(0, distance to the second text - distance to the third + margin), Euclidean distances:
    Schroff et al., 2015, https://arxiv.org/abs/1503.03832."""
    first, similar, other = vectors
    return (vector_norm(first - similar, dim=1) - vector_norm(first - other, dim=1) + margin).relu().mean()


def cosine_similarities(vectors: Sequence[Tensor]) -> Tensor:
    """The cosine similarity of the two texts of each row, (N,)."""
    first, second = vectors
    return (normalize(first) * normalize(second)).sum(1)


def truncate(vectors: Sequence[Tensor], size: int) -> list[Tensor]:
    """The first ``size`` numbers of each vector, as vectors of length 1, for a loss that is summed over several sizes
    (Matryoshka): Kusupati et al., 2022, https://arxiv.org/abs/2205.13147."""
    return [normalize(column[:, :size]) for column in vectors]


def compute_of_lists(scores: Tensor, labels: Tensor, options: Any) -> Tensor:
    """Compute the loss of rerankers that ``options.loss`` names, with ``temperature``, from scores and labels of the
    documents of each query, (queries, documents) each. NaN as a label: there is no document."""
    if options.loss == "binary":
        return binary_cross_entropy_with_logits(scores, labels.to(scores.dtype))
    if options.loss == "list_net":
        return list_net(scores, labels.to(scores.dtype))
    first = torch.zeros(len(scores), dtype=torch.int64, device=scores.device)
    return cross_entropy(scores.sigmoid() / options.temperature, first)


def list_net(scores: Tensor, labels: Tensor) -> Tensor:
    """Mean cross entropy between the softmax of the labels of each query and that of its scores: Cao et al., 2007,
    https://doi.org/10.1145/1273496.1273513."""
    absent = labels.isnan()
    wanted = labels.masked_fill(absent, float("-inf")).softmax(1)
    found = scores.masked_fill(absent, float("-inf")).log_softmax(1).masked_fill(absent, 0)
    return -(wanted * found).sum(1).mean()
