"""`fastloop predict --keep`: columns of the input beside the predictions of its rows.

Modules:
    plugins/fastloop_tools/inference/keep.py
"""

from __future__ import annotations

import csv
import io
import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pytest
import yaml
from inference_runs import texts, train, write_csv, write_recipe
from log_lines import find_lines
from pyarrow import parquet
from text_helpers import TINY_GPT

from fastloop.testing import assert_problem
from fastloop_plugins.rows.json import Json
from fastloop_tools.inference import keep
from fastloop_tools.inference.output import PredictionOutput

ROWS = [{"id": f"{index:03}", "when": f"2026-01-{index:02}", **row} for index, row in enumerate(texts(20), 1)]
"""20 rows with the columns id, when, text and label; the predictions have a label, too."""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The run of a classifier."""
    folder = tmp_path_factory.mktemp("trained")
    train(write_recipe(folder))
    return folder / "run"


def write(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    if path.suffix == ".csv":
        return write_csv(path, rows)
    if path.suffix == ".parquet":
        parquet.write_table(pa.Table.from_pylist(list(rows)), path)
    else:
        path.write_text("\n".join(map(json.dumps, rows)))
    return path


def read(path: Path) -> list[dict[str, Any]]:
    if path.suffix == ".parquet":
        table: list[dict[str, Any]] = parquet.read_table(path).to_pylist()
        return table
    if path.suffix == ".csv":
        with path.open(encoding="utf-8", newline="") as file:
            return list(csv.DictReader(file))
    with path.open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def predict(cli: Any, run: Path, source: Path, out: str, *options: str) -> list[dict[str, Any]]:
    code, _, err = cli("predict", str(run), str(source), "--out", out, *options)
    assert code == 0, err
    return read(Path(out))


def refused(cli: Any, *arguments: Any) -> str:
    code, _, err = cli("predict", *map(str, arguments))
    assert code == 2, err
    error: str = err
    return error


@pytest.mark.parametrize(
    ("source", "out"),
    [("rows.csv", "out.parquet"), ("rows.jsonl", "out.csv"), ("rows.parquet", "out.jsonl")],
)  # the rows of a chunk are lists between reading and writing
def test_kept_columns_stand_before_the_predictions_of_their_rows(run, cli, source, out):
    path = write(Path(source), ROWS)
    plain = predict(cli, run, path, out, "--chunk", "7")
    found = predict(cli, run, path, out, "--chunk", "7", "--keep", "id,text")
    assert list(found[0]) == ["id", "text", *plain[0]]
    assert [{name: row[name] for name in plain[0]} for row in found] == plain
    assert [(row["id"], row["text"]) for row in found] == [(row["id"], row["text"]) for row in ROWS]


def test_all_columns_are_kept_with_another_name_for_one(run, cli):
    path = write(Path("rows.csv"), ROWS)
    found = predict(cli, run, path, "out.jsonl", "--keep", "all,truth=label")
    assert list(found[0])[:5] == ["id", "when", "text", "truth", "label"]
    assert [row["truth"] for row in found] == [row["label"] for row in ROWS]


def test_types_of_parquet_stay(run, cli):
    moment = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    rows = [{"id": index, "at": moment, "day": date(2026, 1, 2), "raw": b"\0\xff", "tags": ["a"], **row}
            for index, row in enumerate(texts(6))]  # fmt: skip
    rows[0]["id"] = None  # the first part has no value to take a type from
    rows[1]["id"] = None
    schema = pa.schema(
        {"id": pa.int32(), "at": pa.timestamp("us", "UTC"), "day": pa.date32(), "raw": pa.binary(),
         "tags": pa.list_(pa.string()), "text": pa.large_string()}
    )  # fmt: skip
    path = Path("rows.parquet")
    parquet.write_table(pa.Table.from_pylist(rows, schema), path)
    found = predict(cli, run, path, "out.parquet", "--keep", "all", "--chunk", "2")
    assert parquet.read_schema("out.parquet").types[:6] == schema.types
    assert [{name: row[name] for name in schema.names} for row in found] == pa.Table.from_pylist(
        rows, schema
    ).to_pylist()
    texts_of_values = predict(cli, run, path, "out.jsonl", "--keep", "at,day,tags")
    assert texts_of_values[0]["at"] == "2026-01-02T03:04:05+00:00"
    assert (texts_of_values[0]["day"], texts_of_values[0]["tags"]) == ("2026-01-02", ["a"])
    assert "type bytes" in refused(cli, run, path, "--keep", "raw")


@pytest.mark.parametrize("out", ["out.csv", "out.jsonl", "out.parquet"])
def test_classes_that_the_file_names_are_kept_by_name(run, cli, out):
    """The names stand in the schema, as `datasets` writes it. -1 stands for a row without a label."""
    features = datasets.Features(
        {
            "text": datasets.Value("string"),
            "truth": datasets.ClassLabel(names=["neg", "pos"]),
            "topics": datasets.Sequence(datasets.ClassLabel(names=["a", "b"])),
        }
    )
    values = {"text": [row["text"] for row in texts(4)], "truth": [1, 0, -1, None], "topics": [[0, 1], [], [1], None]}
    path = Path("rows.parquet")
    datasets.Dataset.from_dict(values, features).to_parquet(path)
    found = predict(cli, run, path, out, "--keep", "truth,topics", "--chunk", "2")
    expected: dict[str, list[Any]] = {"truth": ["pos", "neg", "-1", None], "topics": [["a", "b"], [], ["b"], None]}
    if out == "out.csv":
        expected = {"truth": ["pos", "neg", "-1", ""], "topics": ['["a", "b"]', "[]", '["b"]', ""]}
    assert {name: [row[name] for row in found] for name in expected} == expected
    if out == "out.parquet":
        assert parquet.read_schema(out).types[:2] == [pa.string(), pa.list_(pa.string())]


@pytest.mark.parametrize("out", ["out.csv", "out.jsonl", "out.parquet"])
def test_a_time_of_day_keeps_its_nanoseconds(run, cli, out):
    times = pa.array([3_723_000_000_001, None, 3_723_000_000_000], pa.time64("ns"))  # 01:02:03 and a nanosecond
    path = Path("rows.parquet")
    parquet.write_table(pa.table({"text": ["a film", "a bore", "a fine film"], "at": times}), path)
    found = predict(cli, run, path, out, "--keep", "at", "--chunk", "2")
    if out == "out.parquet":
        assert parquet.read_table(out)["at"].combine_chunks().equals(times)
    else:
        assert [row["at"] or None for row in found] == ["01:02:03.000000001", None, "01:02:03.000000000"]


@pytest.mark.parametrize("out", ["out.csv", "out.jsonl", "out.parquet"])
def test_line_ends_in_cells_begin_no_row(run, cli, out):
    notes = ["a\rb", "a\nb", "a\r\nb", "\r", "plain", 'say "so"', "\u2028\x85\x0b"]
    path = write(Path("rows.jsonl"), [{"text": "a fine\rfilm", "note": note} for note in notes])
    found = predict(cli, run, path, out, "--keep", "text,note")
    assert [(row["text"], row["note"]) for row in found] == [("a fine\rfilm", note) for note in notes]


@pytest.mark.parametrize("out", [["--out", "out.csv"], ["--out", "out.jsonl"], ["--out", "out.parquet"], []])
def test_half_of_a_character_is_refused_with_its_column(run, cli, monkeypatch, out):
    path = write(Path("rows.jsonl"), [{"text": "a film", "note": "so \ud83d"}])
    stdout = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    monkeypatch.setattr(sys, "stdout", stdout)
    message = refused(cli, run, path, "--keep", "note", *out)
    assert_problem(message, "wrong-encoding --keep 'note' UTF-16")


def test_a_row_without_the_key_has_null(run, cli):
    rows: list[dict[str, Any]] = [{"text": "a film", "id": 1}, {"text": "a bore"}, {"text": "a film", "id": 2.5}]
    path = write(Path("rows.jsonl"), rows)
    for out in ("out.jsonl", "out.parquet"):
        found = predict(cli, run, path, out, "--keep", "id", "--chunk", "1")
        assert [row["id"] for row in found] == [1, None, 2.5]
    path = write(Path("mixed.jsonl"), [{"text": "a film", "id": 1}, {"text": "a bore", "id": "b"}])
    for chunk in (1, 2):
        assert ".parquet" in refused(cli, run, path, "--keep", "id", "--chunk", chunk, "--out", "mixed.parquet")


def test_a_job_that_continues_keeps_the_columns_of_its_rows(run, cli, monkeypatch):
    path = write(Path("rows.jsonl"), ROWS)
    add = PredictionOutput.add

    def interrupt(self: PredictionOutput, *arguments: Any, **options: Any) -> None:
        if len(self.parts) == 2:
            raise KeyboardInterrupt
        add(self, *arguments, **options)

    command = ["predict", str(run), str(path), "--out", "out.jsonl", "--keep", "id", "--chunk", "6"]
    monkeypatch.setattr(PredictionOutput, "add", interrupt)
    assert cli(*command)[0] == 130
    monkeypatch.setattr(PredictionOutput, "add", add)
    code, out, _ = cli(*command)
    assert code == 0
    assert find_lines(out, "predict: 12")
    assert [row["id"] for row in read(Path("out.jsonl"))] == [row["id"] for row in ROWS]
    # other columns are another job
    finish = PredictionOutput.finish
    monkeypatch.setattr(PredictionOutput, "finish", lambda self: None)
    assert cli(*command)[0] == 0
    monkeypatch.setattr(PredictionOutput, "finish", finish)
    assert "id" not in predict(cli, run, path, "out.jsonl", "--chunk", "6")[0]


@pytest.mark.parametrize(
    ("keep", "message"),
    [
        ("texts", "'text'"),
        ("other=texts", "'text'"),
        ("label", "--keep input_label=label"),
        ("probability_good=id", "--keep input_probability_good=id"),
        ("all", "--keep input_label=label"),
        ("id,id=text", "'id'"),
    ],
)
def test_columns_are_checked_before_the_model_is_loaded(run, cli, keep, message):
    model = Path(shutil.copytree(run / "model", "model"))
    (model / "model.safetensors").write_bytes(b"no weights")
    path = write(Path("rows.csv"), ROWS)
    recipe = run.parent / "recipe.yaml"
    assert message in refused(cli, model, path, recipe, "--keep", keep)
    assert message not in refused(cli, model, path, recipe, "--keep", "id")  # this one reads the weights


def test_input_without_columns_is_refused(run, cli):
    path = write(Path("rows.csv"), ROWS)
    assert "have no columns" in refused(cli, run, "a film", "--keep", "text")
    assert "have no columns" in refused(cli, run, "-", "--keep", "text")
    assert_problem(refused(cli, run, path, "--keep", "id", "--out", "out.npy"), "exclusive-options")


def test_columns_of_a_splits_file_are_kept(run, cli):
    code, _, err = cli(
        "predict", str(run), "--split", "test", "--keep", "text,truth=label", "--out", "out.jsonl", "--chunk", "7"
    )
    assert code == 0, err
    found = read(Path("out.jsonl"))
    rows = texts(30, 200)
    assert [(row["text"], row["truth"]) for row in found] == [(row["text"], row["label"]) for row in rows]
    plain = predict(cli, run, run.parent / "test.csv", "plain.jsonl")
    assert [row["label"] for row in found] == [row["label"] for row in plain]


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("data.limit.test=10", "'test' 10 30 test.csv"),
        ("data.drop=[{column: text, longer_than: 40}]", "'test' 30 test.csv"),
        ("data.files.test=[test.csv,validation.csv]", "'test'"),
    ],
)
def test_a_split_with_other_rows_than_a_file_keeps_no_columns(run, cli, override, named):
    recipe = run.parent / "recipe.yaml"
    code, _, err = cli("predict", str(run / "model"), str(recipe), override, "--split", "test", "--keep", "text")
    assert code == 2, err
    assert_problem(err, f"exclusive-options --keep {named}")


TASKS = {
    "number": {"data": {"label": "number", "label_type": "number"}},
    "classes": {"data": {"label": "classes", "label_type": "classes"}},
    "causal-lm": {
        "model": {"config": TINY_GPT | {"n_positions": 32}, "tokenizer": {"kind": "bpe", "vocab_size": 300}},
        "data": {"label": None, "max_length": 16},
    },
}


@pytest.mark.parametrize("task", TASKS)
def test_columns_that_tasks_predict_are_refused(tmp_path, cli, task):
    """Their names are known before there are predictions."""
    home = tmp_path / "home"
    home.mkdir()
    recipe = write_recipe(home)
    rows = [{"text": row["text"], "number": index, "classes": [row["label"]]} for index, row in enumerate(texts(30))]
    write(home / "rows.jsonl", rows)
    tree = yaml.safe_load(recipe.read_text())
    tree["data"]["files"] = {"train": "rows.jsonl"}
    for section, values in TASKS[task].items():
        tree[section] |= values
    tree["data"] = {key: value for key, value in tree["data"].items() if value is not None}
    tree["train"]["epochs"] = 1
    recipe.write_text(yaml.safe_dump(tree))
    train(recipe)
    options = ["plugins.causal-lm.max_new_tokens=8"] if task == "causal-lm" else []
    columns = predict(cli, home / "run", home / "rows.jsonl", "out.jsonl", *options)[0]
    for name in columns:
        assert f"input_{name}=number" in refused(
            cli, home / "run", home / "rows.jsonl", *options, "--keep", f"{name}=number"
        )


def test_a_label_map_may_have_text_and_numbers(run, cli):
    path = write(Path("rows.csv"), ROWS)
    options = ["data.label_map={1: bad, b: good}", "--keep", "id"]
    assert len(predict(cli, run, path, "out.jsonl", *options)) == len(ROWS)


def test_the_file_is_parsed_once(run, cli, monkeypatch):
    """And a few first rows once more, for the names of the columns."""
    parsed: list[str] = []
    parse = Json.parse

    def record(self: Json, line: str, place: str) -> Any:
        parsed.append(place)
        return parse(self, line, place)

    monkeypatch.setattr(Json, "parse", record)
    monkeypatch.setattr(keep, "FIRST_ROWS", 3)
    path = write(Path("rows.jsonl"), ROWS)
    found = predict(cli, run, path, "out.jsonl", "--keep", "id,when", "--chunk", "6")
    assert [(row["id"], row["when"]) for row in found] == [(row["id"], row["when"]) for row in ROWS]
    assert len(parsed) == len(ROWS) + 3
