"""Rows, recipes and commands for the tests of both tasks."""

import json
import random
import subprocess
import sys
import warnings

import pytest
from fastloop.testing import TEXTS, run_commands, train

WORDS = "red blue green old new big small fast slow dog cat bird fish house tree river".split()


def rows(count: int = 64):
    """Rows of words, the same words in another order, and other words; with the score 1 or 0."""
    draw = random.Random(0)
    found = []
    for index in range(count):
        words = draw.sample(WORDS, draw.randint(2, 9))
        text, same, other = (" ".join(draw.sample(each, len(each))) for each in (words, words, draw.sample(WORDS, 4)))
        scored = {"first": text, "second": other if index % 2 else same, "score": 1.0 - index % 2}
        found.append({"text": text, "other": same, "negative": other} | scored)
    return {"train": found, "validation": found[: count // 4], "test": found[: count // 4]}


DATA = {"module": f"{__file__}:rows", "max_length": 32}
"""The section ``data``. ``SCORED`` adds scores."""
SCORED = {"text": "first", "other": "second", "label": "score", "label_type": "number"}
TRAIN = {"epochs": 15, "batch_size": 16, "lr": 3e-3, "device": "cpu", "save_every": None}


def write_recipe(folder, options, data, *plugins, task="embedding", model=TEXTS["model"], **train):
    recipe = {"model": model, "data": DATA | data, "output": "run", "plugins": [{task: options}]}
    recipe |= {"plugins": recipe["plugins"] + list(plugins), "train": TRAIN | train}
    (folder / "recipe.yaml").write_text(json.dumps(recipe))  # JSON is YAML


def refused(folder, cases):
    """Train recipes that are refused. A case has the arguments of ``write_recipe``, and a part of the message."""
    for name, (options, data, more, _) in cases.items():
        (folder / name).mkdir()
        write_recipe(folder / name, options, data, **more)
    outputs = run_commands([(folder / name, "train", "recipe.yaml") for name in cases], code=2)
    for (name, (*_, message)), output in zip(cases.items(), outputs, strict=True):
        assert message in " ".join(output.split()), name


def train_all(recipes):
    warnings.simplefilter("ignore")  # torchmetrics warns on a process without rows
    for recipe in recipes:
        train(recipe)


def train_divided(processes, folder, cases, ways, splits=("training", "validation"), **given):
    """Train each case in each way, and compare losses and metrics with those of the first way.

    Args:
        processes: The fixture.
        cases: Name -> options and data.
        ways: Name -> keys of ``train``, plugins and the number of processes.
    """
    recipes = {}
    found = {}
    for case, (options, data) in cases.items():
        for way, (keys, plugins, count) in ways.items():
            found[case, way] = place = folder / f"{case}-{way}"
            place.mkdir()
            write_recipe(place, options, data, *plugins, **given, **keys)
            recipe = json.loads((place / "recipe.yaml").read_text()) | {"output": str(place / "run")}
            recipes.setdefault(count, []).append(recipe)
    for count, known in recipes.items():
        processes(count, train_all, known)
    for (case, way), place in found.items():
        whole = found[case, next(iter(ways))]
        for split in splits:
            values = read_values(place, split)
            expected = read_values(whole, split)
            assert len(expected) > 1
            for one, other in zip(values, expected, strict=True):
                assert one == pytest.approx(other, rel=1e-3, abs=1e-5), (case, way, split)


COMPARED = ("loss", "recall@10", "spearman", "mrr@10", "beir_ndcg@10")


def read_values(folder, split):
    """Losses and metrics of a split in ``metrics.jsonl``."""
    points = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    points = [point for point in points if point.get("split", "training") == split]
    return [found for point in points if (found := {key: point[key] for key in COMPARED if key in point})]


def run_python(script, given):
    """The last line that a script prints, read as JSON, in a process of its own. It reads ``given`` from stdin."""
    command = [sys.executable, "-W", "ignore", "-c", script]
    done = subprocess.run(command, input=json.dumps(given), capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def write_collection(folder):
    """A folder in the layout of BEIR: 40 documents, and 10 queries of which 9 have relevant ones, some of them two."""
    draw = random.Random(1)
    documents = [" ".join(draw.sample(WORDS, 5)) for _ in range(40)]
    queries = [" ".join(draw.sample(text.split(), 3)) for text in documents[:10]]
    (folder / "qrels").mkdir(parents=True)
    for name, texts in (("corpus", documents), ("queries", queries)):
        lines = [json.dumps({"_id": f"{name[0]}{place}", "text": text}) for place, text in enumerate(texts)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    relevant = [(place, place, 2) for place in range(9)] + [(place, place + 20, 1) for place in range(0, 9, 2)]
    lines = [f"q{one}\tc{other}\t{gain}" for one, other, gain in [*relevant, (9, 9, 0)]]
    (folder / "qrels" / "dev.tsv").write_text("\n".join(["query-id\tcorpus-id\tscore", *lines]) + "\n")
    return queries[:9], documents, relevant


def lists(count: int = 16):
    """Queries with four documents each, of which one or two have all its words; with the scores 1 and 0."""
    draw = random.Random(2)
    found = []
    for _ in range(count):
        words = draw.sample(WORDS, 3)
        query, same = (" ".join(draw.sample(words, 3)) for _ in range(2))
        others = [" ".join(draw.sample(WORDS, 3)) for _ in range(3)]
        documents = [(same, 1.0), *((other, 0.0) for other in others)]
        found += [{"first": query, "second": text, "score": score} for text, score in documents]
    return {"train": found, "validation": found[: len(found) // 2], "test": found[: len(found) // 2]}


def repeated():
    """``rows``, of which each first text has three rows, each second text four, and some third texts are second texts
    of other rows."""
    found = []
    for index, row in enumerate(rows()["train"]):
        texts = {"text": f"fish {WORDS[index // 3 % 16]}", "other": f"old {WORDS[index // 4]}"}
        if index % 2:
            texts["negative"] = f"old {WORDS[index // 4 - 1]}"
        found.append(row | texts)
    return {"train": found, "validation": found[:16], "test": found[:16]}


def alike():
    """``rows`` with the same second text in each."""
    return {split: [row | {"other": "fish"} for row in found] for split, found in rows().items()}


def stars():
    """``rows`` with scores from 0 to 5."""
    return {split: [row | {"score": 5 * row["score"]} for row in found] for split, found in rows().items()}


def training():
    """``lists`` without splits to evaluate."""
    return {"train": lists()["train"]}


FEW, MANY = 96, 600
"""Rows that a run of few steps tokenizes at most, and those of the data."""


def check_few_steps(monkeypatch, caplog, options, data, task):
    """A run of two steps tokenizes only its rows, and has the losses of a run that tokenizes all."""
    caplog.set_level("INFO", "fastloop")
    data = DATA | {"arguments": {"count": MANY}, "validation_fraction": 0} | data
    recipe = {"model": TEXTS["model"], "data": data, "plugins": [{task: options}, {"log": False}]}
    recipe |= {"train": TRAIN | {"max_steps": 2, "evaluate_every": None}}
    expected = train(recipe | {"output": "whole"})
    assert "are tokenized: this run reads no others" not in caplog.text
    for module in ("needed_rows", "split_encoder"):
        monkeypatch.setattr(f"fastloop_plugins.text.{module}.LEFT_OUT", 100)
    found = train(recipe | {"output": "few"})
    (line,) = [line for line in caplog.messages if line.startswith("tokens: train:")]
    rows, total = (int(word) for word in line.split() if word.isdecimal())
    assert (rows < FEW, total) == (True, MANY)
    assert found.losses == expected.losses
    assert len(found.losses) == 2


def few_rows():
    """17 of ``rows``."""
    return rows(17)


def few_lists():
    """17 of ``lists``."""
    return lists(17)
