"""Metrics of rankings: recall, MRR@10 and nDCG@10. The gain of a document in nDCG is linear, as in trec_eval."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

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
SHIFTS = torch.tensor([0, 16, 32, 48])
"""Places of the 16-bit parts of a 64-bit number. float32 holds each part exactly."""


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
    vectors: list[Tensor]
    keys: list[Tensor]
    shape: Tensor

    def __init__(self) -> None:
        super().__init__()
        # a process without rows contributes an empty float32 vector, so the states of others have to be such vectors
        self.add_state("vectors", default=[], dist_reduce_fx="cat")
        self.add_state("keys", default=[], dist_reduce_fx="cat")
        self.add_state("shape", default=torch.zeros(2, dtype=torch.int64), dist_reduce_fx="max")

    def update(self, vectors: Tensor, keys: Tensor) -> None:
        """Add the vectors of rows, (rows, columns, D), of which the second column is relevant to the first, and a
        number for each text, (rows, columns) int64. Equal texts have equal numbers."""
        self.vectors.append(vectors.float().flatten())
        self.keys.append((keys[..., None] >> SHIFTS.to(keys.device) & 0xFFFF).float().flatten())
        self.shape = self.shape.new_tensor(vectors.shape[1:])

    def compute(self) -> dict[str, Tensor]:
        columns, size = self.shape.tolist()
        vectors = dim_zero_cat(self.vectors).view(-1, columns, size)
        parts = dim_zero_cat(self.keys).view(-1, columns, len(SHIFTS)).long()
        keys = (parts << SHIFTS.to(parts.device)).sum(-1)
        queries, query_of = unique(vectors[:, 0], keys[:, 0])
        documents, document_of = unique(vectors[:, 1:].flatten(0, 1), keys[:, 1:].flatten())
        wanted = zip((query_of, document_of), keys.T.contiguous(), strict=False)  # the first two columns
        relevant = torch.stack([torch.searchsorted(known, found) for known, found in wanted], 1).unique(dim=0)
        gains = torch.ones_like(relevant[:, 0])
        return measure(*search(queries, documents, relevant, gains, DEPTH), (1, DEPTH))


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
        kept = (labels > 0).any(1)
        gains, order = labels[kept].nan_to_num(0).clamp(min=0).sort(dim=1)
        scores = scores.masked_fill(labels.isnan(), float("-inf"))[kept].gather(1, order)
        if len(gains):
            found = gains.gather(1, scores.argsort(dim=1, descending=True, stable=True))
            self.total += torch.stack([*measure(found, gains, (1,)).values()]) * len(gains)
            self.queries += len(gains)

    def compute(self) -> dict[str, Tensor]:
        return dict(zip(("recall@1", f"mrr@{DEPTH}", f"ndcg@{DEPTH}"), self.total / self.queries, strict=True))


def search(queries: Tensor, documents: Tensor, relevant: Tensor, gains: Tensor, depth: int) -> tuple[Tensor, Tensor]:
    """The arguments of ``measure`` for an exact search by cosine similarity among vectors, (Q, D) and (C, D).

    Args:
        relevant: Distinct pairs of a query and a document that is relevant to it, (P, 2) int64: one or more a query.
        gains: How relevant each is, (P,) above 0.
        depth: Documents of a ranking.
    """
    size, documents = len(documents), normalize(documents).T
    pairs, order = (relevant[:, 0] * size + relevant[:, 1]).sort()
    gains, found = gains[order].float(), []
    for start in range(0, len(queries), CHUNK):
        similar = normalize(queries[start : start + CHUNK]) @ documents
        best = similar.topk(min(depth, size)).indices
        keys = best + size * torch.arange(start, start + len(best), device=best.device)[:, None]
        places = torch.searchsorted(pairs, keys).clamp(max=len(pairs) - 1)
        found.append(gains[places] * (pairs[places] == keys))
    counts = torch.bincount(relevant[:, 0], minlength=len(queries)).tolist()
    return torch.cat(found), pad_sequence(gains.split(counts), batch_first=True)


def measure(found: Tensor, relevant: Tensor, recall_at: Sequence[int]) -> dict[str, Tensor]:
    """Means over queries, from the gains of their documents, best score first, (Q, depth), and those of all relevant
    documents in any order, (Q, most), both filled with 0. ``recall_at``: depths of recall."""
    hit, count = found > 0, (relevant > 0).sum(1)
    places = torch.arange(1, DEPTH + 1, device=found.device)
    ideal = relevant.sort(dim=1, descending=True).values
    dcg, best = (
        (each[:, :DEPTH] / (places + 1).log2()[: each.shape[1]]).sum(1, dtype=torch.float64) for each in (found, ideal)
    )
    metrics = {f"recall@{k}": (hit[:, :k].sum(1) / count).mean() for k in recall_at}
    metrics[f"mrr@{DEPTH}"] = (hit[:, :DEPTH] / places[: hit.shape[1]]).max(1).values.mean()
    return metrics | {f"ndcg@{DEPTH}": (dcg / best).mean()}


def unique(vectors: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """One vector for each distinct key, (U, D), and the sorted keys, (U,)."""
    found, inverse = keys.unique(return_inverse=True)
    places = torch.arange(len(keys), device=keys.device)
    first = places.new_full((len(found),), len(keys)).scatter_reduce(0, inverse, places, "amin")
    return vectors[first], found
