"""Metrics of retrieval: the similar text of each row is searched for among all texts of the split."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize
from torchmetrics import Metric

DEPTH = 10
"""Documents of a ranking that MRR and nDCG read, as in most retrieval benchmarks."""

CHUNK = 1024
"""Queries that are compared with all documents at a time. It limits the memory of the similarities."""


class Retrieval(Metric):
    """Recall at several depths, MRR@10 and nDCG@10 of the nearest documents of each query, by cosine similarity.

    A query is a text of the first column; documents are those of all further columns. Equal texts count once, and a
    query may have several relevant documents. Recall is the share of its relevant documents. The values do not depend
    on the size of batches.

    Args:
        recall_at: Depths of recall.
    """

    full_state_update = False
    queries: list[Tensor]
    documents: list[Tensor]
    query_keys: list[Tensor]
    document_keys: list[Tensor]
    pairs: list[Tensor]

    def __init__(self, recall_at: Sequence[int] = (1, 10)) -> None:
        super().__init__()
        self.recall_at = tuple(recall_at)
        for name in ("queries", "documents", "query_keys", "document_keys", "pairs"):
            self.add_state(name, default=[], dist_reduce_fx="cat")

    def update(self, vectors: Tensor, keys: Tensor) -> None:
        """Add rows.

        Args:
            vectors: Of each text of each row, (rows, columns, D). The second column is relevant to the first.
            keys: A number for each text, (rows, columns) int64. Equal texts have equal numbers.
        """
        self.queries.append(vectors[:, 0])
        self.query_keys.append(keys[:, 0])
        self.documents.append(vectors[:, 1:].flatten(0, 1))
        self.document_keys.append(keys[:, 1:].flatten())
        self.pairs.append(keys[:, :2])

    def compute(self) -> dict[str, Tensor]:
        queries, query_of = unique(_joined(self.queries), _joined(self.query_keys))
        documents, document_of = unique(_joined(self.documents), _joined(self.document_keys))
        wanted = zip((query_of, document_of), _joined(self.pairs).T.contiguous(), strict=True)
        relevant = torch.stack([torch.searchsorted(keys, found) for keys, found in wanted], 1).unique(dim=0)
        return rank(queries, documents, relevant, self.recall_at)


def rank(queries: Tensor, documents: Tensor, relevant: Tensor, recall_at: Sequence[int]) -> dict[str, Tensor]:
    """Compute the metrics, means over queries.

    Args:
        queries: Vectors, (Q, D).
        documents: Vectors, (C, D).
        relevant: Distinct pairs of the index of a query and that of a document which is relevant to it, (P, 2) int64.
            Every query has one or more.
        recall_at: Depths of recall.
    """
    depth = min(max(DEPTH, *recall_at), len(documents))
    documents = normalize(documents).T
    count = torch.bincount(relevant[:, 0], minlength=len(queries)).double()
    wanted = relevant[:, 0] * documents.shape[1] + relevant[:, 1]
    hits = []
    for start in range(0, len(queries), CHUNK):
        part = normalize(queries[start : start + CHUNK]) @ documents
        found = part.topk(depth).indices
        rows = torch.arange(start, start + len(part), device=found.device)[:, None]
        hits.append(torch.isin(rows * documents.shape[1] + found, wanted))
    hit = torch.cat(hits).double()  # (Q, depth)
    places = torch.arange(1, depth + 1, device=hit.device, dtype=hit.dtype)
    discounts = 1 / (places[:DEPTH] + 1).log2()
    best = discounts.cumsum(0)[count.long().clamp(max=len(discounts)) - 1]
    metrics = {f"recall@{k}": (hit[:, :k].sum(1) / count).mean() for k in recall_at}
    metrics[f"mrr@{DEPTH}"] = (hit[:, :DEPTH] / places[:DEPTH]).max(1).values.mean()
    metrics[f"ndcg@{DEPTH}"] = ((hit[:, :DEPTH] * discounts).sum(1) / best).mean()
    return metrics


def unique(vectors: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """One vector for each distinct key, (U, D), and the sorted keys, (U,)."""
    found, inverse = keys.unique(return_inverse=True)
    places = torch.arange(len(keys), device=keys.device)
    first = places.new_full((len(found),), len(keys)).scatter_reduce(0, inverse, places, "amin")
    return vectors[first], found


def _joined(parts: Any) -> Tensor:
    return parts if isinstance(parts, Tensor) else torch.cat(parts)
