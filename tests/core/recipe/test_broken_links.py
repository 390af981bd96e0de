"""A symbolic link that points nowhere: each message names the link and its target, not the hub or a missing file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fastloop.recipe.paths import find_path, nothing_at

FILES = {"files": {"train": "train.csv"}, "text": "text", "label": "label"}
MODEL = {"config": {"model_type": "bert"}, "tokenizer": {"kind": "word"}}
CHATS = {"files": {"train": "chats.jsonl"}, "messages": "messages", "chat_template": "link"}
CASES = {
    "model.name": {"model": {"name": "link"}, "data": FILES},
    "model.name/folder": {"model": {"name": "./link/model"}, "data": FILES},
    "model.weights": {"model": {**MODEL, "weights": "link"}, "data": FILES},
    "data.files.train": {"model": MODEL, "data": {**FILES, "files": {"train": "link"}}},
    "data.name": {"model": MODEL, "data": {"name": "link", "text": "text", "label": "label"}},
    "data.chat_template": {"model": {"config": {"model_type": "gpt2"}, "tokenizer": {"kind": "bpe"}}, "data": CHATS},
    "data.images": {"model": {"config": {"model_type": "vit"}}, "data": {"images": "link"}},
    "model.module": {"model": {"module": "link.py:Net"}, "data": {"module": "link.py:data"}},
}
COMMANDS = {
    "recipe": ["plan", "link"],
    "run": ["evaluate", "link"],
    "report": ["report", "link"],
    "predict": ["predict", "run", "link"],
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    Path("train.csv").write_text("text,label\na,1\nb,0\n")
    Path("chats.jsonl").write_text('{"messages": [{"role": "user", "content": "a"}]}\n')
    Path("link").symlink_to("moved-away")
    Path("link.py").symlink_to("moved-away")


@pytest.mark.parametrize("key", CASES)
def test_a_recipe_that_names_a_broken_link(key, cli):
    Path("recipe.yaml").write_text(json.dumps(CASES[key]))
    code, _, err = cli("plan", "recipe.yaml")
    assert code == 2
    assert "[file-missing]" in err
    assert f"recipe.yaml: {key.partition('/')[0]}" in err
    assert "link" in err
    assert "moved-away" in err


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_that_names_a_broken_link(command, cli):
    code, _, err = cli(*COMMANDS[command])
    assert code == 2
    assert "moved-away" in err


@pytest.mark.parametrize(("target", "reason"), [("moved-away", "does not exist"), ("runs", "leads back to it")])
def test_an_output_that_is_a_broken_link_is_refused_before_data_is_read(target, reason, cli):
    recipe = {"model": MODEL, "data": {**FILES, "files": {"train": "train.csv"}}, "output": "runs/mine"}
    Path("recipe.yaml").write_text(json.dumps(recipe))
    Path("runs").symlink_to(target)
    code, _, err = cli("train", "recipe.yaml")
    (line,) = err.splitlines()
    assert (code, Path("moved-away").exists()) == (2, False)
    assert f"the symbolic link runs points to {target}, which {reason}" in line
    assert line.endswith("[folder-not-writable]")


def test_a_link_beside_the_recipe_is_the_one_that_is_named(tmp_path):
    beside = tmp_path / "elsewhere"
    beside.mkdir()
    (beside / "model").symlink_to("/nowhere/model")
    path = find_path("model", beside / "recipe.yaml")
    assert path == beside / "model"
    assert nothing_at(path).endswith("points to /nowhere/model, which does not exist")
    assert nothing_at(tmp_path / "absent") == "no such file"
