"""Tests of reranker: it learns, predicts and exports scores, refuses what it cannot do, and conforms."""

import json

import numpy as np
import pytest
from fastloop.testing import TEXTS, Conformance, run_commands, with_dropout
from text_runs import DATA, SCORED, check_few_steps, refused, run_python, train_divided, write_collection, write_recipe

NEGATIVE = {"negative": "negative"}
COLLECTION = {"beir": "collection", "candidates": "candidates.trec"}
CASES = {
    "multiple_negatives": ({"negatives": 3}, NEGATIVE | COLLECTION, ("mrr@10", 0.5)),
    "binary": ({"loss": "binary"}, SCORED, ("spearman", 0.3)),
    "list_net": ({"loss": "list_net"}, SCORED | {"module": DATA["module"].replace(":rows", ":lists")}, ("mrr@10", 0.6)),
}
PAIRS = [("red dog", "dog red"), ("red dog", "old slow house"), ("fish", "fish"), ("fish " * 20, "red dog " * 30)]
"""Pairs to predict. The last one is longer than ``data.max_length``."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder for each case, with a trained model in ``run``, and the scores of ``PAIRS`` in ``scores.npy``."""
    folders = {}
    commands = []
    for case, (options, data, (metric, _)) in CASES.items():
        folders[case] = folder = tmp_path_factory.mktemp(case)
        monitored = {"early-stopping": {"monitor": metric, "patience": 99}}
        write_recipe(folder, options, data, monitored, task="reranker", epochs=25)
        write_candidates(folder)
        names = [data.get("text", "text"), data.get("other", "other")]
        (folder / "pairs.csv").write_text("\n".join(map(",".join, [names, *PAIRS])) + "\n")
        for suffix in ("npy", "jsonl"):
            keep = ["--keep", f"query={names[0]}"] if suffix == "jsonl" else []
            commands.append([str(folder), "predict", "run", "pairs.csv", "--out", f"scores.{suffix}", *keep])
        commands[-2:-2] = [[str(folder), "train", "recipe.yaml"]]
        commands.append([str(folder), "predict", "run", "--split", "test", "--with", "packing", "--out", "test.jsonl"])
    arguments = ["predict", "run", "candidates.csv", "--out", "candidates.npy"]
    commands.append([str(folders["multiple_negatives"]), *arguments])
    run_commands(commands)
    return folders


CANDIDATES = 12


def write_candidates(folder):
    """A collection, and candidates for all of its queries but the last one, as a ranking and as pairs to predict.
    Returns the documents that each query is given with, and pairs of relevant ones."""
    queries, documents, relevant = write_collection(folder / "collection")
    lists = [[(3 * query + 7 * place) % len(documents) for place in range(CANDIDATES)] for query in range(len(queries))]
    lists[-1] = []
    pairs = [(query, document) for query, names in enumerate(lists) for document in names]
    lines = [f"q{query} Q0 c{document} 1 0.5 first" for query, document in [*pairs, (9, 9)]]
    (folder / "candidates.trec").write_text("\n".join(lines) + "\n")
    rows = [f"{queries[query]},{documents[document]}" for query, document in pairs]
    (folder / "candidates.csv").write_text("\n".join(["text,other", *rows]) + "\n")
    return pairs, (len(queries), len(documents)), relevant


def test_a_run_of_few_steps_tokenizes_only_its_pairs(tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    check_few_steps(monkeypatch, caplog, {"loss": "binary"}, SCORED, "reranker")


def test_a_ranking_of_candidates_equals_one_by_scikit_learn(trained, tmp_path):
    metrics = pytest.importorskip("sklearn.metrics")
    pairs, shape, relevant = write_candidates(tmp_path)
    gains = np.zeros(shape)
    scores = np.full(shape, -1.0)
    scores[tuple(np.transpose(pairs))] = np.load(trained["multiple_negatives"] / "candidates.npy")
    for query, document, gain in relevant:
        gains[query, document] = gain
    order = (-scores[:-1]).argsort(1)[:, :10]
    hits = np.take_along_axis(gains[:-1], order, 1) > 0
    expected = {"beir_mrr@10": (hits / np.arange(1, 11)).max(1).sum() / len(gains)}  # the last query has no candidate
    expected["beir_ndcg@10"] = metrics.ndcg_score(gains[:-1], scores[:-1], k=10) * len(hits) / len(gains)
    found = json.loads((trained["multiple_negatives"] / "run" / "summary.json").read_text())["validation"]
    assert 0 < expected["beir_mrr@10"] < 1
    assert {name: found[name] for name in expected} == pytest.approx(expected, abs=1e-5)


def test_the_metrics_of_a_ranking_equal_a_table(monkeypatch, tmp_path):
    """Documents in the order of their scores, equal ones in the order of the file, and their gains::

    q1    d3 0    d1 2    d2 0               relevant: d1 2, d4 1
    q2    d4 3    d1 0    d2 0    d3 1       relevant: d4 3, d3 1
    """
    import torch

    from fastloop_embeddings import search
    from fastloop_embeddings.metrics import measure

    def ranked(candidates, scores):
        monkeypatch.setattr(search, "encode_and_compute", lambda *arguments: torch.tensor(scores))
        return measure(judged.rerank(None, None, candidates, None), judged.relevant(), (1,))

    texts = {name: name for name in ("d1", "d2", "d3", "d4")}
    judged = search.Judged(
        {"q1": "one", "q2": "two"}, texts, {"q1": {"d1": 2.0, "d4": 1.0}, "q2": {"d4": 3.0, "d3": 1.0}}
    )
    path = tmp_path / "candidates.trec"
    lines = [
        f"{query} Q0 {name} 0 0 x"
        for query, names in (("q2", "4123"), ("q1", "123"))
        for name in map("d{}".format, names)
    ]
    path.write_text("\n".join(lines))
    found = ranked(path, [0.3, 0.3, 0.9, 4.0, 3.0, 3.0, 1.0])
    second, third, fifth = (1 / np.log2(place) for place in (3, 4, 5))
    ndcg = (2 * second / (2 + second) + (3 + fifth) / (3 + second)) / 2
    assert {name: float(value) for name, value in found.items()} == pytest.approx(
        {"recall@1": 0.25, "mrr@10": 0.75, "ndcg@10": ndcg}
    )
    everything = ranked(None, [4.0, 3.0, 2.0, 1.0, 1.0, 2.0, 3.0, 4.0])  # without candidates: all four documents
    ndcg = ((2 + fifth) / (2 + second) + 1) / 2
    assert {name: float(value) for name, value in everything.items()} == pytest.approx(
        {"recall@1": 0.5, "mrr@10": 1.0, "ndcg@10": ndcg}
    )


@pytest.mark.parametrize("case", CASES)
def test_it_learns_and_predicts(trained, case):
    metric, least = CASES[case][2]
    assert json.loads((trained[case] / "run" / "summary.json").read_text())["validation"][metric] > least
    scores = np.load(trained[case] / "scores.npy")
    assert scores.shape == (len(PAIRS),)
    lines = [json.loads(line) for line in (trained[case] / "scores.jsonl").read_text().splitlines()]
    assert [line["query"] for line in lines] == [pair[0] for pair in PAIRS]
    np.testing.assert_allclose([line["score"] for line in lines], scores, rtol=1e-6)
    samples = [json.loads(line)["score"] for line in (trained[case] / "test.jsonl").read_text().splitlines()]
    sizes = {"multiple_negatives": {5}, "binary": {1}, "list_net": {4}}[case]
    assert {np.size(sample) for sample in samples} == sizes


def test_sentence_transformers_computes_the_same_scores(trained):
    pytest.importorskip("sentence_transformers")
    script = """
import json, sys
from sentence_transformers import CrossEncoder
pairs, *folders = json.loads(sys.stdin.read())
print(json.dumps([CrossEncoder(folder, device="cpu").predict(pairs).tolist() for folder in folders]))
"""
    found = run_python(script, [PAIRS, *(str(folder / "run" / "model") for folder in trained.values())])
    for folder, theirs in zip(trained.values(), found, strict=True):
        np.testing.assert_allclose(np.load(folder / "scores.npy"), theirs, rtol=1e-4, atol=1e-6)


def test_recipes_that_it_cannot_train_are_refused_by_name(tmp_path):
    stars, lists = ({"module": DATA["module"].replace(":rows", f":{name}")} for name in ("stars", "training"))
    (tmp_path / "train.csv").write_text("first,second,score\none,two,1\n")
    files = {"module": None, "files": {"train": str(tmp_path / "train.csv")}}
    write_candidates(tmp_path)
    ranked = {"beir": str(tmp_path / "collection"), "candidates": str(tmp_path / "bad.trec")}
    (tmp_path / "bad.trec").write_text("q0 Q0 c1 1 0.5 first\nq0 Q0 nowhere 2 0.4 first\n")
    cases = {
        "negative": ({"loss": "binary"}, SCORED | NEGATIVE, {}, "data.negative: the loss binary reads a score"),
        "streaming": ({}, {"streaming": True}, {}, "data.streaming: the loss multiple_negatives reads several rows"),
        "classes": ({"loss": "list_net"}, SCORED | {"label_type": "class"}, {}, "label_type: found class, expected n"),
        "stars": ({"loss": "binary"}, SCORED | stars, {}, "data.label: train: found numbers from 0 to 5, and the loss"),
        "lists": ({"loss": "list_net"}, SCORED | lists, {}, "data.files.validation: missing, and rows that are held"),
        "files": ({"loss": "list_net"}, SCORED | files, {}, "or set data.validation_fraction: 0"),
        "alone": (
            {},
            {"candidates": "bad.trec"},
            {},
            "bad.trec, and data.beir is None. Expected a file, and the folder",
        ),
        "one text": (
            {},
            {"module": DATA["module"].replace(":rows", ":alike")},
            {},
            "data.other: all 64 rows of train have the same text here",
        ),
        "missing": ({}, ranked | {"candidates": "no.trec"}, {}, "Expected a file, and the folder of its documents"),
        "line": (
            {},
            ranked,
            {"epochs": 1},
            "bad.trec, line 2: found 'q0 Q0 nowhere 2 0.4 first', expected a query, Q0",
        ),
    }
    refused(
        tmp_path,
        {
            name: (options, data, {"task": "reranker"} | more, text)
            for name, (options, data, more, text) in cases.items()
        },
    )


WAYS = {
    "whole": ({}, (), 1),
    "parts": ({"micro_batch_size": 8}, (), 1),
    "packed": ({"micro_batch_size": 4}, ("packing", "cls-last-layer"), 1),
    "processes": ({"micro_batch_size": 6}, ("ddp",), 2),
}


def test_micro_batches_and_processes_do_not_change_the_loss(tmp_path, processes):
    """The last batch has fewer rows, of which one process has fewer; it also has none of validation."""
    write_candidates(tmp_path)
    found = {name: str(tmp_path / path) for name, path in COLLECTION.items()}
    cases = {case: (options, data | (found if "beir" in data else {})) for case, (options, data, _) in CASES.items()}
    model = with_dropout(TEXTS, 0.0)["model"]
    sizes = {"batch_size": 24, "epochs": 2, "log_every": 1, "eval_batch_size": 16}
    train_divided(processes, tmp_path, cases, WAYS, task="reranker", model=model, **sizes)


class TestConformance(Conformance):
    plugin = "reranker"
    task = {"model": TEXTS["model"], "data": DATA}


class TestConformanceOfScoredPairs(Conformance):
    plugin = "reranker"
    options = {"loss": "binary"}
    task = {"model": TEXTS["model"], "data": DATA | SCORED}
