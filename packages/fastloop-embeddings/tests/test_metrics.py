"""Metrics of rankings equal tables computed by hand, and those of scikit-learn."""

import math

import pytest
import torch

from fastloop_embeddings.metrics import Ranking, Retrieval, measure, search

ANGLES = {"a": 0, "b": 10, "c": 25, "d": 45, "e": 80, "f": 130}
"""Documents, as angles in degrees. The nearest of a query at 0 degrees is a, then b, and so on."""


def vector(angle: float):
    return [math.cos(math.radians(angle)), math.sin(math.radians(angle))]


def rank(queries, documents, relevant, gains, recall_at):
    return measure(search(queries, documents, relevant, gains, max(10, *recall_at)), gains, recall_at)


def test_rankings_by_hand():
    documents = torch.tensor([vector(angle) for angle in ANGLES.values()])
    queries = torch.tensor([vector(angle) for angle in (0, 0, 44)])
    # query 0: a c relevant, at ranks 1 and 3; query 1: e, at rank 5; query 2 (d c b e a f): b, at rank 3
    relevant = torch.tensor([[0, 2], [4, -1], [1, -1]])
    found = {
        name: value.item() for name, value in rank(queries, documents, relevant, relevant >= 0, (1, 3, 10)).items()
    }
    second = 1 / math.log2(3)
    third = 1 / math.log2(4)
    fifth = 1 / math.log2(6)
    assert found == pytest.approx(
        {
            "recall@1": (1 / 2 + 0 + 0) / 3,
            "recall@3": (1 + 0 + 1) / 3,
            "recall@10": 1,
            "mrr@10": (1 + 1 / 5 + 1 / 3) / 3,
            "ndcg@10": ((1 + third) / (1 + second) + fifth + third) / 3,
        }
    )
    graded = rank(queries, documents, relevant, torch.tensor([[1.0, 3], [2, 0], [2, 0]]), (1,))
    assert graded["ndcg@10"].item() == pytest.approx(((1 + 3 * third) / (3 + second) + fifth + third) / 3)


def test_candidates_by_hand():
    """Query 0: relevant at ranks 2 and 3 (with gains 2 and 1); query 1: none; query 2: equal scores, so at rank 3."""
    absent = float("nan")
    scores = torch.tensor([[0.5, 0.9, 0.4, 0.0], [1, 2, 3, 0.0], [0.1, 0.1, 0.1, 0.0]])
    labels = torch.tensor([[2, 0, 1, absent], [0, 0, 0, absent], [1, 0, 0, absent]])
    whole = Ranking()
    parts = Ranking()
    whole.update(scores, labels)
    for row in range(3):
        parts.update(scores[row : row + 1], labels[row : row + 1])
    found = {name: value.item() for name, value in whole.compute().items()}
    assert found == pytest.approx({name: value.item() for name, value in parts.compute().items()})
    second = 1 / math.log2(3)
    third = 1 / math.log2(4)
    first = (2 * second + third) / (2 + second)
    assert found == pytest.approx({"recall@1": 0, "mrr@10": (1 / 2 + 1 / 3) / 2, "ndcg@10": (first + third) / 2})


def test_candidates_equal_those_of_scikit_learn():
    metrics = pytest.importorskip("sklearn.metrics")
    draw = torch.Generator().manual_seed(0)
    scores = torch.randn(50, 30, generator=draw)
    labels = torch.randint(4, (50, 30), generator=draw).float()
    labels[labels == 3] = -1
    ranking = Ranking()
    ranking.update(scores, labels)
    expected = metrics.ndcg_score(labels.clamp(min=0).numpy(), scores.numpy(), k=10)
    assert ranking.compute()["ndcg@10"].item() == pytest.approx(expected)


def test_batches_and_equal_texts_do_not_change_the_values():
    # rows (query, relevant, hard negative); query 1 is there twice, with two relevant documents
    keys = torch.tensor([[1, -5, 7], [2, 8, 7], [1, 9, -5]])
    angles = {1: 0, 2: 44, -5: 5, 7: 30, 8: 50, 9: 20}
    vectors = torch.tensor([[vector(angles[key]) for key in row] for row in keys.tolist()])
    whole = Retrieval()
    parts = Retrieval()
    whole.update(vectors, keys)
    for index in range(3):
        parts.update(vectors[index : index + 1], keys[index : index + 1])
    found = {name: value.item() for name, value in whole.compute().items()}
    assert found == {name: value.item() for name, value in parts.compute().items()}
    # query 1: -5 and 9 at ranks 1 and 2; query 2: 8 at rank 1
    assert found == pytest.approx({"recall@1": 0.75, "recall@10": 1, "mrr@10": 1, "ndcg@10": 1})


def test_more_queries_than_one_part_compares(monkeypatch):
    draw = torch.Generator().manual_seed(0)
    queries = torch.randn(7, 4, generator=draw)
    documents = torch.randn(20, 4, generator=draw)
    relevant = torch.arange(7)[:, None]
    expected = rank(queries, documents, relevant, torch.ones(7, 1), (5,))
    monkeypatch.setattr("fastloop_embeddings.metrics.CHUNK", 3)
    assert rank(queries, documents, relevant, torch.ones(7, 1), (5,)) == expected
