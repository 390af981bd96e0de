"""`fastloop predict`: labels and probabilities of a trained model, in the order of the file.

Modules:
    plugins/fastloop_plugins/tasks/shared/predicted_columns.py
    plugins/fastloop_tools/inference/chunks.py
    plugins/fastloop_tools/inference/output.py
    plugins/fastloop_tools/inference/predict.py
    plugins/fastloop_tools/inference/predictions.py
"""

from __future__ import annotations

import bz2
import csv
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import forked
import pytest
import yaml
from fault_runs import until
from inference_runs import CLASSES, texts, train, write_csv, write_recipe
from test_evaluate import CODE
from text_helpers import TINY_GPT

from fastloop import UsageError
from fastloop.testing import assert_problem, expect_problem
from fastloop_tools.inference.output import PredictionOutput


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with a recipe, its files and its run."""
    folder = tmp_path_factory.mktemp("trained")
    train(write_recipe(folder))
    return folder


@pytest.fixture(scope="module")
def expected(trained):
    """The predictions of transformers' pipeline for the test file: name -> probability, for each text."""
    from transformers import pipeline

    classify = pipeline("text-classification", model=str(trained / "run" / "model"), device="cpu", top_k=None)
    found = classify([row["text"] for row in texts(30, 200)], truncation=True, max_length=32)
    return [{item["label"]: item["score"] for item in items} for items in found]


def predict(cli: Any, *arguments: Any) -> str:
    code, out, err = cli("predict", *map(str, arguments))
    assert code == 0, err
    found: str = out
    return found


def same(rows: list[dict[str, Any]], expected: list[dict[str, float]]) -> bool:
    """Whether labels are equal, and probabilities within 1e-5."""
    assert len(rows) == len(expected)
    assert [row["label"] for row in rows] == [max(scores, key=scores.__getitem__) for scores in expected]
    for row, scores in zip(rows, expected, strict=True):
        assert {name: float(row[f"probability_{name}"]) for name in CLASSES} == pytest.approx(scores, abs=1e-5)
        assert float(row["probability"]) == pytest.approx(max(scores.values()), abs=1e-5)
    return True


def read(path: str) -> list[dict[str, Any]]:
    if path.endswith(".parquet"):
        from pyarrow import parquet

        table: list[dict[str, Any]] = parquet.read_table(path).to_pylist()
        return table
    content = Path(path).read_text(encoding="utf-8")
    return (
        [json.loads(line) for line in content.splitlines()]
        if path.endswith(".jsonl")
        else list(csv.DictReader(io.StringIO(content)))
    )


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [7, 4096])
@pytest.mark.parametrize("out", ["out.csv", "out.jsonl", "out.parquet"])
def test_predictions_equal_those_of_transformers(trained, expected, cli, out, chunk):
    assert f"written to {out}" in predict(cli, trained / "run", trained / "test.csv", "--out", out, "--chunk", chunk)
    assert same(read(out), expected)
    assert not Path(f"{out}.parts").exists()


@pytest.mark.parametrize("plugins", ["packing", "length-bucketing", "packing,length-bucketing", "dataloader-workers"])
def test_plugins_keep_predictions_and_order(trained, expected, cli, plugins):
    options = ["plugins.dataloader-workers.num_workers=2"] if "workers" in plugins else []
    predict(
        cli, trained / "run", trained / "test.csv", *options, "--with", plugins, "--out", "out.jsonl", "--chunk", 11
    )
    assert same(read("out.jsonl"), expected)


def test_half_precision_comes_from_the_recipe(trained, expected, cli):
    predict(cli, trained / "run", trained / "test.csv", "plugins.amp.dtype=bf16", "--with", "amp", "--out", "out.jsonl")
    found = [row["probability_good"] for row in read("out.jsonl")]
    exact = [scores["good"] for scores in expected]
    assert found != pytest.approx(exact, abs=1e-6)
    assert found == pytest.approx(exact, abs=0.05)


@pytest.mark.slow
def test_every_format_and_texts(trained, expected, cli, monkeypatch):
    rows = [{"text": row["text"]} for row in texts(30, 200)]
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    Path("rows.json").write_text(json.dumps(rows))
    Path("rows.txt").write_text("\n".join(row["text"] for row in rows))
    Path("rows.csv.bz2").write_bytes(bz2.compress(write_csv(Path("rows.csv"), rows).read_bytes()))
    import pyarrow as pa
    from pyarrow import parquet

    parquet.write_table(pa.Table.from_pylist(rows), "rows.parquet")
    for name in ("rows.jsonl", "rows.json", "rows.txt", "rows.csv.bz2", "rows.parquet"):
        out = predict(cli, trained / "run", name, "--chunk", 8)
        assert same([json.loads(line) for line in out.splitlines()], expected), name
    monkeypatch.setattr(sys, "stdin", io.StringIO(Path("rows.txt").read_text()))
    assert same([json.loads(line) for line in predict(cli, trained / "run", "-", "--chunk", 8).splitlines()], expected)
    assert same([json.loads(predict(cli, trained / "run", rows[3]["text"]))], expected[3:4])


@pytest.mark.slow
def test_the_threshold_of_the_recipe_decides_the_label(tmp_path, cli):
    recipe = write_recipe(tmp_path, [{"text-classification": {"threshold": 0.5}}])
    for split in ("train", "validation", "test"):
        rows = read(str(tmp_path / f"{split}.csv"))
        write_csv(
            tmp_path / f"{split}.csv", [row | {"label": "good" if row["label"] == "good" else "bad"} for row in rows]
        )
    train(recipe)

    def labels(*overrides: str) -> list[tuple[str, float]]:
        predict(cli, tmp_path / "run", tmp_path / "test.csv", "--out", tmp_path / "out.csv", *overrides)
        return [(row["label"], float(row["probability_good"])) for row in read(str(tmp_path / "out.csv"))]

    found = labels()
    assert all((label == "good") == (probability > 0.5) for label, probability in found)
    limit = round(sorted(probability for _, probability in found)[len(found) // 2], 6)
    (tmp_path / "out.csv").unlink()
    changed = labels(f"plugins.text-classification.threshold={limit}")
    assert all((label == "good") == (probability > limit) for label, probability in changed)
    assert {label for label, _ in changed} == {"good", "bad"}


def test_a_split_and_an_exported_model(trained, expected, cli):
    model = shutil.copytree(trained / "run" / "model", "model")
    out = predict(cli, model, trained / "recipe.yaml", "--split", "test", "--chunk", 9)
    assert same([json.loads(line) for line in out.splitlines()], expected)


@pytest.mark.parametrize("out", ["out.csv", "out.jsonl", "out.parquet"])
def test_an_interrupted_job_continues(trained, cli, monkeypatch, out):
    command = [trained / "run", trained / "test.csv", "--chunk", 8, "--out"]
    predict(cli, *command, f"whole-{out}")
    added: list[int] = []
    add = PredictionOutput.add

    def interrupt(self: PredictionOutput, columns: Any, **options: Any) -> None:
        added.append(len(self.parts))
        if added == [0, 1, 2]:
            raise KeyboardInterrupt
        add(self, columns, **options)

    monkeypatch.setattr(PredictionOutput, "add", interrupt)
    code, _, _ = cli("predict", *map(str, command), out)
    assert code == 130
    assert not Path(out).exists()
    Path(f"{out}.parts", "unfinished").write_text("half a chunk")
    assert "continues after 16 rows" in predict(cli, *command, out)
    assert added == [0, 1, 2, 2, 3]
    assert Path(out).read_bytes() == Path(f"whole-{out}").read_bytes()
    assert not Path(f"{out}.parts").exists()


def test_a_file_is_read_in_chunks(trained, cli):
    rows = write_csv(Path("rows.csv"), texts(40)).read_text().splitlines()
    Path("rows.csv").write_text("\n".join([*rows, "a text, and one cell too many,bad"]))
    code, _, err = cli("predict", str(trained / "run"), "rows.csv", "--chunk", "10", "--out", "out.csv")
    assert code == 2
    assert_problem(err, "invalid-row rows.csv line 42 3 2")
    assert sorted(path.name for path in Path("out.csv.parts").glob("0*")) == ["00000000", "00000001", "00000002"]
    assert not Path("out.csv").exists()


@pytest.mark.slow
def test_a_killed_job_continues(trained, cli):
    rows = write_csv(Path("rows.csv"), texts(4000))
    # to the byte: packed rows round differently with another number of threads
    command = [str(trained / "run"), str(rows), "--chunk", "20", "--without", "auto", "--out"]
    with forked.Command("-m", "fastloop", "predict", *command, "out.csv") as process:
        deadline = time.monotonic() + 300
        while len(list(Path("out.csv.parts").glob("0*"))) < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
        process.kill()
    assert not Path("out.csv").exists()
    assert "rows of an interrupted job" in predict(cli, *command, "out.csv")
    predict(cli, *command, "whole.csv")
    assert Path("out.csv").read_bytes() == Path("whole.csv").read_bytes()
    assert len(read("out.csv")) == 4000


def test_another_job_does_not_continue(trained, cli, monkeypatch):
    command = [trained / "run", "rows.csv", "--chunk", 4, "--out", "out.csv"]
    write_csv(Path("rows.csv"), texts(10))
    finish = PredictionOutput.finish
    monkeypatch.setattr(PredictionOutput, "finish", lambda self: None)
    predict(cli, *command)
    assert len(list(Path("out.csv.parts").glob("0*"))) == 3
    monkeypatch.setattr(PredictionOutput, "finish", finish)
    write_csv(Path("rows.csv"), texts(7))
    assert "the parts of another job are removed" in predict(cli, *command)
    assert len(read("out.csv")) == 7


@pytest.mark.parametrize("files", ["rows.csv", "ro*.csv"])
def test_a_job_on_a_split_whose_file_has_changed_begins_again(trained, cli, monkeypatch, files):
    write_csv(Path("rows.csv"), texts(12))
    override = f"data.files.test={Path(files).absolute()}"
    command = [trained / "run", override, "--split", "test", "--chunk", 4, "--out"]
    finish = PredictionOutput.finish
    monkeypatch.setattr(PredictionOutput, "finish", lambda self: None)
    predict(cli, *command, "out.csv")
    Path("out.csv.parts", "00000002.last").unlink()
    monkeypatch.setattr(PredictionOutput, "finish", finish)
    write_csv(Path("rows.csv"), texts(12, 5))
    assert "the parts of another job are removed" in predict(cli, *command, "out.csv")
    predict(cli, *command, "whole.csv")
    assert Path("out.csv").read_bytes() == Path("whole.csv").read_bytes()


def test_a_second_job_does_not_write_the_parts_of_a_running_one(trained, cli):
    write_csv(Path("rows.csv"), texts(6))
    command = ["predict", str(trained / "run"), "rows.csv", "--out", "out.csv"]
    child = os.fork()
    if child == 0:
        try:
            PredictionOutput(Path("out.csv"), {"command": "another one"})
            signal.pause()
        finally:
            os._exit(1)
    try:
        until(Path("out.csv.parts", "job.json").exists)
        code, _, err = cli(*command)
        assert code == 2
        assert_problem(err, f"folder-in-use out.csv.parts {child} --out")
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert "the parts of another job" not in predict(cli, *command[1:]), "the other job had written none"
    assert len(read("out.csv")) == 6
    assert not Path("out.csv.parts").exists()


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("rows.csv",), "unknown-column rows.csv 'text' data.read.columns=[text]"),
        (("rows.csv", "data.text=words", "--keep", "id"), "unknown-column --keep rows.csv 'id'"),
    ],
)
def test_a_refused_job_leaves_no_parts(trained, cli, arguments, problem):
    Path("rows.csv").write_text("words\na good film\n")
    before = sorted(Path().iterdir())
    code, _, err = cli("predict", str(trained / "run"), *arguments, "--out", "out.csv")
    assert code == 2
    assert_problem(err, problem)
    assert sorted(Path().iterdir()) == before


def test_a_path_with_spaces_to_no_file_is_no_text(trained, cli):
    Path("my data").mkdir()
    run = str(trained / "run")
    code, _, err = cli("predict", run, "my data/new.csv")
    assert code == 2
    assert_problem(err, "file-missing my data/new.csv")
    code, out, err = cli("predict", run, "my new.csv")
    assert (code, len(out.splitlines())) == (0, 1)
    assert_problem(err, "file-missing my new.csv text")


def test_a_path_with_a_line_break_is_no_text(trained, cli):
    Path("two\nlines").mkdir()
    shutil.copy(trained / "test.csv", "two\nlines/test.csv")
    assert predict(cli, trained / "run", "two\nlines/test.csv") == predict(cli, trained / "run", trained / "test.csv")


def test_a_complete_job_only_writes_the_file(trained, cli, monkeypatch):
    command = [trained / "run", trained / "test.csv", "--out", "out.csv"]
    predict(cli, *command)
    whole = Path("out.csv").read_bytes()
    finish = PredictionOutput.finish
    monkeypatch.setattr(PredictionOutput, "finish", lambda self: None)
    predict(cli, *command)
    monkeypatch.setattr(PredictionOutput, "finish", finish)
    monkeypatch.setattr("fastloop_tools.inference.target.open_inference", None)
    predict(cli, *command)
    assert Path("out.csv").read_bytes() == whole


def module_run(tmp_path: Path, code: str, **options: Any) -> Path:
    (tmp_path / "code.py").write_text(code)
    recipe = {
        "model": {"module": "code.py:Net"},
        "data": {"module": "code.py:data"},
        "train": {"epochs": 2, "batch_size": 8, "lr": 0.1, "device": "cpu"},
        "plugins": [{"module": options}],
        "output": str(tmp_path / "run"),
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    train(tmp_path / "recipe.yaml")
    return tmp_path / "run"


def test_a_module_predicts_a_split(tmp_path, cli):
    import torch
    from safetensors.torch import load_file

    home = tmp_path / "home"
    home.mkdir()
    run = module_run(home, CODE, loss="cross_entropy")
    rows = [json.loads(line) for line in predict(cli, run, "--split", "test", "--chunk", 12).splitlines()]
    weights = load_file(run / "model" / "model.safetensors")
    inputs = torch.stack([torch.full((4,), float(i % 3)) + torch.arange(4) / 10 for i in range(30)])
    exact = (inputs @ weights["weight"].T + weights["bias"]).softmax(1)
    assert [row["label"] for row in rows] == exact.argmax(1).tolist()
    assert [[row[f"probability_{index}"] for index in range(3)] for row in rows] == [
        pytest.approx(row) for row in exact.tolist()
    ]
    code, _, err = cli("predict", str(run), "a text")
    assert code == 2
    assert_problem(err, "unsupported-task 'module'")
    code, _, err = cli("predict", str(run), "--split", "dev")
    assert code == 2
    assert_problem(err, "iterable-dataset 'dev'")


def test_a_regression_gives_its_output(tmp_path, cli):
    home = tmp_path / "home"
    home.mkdir()
    code = CODE.replace("(4, 3)", "(4, 1)").replace("i % 3) for", "torch.ones(1)) for")
    run = module_run(home, code, loss="mse_loss")
    rows = [json.loads(line) for line in predict(cli, run, "--split", "validation").splitlines()]
    assert [list(row) for row in rows] == [["output"]] * 30
    assert all(isinstance(row["output"][0], float) for row in rows)


TASK = """
import torch
from torch import nn
from fastloop import Output, Plugin, hookimpl

class Ranking(Plugin):
    name = "ranking"
    slot = "task"

    @hookimpl
    def build_datasets(self):
        return {split: [torch.full((2,), float(index)) for index in range(6)] for split in ("train", "test")}

    @hookimpl
    def build_model(self):
        return nn.Linear(2, 1)

    @hookimpl
    def compute_loss(self, model, batch):
        scores = model(batch)[:, 0]
        return Output(scores.square().mean(), scores)
"""
PREDICT = """
    @hookimpl
    def predict(self, run, batch):
        return {"score": run.hooks.compute_loss(run=run, model=run.model, batch=batch).predictions[RANGE]}
"""


@pytest.mark.parametrize("out", ["out.npy", "out.parquet", "out.jsonl"])
def test_tensors_are_written_as_arrays(tmp_path, out):
    """In two parts; a sample that could not be read is NaN."""
    import numpy as np
    import torch
    from pyarrow import parquet

    vectors = torch.arange(10, dtype=torch.float32).view(5, 2)
    output = PredictionOutput(tmp_path / out, {})
    output.add({"vector": [*vectors[:3]]}, last=False)
    output.add({"vector": [*vectors[3:], None]}, last=True)
    output.finish()
    expected = np.concatenate([vectors.numpy(), np.full((1, 2), np.nan, np.float32)])
    if out == "out.npy":
        found = np.load(tmp_path / out, allow_pickle=False)
        assert found.dtype == np.float32
    else:
        found = np.array([row["vector"] for row in read(str(tmp_path / out))], np.float32)
    np.testing.assert_array_equal(found, expected)
    if out == "out.parquet":
        assert str(parquet.read_schema(tmp_path / out).field("vector").type) == "list<element: float>"
    two = PredictionOutput(tmp_path / f"two-{out}", {})
    rows = {"label": ["a", "b"], "score": [*torch.tensor([0.5, 1.0])]}
    if out == "out.npy":
        with expect_problem("unknown-format", UsageError):
            two.add(rows, last=True)
    else:
        two.add(rows, last=True)
        two.finish()
        assert read(str(tmp_path / f"two-{out}")) == [{"label": "a", "score": 0.5}, {"label": "b", "score": 1.0}]


@pytest.mark.parametrize("rows", [None, ":", ":1"], ids=["no-hook", "hook", "too-few"])
def test_a_task_from_elsewhere(tmp_path, cli, rows):
    from safetensors.torch import load_file

    home = tmp_path / "home"
    home.mkdir()
    (home / "task.py").write_text(TASK + (PREDICT.replace("RANGE", rows) if rows else ""))
    recipe = {
        "train": {"epochs": 1, "batch_size": 4, "device": "cpu"},
        "plugins": ["./task.py"],
        "output": str(home / "run"),
    }
    (home / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    summary = train(home / "recipe.yaml")
    code, out, _ = cli("evaluate", str(home / "run"), "--json", "-")
    assert json.loads(out)["metrics"] == summary["test"]
    code, out, err = cli("predict", str(home / "run"), "--split", "test", "--chunk", "4")
    if rows == ":":
        assert code == 0, err
        weights = load_file(home / "run" / "model" / "model.safetensors")
        exact = [float(weights["weight"].sum() * index + weights["bias"]) for index in range(6)]
        assert [json.loads(line)["score"] for line in out.splitlines()] == pytest.approx(exact)
    else:
        assert code == 2
        if rows:
            assert_problem(err, "wrong-result 'ranking' 1 'score' 4")
        else:
            assert_problem(err, "unsupported-task 'ranking' predict.")


@pytest.fixture(scope="module")
def language_model(tmp_path_factory):
    """The run of a tiny language model that knows a few sentences."""
    folder = tmp_path_factory.mktemp("gpt")
    recipe = write_recipe(folder)
    tree = yaml.safe_load(recipe.read_text())
    tree["model"] = {"config": TINY_GPT | {"n_positions": 32}, "tokenizer": {"kind": "bpe", "vocab_size": 300}}
    tree["data"] = {"files": tree["data"]["files"], "max_length": 16}
    recipe.write_text(yaml.safe_dump(tree))
    train(recipe)
    return folder / "run"


@pytest.mark.slow
def test_a_language_model_continues_texts_like_transformers(language_model, cli):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    prompts = ["a lovely film", "a", "a plain film number 3 indeed", "", "a film " * 40]
    Path("prompts.txt").write_text("\n".join(prompts))
    out = predict(cli, language_model, "prompts.txt", "plugins.causal-lm.max_new_tokens=8")
    found = [json.loads(line)["text"] for line in out.splitlines()]
    model = AutoModelForCausalLM.from_pretrained(language_model / "model")
    tokenizer = AutoTokenizer.from_pretrained(language_model / "model")
    for prompt, text in zip(prompts, found, strict=True):  # one by one, without padding
        ids = tokenizer(prompt or tokenizer.eos_token, return_tensors="pt", verbose=False)["input_ids"][:, -24:]
        whole = model.generate(
            ids, attention_mask=ids >= 0, max_new_tokens=8, do_sample=False, pad_token_id=tokenizer.pad_token_id
        )
        assert text == tokenizer.decode(whole[0, ids.shape[1] :], skip_special_tokens=True)


@pytest.mark.slow
def test_drawn_texts_depend_on_the_seed_alone(language_model, cli):
    command = [
        language_model,
        "a lovely film",
        "plugins.causal-lm.max_new_tokens=12",
        "plugins.causal-lm.temperature=1.5",
    ]
    first, again, other = predict(cli, *command), predict(cli, *command), predict(cli, *command, "train.seed=9")
    assert first == again
    assert first != other


def test_what_is_refused(trained, language_model, cli):
    def refused(*arguments: Any) -> str:
        code, _, err = cli("predict", *map(str, arguments))
        assert code == 2
        error: str = err
        return error

    run = trained / "run"
    assert_problem(refused(run), "nothing-to-predict")
    assert_problem(refused(run, "nowhere.csv"), "file-missing nowhere.csv")
    assert_problem(refused(run, "."), "not-a-file FILE")
    assert_problem(refused(run, "a text", "--out", "out.xml"), "unknown-format")
    assert_problem(refused(run, "a text", "--out", "nowhere/out.csv"), "folder-missing")
    for name, content in (("other.csv", "words,label\na,b\n"), ("other.jsonl", '{"words": "a"}\n')):
        Path(name).write_text(content)
        assert_problem(refused(run, name), "unknown-column 'text' data.text")
    assert_problem(refused(run, ""), "nothing-to-predict")
    Path("texts.csv").write_text("text\na good film\n")
    assert "--out texts.csv: this is the file to predict" in refused(run, "texts.csv", "--out", "texts.csv")
    assert Path("texts.csv").read_text() == "text\na good film\n"
    assert_problem(refused(language_model, "--split", "test"), "nothing-to-predict")
    assert_problem(
        refused(language_model, "a", "plugins.causal-lm.max_new_tokens=99"), "out-of-range max_new_tokens 99 32"
    )


@pytest.mark.parametrize(
    ("name", "content"),
    [("a.csv", ""), ("a.csv", "text\n"), ("a.jsonl", "\n"), ("a.json", "[]"), ("a.txt", ""), ("-", "")],
)
def test_input_without_a_sample_is_named(trained, cli, monkeypatch, name, content):
    if name == "-":
        monkeypatch.setattr(sys, "stdin", io.StringIO(content))
    else:
        Path(name).write_text(content)
    code, _, err = cli("predict", str(trained / "run"), name)
    assert code == 2
    assert_problem(err, f"nothing-to-predict {'stdin' if name == '-' else name}")


def test_a_file_without_header_needs_the_names_of_its_columns(trained, cli):
    Path("texts.csv").write_text("a lovely film\na dull film\n")
    code, _, err = cli("predict", str(trained / "run"), "texts.csv")
    assert code == 2
    assert_problem(err, "unknown-column texts.csv 1 data.read.columns=[text]")
    assert len(predict(cli, trained / "run", "texts.csv", "data.read.columns=[text]").splitlines()) == 2


@pytest.mark.slow
def test_a_reader_that_closes_stdout_ends_the_command_quietly(trained):
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "fastloop", "predict", str(trained / "run"), "a good film"]
    with os.fdopen(writer, "w") as stdout:
        done = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=300, check=False)
    assert done.stderr == ""
    assert done.returncode == 1
