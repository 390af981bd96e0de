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
        pairs = np.unique(np.stack([query_of, document_of[:: keys.shape[1] - 1]], 1), axis=0)
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
        kept = (labels > 0).any(1)
        gains, order = labels[kept].nan_to_num(0).clamp(min=0).sort(dim=1)
        scores = scores.masked_fill(labels.isnan(), float("-inf"))[kept].gather(1, order)
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
    chunks = [torch.split(each, CHUNK) for each in (queries, relevant, gains)]
    for part, own, gain in zip(*chunks, strict=True):
        best = (normalize(part) @ documents).topk(min(depth, documents.shape[1])).indices
        places = torch.searchsorted(own, best).clamp(max=own.shape[1] - 1)
        parts.append(gain.gather(1, places) * (own.gather(1, places) == best))
    return torch.cat(parts)


def measure(found: Tensor, relevant: Tensor, recall_at: Sequence[int]) -> dict[str, Tensor]:
    """Means over queries, from the gains of their documents, best score first, (Q, depth), and those of all relevant
    documents in any order, (Q, most), both filled with 0. ``recall_at``: depths of recall."""
    hit = found > 0
    count = (relevant > 0).sum(1)
    places = torch.arange(1, DEPTH + 1, device=found.device)
    ideal = relevant.sort(dim=1, descending=True).values
    dcg, best = (
        (each[:, :DEPTH] / (places + 1).log2()[: each.shape[1]]).sum(1, dtype=torch.float64) for each in (found, ideal)
    )
    metrics = {f"recall@{k}": (hit[:, :k].sum(1) / count).mean() for k in recall_at}
    metrics[f"mrr@{DEPTH}"] = (hit[:, :DEPTH] / places[: hit.shape[1]]).max(1).values.mean()
    return metrics | {f"ndcg@{DEPTH}": (dcg / best).mean()}
