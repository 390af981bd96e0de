"""Tests of sentence-similarity: it learns, predicts vectors, and passes fastloop's conformance tests."""

import json
import random

import pytest
from fastloop.testing import TEXTS, Conformance, run_commands

WORDS = "red blue green old new big small fast slow dog cat bird fish house tree river".split()


def pairs(count: int = 64):
    """Rows of words, and of the same words in another order, with the similarity 1."""
    draw = random.Random(0)
    rows = []
    for _ in range(count):
        words = draw.sample(WORDS, draw.randint(2, 9))
        rows.append({"text": " ".join(words), "other": " ".join(draw.sample(words, len(words))), "score": 1.0})
    return {"train": rows, "validation": rows[: count // 4], "test": rows[: count // 4]}


DATA = {"module": f"{__file__}:pairs", "max_length": 32}


@pytest.mark.filterwarnings("ignore:The variance of predictions or target:UserWarning")  # each score is 1
@pytest.mark.parametrize("label", [{}, {"label": "score", "label_type": "number"}], ids=["pairs", "scores"])
def test_it_learns_that_the_same_words_are_similar(tmp_path, label):
    recipe = {"model": TEXTS["model"], "data": {**DATA, **label}, "output": "run", "plugins": ["sentence-similarity"]}
    recipe["train"] = {"epochs": 15, "batch_size": 16, "lr": 3e-3, "device": "cpu"}
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))  # JSON is YAML
    (tmp_path / "texts.csv").write_text("text\nred dog\ndog red\nold slow house\n")
    predict = (tmp_path, "predict", "run", "texts.csv", "--out", "vectors.jsonl")
    run_commands([(tmp_path, "train", "recipe.yaml"), predict])
    found = json.loads((tmp_path / "run" / "summary.json").read_text())["validation"]
    assert found["loss"] < 0.05 if label else found["accuracy"] > 0.9
    first, same, other = (json.loads(line)["vector"] for line in (tmp_path / "vectors.jsonl").read_text().splitlines())
    similar = [sum(one * two for one, two in zip(first, vector, strict=True)) for vector in (first, same, other)]
    assert similar[0] == pytest.approx(1, abs=1e-5)
    assert similar[1] > 0.9
    assert label or similar[2] < similar[1]


class TestConformance(Conformance):
    plugin = "sentence-similarity"
    task = {"model": TEXTS["model"], "data": DATA}
