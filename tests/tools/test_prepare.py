"""`fastloop prepare`: token ids are in the cache before a run trains on them.

Modules:
    plugins/fastloop_tools/prepare/command.py
    plugins/fastloop_tools/prepare/data.py
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from text_helpers import TINY, TINY_GPT, rows

from fastloop.testing import assert_problem
from fastloop_plugins.text import needed_rows, tokens

TASKS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "text-classification": ({"config": TINY, "tokenizer": {"kind": "word"}}, {"label": "label"}),
    "causal-lm": ({"config": TINY_GPT, "tokenizer": {"kind": "bpe", "vocab_size": 300}}, {}),
}
COUNT = 40


def tree(task: str, *plugins: Any, **data: Any) -> dict[str, Any]:
    """A recipe of one task on a file of ``COUNT`` rows."""
    Path("a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows(COUNT, ("bad", "good"))))
    model, section = TASKS[task]
    section = {"files": {"train": "a.jsonl"}, "max_length": 16} | section | data
    train = {"epochs": 1, "batch_size": 8, "device": "cpu"}
    return {"model": model, "data": section, "train": train, "plugins": [task, {"module": False}, *plugins]}


def recipe_file(task: str, *plugins: Any, **data: Any) -> str:
    Path("recipe.json").write_text(json.dumps(tree(task, *plugins, **data) | {"output": "run"}))
    return "recipe.json"


@pytest.mark.parametrize("task", TASKS)
def test_a_prepared_run_tokenizes_nothing(task, cli, monkeypatch):
    recipe = recipe_file(task, {"token-cache": {"folder": "cache"}})
    code, out, _ = cli("prepare", recipe)
    assert code == 0
    entries = re.findall(r"^ *[\d.]+ kB +(\d+) rows  (\S+)$", out, re.MULTILINE)
    assert sum(int(count) for count, _ in entries) == COUNT
    assert all((Path(path) / "ids.bin").is_file() for _, path in entries)
    assert re.fullmatch(r" *\d+\.\d kB  in cache", out.splitlines()[-1])
    assert not Path("run").exists()
    monkeypatch.setattr(tokens, "encode_marked", lambda *_, **__: pytest.fail("tokenized again"))
    assert cli("train", recipe)[0] == 0


def test_a_second_time_finds_the_same_entries(cli):
    recipe = recipe_file("text-classification", {"token-cache": {"folder": "cache"}})
    first, second = cli("prepare", recipe), cli("prepare", recipe)
    assert first[0] == second[0] == 0
    assert [line for line in first[1].splitlines() if "rows  " in line] == [
        line for line in second[1].splitlines() if "rows  " in line
    ]


def test_all_rows_of_a_recipe_of_few_steps_are_prepared(cli, monkeypatch):
    monkeypatch.setattr(needed_rows, "LEFT_OUT", 10)
    recipe = recipe_file("text-classification", {"token-cache": {"folder": "cache"}})
    code, out, _ = cli("prepare", recipe, "train.max_steps=1")
    assert code == 0
    assert sum(int(count) for count in re.findall(r"kB +(\d+) rows", out)) == COUNT


def test_a_recipe_without_the_plugin_is_prepared_in_the_users_cache_with_the_command_to_train(
    cli, monkeypatch, tmp_path
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "elsewhere"))
    recipe = recipe_file("text-classification")
    code, out, _ = cli("prepare", recipe, "data.max_length=7", "--with", "ema")
    assert code == 0
    changes = ["data.max_length=7", "--with", "ema,token-cache"]
    assert out.splitlines()[-1] == f"To train on it: fastloop train {recipe} {' '.join(changes)}"
    monkeypatch.setattr(tokens, "encode_marked", lambda *_, **__: pytest.fail("tokenized again"))
    assert cli("train", recipe, *changes)[0] == 0


def test_a_task_without_token_ids_is_refused(cli):
    Path("mine.py").write_text(
        "import torch\n"
        "def model(): return torch.nn.Linear(2, 2)\n"
        "def data(): return {'train': [(torch.zeros(2), 0)] * 32}\n"
    )
    sections = {"model": {"module": "mine.py:model"}, "data": {"module": "mine.py:data"}}
    plugins = [{"module": {"loss": "cross_entropy"}}]
    Path("recipe.json").write_text(json.dumps(sections | {"plugins": plugins, "output": "run"}))
    code, _, err = cli("prepare", "recipe.json")
    assert code == 2
    assert_problem(err, "unsupported-task recipe.json: 'module'")


def test_a_bad_row_is_named_and_nothing_is_left(cli):
    recipe = recipe_file("text-classification", {"token-cache": {"folder": "cache"}})
    with Path("a.jsonl").open("a") as file:
        file.write('{"text": 5, "label": "bad"}\n')
    code, _, err = cli("prepare", recipe)
    assert (code, "a.jsonl, line 41: column 'text'" in err) == (2, True)
    assert not list(Path("cache").glob("*/ids.bin"))


def test_a_stream_has_nothing_to_prepare(cli):
    recipe = recipe_file("text-classification", streaming=True, validation_fraction=0)
    code, _, err = cli("prepare", recipe)
    assert (code, "data.streaming=false" in err) == (2, True)
    assert cli("prepare", recipe, "data.streaming=false", "--with", "token-cache")[0] == 0


def test_under_a_launcher_it_is_refused(cli, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    code, _, err = cli("prepare", recipe_file("text-classification"))
    assert (code, "without a launcher" in err) == (2, True)
