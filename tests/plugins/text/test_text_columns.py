"""Several columns of texts: pairs with token types, and more columns joined with the separator token.

Modules:
    plugins/fastloop_plugins/text/columns.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pytest
import torch
from data_helpers import problem_of, refusal, text_data
from inference_runs import write_csv
from interrupted_runs import Case, check_interrupted
from pyarrow import parquet
from recipe_runs import assert_same
from text_helpers import TINY_GPT, make_run
from text_loops import BERT, DISTILBERT, TRAIN, plain_loop, pretrained, trained
from torch.nn.functional import cross_entropy
from training_runs import execute
from transformers import AutoTokenizer, pipeline

from fastloop.errors import RecipeError
from fastloop.testing import assert_problem, expect_problem

TASK = "text-classification"
PAIR = ["premise", "hypothesis"]
SCRATCH = {"tokenizer": {"kind": "word"}}
SPLITS = {"train": 40, "validation": 16, "test": 20}
DATA: dict[str, Any] = {
    "files": {split: f"{split}.csv" for split in SPLITS},
    "text": PAIR,
    "label": "label",
    "max_length": 24,
}


def rows(count: int, offset: int = 0) -> list[dict[str, str]]:
    """Pairs of different lengths, some longer than 24 tokens."""
    found = []
    for index in range(offset, offset + count):
        premise = f"a film number {index % 13} is {('good', 'bad')[index % 2]}" + " indeed" * (index * 5 % 14)
        hypothesis = f"the film {index % 7} is {('good', 'bad')[index // 2 % 2]}" + " today" * (index * 3 % 11)
        label = ("yes", "no")[(index % 2) ^ (index // 2 % 2)]
        found.append({"premise": premise, "hypothesis": hypothesis, "source": f"set {index % 3}", "label": label})
    return found


@pytest.fixture(autouse=True)
def _files():
    for number, (split, count) in enumerate(SPLITS.items()):
        write_csv(Path(f"{split}.csv"), rows(count, 100 * number))


def columns(count: int = SPLITS["train"], offset: int = 0) -> list[list[str]]:
    return [[row[name] for row in rows(count, offset)] for name in PAIR]


def targets() -> torch.Tensor:
    return torch.tensor([("no", "yes").index(row["label"]) for row in rows(SPLITS["train"])])


@pytest.mark.parametrize("config", [BERT, DISTILBERT], ids=["bert", "distilbert"])
def test_the_weights_equal_those_of_a_plain_loop(config):
    folder = pretrained(TASK, config, DATA)
    run = make_run(TASK, {"name": folder}, DATA, **TRAIN)
    batch = next(iter(run.train_loader.batches())).inputs
    assert ("token_type_ids" in batch) == (config is BERT)
    execute(run)
    assert_same(run.unwrap_model().state_dict(), plain_loop(folder, columns(), targets(), cross_entropy, 24))


def test_the_longer_text_is_truncated_first_and_types_mark_the_second():
    run = make_run(TASK, {"name": pretrained(TASK, BERT, DATA)}, DATA)
    tokenizer, dataset = AutoTokenizer.from_pretrained("pretrained"), run.datasets["train"]
    expected = tokenizer(*columns(), truncation="longest_first", max_length=24)
    assert [sample["input_ids"].tolist() for sample in dataset] == expected["input_ids"]
    assert [sample["token_type_ids"].tolist() for sample in dataset] == expected["token_type_ids"]
    assert dataset.lengths.tolist() == [len(ids) for ids in expected["input_ids"]]
    assert max(dataset.lengths) == 24
    assert all(sum(types) > 1 for types in expected["token_type_ids"])


@pytest.mark.parametrize("side", ["right", "left"])
def test_a_huge_text_of_a_pair_gives_the_tokens_of_the_whole_text(side):
    short, odd = "a film", "x" * 3000 + " film"
    pairs = [
        (short, "film number " * 5000),
        ("a film " * 5000 + "is bad", "is good " * 3),
        (odd, short),
        (f"{odd} {odd} " * 3, "is bad " * 4000),
    ]
    content = [
        {"premise": one, "hypothesis": other, "label": f"{index % 2}"} for index, (one, other) in enumerate(pairs)
    ]
    folder = pretrained(TASK, BERT, DATA)
    AutoTokenizer.from_pretrained(folder, truncation_side=side).save_pretrained(folder)
    write_csv(Path("train.csv"), content)
    run = make_run(TASK, {"name": folder}, DATA | {"files": {"train": "train.csv"}, "validation_fraction": 0})
    expected = AutoTokenizer.from_pretrained(folder)(
        *map(list, zip(*pairs, strict=True)), truncation=True, max_length=24
    )
    assert [sample["input_ids"].tolist() for sample in run.datasets["train"]] == expected["input_ids"]


def test_more_columns_are_joined_with_the_separator_token():
    folder = pretrained(TASK, BERT, DATA)
    run = make_run(TASK, {"name": folder}, DATA | {"text": [*PAIR, "source"]})
    joined = [" [SEP] ".join([row["premise"], row["hypothesis"], row["source"]]) for row in rows(SPLITS["train"])]
    expected = AutoTokenizer.from_pretrained(folder)(joined, truncation=True, max_length=24)["input_ids"]
    assert [sample["input_ids"].tolist() for sample in run.datasets["train"]] == expected
    assert "token_type_ids" not in run.datasets["train"][0]
    assert sum(ids.count(3) for ids in expected) > 2 * len(expected)


def test_a_tokenizer_without_a_separator_puts_its_end_token_between_texts():
    model = {"config": TINY_GPT, "tokenizer": {"kind": "bpe", "vocab_size": 300}}
    execute(make_run("causal-lm", model, {"files": {"train": "train.csv"}, "text": "premise", "max_length": 16}))
    run = make_run(TASK, {"name": "run/model"}, DATA | {"max_length": 16})
    tokenizer = AutoTokenizer.from_pretrained("run/model")
    joined = [" <|endoftext|> ".join(pair) for pair in zip(*columns(), strict=True)]
    expected = tokenizer(joined, truncation=True, max_length=16)["input_ids"]
    assert [sample["input_ids"].tolist() for sample in run.datasets["train"]] == expected
    config = json.loads(Path("run/model/tokenizer_config.json").read_text())
    Path("run/model/tokenizer_config.json").write_text(json.dumps({**config, "eos_token": None}))
    with expect_problem("no-separator model.tokenizer", RecipeError):
        make_run(TASK, {"name": "run/model"}, DATA | {"max_length": 16})


@pytest.mark.parametrize("source", ["jsonl", "parquet", "folder", "module"])
def test_every_source_gives_the_same_pairs(source):
    section = {key: value for key, value in DATA.items() if key != "files"}
    if source == "module":
        Path("code.py").write_text(
            f"def load():\n    return {{'train': {rows(40)!r}, 'validation': {rows(16, 100)!r}}}\n"
        )
        section["module"] = "code.py:load"
    elif source == "folder":
        Path("set").mkdir()
        for split in SPLITS:
            Path(f"{split}.csv").rename(f"set/{split}.csv")
        section["name"] = "set"
    else:
        parquet.write_table(pyarrow.Table.from_pylist(rows(40)), "train.parquet")
        Path("train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows(40)))
        section["files"] = {"train": f"train.{source}"}
    found = text_data(**section | {"validation_fraction": 0.0}).load()["train"]
    assert list(found.texts) == list(zip(*columns(), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    "plugins", ["packing", "length-bucketing", "packing,length-bucketing,cls-last-layer", "cls-last-layer"]
)
@pytest.mark.parametrize("config", [BERT, DISTILBERT], ids=["bert", "distilbert"])
def test_plugins_give_the_same_loss(plugins, config):
    folder = pretrained(TASK, config, DATA)
    runs = [trained({"name": folder}, DATA, [TASK, *names], f"run-{len(names)}") for names in ([], plugins.split(","))]
    losses = [run.state.metrics["test"]["loss"] for run in runs]
    order_differs = "length-bucketing" in plugins
    assert losses[1] == pytest.approx(losses[0], rel=0.1 if order_differs else 1e-4)


@pytest.mark.slow
def test_the_token_cache_gives_the_same_pairs_and_keeps_them_apart_from_single_texts():
    from fastloop_plugins._cache import tokens_kept_in

    folder = pretrained(TASK, BERT, DATA)
    plain = [sample["input_ids"].tolist() for sample in make_run(TASK, {"name": folder}, DATA).datasets["train"]]
    for _ in range(2):
        with tokens_kept_in(Path("cache")):
            cached = make_run(TASK, {"name": folder}, DATA).datasets["train"]
            single = make_run(TASK, {"name": folder}, DATA | {"text": "premise"}).datasets["train"]
        assert [sample["input_ids"].tolist() for sample in cached] == plain
        assert "token_type_ids" in cached[0]
        assert "token_type_ids" not in single[0]


@pytest.mark.slow
def test_a_run_resumes_bit_for_bit():
    task = {"model": {"name": pretrained(TASK, BERT, DATA)}, "data": DATA, "plugins": [TASK]}
    check_interrupted(Case(task, train=TRAIN), "limit", 6)


@pytest.mark.parametrize("config", [BERT, DISTILBERT], ids=["bert", "distilbert"])
def test_predict_equals_the_pipeline_on_pairs(config, cli):
    run = trained(SCRATCH | {"config": config}, DATA).folder
    code, _, err = cli("predict", str(run), "test.csv", "--out", "out.jsonl", "--chunk", "7")
    assert code == 0, err
    found = [json.loads(line) for line in Path("out.jsonl").read_text().splitlines()]
    classify = pipeline("text-classification", model=str(run / "model"), device="cpu", top_k=None)
    for row, one, other in zip(found, *columns(20, 200), strict=True):
        scores = classify({"text": one, "text_pair": other}, truncation=True, max_length=24)
        expected = {item["label"]: item["score"] for item in scores}
        assert {name: row[f"probability_{name}"] for name in expected} == pytest.approx(expected, abs=1e-5)


def test_evaluate_reads_pairs_and_predict_refuses_a_single_text(cli):
    run = trained(SCRATCH | {"config": BERT}, DATA).folder
    code, out, err = cli("evaluate", str(run), "--file", "test.csv", "--json", "-")
    assert code == 0, err
    metrics = json.loads(out)["metrics"]
    assert metrics == pytest.approx(json.loads((run / "summary.json").read_text())["test"])
    code, _, err = cli("predict", str(run), "a good film")
    assert code == 2
    assert_problem(err, "missing-column data.text 'premise' 'hypothesis'")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ([], "wrong-type data.text"),
        (["premise", "premise"], "wrong-type"),
        (["premise", "hypotesis"], "unknown-column 'hypotesis' data.text"),
        (["premise", "number"], "invalid-row data.text 1"),
    ],
)
def test_wrong_columns_are_refused(text, expected):
    Path("train.jsonl").write_text("".join(json.dumps(row | {"number": 1}) + "\n" for row in rows(8)))
    assert_problem(problem_of("train.jsonl", text=text), expected)


def test_a_text_file_and_a_language_model_have_one_column():
    Path("train.txt").write_text("one\ntwo\n")
    assert_problem(problem_of("train.txt", text=PAIR), "unknown-format")
    with expect_problem("wrong-type data.text", RecipeError):
        make_run("causal-lm", {"config": TINY_GPT}, {"files": {"train": "train.csv"}, "text": PAIR})


def test_a_file_without_a_header_gets_a_suggestion_with_all_columns():
    Path("train.csv").write_text("\n".join(f"{row['premise']},{row['hypothesis']},{row['label']}" for row in rows(8)))
    assert "data.read.columns=[premise,hypothesis,label]" in refusal("train.csv", text=PAIR)


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet"])
@pytest.mark.parametrize(("read", "other"), [("text", "Text"), ("label", "LABEL")])
def test_columns_that_differ_by_case_give_one_warning(read, other, suffix, caplog):
    content = [{"text": f"a film number {row}", "label": row % 2} for row in range(6)]
    for row in content:
        row[other] = row[read]
    path = f"alike.{suffix}"
    if suffix == "csv":
        write_csv(Path(path), content)
    elif suffix == "jsonl":
        Path(path).write_text("".join(json.dumps(row) + "\n" for row in content))
    else:
        parquet.write_table(pyarrow.Table.from_pylist(content), path)
    text_data({"train": path, "validation": path}).load()
    warnings = [record.msg for record in caplog.records if getattr(record.msg, "code", "") == "alike-columns"]
    (warning,) = warnings
    assert_problem(warning, f"alike-columns {path} '{read}' '{other}' data.{read}")
