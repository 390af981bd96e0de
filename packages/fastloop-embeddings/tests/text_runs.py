"""Rows, recipes and commands for the tests of both tasks."""

import json
import random
import subprocess
import sys

import pytest
from fastloop.testing import TEXTS

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
"""The section ``data``. ``SCORED`` adds scores."""
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


def write_recipe(folder, options, data, *plugins, task="embedding", model=TEXTS["model"], **train):
    recipe = {"model": model, "data": DATA | data, "output": "run", "plugins": [{task: options}]}
    recipe |= {"plugins": recipe["plugins"] + list(plugins), "train": TRAIN | train}
    (folder / "recipe.yaml").write_text(json.dumps(recipe))  # JSON is YAML


def refused(folder, cases):
    """Train recipes that are refused. A case has the arguments of ``write_recipe``, and a part of the message."""
    for name, (options, data, more, _) in cases.items():
        (folder / name).mkdir()
        write_recipe(folder / name, options, data, **more)
    fastloop([[str(folder / name), "train", "recipe.yaml"] for name in cases], code=2)
    for name, (*_, message) in cases.items():
        assert message in " ".join((folder / name / "output.txt").read_text().split()), name


def train_divided(folder, cases, ways, splits=("training", "validation"), **given):
    """Train each case in each way, and compare losses and metrics with those of the first way.

    Args:
        cases: Name -> options and data.
        ways: Name -> keys of ``train``, plugins and arguments of the command.
    """
    commands, found = [], {}
    for case, (options, data) in cases.items():
        for way, (train, plugins, arguments) in ways.items():
            found[case, way] = place = folder / f"{case}-{way}"
            place.mkdir()
            write_recipe(place, options, data, *plugins, **given, **train)
            commands.append([str(place), "train", "recipe.yaml", *arguments])
    fastloop(commands)
    for (case, way), place in found.items():
        whole = found[case, next(iter(ways))]
        for split in splits:
            values, expected = read_values(place, split), read_values(whole, split)
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
    done = subprocess.run(command, input=json.dumps(given), capture_output=True, text=True, check=False)
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
    draw, found = random.Random(2), []
    for _ in range(count):
        words = draw.sample(WORDS, 3)
        query, same = (" ".join(draw.sample(words, 3)) for _ in range(2))
        others = [" ".join(draw.sample(WORDS, 3)) for _ in range(3)]
        documents = [(same, 1.0), *((other, 0.0) for other in others)]
        found += [{"first": query, "second": text, "score": score} for text, score in documents]
    return {"train": found, "validation": found[: len(found) // 2], "test": found[: len(found) // 2]}


def stars():
    """``rows`` with scores from 0 to 5."""
    return {split: [row | {"score": 5 * row["score"]} for row in found] for split, found in rows().items()}


def training():
    """``lists`` without splits to evaluate."""
    return {"train": lists()["train"]}
