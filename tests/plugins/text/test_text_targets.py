"""Text classification with numbers as labels, and with any number of classes a row.

Modules:
    plugins/fastloop_plugins/tasks/shared/problems.py
    plugins/fastloop_plugins/text/option_checks.py
    plugins/fastloop_plugins/text/targets.py
"""

from __future__ import annotations

import csv
import json
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow
import pytest
import torch
from data_helpers import problem_of, text_data
from inference_runs import write_csv
from interrupted_runs import Case, check_interrupted
from pyarrow import parquet
from recipe_runs import assert_same
from text_helpers import TINY_GPT, make_run
from text_loops import BERT, DISTILBERT, TRAIN, plain_loop, pretrained, trained
from torch.nn.functional import binary_cross_entropy_with_logits, mse_loss
from torchmetrics.functional import mean_absolute_error, mean_squared_error, pearson_corrcoef, spearman_corrcoef
from torchmetrics.functional.classification import multilabel_exact_match, multilabel_f1_score
from transformers import AutoConfig, AutoModelForSequenceClassification, pipeline

from fastloop.errors import RecipeError
from fastloop.testing import assert_problem, expect_problem

TASK = "text-classification"
SCRATCH = {"config": BERT, "tokenizer": {"kind": "word"}}
SPLITS = {"train": 40, "validation": 16, "test": 20}
NAMES = ["insult", "toxic", "spam"]


def rows(count: int, offset: int = 0) -> list[dict[str, Any]]:
    """Texts with a number, three columns of 0 and 1, and the same classes as a list of names."""
    found = []
    for index in range(offset, offset + count):
        flags = {"toxic": index % 2, "insult": index // 2 % 2, "spam": int(index % 5 == 0)}
        words = [name for name, present in flags.items() if present]
        text = f"a film number {index % 13} {' '.join(words)}" + " indeed" * (index * 5 % 14)
        found.append({"text": text, "score": round(0.37 * (index % 7) - 1, 2), **flags, "tags": words})
    return found


def write() -> None:
    for number, (split, count) in enumerate(SPLITS.items()):
        content = rows(count, 100 * number)
        Path(f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content))
        write_csv(
            Path(f"{split}.csv"), [{key: value for key, value in row.items() if key != "tags"} for row in content]
        )


@pytest.fixture(autouse=True)
def _files():
    write()


def data(suffix: str, **section: Any) -> dict[str, Any]:
    return {"files": {split: f"{split}.{suffix}" for split in SPLITS}, "max_length": 24} | section


NUMBERS = data("csv", label="score", label_type="number")
COLUMNS = data("csv", label=["insult", "toxic", "spam"])
LISTS = data("jsonl", label="tags", label_type="classes")


def flags(found: list[dict[str, Any]], names: list[str] = NAMES) -> torch.Tensor:
    return torch.tensor([[float(row[name]) for name in names] for row in found])


def texts(count: int = 40, offset: int = 0) -> list[str]:
    return [row["text"] for row in rows(count, offset)]


@pytest.mark.parametrize("config", [BERT, DISTILBERT], ids=["bert", "distilbert"])
def test_regression_equals_a_plain_loop(config):
    folder = pretrained(TASK, config, NUMBERS)
    targets = torch.tensor([row["score"] for row in rows(40)])
    run = trained({"name": folder}, NUMBERS)
    theirs = plain_loop(folder, [texts()], targets, lambda logits, batch: mse_loss(logits.squeeze(), batch), 24)
    assert_same(run.unwrap_model().state_dict(), theirs)


@pytest.mark.parametrize("weights", [None, "balanced", {"insult": 1.0, "toxic": 3.0, "spam": 0.5}], ids=str)
@pytest.mark.parametrize("section", [COLUMNS, LISTS], ids=["columns", "lists"])
def test_multi_label_equals_a_plain_loop(section, weights):
    """The weight of a class is torch's ``pos_weight``."""
    folder = pretrained(TASK, BERT, section)
    names = list(AutoConfig.from_pretrained(folder).id2label.values())
    assert names == (section["label"] if section is COLUMNS else sorted(NAMES))
    targets = flags(rows(40), names)
    of_ones = None
    if weights == "balanced":
        of_ones = (40 - targets.sum(0)) / targets.sum(0)
    elif weights is not None:
        of_ones = torch.tensor([weights[name] for name in names])
    loss = partial(binary_cross_entropy_with_logits, pos_weight=of_ones)
    theirs = plain_loop(folder, [texts()], targets, loss, 24)
    run = trained({"name": folder}, section, [{TASK: {"loss": {"class_weights": weights}}}])
    assert_same(run.unwrap_model().state_dict(), theirs)


def test_balanced_needs_samples_with_and_without_each_class():
    kept = [{"text": f"film {index}", "toxic": index % 2, "insult": 0, "spam": 1} for index in range(8)]
    Path("train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept))
    for columns, expected in ((["toxic", "insult"], "no 'insult'"), (["toxic", "spam"], "every 'spam'")):
        section = {"files": {"train": "train.jsonl"}, "label": columns, "max_length": 24}
        with expect_problem(f"empty-class loss.class_weights balanced {expected}", RecipeError):
            make_run({TASK: {"loss": {"class_weights": "balanced"}}}, SCRATCH, section)


@pytest.mark.slow
def test_a_checkpoint_keeps_its_order_of_classes():
    folder = pretrained(TASK, BERT, COLUMNS)
    run = make_run(TASK, {"name": folder}, COLUMNS | {"label": ["toxic", "spam", "insult"]})
    assert [run.model.config.id2label[index] for index in range(3)] == NAMES
    assert torch.equal(torch.from_numpy(run.datasets["train"].labels), flags(rows(40)))


def test_a_regression_head_is_kept_under_any_name(cli):
    folder = Path(pretrained(TASK, BERT, NUMBERS))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"id2label": {"0": "stars"}, "label2id": {"stars": 0}}))
    before, run = (
        AutoModelForSequenceClassification.from_pretrained(folder),
        trained({"name": str(folder)}, NUMBERS, max_steps=1, lr=1e-9),
    )
    torch.testing.assert_close(run.unwrap_model().classifier.weight, before.classifier.weight)
    result = evaluate(cli, str(run.folder), "--file", "test.csv")["metrics"]
    assert result == pytest.approx(json.loads((run.folder / "summary.json").read_text())["test"])


def test_a_head_for_classes_is_replaced_for_regression():
    folder = pretrained(TASK, BERT, COLUMNS)
    run = make_run(TASK, {"name": folder}, NUMBERS)
    assert run.model.classifier.out_features == run.model.config.num_labels == 1


@pytest.mark.parametrize("section", [NUMBERS, COLUMNS], ids=["number", "classes"])
def test_a_run_resumes_bit_for_bit(section):
    task = {"model": SCRATCH, "data": section, "plugins": ["text-classification"]}
    check_interrupted(Case(task, train=TRAIN, write=write), "limit", 6)


@pytest.mark.slow
@pytest.mark.parametrize("plugins", ["packing", "length-bucketing", "packing,cls-last-layer", "token-cache"])
@pytest.mark.parametrize("section", [NUMBERS, COLUMNS], ids=["number", "classes"])
def test_plugins_give_the_same_loss(section, plugins):
    options = [{"token-cache": {"folder": "cache"}} if name == "token-cache" else name for name in plugins.split(",")]
    plain = trained(SCRATCH, section).state.metrics["test"]["loss"]
    again = [
        trained(SCRATCH, section, [TASK, *options], f"run-{number}").state.metrics["test"]["loss"]
        for number in range(2)
    ]
    assert again[0] == again[1] == pytest.approx(plain, rel=0.05 if plugins == "length-bucketing" else 1e-4)


def predictions(cli: Any, *arguments: str) -> list[dict[str, Any]]:
    code, _, err = cli("predict", *arguments, "--out", "out.jsonl", "--chunk", "7")
    assert code == 0, err
    return [json.loads(line) for line in Path("out.jsonl").read_text().splitlines()]


def evaluate(cli: Any, *arguments: str) -> dict[str, Any]:
    code, out, err = cli("evaluate", *arguments, "--json", "-")
    assert code == 0, err
    found: dict[str, Any] = json.loads(out)
    return found


def test_regression_predicts_as_the_pipeline_and_evaluates_as_torchmetrics(cli):
    folder = trained(SCRATCH, NUMBERS).folder
    config = AutoConfig.from_pretrained(folder / "model")
    assert (config.problem_type, config.num_labels) == ("regression", 1)
    found = torch.tensor([row["prediction"] for row in predictions(cli, str(folder), "test.csv")])
    read = pipeline("text-classification", model=str(folder / "model"), device="cpu")
    expected = [read(text, truncation=True, max_length=24)[0]["score"] for text in texts(20, 200)]
    assert found.tolist() == pytest.approx(expected, abs=1e-5)
    targets = torch.tensor([row["score"] for row in rows(20, 200)])
    result = evaluate(cli, str(folder), "--file", "test.csv")
    metrics = {
        "mse": mean_squared_error,
        "mae": mean_absolute_error,
        "pearson": pearson_corrcoef,
        "spearman": spearman_corrcoef,
    }
    assert {name: result["metrics"][name] for name in metrics} == pytest.approx(
        {name: function(found, targets).item() for name, function in metrics.items()}, abs=1e-4
    )
    assert result["metrics"]["loss"] == pytest.approx(result["metrics"]["mse"])
    assert result["classes"] == []


@pytest.mark.parametrize(("section", "threshold"), [(COLUMNS, None), (LISTS, 0.4)], ids=["columns", "lists"])
def test_multi_label_predicts_as_the_pipeline_and_evaluates_as_torchmetrics(section, threshold, cli):
    folder = trained(SCRATCH, section, [{TASK: {"threshold": threshold}}]).folder
    file = section["files"]["test"]
    config = AutoConfig.from_pretrained(folder / "model")
    names = [config.id2label[index] for index in range(3)]
    assert config.problem_type == "multi_label_classification"
    found = predictions(cli, str(folder), file)
    read = pipeline("text-classification", model=str(folder / "model"), device="cpu", top_k=None)
    for row, text in zip(found, texts(20, 200), strict=True):
        scores = {item["label"]: item["score"] for item in read(text, truncation=True, max_length=24)[0]}
        assert {name: row[f"probability_{name}"] for name in names} == pytest.approx(scores, abs=1e-5)
        assert row["labels"] == [name for name in names if row[f"probability_{name}"] > (threshold or 0.5)]
    probabilities = torch.tensor([[row[f"probability_{name}"] for name in names] for row in found])
    targets, result = flags(rows(20, 200), names).long(), evaluate(cli, str(folder), "--file", file)["metrics"]
    limit = threshold or 0.5
    assert result["f1_micro"] == pytest.approx(multilabel_f1_score(probabilities, targets, 3, limit, "micro").item())
    assert result["f1_macro"] == pytest.approx(multilabel_f1_score(probabilities, targets, 3, limit, "macro").item())
    assert result["subset_accuracy"] == pytest.approx(multilabel_exact_match(probabilities, targets, 3, limit).item())
    assert result == pytest.approx(json.loads((folder / "summary.json").read_text())["test"])


def test_predictions_as_csv_hold_lists_as_json(cli):
    folder = trained(SCRATCH, COLUMNS).folder
    code, _, err = cli("predict", str(folder), "a toxic film", "--out", "out.csv")
    assert code == 0, err
    with Path("out.csv").open() as file:
        row = next(csv.DictReader(file))
    assert set(json.loads(row["labels"])) <= set(NAMES)
    assert all(0 < float(row[f"probability_{name}"]) < 1 for name in NAMES)


def test_metrics_of_the_recipe_get_their_arguments():
    options = {"metrics": {"hamming": {"type": "MultilabelHammingDistance"}}}
    assert 0 <= trained(SCRATCH, COLUMNS, [{TASK: options}]).state.metrics["test"]["hamming"] <= 1
    options = {"metrics": {"r2": {"type": "R2Score"}}}
    assert trained(SCRATCH, NUMBERS, [{TASK: options}], "numbers").state.metrics["test"]["r2"] < 1
    with expect_problem("name-taken metrics.mse 'mse'", RecipeError):
        trained(SCRATCH, NUMBERS, [{TASK: {"metrics": {"mse": {"type": "R2Score"}}}}], "again")


@pytest.mark.parametrize(
    ("suffix", "section", "expected"),
    [
        ("csv", {"label": "score"}, "wrong-label data.label_type=number"),
        ("csv", {"label": ["score", "spam"], "label_type": "number"}, "wrong-type data.label 'module' Trainer"),
        ("jsonl", {"label": "score"}, "wrong-label data.label_type=number"),
        ("jsonl", {"label": "tags"}, "wrong-label data.label_type=classes"),
        (
            "csv",
            {"label": "text", "label_type": "number"},
            "wrong-label data.label_type=number",
        ),
        ("csv", {"label": "toxic", "label_type": "classes"}, "wrong-label data.label_type=classes"),
        ("csv", {"label": ["toxic", "score"]}, "wrong-label 'score' data.label '-1.0' 0 1"),
        (
            "csv",
            {"label": ["toxic", "insult"], "label_type": "class"},
            "wrong-type data.label_type=class",
        ),
        ("csv", {"label": ["toxic"]}, "wrong-type 0 1"),
        ("csv", {"label": ["toxic", "insults"]}, "unknown-column 'insults' data.label"),
        (
            "csv",
            {"label": "score", "label_type": "number", "label_map": {"a": 1}},
            "unknown-option data.label_map data.label_type=class",
        ),
        ("csv", {"label": "score", "label_type": "float"}, "invalid-value data.label_type 'float'"),
    ],
)
def test_wrong_labels_are_refused_with_the_key(suffix, section, expected):
    assert_problem(problem_of(f"train.{suffix}", **section), expected)


@pytest.mark.parametrize("value", ["nan", "inf", "", None, True])
def test_a_number_that_is_none_is_refused_or_skipped(value):
    Path("bad.jsonl").write_text(
        "".join(json.dumps({"text": "a film", "score": score}) + "\n" for score in (0.5, value, 1))
    )
    assert_problem(
        problem_of("bad.jsonl", label="score", label_type="number"), "wrong-label bad.jsonl 2 'score' data.label"
    )
    section = text_data("bad.jsonl", label="score", label_type="number")
    section.skip_unreadable = True
    assert section.load()["train"].labels.tolist() == [0.5, 1.0]


@pytest.mark.parametrize(
    ("value", "with_a_point"), [("5,46", "5.46"), (" -0,5 ", "-0.5"), ("1.234,56", None), ("much", None)]
)
def test_a_decimal_comma_is_named(value, with_a_point):
    Path("prices.csv").write_text(f"text;score\na film;{value}\n")
    problem = problem_of("prices.csv", label="score", label_type="number")
    assert_problem(problem, "wrong-label prices.csv 'score' data.label")
    assert ("comma" in problem.remedy) == (with_a_point is not None)
    assert with_a_point is None or problem.remedy.endswith(f"{with_a_point}.")


@pytest.mark.parametrize("streaming", [False, True])
def test_numbers_that_float32_rounds_are_counted(streaming, caplog):
    lines = [{"text": f"a {index}", "score": 1_700_000_001 + 128 * index} for index in range(3)]
    lines += [{"text": "b", "score": 2**24}, {"text": "c", "score": -0.1}, {"text": "d", "score": 1e300}]
    Path("t.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = {"streaming": True} if streaming else {}
    data = text_data("t.jsonl", label="score", label_type="number", **options)
    data.load()
    assert_problem(caplog, "doubtful-labels t.jsonl: 4 of 6 'score' becomes mean")
    if not streaming:
        assert "1700000001 becomes 1700000000." in caplog.text


def test_numbers_that_are_no_longer_than_others_are_not_counted(caplog):
    lines = [{"text": f"a {index}", "score": 0.1 * index} for index in range(9)]
    Path("t.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [*lines, {"text": "b", "score": 2**60}]))
    text_data("t.jsonl", label="score", label_type="number").load()
    assert not caplog.records


def test_a_class_that_training_lacks_is_refused():
    Path("validation.jsonl").write_text(json.dumps({"text": "a film", "tags": ["rude"]}) + "\n")
    problem = problem_of({"train": "train.jsonl", "validation": "validation.jsonl"}, label="tags", label_type="classes")
    assert_problem(problem, "unknown-label validation.jsonl 1 data.label 'rude' 'insult' 'spam' 'toxic'")


@pytest.mark.parametrize(
    ("section", "options", "expected"),
    [
        (
            NUMBERS,
            {"loss": "focal"},
            "unknown-option data.label_type",
        ),
        (
            COLUMNS,
            {"loss": {"class_weights": "balanced", "label_smoothing": 0.1}},
            "unknown-option data.label_type class_weights",
        ),
        (NUMBERS, {"threshold": 0.5}, "unknown-option data.label_type"),
    ],
)
def test_options_of_another_problem_are_refused(section, options, expected):
    with pytest.raises(RecipeError) as caught:
        trained(SCRATCH, section, [{TASK: options}])
    assert_problem(caught.value.problem, expected)


def test_a_language_model_has_no_label_type():
    with expect_problem("unknown-option data.label_type", RecipeError):
        make_run("causal-lm", {"config": TINY_GPT}, {"files": {"train": "train.csv"}, "label_type": "number"})


def write_decimals(column: str) -> None:
    """Write ``train.parquet``, in which a column holds decimals."""
    values = {"text": [f"a film number {row}" for row in range(8)], "score": [row % 2 for row in range(8)]}
    arrays = {name: pyarrow.array(cells) for name, cells in values.items()}
    arrays[column] = pyarrow.array([Decimal(row % 2) for row in range(8)])
    parquet.write_table(pyarrow.table(arrays), "train.parquet")


@pytest.mark.parametrize(
    ("column", "label", "label_type", "code"),
    [
        pytest.param("score", "score", "class", "wrong-label", id="class"),
        pytest.param("score", "score", "number", "wrong-label", id="number"),
        pytest.param("text", "score", "class", "invalid-row", id="text"),
    ],
)
def test_decimals_are_an_error_that_proposes_a_cast(column, label, label_type, code):
    write_decimals(column)
    problem = problem_of("train.parquet", label=label, label_type=label_type)
    assert_problem(problem, f"{code} {column} Decimal float64 int64")
