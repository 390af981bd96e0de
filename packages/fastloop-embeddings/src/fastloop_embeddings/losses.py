"""Losses. Each equals the loss of Sentence Transformers of the same name, in value and gradient, if no text is
repeated.

Those of embeddings take the vectors of each column of texts, (N, D) each, and the scores of the rows, (N,) or None.
Those of rerankers take scores of the documents of each query.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def compute(vectors: Sequence[Tensor], scores: Any, options: Any, keys: Tensor | None = None) -> Tensor:
    """Compute the loss of embeddings that ``options.loss`` names, with ``temperature`` and ``margin`` of them.
    ``multiple_negatives`` reads ``keys``.

    ``cosine`` is the mean squared difference between the cosine similarity of each row and its score. ``triplet`` is
    the mean over rows of max(0, distance to the second text - distance to the third + margin), Euclidean distances:
    Schroff et al., 2015, https://arxiv.org/abs/1503.03832.
    """
    if options.loss == "cosine":
        first, second = vectors
        similar = functional.cosine_similarity(first, second)
        return functional.mse_loss(similar, scores.to(similar.dtype))
    if options.loss == "cosent":
        return cosent(vectors, scores, options.temperature)
    if options.loss == "triplet":
        text, near, far = vectors
        return functional.triplet_margin_loss(text, near, far, margin=options.margin, eps=0)
    return multiple_negatives(vectors, options.temperature, keys)


def multiple_negatives(vectors: Sequence[Tensor], temperature: float, keys: Tensor | None = None) -> Tensor:
    """Cross entropy of the cosine similarities of each first text with all others, where that of its row is right.
    Columns after the second are hard negatives. Henderson et al., 2017, https://arxiv.org/abs/1705.00652.

    Args:
        keys: A number for each text, equal for equal texts, (N, columns) int64. A text of another row that fits a first
            text, too, is left out of its sum, see ``find_false_negatives``. None: no text is repeated.
    """
    first, *others = (functional.normalize(column) for column in vectors)
    similar = first @ torch.cat(others).T / temperature
    if keys is not None:
        similar = similar.masked_fill(find_false_negatives(keys), -torch.inf)
    return functional.cross_entropy(similar, torch.arange(len(first), device=first.device))


def find_false_negatives(keys: Tensor) -> Tensor:
    """The texts of other rows that are no negatives of a row's first text: those that any row gives as its second text,
    and those that are equal to it.

    With rows (a, x), (a, y), (b, x) and (c, a), the text x of the third row and y are no negatives of the first row,
    because the second one gives y for a. Neither is a, but x of the first row is one of c. The texts of a row itself
    stay: they are what the data says.

    Args:
        keys: As in ``multiple_negatives``.

    Returns:
        (N, N * (columns - 1)) bool: the second texts of all rows, then their third ones.
    """
    rows, columns = keys.shape
    texts = keys[:, 1:].T.flatten()
    anchor_ids = number(keys[:, 0])
    text_ids = number(texts)
    fits = torch.zeros(rows, len(texts), dtype=torch.bool, device=keys.device)
    fits[anchor_ids, text_ids[:rows]] = True
    false = fits[anchor_ids][:, text_ids] | (keys[:, :1] == texts)
    own = torch.eye(rows, dtype=torch.bool, device=keys.device).repeat(1, columns - 1)
    return false & ~own


def number(keys: Tensor) -> Tensor:
    """A number from 0 to N - 1 for each key, equal for equal keys, (N,) int64. Unlike ``unique``, it does not wait for
    the device. For [7, 3, 7] it is [1, 0, 1]."""
    return torch.searchsorted(keys.sort().values, keys.contiguous())


def cosent(vectors: Sequence[Tensor], scores: Tensor, temperature: float) -> Tensor:
    """log(1 + sum exp((similarity of row i - that of row j) / temperature)) over rows i, j with a smaller score of i:
    Su, 2022, https://kexue.fm/archives/8847."""
    first, second = vectors
    similar = functional.cosine_similarity(first, second) / temperature
    has_smaller_score = scores[:, None] < scores  # (rows i, rows j)
    differences = (similar[:, None] - similar)[has_smaller_score]
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
        # -inf would give 0 * inf
        absent = labels.isnan()
        lowest = torch.finfo(scores.dtype).min
        wanted = labels.masked_fill(absent, lowest).softmax(1)
        return functional.cross_entropy(scores.masked_fill(absent, lowest), wanted)
    first = torch.zeros(len(scores), dtype=torch.int64, device=scores.device)
    logits = (scores.sigmoid() / options.temperature).masked_fill(labels.isnan(), -torch.inf)
    return functional.cross_entropy(logits, first)
