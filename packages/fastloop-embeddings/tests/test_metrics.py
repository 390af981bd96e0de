"""Metrics of retrieval equal a table computed by hand."""

import math

import pytest
import torch

from fastloop_embeddings.metrics import Retrieval, rank

ANGLES = {"a": 0, "b": 10, "c": 25, "d": 45, "e": 80, "f": 130}
"""Documents, as angles in degrees. The nearest of a query at 0 degrees is a, then b, and so on."""


def vector(angle: float):
    return [math.cos(math.radians(angle)), math.sin(math.radians(angle))]


def test_rankings_by_hand():
    documents = torch.tensor([vector(angle) for angle in ANGLES.values()])
    queries = torch.tensor([vector(angle) for angle in (0, 0, 44)])
    # query 0: a c relevant, at ranks 1 and 3; query 1: e, at rank 5; query 2 (d c b e a f): b, at rank 3
    relevant = torch.tensor([[0, 0], [0, 2], [1, 4], [2, 1]])
    found = {name: value.item() for name, value in rank(queries, documents, relevant, (1, 3, 10)).items()}
    second, third, fifth = 1 / math.log2(3), 1 / math.log2(4), 1 / math.log2(6)
    assert found == pytest.approx(
        {
            "recall@1": (1 / 2 + 0 + 0) / 3,
            "recall@3": (1 + 0 + 1) / 3,
            "recall@10": 1,
            "mrr@10": (1 + 1 / 5 + 1 / 3) / 3,
            "ndcg@10": ((1 + third) / (1 + second) + fifth + third) / 3,
        }
    )


def test_batches_and_equal_texts_do_not_change_the_values():
    # rows (query, relevant, hard negative); query 1 is there twice, with two relevant documents
    keys = torch.tensor([[1, -5, 7], [2, 8, 7], [1, 9, -5]])
    angles = {1: 0, 2: 44, -5: 5, 7: 30, 8: 50, 9: 20}
    vectors = torch.tensor([[vector(angles[key]) for key in row] for row in keys.tolist()])
    whole, parts = Retrieval(), Retrieval()
    whole.update(vectors, keys)
    for index in range(3):
        parts.update(vectors[index : index + 1], keys[index : index + 1])
    found = {name: value.item() for name, value in whole.compute().items()}
    assert found == {name: value.item() for name, value in parts.compute().items()}
    # query 1: -5 and 9 at ranks 1 and 2; query 2: 8 at rank 1
    assert found == pytest.approx({"recall@1": 0.75, "recall@10": 1, "mrr@10": 1, "ndcg@10": 1})


def test_more_queries_than_one_part_compares(monkeypatch):
    draw = torch.Generator().manual_seed(0)
    queries, documents = torch.randn(7, 4, generator=draw), torch.randn(20, 4, generator=draw)
    relevant = torch.stack([torch.arange(7), torch.arange(7)], 1)
    expected = rank(queries, documents, relevant, (5,))
    monkeypatch.setattr("fastloop_embeddings.metrics.CHUNK", 3)
    assert rank(queries, documents, relevant, (5,)) == expected
