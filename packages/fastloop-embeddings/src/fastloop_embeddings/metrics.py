"""Metrics of rankings: recall, MRR@10 and nDCG@10. The gain of a document in nDCG is linear, as in trec_eval."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize
from torch.nn.utils.rnn import pad_sequence
from torchmetrics import Metric, MetricCollection, PearsonCorrCoef, SpearmanCorrCoef
from torchmetrics.utilities import dim_zero_cat

DEPTH = 10
"""Documents of a ranking that MRR and nDCG read, as in most retrieval benchmarks."""
CHUNK = 1024
"""Queries that are compared with all documents at a time. It limits the memory of the similarities."""


def collect(rankings: Metric | None) -> MetricCollection:
    """The metrics of a task: of ``rankings``; None: of scores."""
    if rankings is not None:
        return MetricCollection({"rankings": rankings})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that all scores are kept
        return MetricCollection({"spearman": SpearmanCorrCoef(), "pearson": PearsonCorrCoef()})


class Retrieval(Metric):
    """The metrics of the nearest documents of each query, by cosine similarity.

    A query is a text of the first column; documents are those of all further columns. Equal texts count once, and a
    query may have several relevant documents.
    """

    full_state_update = False
    rows: list[Tensor]
    shape: Tensor

    def __init__(self) -> None:
        super().__init__()
        # a process without rows contributes an empty float32 vector, so the state of others has to be such a vector
        self.add_state("rows", default=[], dist_reduce_fx="cat")
        self.add_state("shape", default=torch.zeros(2, dtype=torch.int64), dist_reduce_fx="max")

    def update(self, vectors: Tensor, keys: Tensor) -> None:
        """Add the vectors of rows, (rows, columns, D), of which the second column is relevant to the first, and a
        number for each text, (rows, columns) int64. Equal texts have equal numbers."""
        rows = torch.cat([vectors.float(), keys[..., None].view(torch.float32)], 2)  # the bits of keys, as two numbers
        self.rows.append(rows.flatten())
        self.shape = self.shape.new_tensor(rows.shape[1:])

    def compute(self) -> dict[str, Tensor]:
        rows = dim_zero_cat(self.rows).view(-1, *self.shape.tolist())
        vectors = rows[..., :-2]
        keys = rows[..., -2:].contiguous().view(torch.int64)[..., 0].cpu().numpy()
        _, queries, query_of = np.unique(keys[:, 0], return_index=True, return_inverse=True)
        _, documents, document_of = np.unique(keys[:, 1:].ravel(), return_index=True, return_inverse=True)
        # with two columns of documents, [0 1] and [2 3], the relevant one of each row is the first: [0 2]
        relevant_of = document_of[:: keys.shape[1] - 1]
        pairs = np.unique(np.stack([query_of, relevant_of], 1), axis=0)
        parts = torch.split(torch.from_numpy(pairs[:, 1]), np.bincount(pairs[:, 0]).tolist())
        relevant = pad_sequence(list(parts), batch_first=True, padding_value=-1).to(rows.device)
        ranking = search(
            vectors[:, 0][queries], vectors[:, 1:].flatten(0, 1)[documents], relevant, relevant >= 0, DEPTH
        )
        return measure(ranking, relevant >= 0, (1, DEPTH))


class Ranking(Metric):
    """The metrics of the documents that each query comes with, of queries with relevant ones. Equal scores count as the
    worst order."""

    full_state_update = False
    total: Tensor
    queries: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", default=torch.zeros(3), dist_reduce_fx="sum")
        self.add_state("queries", default=torch.zeros(()), dist_reduce_fx="sum")

    def update(self, scores: Tensor, labels: Tensor) -> None:
        """Add queries: scores of their documents, and how relevant they are (0 or less: not), (queries, documents)
        each. NaN as a label: there is no document."""
        has_relevant = (labels > 0).any(1)
        gains, order = labels[has_relevant].nan_to_num(0).clamp(min=0).sort(dim=1)
        scores = scores.masked_fill(labels.isnan(), float("-inf"))[has_relevant].gather(1, order)
        if len(gains):
            ranked = gains.gather(1, scores.argsort(dim=1, descending=True, stable=True))
            self.total += torch.stack([*measure(ranked, gains, (1,)).values()]) * len(gains)
            self.queries += len(gains)

    def compute(self) -> dict[str, Tensor]:
        return dict(zip(("recall@1", f"mrr@{DEPTH}", f"ndcg@{DEPTH}"), self.total / self.queries, strict=True))


def search(queries: Tensor, documents: Tensor, relevant: Tensor, gains: Tensor, depth: int) -> Tensor:
    """Search by cosine similarity among vectors, (Q, D) and (C, D), and return the gains of the nearest documents of
    each query, (Q, depth).

    Args:
        relevant: The documents that are relevant to each query, filled with -1, (Q, most) int64.
        gains: How relevant each is, (Q, most).
        depth: Documents of a ranking.
    """
    relevant, order = relevant.sort(dim=1)
    gains = gains.gather(1, order)
    documents = normalize(documents).T
    parts = []
    chunks = (torch.split(queries, CHUNK), torch.split(relevant, CHUNK), torch.split(gains, CHUNK))
    for some_queries, known, gains_of_known in zip(*chunks, strict=True):
        nearest = (normalize(some_queries) @ documents).topk(min(depth, documents.shape[1])).indices
        # known [2, 5, 9] and nearest [5, 7]: places [1, 2], of which the second has document 9, so 7 has no gain
        places = torch.searchsorted(known, nearest).clamp(max=known.shape[1] - 1)
        is_known = known.gather(1, places) == nearest
        parts.append(gains_of_known.gather(1, places) * is_known)
    return torch.cat(parts)


def measure(gains: Tensor, relevant: Tensor, recall_at: Sequence[int]) -> dict[str, Tensor]:
    """Means over queries.

    Args:
        gains: Those of the documents of each query, best score first, (Q, depth), filled with 0.
        relevant: Those of all relevant documents in any order, (Q, most), filled with 0.
        recall_at: Depths of recall.
    """
    hit = gains > 0
    count = (relevant > 0).sum(1)
    places = torch.arange(1, DEPTH + 1, device=gains.device)
    ideal = relevant.sort(dim=1, descending=True).values
    metrics = {f"recall@{k}": (hit[:, :k].sum(1) / count).mean() for k in recall_at}
    metrics[f"mrr@{DEPTH}"] = (hit[:, :DEPTH] / places[: hit.shape[1]]).max(1).values.mean()
    metrics[f"ndcg@{DEPTH}"] = (discounted_gain(gains, places) / discounted_gain(ideal, places)).mean()
    return metrics


def discounted_gain(gains: Tensor, places: Tensor) -> Tensor:
    """The sum of the gains at the first ``DEPTH`` places, each divided by the logarithm of its place, (Q,) float64.

    Args:
        gains: The gain at each place, (Q, most).
        places: The numbers from 1 to ``DEPTH``.
    """
    discounts = (places + 1).log2()[: gains.shape[1]]
    return (gains[:, :DEPTH] / discounts).sum(1, dtype=torch.float64)
