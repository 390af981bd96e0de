"""The code in the README of each kind of export, run in a process of its own: it prints the results of `predict`.

Modules:
    plugins/fastloop_tools/export/card.py
"""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from inference_runs import train
from long_form import long_form_only
from needed_packages import skip_file_without
from round_trip_cases import KINDS, Case
from round_trip_data import Bases, read_rows, write_data
from round_trip_runs import command

pytest.importorskip("peft")
skip_file_without("onnxruntime")

FORMS = {"model": "full", "adapter": "unmerged", "merged": "unmerged", "onnx": "full", "onnx-int8": "full"}
"""Form of an export -> the method of its run, as in ``Case``."""
QUICK = {("class", "model"), ("chat", "adapter")}
LIMIT = 20
"""Tokens of a generated text at most: the models of these runs have no room for the 100 of the code."""
Runs = Callable[[str, str], Path]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Trains the run of a kind and a method, once."""
    folder = tmp_path_factory.mktemp("examples")
    write_data(folder)
    bases = Bases(folder)

    def find(kind: str, method: Any) -> Path:
        output = folder / f"{kind}-{method}"
        if not output.exists():
            is_cut = KINDS[kind].task == "text-classification"
            case = Case(kind=kind, start="bare", method=method, data={"max_length": 12} if is_cut else {})
            path = folder / f"{kind}-{method}.yaml"
            path.write_text(yaml.safe_dump(case.recipe(bases, str(output))))
            train(path)
        return output

    return find


def cases() -> list[Any]:
    """Each kind in each form that it has. Outside the long form, each kind runs in one form, in turn, and in those of
    ``QUICK``."""
    made = []
    for number, kind in enumerate(KINDS):
        for index, form in enumerate(FORMS):
            if kind == "module" and form in ("adapter", "merged"):
                continue  # an adapter needs a pretrained model
            marks = []
            if (kind, form) not in QUICK:
                marks.append(pytest.mark.slow)
                if index != number % len(FORMS):
                    marks.append(long_form_only)
            made.append(pytest.param(kind, form, id=f"{kind}-{form}", marks=marks))
    return made


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing")  # peft uses this name of transformers
@pytest.mark.parametrize(("kind", "form"), cases())
def test_the_code_of_a_page_prints_the_results_of_predict(runs: Runs, tmp_path: Path, kind: str, form: str) -> None:
    run = runs(kind, FORMS[form])
    if (kind, form) == ("seq2seq", "onnx-int8"):
        error = command("export", str(run), "--to", "onnx", "--quantize", "int8", "--out", str(tmp_path / "out"))
        assert "--quantize int8: the metrics cannot be computed" in error
        assert "[metric-failed]" in error
        return
    folder = write_export(run, form, tmp_path)
    rows = list(read_rows(run.parent, "test")[:2])
    code = replace_texts(code_of_page(folder), kind, rows)
    code = code.replace("max_new_tokens=100", f"max_new_tokens={LIMIT}").replace("range(100)", f"range({LIMIT})")
    if kind == "module" and form == "model":
        shutil.copyfile(run.parent / "code.py", tmp_path / "user_code.py")
        code = f"from user_code import Net\nmodel = Net()\n{code}"
    image = sorted((run.parent / "images" / "test").glob("*/*.png"))[0]
    shutil.copyfile(image, tmp_path / "image.png")
    printed = run_code(code, tmp_path)
    if kind == "module" or (kind == "image" and "onnx" in form):
        assert printed == []  # it runs on zeros
        return
    check_printed(printed, predict(run, kind, rows, image, tmp_path), kind, form)


def write_export(run: Path, form: str, folder: Path) -> Path:
    if form == "model":
        return run / "model"
    to = {"merged": "safetensors", "onnx-int8": "onnx"}.get(form, form)
    more = ["--quantize", "int8"] if form == "onnx-int8" else []
    error = command("export", str(run), "--to", to, *more, "--out", str(folder / "out"))
    assert error == ""
    return folder / "out"


def code_of_page(folder: Path) -> str:
    page = (folder / "README.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, flags=re.S)
    return str(code)


def replace_texts(code: str, kind: str, rows: list[Mapping[str, Any]]) -> str:
    """The code with the texts of rows in place of its own."""
    first = rows[0]
    examples: dict[str, Any] = {}
    if kind in ("class", "topics", "number", "pair"):
        columns = ["text", "other"] if kind == "pair" else ["text"]
        for column in columns:
            examples[json.dumps([f"the first {column}", "a second one"])] = [row[column] for row in rows]
    elif kind == "tags":
        examples['["the", "first", "text"]'] = first["words"]
    elif kind == "chat":
        examples['"Hello"'] = first["prompt"]
    elif kind == "seq2seq":
        examples['["the first prompt", "a second one"]'] = [row["prompt"] for row in rows]
        examples['["the first text", "a second one"]'] = [row["prompt"] for row in rows]
    elif kind in ("document", "completion"):
        examples['"the first text"'] = first["prompt"]
    for example, value in examples.items():
        code = code.replace(example, json.dumps(value))
    for value in examples.values():
        assert json.dumps(value) in code, "the code has no example that can be replaced"
    return code


def run_code(code: str, folder: Path) -> list[str]:
    """The lines that a program prints."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, f"{code}\n{done.stderr[-3000:]}"
    return done.stdout.splitlines()


def predict(run: Path, kind: str, rows: list[Mapping[str, Any]], image: Path, folder: Path) -> list[dict[str, Any]]:
    """The lines of ``fastloop predict`` for rows, or for an image."""
    given = image
    if kind != "image":
        given = folder / "rows.jsonl"
        asked = [{**row, "document": row["prompt"]} for row in rows]
        given.write_text("".join(json.dumps(row) + "\n" for row in asked))
    out = folder / "predicted.jsonl"
    task = KINDS[kind].task
    limit = [f"plugins.causal-lm.max_new_tokens={LIMIT}"] if task == "causal-lm" else []
    assert command("predict", str(run), str(given), *limit, "--out", str(out), "--without", "auto") == ""
    return [json.loads(line) for line in out.read_text().splitlines()]


def check_printed(printed: list[str], predicted: list[dict[str, Any]], kind: str, form: str) -> None:
    """Compare the lines that a page's code prints with the rows of ``predict``."""
    tolerance = 0.1 if form == "onnx-int8" else 1e-5
    if kind in ("class", "pair", "image"):
        assert [line.split()[0] for line in printed] == [row["label"] for row in predicted]
        for line, row in zip(printed, predicted, strict=True):
            for probability in line.split()[1:]:
                expected = row[f"probability_{row['label']}"]
                assert float(probability) == pytest.approx(expected, abs=tolerance)
        assert all(len(line.split()) == (1 if "onnx" in form else 2) for line in printed)
    elif kind == "topics":
        for line, row in zip(printed, predicted, strict=True):
            names = [name.removeprefix("probability_") for name in row if name.startswith("probability_")]
            assert ast.literal_eval(line) == [name for name in names if row[f"probability_{name}"] > 0.5]
    elif kind == "number":
        (line,) = printed
        assert ast.literal_eval(line) == pytest.approx([row["prediction"] for row in predicted], abs=tolerance)
    elif kind == "tags":
        assert [line.split()[1] for line in printed] == predicted[0]["tags"]
    elif kind == "seq2seq":
        texts = printed if "onnx" in form else ast.literal_eval(printed[0])
        assert texts == [row["text"] for row in predicted]
    elif form == "onnx-int8":
        assert printed  # rounded weights write other words
    else:
        assert "\n".join(printed) == predicted[0]["text"]
