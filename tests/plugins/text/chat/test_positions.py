"""`fastloop plan` refuses a ``data.max_length`` that `fastloop train` refuses, by the same message.

Modules:
    plugins/fastloop_plugins/text/positions.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from chat_helpers import byte_tokenizer
from text_helpers import TINY, TINY_GPT, rows

from fastloop.testing import assert_problem, find_problems

GPT = {key: value for key, value in TINY_GPT.items() if key != "n_positions"}
T5 = {"model_type": "t5", "d_model": 16, "d_ff": 16, "num_layers": 1, "num_heads": 2, "d_kv": 8}
TRAINED = {"kind": "byte"}


def write_model(config: dict[str, Any], model_max_length: int | None = None) -> str:
    """A folder with the configuration and the tokenizer of a model, without weights."""
    from transformers import AutoConfig

    tokenizer = byte_tokenizer(None, [])
    if model_max_length is not None:
        tokenizer.model_max_length = model_max_length
    tokenizer.save_pretrained("model")
    tokens = {"vocab_size": len(tokenizer), "bos_token_id": 0, "eos_token_id": 0}
    AutoConfig.for_model(**config | tokens).save_pretrained("model")
    return "model"


MODELS: dict[str, tuple[str, Any, int]] = {
    "from scratch": ("text-classification", lambda: {"config": TINY, "tokenizer": TRAINED}, 32),
    "another key": ("causal-lm", lambda: {"config": TINY_GPT, "tokenizer": TRAINED}, 16),
    "the default": ("causal-lm", lambda: {"config": GPT, "tokenizer": TRAINED}, 1024),
    "a folder": ("causal-lm", lambda: {"name": write_model(TINY_GPT)}, 16),
    "its tokenizer": ("causal-lm", lambda: {"name": write_model(TINY_GPT | {"n_positions": 64}, 24)}, 24),
}


@pytest.mark.parametrize("kind", MODELS)
def test_plan_and_train_refuse_the_same_lengths(kind, cli):
    task, make, limit = MODELS[kind]
    Path("a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows()))
    data = {"files": {"train": "a.jsonl"}, "max_length": limit} | ({"label": "label"} if task != "causal-lm" else {})
    recipe = {"model": make(), "data": data, "plugins": [task], "train": {"device": "cpu"}, "output": "out"}
    Path("recipe.json").write_text(json.dumps(recipe))
    code, out, err = cli("plan", "recipe.json")
    assert code == 0, out + err
    messages = []
    for command in ("plan", "train"):
        code, out, err = cli(command, "recipe.json", f"data.max_length={limit + 1}")
        assert code == 2, out + err
        assert_problem(err, f"out-of-range data.max_length: {limit + 1} {limit}")
        messages.append(" ".join(err.split()))
    assert messages[0] == messages[1]


def test_a_model_without_a_limit_takes_any_length(cli):
    Path("a.jsonl").write_text("".join(json.dumps({"text": "a", "to": "b"}) + "\n" for _ in range(9)))
    data = {"files": {"train": "a.jsonl"}, "target": "to", "max_length": 4096}
    for more in ({}, {"n_positions": 16}):  # T5 has relative positions, and reads no such key
        recipe = {"model": {"config": T5 | more, "tokenizer": TRAINED}, "data": data, "plugins": ["seq2seq"]}
        Path("recipe.json").write_text(json.dumps(recipe))
        code, out, err = cli("plan", "recipe.json")
        assert not find_problems(err, "out-of-range"), err
        assert code == 0 or "n_positions" in err, out + err
