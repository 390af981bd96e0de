"""An error in a recipe or a command gives one readable message: the place, the finding, and the remedy.

Every case runs the command line. The exit code is 2 (usage error) or 1 (found only while running). There is no
traceback and no run folder.
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from fastloop.cli import main

ROWS = [("a fine film", "good"), ("a dull film", "bad"), ("fine and moving", "good"), ("dull and long", "bad")] * 4

GOOD: dict[str, Any] = {
    "model": {
        "config": {
            "model_type": "distilbert",
            "dim": 16,
            "n_layers": 1,
            "n_heads": 2,
            "hidden_dim": 16,
            "max_position_embeddings": 16,
        }
    },
    "data": {
        "files": {"train": "train.csv", "validation": "train.csv"},
        "text": "text",
        "label": "label",
        "max_length": 16,
    },
    "train": {"epochs": 1, "batch_size": 4, "device": "cpu"},
    "plugins": [],
    "output": "out/run",
}


def write_csv(path: str, rows: list[tuple[Any, ...]], header: str = "text,label") -> None:
    Path(path).write_text("\n".join([header, *(",".join(map(str, row)) for row in rows)]) + "\n")


def recipe(*changes: tuple[str, Any]) -> str:
    """Write the good recipe with dotted keys set (or, with ``...``, removed) as r.yaml, beside good data."""
    tree = copy.deepcopy(GOOD)
    for key, value in changes:
        *parents, last = key.split(".")
        place = tree
        for parent in parents:
            place = place.setdefault(parent, {})
        if value is ...:
            del place[last]
        else:
            place[last] = value
    Path("r.yaml").write_text(yaml.safe_dump(tree, sort_keys=False))
    write_csv("train.csv", ROWS)
    return "r.yaml"


def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[int, str]:
    """Exit code and everything printed by the command line."""
    monkeypatch.setattr(sys, "argv", ["fastloop", *arguments])
    with pytest.raises(SystemExit) as exited:
        main()
    captured = capsys.readouterr()
    return int(exited.value.code or 0), captured.out + captured.err


# name -> (changes to the recipe, further arguments, the text that the message must contain)
RECIPES: dict[str, tuple[list[tuple[str, Any]], list[str], list[str]]] = {
    "unknown section": ([("trian", {})], [], ["r.yaml", "trian", "train"]),
    "unknown key": ([("train.learning_rate", 0.1)], [], ["r.yaml", "train.learning_rate", "[unknown-option]"]),
    "misspelled key": ([("train.epoch", 2)], [], ["train.epoch", "'epochs'"]),
    "wrong type": ([("train.batch_size", "many")], [], ["train.batch_size", "'many'", "int"]),
    "a number as text": ([("train.epochs", "3")], [], ["train.epochs", "'3'", "int"]),
    "out of range": ([("train.lr", -1.0)], [], ["train.lr", "-1.0", "greater than 0"]),
    "zero batch": ([("train.batch_size", 0)], [], ["train.batch_size", "greater than or equal to 1"]),
    "bad choice": ([("train.evaluate_every", "week")], [], ["train.evaluate_every", "'week'", "epoch"]),
    "unknown optimizer": ([("train.optimizer", "AdamV")], [], ["train.optimizer", "AdamV", "[unknown-optimizer]"]),
    "a batch that does not divide": (
        [("train.batch_size", 10), ("train.micro_batch_size", 4)],
        [],
        ["batch_size", "10", "8", "12"],
    ),
    "unknown plugin": ([("plugins", ["chekpoint-best"])], [], ["chekpoint-best", "'checkpoint-best'"]),
    "a plugin listed twice": ([("plugins", ["amp", "amp"])], [], ["'amp'", "[listed-twice]"]),
    "a plugin's unknown option": (
        [("plugins", [{"amp": {"dtyp": "bf16"}}])],
        [],
        ["plugins.amp.dtyp", "'dtype'"],
    ),
    "a plugin's wrong option": (
        [("plugins", [{"amp": {"dtype": "bf17"}}])],
        [],
        ["plugins.amp.dtype", "'bf17'", "bf16"],
    ),
    "a dtype the device lacks": ([("plugins", [{"amp": {"dtype": "fp16"}}])], [], ["'amp'", "fp16", "bf16"]),
    "plugin options that are no mapping": ([("plugins", [{"amp": "bf16"}])], [], ["plugins.amp", "'bf16'", "mapping"]),
    "plugins that are no list": ([("plugins", "amp")], [], ["plugins", "'amp'", "list"]),
    "two tasks": (
        [("plugins", ["text-classification", "causal-lm"])],
        [],
        ["text-classification", "causal-lm", "'task'", "--without", "[slot-filled-twice]"],
    ),
    "a monitor without evaluation": (
        [
            ("plugins", [{"checkpoint-best": {"monitor": "accuracy"}}]),
            ("data.files.validation", ...),
            ("data.validation_fraction", 0),
        ],
        [],
        ["checkpoint-best", "validation"],
    ),
    "model with an unknown key": ([("model.nme", "x")], [], ["model.nme", "'name'"]),
    "no model": ([("model", {})], [], ["model", "name", "config"]),
    "unknown architecture": (
        [("model.config.model_type", "distilbrt")],
        [],
        ["model", "distilbrt", "'distilbert'"],
    ),
    "data with an unknown key": ([("data.txt", "x")], [], ["data.txt", "'text'"]),
    "no data": ([("data", {})], [], ["data"]),
    "missing data file": ([("data.files.train", "trian.csv")], [], ["data.files.train", "trian.csv"]),
    "unknown file type": ([("data.files.train", "r.yaml")], [], ["data.files.train", "yaml", "csv"]),
    "missing text column": ([("data.text", "txt")], [], ["txt", "text", "label"]),
    "missing label column": ([("data.label", "labels")], [], ["labels", "'label'"]),
    "output that cannot be written": ([("output", "train.csv/run")], [], ["output", "train.csv"]),
    "not an override": ([], ["train.lr"], ["train.lr", "key=value"]),
    "an override of an unknown section": ([], ["trian.lr=1"], ["trian", "'train'"]),
    "an override of a plugin that is not listed": ([], ["plugins.amp.dtype=bf16"], ["amp", "--with amp"]),
    "with an unknown plugin": ([], ["--with", "ampp"], ["ampp", "'amp'"]),
    "without an unknown plugin": ([], ["--without", "ampp"], ["ampp", "'amp'"]),
    "resume from nowhere": ([], ["--resume", "nowhere"], ["nowhere", "[no-checkpoint]"]),
    "extends a recipe that is not there": ([("extends", "base.yaml")], [], ["base.yaml", "[file-missing]"]),
    "a hub model without a hub": (
        [("model", {"name": "distilbert-base-uncased"})],
        [],
        ["distilbert-base-uncased", "model.name"],
    ),
}


@pytest.mark.parametrize("name", RECIPES)
def test_a_bad_recipe_or_override_is_explained(name, capsys, monkeypatch):
    changes, arguments, fragments = RECIPES[name]
    code, text = run(capsys, monkeypatch, "train", recipe(*changes), *arguments)
    check(code, text, fragments)


# name -> (rows, header, the text that the message must contain)
DATA: dict[str, tuple[list[tuple[Any, ...]], str, list[str]]] = {
    "empty split": ([], "text,label", ["train", "empty"]),
    "labels out of range": ([("fine", 0), ("dull", 7)] * 8, "text,label", ["label", "7"]),
    "labels that are fractions": ([("fine", 0.5), ("dull", 1.5)] * 8, "text,label", ["label", "0.5"]),
    "one label only": ([("fine", "good")] * 8, "text,label", ["label", "good"]),
    "only empty texts": ([("", "good"), ("", "bad")] * 8, "text,label", ["text", "empty"]),
    "missing labels": ([("fine", "good"), ("dull", "")] * 8, "text,label", ["label", "line 3", "empty"]),
}


@pytest.mark.parametrize("name", DATA)
def test_bad_data_is_explained(name, capsys, monkeypatch):
    rows, header, fragments = DATA[name]
    path = recipe()
    write_csv("train.csv", rows, header)
    code, text = run(capsys, monkeypatch, "train", path)
    check(code, text, ["train.csv" if name != "empty split" else "train", *fragments])


def check(code: int, text: str, fragments: list[str]) -> None:
    assert code == 2, text
    assert "Traceback" not in text
    assert len(text.splitlines()) <= 4, text
    for fragment in fragments:
        assert fragment in text
    assert not Path("out").exists()


def test_a_label_that_training_never_saw_is_explained(capsys, monkeypatch):
    path = recipe(("data.files.validation", "validation.csv"))
    write_csv("validation.csv", [("fine", "good"), ("odd", "strange")])
    code, text = run(capsys, monkeypatch, "train", path)
    check(code, text, ["validation", "strange"])


@pytest.mark.parametrize(
    ("text", "fragments"),
    [
        ("train: {epochs: 1", ["r.yaml", "line", "YAML"]),
        ("- a\n- b\n", ["r.yaml", "mapping"]),
        ("", ["r.yaml", "mapping"]),
        ("train: {lr: '${train.nope}'}", ["r.yaml", "train.nope"]),
    ],
    ids=["broken yaml", "a list", "an empty file", "an interpolation of nothing"],
)
def test_a_file_that_is_no_recipe_is_explained(text, fragments, capsys, monkeypatch):
    Path("r.yaml").write_text(text)
    code, printed = run(capsys, monkeypatch, "train", "r.yaml")
    check(code, printed, fragments)


@pytest.mark.parametrize(
    ("arguments", "fragments"),
    [
        (["train", "nope.yaml"], ["nope.yaml", "[file-missing]"]),
        (["train", "quickstrat"], ["quickstrat", "'quickstart'"]),
        (["plugins", "ampp"], ["ampp", "'amp'"]),
        (["recipes", "quickstrat"], ["quickstrat", "'quickstart'"]),
        (["plan", "nope.yaml"], ["nope.yaml", "[file-missing]"]),
        (["export", "run", "--to", "merged"], ["--to: ", "'merged'", "safetensors, adapter, onnx"]),
        (["export", "run", "--to", "onx"], ["--to", "'onx'", "'onnx'"]),
        (["sweep", "nope.yaml", "--mode", "mni"], ["--mode", "'mni'", "auto, min, max", "'min'"]),
        (["sweep", "nope.yaml", "--trials", "2", "--mode", "up"], ["--mode", "'up'", "auto, min, max"]),
    ],
    ids=" ".join,
)
def test_a_wrong_name_on_the_command_line_is_explained(arguments, fragments, capsys, monkeypatch):
    code, text = run(capsys, monkeypatch, *arguments)
    check(code, text, fragments)


@pytest.mark.parametrize(
    "arguments", [["trian", "quickstart"], ["train", "quickstart", "--wiht", "amp"], ["train"]], ids=" ".join
)
def test_a_wrong_command_or_option_exits_2(arguments, capsys, monkeypatch):
    code, text = run(capsys, monkeypatch, *arguments)
    assert code == 2
    assert "Traceback" not in text
    assert "fastloop" in text


def test_a_plugin_whose_extra_is_missing_names_the_install_command(capsys, monkeypatch):
    import importlib.metadata

    installed = importlib.metadata.version

    def version(name: str) -> str:
        if name == "peft":
            raise importlib.metadata.PackageNotFoundError(name)
        return installed(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    code, text = run(capsys, monkeypatch, "train", recipe(("plugins", ["lora"])))
    check(code, text, ["'lora'", "peft", "pip install 'fastloop-train[lora]'"])


def test_a_checkpoint_of_another_model_is_refused(capsys, monkeypatch):
    code, _ = run(capsys, monkeypatch, "train", recipe())
    assert code == 0
    assert json.loads(Path("out/run/summary.json").read_text())["status"] == "completed"
    before = sorted(str(path) for path in Path("out").rglob("*"))
    code, text = run(capsys, monkeypatch, "train", recipe(("model.config.dim", 32)), "--resume")
    assert code == 2
    assert "model" in text
    assert "Traceback" not in text
    assert sorted(str(path) for path in Path("out").rglob("*")) == before


@pytest.mark.slow
def test_shipped_recipe_without_hub_reports_repair():
    done = subprocess.run(
        [sys.executable, "-m", "fastloop", "train", "distilbert_imdb", "train.device=cpu"],
        capture_output=True,
        text=True,
        timeout=600,
        env={key: value for key, value in os.environ.items() if key != "HF_HUB_OFFLINE"}
        | {"HF_ENDPOINT": "http://127.0.0.1:9"},
    )
    assert done.returncode == 2, done.stderr
    assert "distilbert-base-uncased" in done.stderr
    assert "model.name=" in done.stderr
    assert "Traceback" not in done.stderr
    assert not Path("runs").exists()
