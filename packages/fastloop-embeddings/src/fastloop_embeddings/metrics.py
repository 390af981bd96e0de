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


SHIFTS = torch.tensor([0, 16, 32, 48])
"""Places of the 16-bit parts of a 64-bit number. float32 holds each part exactly."""


class Retrieval(Metric):
    """Recall at several depths, MRR@10 and nDCG@10 of the nearest documents of each query, by cosine similarity.

    A query is a text of the first column; documents are those of all further columns. Equal texts count once, and a
    query may have several relevant documents. Recall is the share of its relevant documents. The values do not depend
    on the size of batches.

    Args:
        recall_at: Depths of recall.
    """

    full_state_update = False
    vectors: list[Tensor]
    keys: list[Tensor]
    shape: Tensor

    def __init__(self, recall_at: Sequence[int] = (1, 10)) -> None:
        super().__init__()
        self.recall_at = tuple(recall_at)
        # a process without rows contributes an empty float32 vector, so the states of others have to be such vectors
        self.add_state("vectors", default=[], dist_reduce_fx="cat")
        self.add_state("keys", default=[], dist_reduce_fx="cat")
        self.add_state("shape", default=torch.zeros(2, dtype=torch.int64), dist_reduce_fx="max")

    def update(self, vectors: Tensor, keys: Tensor) -> None:
        """Add rows.

        Args:
            vectors: One for each text of each row, (rows, columns, D). The second column is relevant to the first.
            keys: A number for each text, (rows, columns) int64. Equal texts have equal numbers.
        """
        self.vectors.append(vectors.float().flatten())
        self.keys.append((keys[..., None] >> SHIFTS.to(keys.device) & 0xFFFF).float().flatten())
        self.shape = self.shape.new_tensor(vectors.shape[1:])

    def compute(self) -> dict[str, Tensor]:
        columns, size = self.shape.tolist()
        vectors = joined(self.vectors).view(-1, columns, size)
        parts = joined(self.keys).view(-1, columns, len(SHIFTS)).long()
        keys = (parts << SHIFTS.to(parts.device)).sum(-1)
        queries, query_of = unique(vectors[:, 0], keys[:, 0])
        documents, document_of = unique(vectors[:, 1:].flatten(0, 1), keys[:, 1:].flatten())
        wanted = zip((query_of, document_of), keys.T.contiguous(), strict=False)  # the first two columns
        relevant = torch.stack([torch.searchsorted(known, found) for known, found in wanted], 1).unique(dim=0)
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


def joined(parts: Any) -> Tensor:
    """The parts of a state end to end. Torchmetrics has joined those of several processes."""
    return parts if isinstance(parts, Tensor) else torch.cat(parts)
