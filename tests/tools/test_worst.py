"""`fastloop evaluate` stores results in the run folder, with the samples that the model got most wrong.

`fastloop report` shows them.

Modules:
    plugins/fastloop_plugins/text/row_places.py
    plugins/fastloop_tools/inference/saved.py
    plugins/fastloop_tools/inference/worst.py
    plugins/fastloop_tools/shared/sample_text.py
"""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
import yaml
from inference_runs import CLASSES, texts, train, write_csv, write_recipe
from text_helpers import TINY_GPT

from fastloop.testing import assert_problem
from fastloop_tools.inference.worst import name_classes, score, score_sets
from fastloop_tools.report.page import MOST_CLASSES
from fastloop_tools.report.read import read_evaluation
from fastloop_tools.shared.sample_text import describe_sample

CODE = """
import torch

def data():
    generator = torch.Generator().manual_seed(0)
    rows = [(torch.randn(4, generator=generator), index % 3) for index in range(30)]
    return {split: rows for split in ("train", "validation", "test")}

class Net(torch.nn.Linear):
    def __init__(self):
        super().__init__(4, 3)
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with a recipe, its files and its run."""
    folder = tmp_path_factory.mktemp("trained")
    train(write_recipe(folder))
    return folder


@pytest.fixture
def run(trained):
    """A copy of the run in the current folder."""
    return Path(shutil.copytree(trained / "run", "run"))


def evaluate(cli: Any, *arguments: Any) -> str:
    code, out, err = cli("evaluate", *map(str, arguments))
    assert code == 0, err
    text: str = out
    return text


def stored(run: Path, name: str = "test") -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "evaluation" / f"{name}.json").read_text())
    return found


def page(cli: Any, *runs: Any) -> str:
    code, _, err = cli("report", *map(str, runs))
    assert code == 0, err
    return Path("report.html").read_text()


def scores_by_hand(model: Path, file: Path) -> list[tuple[str, str, float, str, float]]:
    """Text, target, its probability, prediction and its probability of each row, from the exported model alone."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    classifier = AutoModelForSequenceClassification.from_pretrained(model).eval()
    tokenizer = AutoTokenizer.from_pretrained(model)
    found = []
    with file.open(encoding="utf-8", newline="") as lines, torch.no_grad():
        for row in csv.DictReader(lines):
            shares = (
                classifier(**tokenizer(row["text"], truncation=True, max_length=32, return_tensors="pt"))
                .logits[0]
                .softmax(0)
            )
            best = int(shares.argmax())
            target = float(shares[CLASSES.index(row["label"])])
            found.append((row["text"], row["label"], target, CLASSES[best], float(shares[best])))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("plugins", ["", "packing,length-bucketing"])
def test_worst_samples_equal_those_of_the_exported_model(run, trained, cli, plugins):
    arguments = ["--with", plugins] if plugins else []
    evaluate(cli, run, "--worst", "7", "--json", "results.json", *arguments)
    found = json.loads(Path("results.json").read_text())["worst"]
    expected = scores_by_hand(run / "model", trained / "test.csv")
    order = sorted(range(30), key=lambda index: expected[index][2])[:7]
    assert [row["target_probability"] for row in found] == pytest.approx(
        [expected[index][2] for index in order], abs=1e-5
    )
    assert {row["index"] for row in found} == set(order)
    for row in found:
        text, target, share, prediction, best = expected[row["index"]]
        assert (row["input"], row["target"], row["prediction"]) == (text, target, prediction)
        assert (row["target_probability"], row["prediction_probability"]) == pytest.approx((share, best), abs=1e-5)
    assert found[0]["target"] != found[0]["prediction"], "a tenth of the labels is wrong"


def test_each_worst_sample_names_its_line_and_columns(tmp_path, cli, monkeypatch):
    """Rows of validation are held out of train, and one row is dropped: their numbers are not those of the samples."""
    monkeypatch.chdir(tmp_path)
    for number, name in enumerate(("a.csv", "b.csv")):
        rows = [{"id": f"{name}-{row}", **values} for row, values in enumerate(texts(40, 100 * number))]
        rows[7]["text"] = "remove this"
        rows[9]["text"] += "\nover two lines"
        write_csv(tmp_path / name, rows)
    data = {"files": {"train": ["a.csv", "b.csv"]}, "text": "text", "label": "label", "max_length": 32}
    data |= {"validation_fraction": 0.25, "drop": [{"column": "text", "equals": "remove this"}]}
    recipe = write_recipe(tmp_path, data=data, train={"max_steps": 1, "batch_size": 8, "device": "cpu"})
    train(recipe)
    out = evaluate(cli, "run", "--split", "validation", "--worst", "12", "--keep", "id,wrong=label")
    found = stored(Path("run"), "validation")["worst"]
    assert [line for line in out.splitlines() if line != line.rstrip()] == []
    assert {row["place"].partition(",")[0] for row in found} == {"a.csv", "b.csv"}
    for row in found:
        name, _, line = row["place"].partition(", line ")
        first = Path(name).read_text().splitlines()[int(line) - 1]
        assert first.startswith(f"{row['kept']['id']},{row['input'].split(' over')[0]}")
        assert row["kept"]["wrong"] == row["target"]
        assert row["place"] in out
        assert row["kept"]["id"] in out
    assert found[0]["place"] in page(cli, "run")
    code, _, err = cli("evaluate", "run", "--split", "validation", "--worst", "2", "--keep", "idd")
    assert code == 2
    assert_problem(err, "unknown-column --keep 'idd' 'id'?")
    code, _, err = cli("evaluate", "run", "--keep", "id")
    assert code == 2
    assert_problem(err, "missing-value --keep --worst")


@pytest.mark.parametrize("columns", ["text", ["title", "text"]])
def test_the_input_of_a_worst_sample_is_the_text_of_its_row(tmp_path, cli, monkeypatch, columns):
    """Tokens would lose capitals and line breaks, and all words after the fourth token."""
    monkeypatch.chdir(tmp_path)
    rows = []
    for number, values in enumerate(texts(16, 0)):
        rows.append({**values, "title": f"No. {number}", "text": f"It's  GREAT!\n{values['text']}<br />"})
    write_csv(tmp_path / "rows.csv", rows)
    data = {"files": {"train": "rows.csv"}, "text": columns, "label": "label", "max_length": 4}
    data["validation_fraction"] = 0.5
    train(write_recipe(tmp_path, data=data, train={"max_steps": 1, "batch_size": 8, "device": "cpu"}))
    evaluate(cli, "run", "--split", "validation", "--worst", "3", "--keep", "title,whole=text")
    found = stored(Path("run"), "validation")["worst"]
    assert len(found) == 3
    for row in found:
        whole = row["kept"]["whole"]
        expected = whole if columns == "text" else f"title: {row['kept']['title']}\ntext: {whole}"
        assert row["input"] == expected


@pytest.mark.slow
def test_results_are_stored_in_the_run_without_texts(run, cli):
    out = evaluate(cli, run)
    assert f"written to {run / 'evaluation' / 'test.json'}" in out
    found = stored(run)
    summary = json.loads((run / "summary.json").read_text())
    assert found["metrics"] == pytest.approx(summary["test"], rel=1e-6)
    assert found["steps"] == summary["steps"]
    assert "worst" not in found
    assert not any(row["text"] in json.dumps(found) + page(cli, run) for row in texts(30, 200))


@pytest.mark.slow
def test_other_settings_and_files_replace_no_results(run, trained, cli):
    evaluate(cli, run)
    evaluate(cli, run, "--split", "validation")
    before = stored(run)
    evaluate(cli, run, "data.max_length=8")
    evaluate(cli, run, "--file", trained / "validation.csv")
    Path("elsewhere").mkdir()
    evaluate(cli, run, "--file", write_csv(Path("elsewhere/validation.csv"), texts(9)))
    names = sorted(path.stem for path in (run / "evaluation").iterdir())
    assert stored(run) == before
    assert [re.sub("-[0-9a-f]{4}$", "-HASH", name) for name in names] == [
        "test",
        "test-HASH",
        "validation",
        *["validation-HASH"] * 2,
    ]
    text = page(cli, run)
    assert "data.max_length=8" in text
    assert text.count('<h2 id="evaluation') == 5


def test_an_exported_model_stores_nothing(run, trained, cli):
    evaluate(cli, run / "model", trained / "recipe.yaml")
    assert not list(run.rglob("evaluation"))


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_run_is_evaluated(run, cli):
    run.chmod(0o555)
    try:
        assert "test accuracy" in evaluate(cli, run)
    finally:
        run.chmod(0o755)


def test_results_that_cannot_be_stored_are_a_warning(run, cli):
    (run / "evaluation").write_text("a file in the place of the folder")
    code, out, _ = cli("evaluate", str(run))
    assert code == 0
    assert "test accuracy" in out
    assert_problem(out, "file-not-writable")


def test_the_report_shows_matrix_classes_and_worst_samples(run, cli):
    evaluate(cli, run, "--worst", "3")
    found, text = stored(run), page(cli, run)
    assert text.count('class="cell"') == 9
    counts = re.findall(r'<text class="count[^>]*>(\d+)</text>', text)
    assert counts == [str(count) for row in found["confusion"] for count in row]
    assert [row["input"] in text for row in found["worst"]] == [True] * 3
    for row in found["classes"]:
        values = "".join(f'<td class="n">{row[key]:.4f}</td>' for key in ("precision", "recall", "f1"))
        assert f'<th scope="row">{row["name"]}</th>{values}<td class="n">{row["samples"]}</td>' in text
    assert "evaluate it again" not in text
    summary = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps(summary | {"steps": summary["steps"] + 5}))
    assert f"This is the model after {summary['steps']} steps" in page(cli, run)


def test_many_classes_show_the_most_frequent_confusions(run, cli):
    evaluate(cli, run)
    count = MOST_CLASSES + 1
    confusion = [
        [(5 if (row, column) == (4, 7) else 0) + (row == column) for column in range(count)] for row in range(count)
    ]
    scores = {"precision": 1.0, "recall": 1.0, "f1": 1.0, "samples": 1}
    classes = [{"name": f"class {index}", **scores} for index in range(count)]
    (run / "evaluation" / "test.json").write_text(
        json.dumps(stored(run) | {"classes": classes, "confusion": confusion})
    )
    text = page(cli, run)
    assert 'class="cell"' not in text
    assert '<th scope="row">class 4</th><td>class 7</td><td>5</td>' in text


@pytest.mark.slow
def test_a_module_shows_few_numbers_and_a_language_model_no_order(tmp_path, cli):
    home = tmp_path / "home"
    home.mkdir()
    (home / "code.py").write_text(CODE)
    recipe = {
        "model": {"module": "code.py:Net"},
        "data": {"module": "code.py:data"},
        "train": {"epochs": 2, "batch_size": 8, "lr": 0.1, "device": "cpu"},
        "plugins": [
            {
                "module": {
                    "loss": "cross_entropy",
                    "metrics": {"accuracy": {"type": "MulticlassAccuracy", "num_classes": 3}},
                }
            }
        ],
        "output": str(tmp_path / "module"),
    }
    (home / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    train(home / "recipe.yaml")
    evaluate(cli, tmp_path / "module", "--worst", "30")
    found = stored(tmp_path / "module")["worst"]
    assert sorted(row["index"] for row in found) == list(range(30))
    assert {row["target"] for row in found} == {"0", "1", "2"}
    assert all(len(row["input"].split(", ")) == 4 for row in found)
    weights = write_recipe(tmp_path)
    tree = yaml.safe_load(weights.read_text())
    tree["model"]["config"], tree["model"]["tokenizer"] = TINY_GPT, {"kind": "bpe", "vocab_size": 300}
    tree["data"] = {"files": tree["data"]["files"], "max_length": 16}
    weights.write_text(yaml.safe_dump(tree))
    train(weights)
    assert "no score for each class" in evaluate(cli, tmp_path / "run", "--worst", "2")
    assert stored(tmp_path / "run")["worst"] == []


def test_samples_without_a_target_are_left_out():
    scores = torch.tensor([[0.0, 2.0], [3.0, 0.0], [1.0, 1.0]])
    found = score(scores, torch.tensor([0, -100, 1]), (7, 8, 9))
    assert [(one.sample, one.target, one.prediction) for one in found] == [(7, (0,), (1,)), (9, (1,), (0,))]
    assert found[0].target_score == pytest.approx(scores[0].log_softmax(0)[0].item())


def test_the_target_of_several_labels_has_the_product_of_their_probabilities():
    """Sample 7 has both classes, sample 8 none, and the threshold is above the second score of sample 8."""
    scores = torch.tensor([[1.0, -2.0], [-1.0, 0.5]])
    found = score_sets(scores, torch.tensor([[1.0, 1.0], [0.0, 0.0]]), (7, 8), 0.7)
    assert [(one.sample, one.target, one.prediction) for one in found] == [(7, (0, 1), (0,)), (8, (), ())]
    shares = scores.sigmoid()
    targets = [shares[0, 0] * shares[0, 1], (1 - shares[1, 0]) * (1 - shares[1, 1])]
    predictions = [shares[0, 0] * (1 - shares[0, 1]), targets[1]]
    assert [one.target_score for one in found] == pytest.approx([value.log().item() for value in targets])
    assert [one.prediction_score for one in found] == pytest.approx([value.log().item() for value in predictions])
    assert [name_classes(["spam", "toxic"], one.target) for one in found] == ["spam, toxic", "none"]


def test_the_worst_samples_of_several_labels_are_shown(tmp_path, cli, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = []
    for number, values in enumerate(texts(40, 0)):
        labels = [[], [values["label"]], [values["label"], "long"]][number % 3]
        rows.append({"text": values["text"], "tags": labels})
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"files": {"train": "rows.jsonl"}, "text": "text", "label": "tags", "label_type": "classes"}
    data |= {"max_length": 32, "validation_fraction": 0.5}
    train(write_recipe(tmp_path, data=data, train={"max_steps": 2, "batch_size": 8, "lr": 0.1, "device": "cpu"}))
    out = evaluate(cli, "run", "--split", "validation", "--worst", "20")
    found = stored(Path("run"), "validation")["worst"]
    assert len(found) == 20
    probabilities = [row["target_probability"] for row in found]
    assert probabilities == sorted(probabilities)
    assert {"none"} < {row["target"] for row in found}
    for row in found:
        line = int(row["place"].partition(", line ")[2])
        assert row["target"] == (", ".join(sorted(rows[line - 1]["tags"])) or "none")
        assert row["place"] in out
    assert [re.findall(r"P\(\w+\)", out)] == [["P(target)", "P(prediction)"]]


def test_inputs_are_described():
    assert describe_sample(("a text", 1), None) == "a text"
    assert describe_sample({"premise": "a", "label": 1}, None) == "premise: a"
    assert describe_sample((torch.tensor([1.0, 2.5]), 0), None) == "1, 2.5"
    assert describe_sample((torch.zeros(3, 8, 8), 0), None) == "(3, 8, 8) float32"
    assert describe_sample(object(), None) is None


@pytest.mark.parametrize(
    "harm",
    [
        {"metrics": 3},
        {"classes": [{"name": "a"}]},
        {"confusion": [[1]]},
        {"worst": [3]},
        {"confusion": "abc", "classes": "abc"},
    ],
)
def test_a_broken_result_is_named(run, cli, harm):
    evaluate(cli, run)
    (run / "evaluation" / "test.json").write_text(json.dumps(stored(run) | harm))
    code, _, err = cli("report", str(run))
    assert code == 2
    assert_problem(err, "wrong-format evaluation/test.json")
    (run / "evaluation" / "test.json").write_text("{")
    assert cli("report", str(run))[0] == 2


def test_a_result_is_read_as_written(run, cli):
    evaluate(cli, run, "--worst", "2")
    found, read = stored(run), read_evaluation(run / "evaluation" / "test.json")
    assert read.metrics == found["metrics"]
    assert read.confusion == found["confusion"]
    assert [vars(row) for row in read.worst] == found["worst"]
    assert [vars(row) for row in read.classes] == found["classes"]
    assert read.samples == 30


@pytest.mark.slow
def test_worst_samples_of_two_processes_equal_those_of_one(tmp_path):
    recipe = write_recipe(tmp_path, ["ddp"])

    def call(*arguments: str) -> None:
        done = forked.run("-m", "fastloop", *arguments)
        assert done.returncode == 0, done.stdout + done.stderr

    call("train", str(recipe), "--nproc", "2")
    found = {}
    for processes in ("1", "2"):
        call("evaluate", str(tmp_path / "run"), "--worst", "6", "--nproc", processes)
        found[processes] = stored(tmp_path / "run")["worst"]
    assert [row["index"] for row in found["1"]] == [row["index"] for row in found["2"]]
    for one, two in zip(found["1"], found["2"], strict=True):
        assert one["target_probability"] == pytest.approx(two["target_probability"], abs=1e-5)
        assert one["input"] == two["input"]
