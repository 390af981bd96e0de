"""Losses of text embeddings. Each equals the loss of Sentence Transformers of the same name, in value and gradient.

A loss takes the vectors of each column of texts, (N, D) each, and the scores of the rows, (N,) or None.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

SPANS_ROWS = ("multiple_negatives", "cosent")
"""Losses that compare the rows of a batch with each other. Those of parts of a batch do not add up to its loss."""

SCORED = ("cosent", "cosine")
"""Losses that read a score for each row. The others read pairs of similar texts."""


def compute(vectors: Sequence[Tensor], scores: Any, options: Any) -> Tensor:
    """Compute the loss that ``options.loss`` names.

    Args:
        options: Those of the task: ``loss``, ``temperature`` and ``margin``.
    """
    if options.loss == "cosine":
        return cosine(vectors, scores)
    if options.loss == "cosent":
        return cosent(vectors, scores, options.temperature)
    if options.loss == "triplet":
        return triplet(vectors, options.margin)
    return multiple_negatives(vectors, options.temperature)


def multiple_negatives(vectors: Sequence[Tensor], temperature: float) -> Tensor:
    """Cross entropy of the cosine similarities between each first text and all others of the batch.

    The text of the same row in the second column is the right one. Henderson et al., 2017,
    https://arxiv.org/abs/1705.00652.

    Args:
        vectors: Those of the first texts, of the similar ones, and of any number of columns of hard negatives.
        temperature: Divides the similarities.
    """
    import torch
    from torch.nn.functional import cross_entropy, normalize

    first, *others = (normalize(column) for column in vectors)
    return cross_entropy(first @ torch.cat(others).T / temperature, torch.arange(len(first), device=first.device))


def cosent(vectors: Sequence[Tensor], scores: Tensor, temperature: float) -> Tensor:
    """Penalize each two rows whose cosine similarities are in another order than their scores.

    The loss is log(1 + sum exp((similarity of row i - similarity of row j) / temperature)) over all rows i, j where
    the score of i is smaller. Su, 2022, https://kexue.fm/archives/8847.
    """
    from torch.nn.functional import pad

    similar = cosine_similarities(vectors) / temperature
    differences = (similar[:, None] - similar)[scores[:, None] < scores]
    return pad(differences, (1, 0)).logsumexp(0)


def cosine(vectors: Sequence[Tensor], scores: Tensor) -> Tensor:
    """Mean squared difference between the cosine similarity of each row and its score."""
    from torch.nn.functional import mse_loss

    similar = cosine_similarities(vectors)
    return mse_loss(similar, scores.to(similar.dtype))


def triplet(vectors: Sequence[Tensor], margin: float) -> Tensor:
    """Mean over rows of max(0, distance to the second text - distance to the third + margin), Euclidean distances.

    Schroff et al., 2015, https://arxiv.org/abs/1503.03832.
    """
    from torch.linalg import vector_norm

    first, similar, other = vectors
    return (vector_norm(first - similar, dim=1) - vector_norm(first - other, dim=1) + margin).relu().mean()


def cosine_similarities(vectors: Sequence[Tensor]) -> Tensor:
    """The cosine similarity of the two texts of each row, (N,)."""
    from torch.nn.functional import normalize

    first, second = vectors
    return (normalize(first) * normalize(second)).sum(1)


def truncate(vectors: Sequence[Tensor], size: int) -> list[Tensor]:
    """The first ``size`` numbers of each vector, as vectors of length 1.

    The sum of a loss over several sizes is Matryoshka representation learning: Kusupati et al., 2022,
    https://arxiv.org/abs/2205.13147.
    """
    from torch.nn.functional import normalize

    return [normalize(column[:, :size]) for column in vectors]
