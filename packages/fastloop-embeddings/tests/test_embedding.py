"""Tests of embedding: it learns, predicts and exports vectors, refuses what it cannot do, and conforms."""

import json
import random
import subprocess
import sys

import pytest
from fastloop.testing import TEXTS, Conformance, with_dropout

WORDS = "red blue green old new big small fast slow dog cat bird fish house tree river".split()


def rows(count: int = 64):
    """Rows of words, the same words in another order, and other words; with the score 1 or 0."""
    draw, found = random.Random(0), []
    for index in range(count):
        words = draw.sample(WORDS, draw.randint(2, 9))
        text, same, other = (" ".join(draw.sample(each, len(each))) for each in (words, words, draw.sample(WORDS, 4)))
        scored = {"first": text, "second": other if index % 2 else same, "score": 1.0 - index % 2}
        found.append({"text": text, "other": same, "negative": other} | scored)
    return {"train": found, "validation": found[: count // 4], "test": found[: count // 4]}


DATA = {"module": f"{__file__}:rows", "max_length": 32}
SCORED = {"text": "first", "other": "second", "label": "score", "label_type": "number"}
TRAIN = {"epochs": 15, "batch_size": 16, "lr": 3e-3, "device": "cpu"}


FORKS = """
import json, os, runpy, sys
import accelerate, datasets, torchmetrics, transformers
import fastloop.defaults, fastloop.lifecycle
for folder, *arguments in json.loads(sys.stdin.read()):
    child = os.fork()
    if child == 0:
        os.chdir(folder)
        sys.argv = ["fastloop", *arguments]
        os.dup2(os.open("output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
        os.dup2(1, 2)
        runpy.run_module("fastloop", run_name="__main__", alter_sys=True)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code != int(sys.argv[1]):
        sys.exit(f"{arguments}: exit code {code}: " + open(f"{folder}/output.txt").read())
"""
"""Runs commands of fastloop, each in a process forked from this one, which has imported torch."""


def fastloop(commands, code=0):
    """Run commands of fastloop: [folder, argument, ...] each. Each writes ``output.txt`` in its folder."""
    command = [sys.executable, "-W", "ignore", "-c", FORKS, str(code)]
    done = subprocess.run(command, input=json.dumps(commands), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def write_recipe(folder, options, data, *plugins, model=TEXTS["model"], **train):
    recipe = {"model": model, "data": DATA | data, "output": "run", "plugins": [{"embedding": options}]}
    recipe |= {"plugins": recipe["plugins"] + list(plugins), "train": TRAIN | train}
    (folder / "recipe.yaml").write_text(json.dumps(recipe))  # JSON is YAML


CASES = {
    "multiple_negatives": ({"dims": [8, 16]}, {"negative": "negative"}, ("recall@1", 0.9)),
    "triplet": ({"loss": "triplet", "pooling": "first", "normalize": False}, {"negative": "negative"}, ("mrr@10", 0.5)),
    "cosent": ({"loss": "cosent", "pooling": "last"}, SCORED, ("spearman", 0.8)),
    "cosine": ({"loss": "cosine"}, SCORED, ("spearman", 0.8)),
}


TEXTS_TO_PREDICT = ["red dog", "dog red", "old slow house", "fish"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder for each case, with a trained model in ``run`` and the vectors that it predicts in ``vectors.jsonl``."""
    folders, commands = {}, []
    for case, (options, data, _) in CASES.items():
        folders[case] = folder = tmp_path_factory.mktemp(case)
        write_recipe(folder, options, data)
        (folder / "texts.csv").write_text("\n".join([data.get("text", "text"), *TEXTS_TO_PREDICT]) + "\n")
        commands.append([str(folder), "train", "recipe.yaml"])
        commands.append([str(folder), "predict", "run", "texts.csv", "--out", "vectors.jsonl"])
    fastloop(commands)
    return folders


def predicted(folder):
    return [json.loads(line)["vector"] for line in (folder / "vectors.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("case", CASES)
def test_it_learns_and_predicts(trained, case):
    options, _, (metric, least) = CASES[case]
    found = json.loads((trained[case] / "run" / "summary.json").read_text())["validation"]
    assert found[metric] > least
    vectors = predicted(trained[case])
    assert len(vectors) == len(TEXTS_TO_PREDICT)
    normalized = options.get("normalize", True)
    assert (abs(sum(number**2 for number in vectors[0]) - 1) < 1e-5) == normalized
    modules = json.loads((trained[case] / "run" / "model" / "modules.json").read_text())
    assert [module["path"] for module in modules] == ["", "1_Pooling", "2_Normalize"][: 2 + normalized]


def test_sentence_transformers_computes_the_same_vectors(trained):
    pytest.importorskip("sentence_transformers")
    import numpy as np

    script = """
import json, sys
from sentence_transformers import SentenceTransformer
texts, *folders = json.loads(sys.stdin.read())
models = [SentenceTransformer(folder, device="cpu") for folder in folders]
print(json.dumps([[model.similarity_fn_name, model.encode(texts).tolist()] for model in models]))
"""
    given = json.dumps([TEXTS_TO_PREDICT, *(str(folder / "run" / "model") for folder in trained.values())])
    command = [sys.executable, "-W", "ignore", "-c", script]
    done = subprocess.run(command, input=given, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for folder, (similarity, theirs) in zip(trained.values(), json.loads(done.stdout.splitlines()[-1]), strict=True):
        assert similarity == "cosine"
        np.testing.assert_allclose(predicted(folder), theirs, rtol=1e-4, atol=1e-5)


REFUSED = {
    "triplet": ({"loss": "triplet"}, {}, [], {}, "data.negative: missing, and the loss triplet reads it"),
    "negative": ({"loss": "cosine"}, SCORED | {"negative": "negative"}, [], {}, "data.negative: the loss cosine"),
    "classes": ({"loss": "cosine"}, SCORED | {"label_type": "class"}, [], {}, "label_type: found class, expected numb"),
    "dims": ({"dims": [8, 17]}, {}, [], {}, "dims: found 17, and vectors of the model have 16 numbers"),
    "no dims": ({"dims": [0]}, {}, [], {}, "dims: found [0], expected 1 or more"),
}


def test_recipes_that_it_cannot_train_are_refused_by_name(tmp_path):
    for name, (options, data, plugins, given, _) in REFUSED.items():
        (tmp_path / name).mkdir()
        write_recipe(tmp_path / name, options, data, *plugins, **given)
    fastloop([[str(tmp_path / name), "train", "recipe.yaml"] for name in REFUSED], code=2)
    for name, (*_, message) in REFUSED.items():
        assert message in " ".join((tmp_path / name / "output.txt").read_text().split())


DIVIDED = {
    "multiple_negatives": ({"dims": [8, 16]}, {"negative": "negative"}),
    "cosent": ({"loss": "cosent"}, SCORED),
}


def test_micro_batches_and_processes_do_not_change_the_loss(tmp_path):
    """The last batch has 16 of 24 rows, of which one process has fewer; it also has none of validation."""
    commands, found = [], {}
    for case, (options, data) in DIVIDED.items():
        for name, train, more in (
            ("whole", {}, ()),
            ("parts", {"micro_batch_size": 8}, ()),
            ("processes", {"micro_batch_size": 6}, ("--nproc", "2")),
        ):
            found[case, name] = folder = tmp_path / f"{case}-{name}"
            folder.mkdir()
            own = {"batch_size": 24, "epochs": 2, "log_every": 1, "eval_batch_size": 16} | train
            write_recipe(
                folder, options, data, *["ddp"] * len(more[1:]), model=with_dropout(TEXTS, 0.0)["model"], **own
            )
            commands.append([str(folder), "train", "recipe.yaml", *more])
    fastloop(commands)
    for (case, _), folder in found.items():
        for split, key in (("training", "loss"), ("validation", "recall@10"), ("validation", "spearman")):
            values, whole = (read_values(place, split, key) for place in (folder, found[case, "whole"]))
            assert len(whole) == 6 or split == "validation"
            assert values == pytest.approx(whole, rel=1e-3), (folder.name, key)


def read_values(folder, split, key):
    """The values of a key in ``metrics.jsonl``."""
    points = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return [point[key] for point in points if key in point and point.get("split", "training") == split]


class TestConformance(Conformance):
    plugin = "embedding"
    task = {"model": TEXTS["model"], "data": DATA}


class TestConformanceOfRowLosses(Conformance):
    plugin = "embedding"
    options = {"loss": "triplet"}
    task = {"model": TEXTS["model"], "data": DATA | {"negative": "negative"}}
