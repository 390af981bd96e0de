"""Tests of reranker: it learns, predicts and exports scores, refuses what it cannot do, and conforms."""

import json

import numpy as np
import pytest
from fastloop.testing import TEXTS, Conformance, with_dropout
from text_runs import DATA, SCORED, fastloop, refused, run_python, train_divided, write_recipe

NEGATIVE = {"negative": "negative"}
CASES = {
    "multiple_negatives": ({"negatives": 3}, NEGATIVE, ("mrr@10", 0.5)),
    "binary": ({"loss": "binary"}, SCORED, ("spearman", 0.3)),
    "list_net": ({"loss": "list_net"}, SCORED | {"module": DATA["module"].replace(":rows", ":lists")}, ("mrr@10", 0.6)),
}
PAIRS = [("red dog", "dog red"), ("red dog", "old slow house"), ("fish", "fish"), ("fish " * 20, "red dog " * 30)]
"""Pairs to predict. The last one is longer than ``data.max_length``."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder for each case, with a trained model in ``run``, and the scores of ``PAIRS`` in ``scores.npy``."""
    folders, commands = {}, []
    for case, (options, data, _) in CASES.items():
        folders[case] = folder = tmp_path_factory.mktemp(case)
        write_recipe(folder, options, data, task="reranker", epochs=25)
        names = [data.get("text", "text"), data.get("other", "other")]
        (folder / "pairs.csv").write_text("\n".join(map(",".join, [names, *PAIRS])) + "\n")
        for suffix in ("npy", "jsonl"):
            commands.append([str(folder), "predict", "run", "pairs.csv", "--out", f"scores.{suffix}"])
        commands[-2:-2] = [[str(folder), "train", "recipe.yaml"]]
        commands.append([str(folder), "predict", "run", "--split", "test", "--with", "packing", "--out", "test.jsonl"])
    fastloop(commands)
    return folders


@pytest.mark.parametrize("case", CASES)
def test_it_learns_and_predicts(trained, case):
    metric, least = CASES[case][2]
    assert json.loads((trained[case] / "run" / "summary.json").read_text())["validation"][metric] > least
    scores = np.load(trained[case] / "scores.npy")
    assert scores.shape == (len(PAIRS),)
    lines = [json.loads(line)["score"] for line in (trained[case] / "scores.jsonl").read_text().splitlines()]
    np.testing.assert_allclose(lines, scores, rtol=1e-6)
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
    stars = {"module": DATA["module"].replace(":rows", ":stars")}
    cases = {
        "negative": ({"loss": "binary"}, SCORED | NEGATIVE, {}, "data.negative: the loss binary reads a score"),
        "streaming": ({}, {"streaming": True}, {}, "data.streaming: the loss multiple_negatives reads several rows"),
        "classes": ({"loss": "list_net"}, SCORED | {"label_type": "class"}, {}, "label_type: found class, expected n"),
        "stars": ({"loss": "binary"}, SCORED | stars, {}, "data.label: train: found numbers from 0 to 5, and the loss"),
    }
    refused(
        tmp_path,
        {
            name: (options, data, {"task": "reranker"} | more, text)
            for name, (options, data, more, text) in cases.items()
        },
    )


WAYS = {
    "whole": ({}, (), ()),
    "parts": ({"micro_batch_size": 8}, (), ()),
    "packed": ({"micro_batch_size": 4}, ("packing", "cls-last-layer"), ()),
    "processes": ({"micro_batch_size": 6}, ("ddp",), ("--nproc", "2")),
}


def test_micro_batches_and_processes_do_not_change_the_loss(tmp_path):
    """The last batch has fewer rows, of which one process has fewer; it also has none of validation."""
    cases = {case: (options, data) for case, (options, data, _) in CASES.items()}
    model = with_dropout(TEXTS, 0.0)["model"]
    sizes = {"batch_size": 24, "epochs": 2, "log_every": 1, "eval_batch_size": 16}
    train_divided(tmp_path, cases, WAYS, task="reranker", model=model, **sizes)


class TestConformance(Conformance):
    plugin = "reranker"
    task = {"model": TEXTS["model"], "data": DATA}


class TestConformanceOfScoredPairs(Conformance):
    plugin = "reranker"
    options = {"loss": "binary"}
    task = {"model": TEXTS["model"], "data": DATA | SCORED}
