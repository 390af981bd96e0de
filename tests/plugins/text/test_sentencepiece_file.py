"""The SentencePiece file of a pretrained tokenizer is exported beside `tokenizer.json`: llama.cpp may need it."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from inference_runs import TRAIN, train, write_recipe
from text_helpers import TINY_GPT
from transformers import AutoTokenizer

TEXT = "a dull film number 3 indeed"


@pytest.mark.parametrize("tokens", [[], ["<call>"]])
def test_a_tokenizer_model_is_exported_unless_tokens_are_added(tmp_path, tokens):
    """The converter would take the ids of added tokens for unused ones, and without the file it reads all tokens from
    tokenizer.json."""
    data = {"files": {"train": "train.csv"}, "text": "text", "max_length": 16}
    model = {"config": TINY_GPT, "tokenizer": {"kind": "bpe", "vocab_size": 300}}
    keys = TRAIN | {"epochs": 1}
    base = tmp_path / "base"
    train(write_recipe(tmp_path, model=model, data=data, train=keys, output=str(base)))
    content = b"\n\x0e\n\x05<unk>"
    (base / "model/tokenizer.model").write_bytes(content)
    recipe = write_recipe(tmp_path, model={"name": str(base / "model")}, data=data, train=keys)
    if tokens:
        tree = yaml.safe_load(recipe.read_text())
        tree["model"]["tokens"] = tokens
        recipe.write_text(yaml.safe_dump(tree))
    train(recipe)
    exported = Path(tmp_path, "run/model/tokenizer.model")
    assert exported.exists() == (not tokens)
    if not tokens:
        assert exported.read_bytes() == content
    before = AutoTokenizer.from_pretrained(base / "model")
    after = AutoTokenizer.from_pretrained(tmp_path / "run/model")
    assert after(TEXT)["input_ids"] == before(TEXT)["input_ids"]
