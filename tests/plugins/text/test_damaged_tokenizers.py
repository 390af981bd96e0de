"""A damaged tokenizer, each kind of file x each kind of damage: the error names the file and what to do.

``test_value_cache.py`` and ``test_new_tokens.py`` cover tokenizers that can be read.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from text_helpers import TINY

from fastloop import RecipeError
from fastloop.lifecycle import open_run
from fastloop.plugins.resolve import resolve
from fastloop.recipe import make_recipe
from fastloop.testing import expect_problem

VOCABULARY = {"[PAD]": 0, "[UNK]": 1, "a": 2, "b": 3, "film": 4}
TOKENIZER: dict[str, Any] = {
    "version": "1.0",
    "added_tokens": [],
    "pre_tokenizer": {"type": "Whitespace"},
    "model": {"type": "WordLevel", "vocab": VOCABULARY, "unk_token": "[UNK]"},
}
CONFIG = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "[PAD]", "unk_token": "[UNK]"}
GPT2 = {
    "tokenizer.json": None,
    "tokenizer_config.json": {"tokenizer_class": "GPT2Tokenizer"},
    "vocab.json": {"a": 0, "<|endoftext|>": 1},
    "merges.txt": "",
}
BERT = {"tokenizer.json": None, "tokenizer_config.json": {"tokenizer_class": "BertTokenizer"}}


def without(mapping: dict[str, Any], key: str) -> dict[str, Any]:
    """A copy without a key."""
    return {name: value for name, value in mapping.items() if name != key}


def with_model(**values: Any) -> dict[str, Any]:
    """``tokenizer.json`` with other values of its model."""
    return {**TOKENIZER, "model": {**TOKENIZER["model"], **values}}


DAMAGE: dict[str, tuple[dict[str, Any], str]] = {
    "tokenizer.json, cut": ({"tokenizer.json": json.dumps(TOKENIZER)[:100]}, "tokenizer.json"),
    "tokenizer.json, empty": ({"tokenizer.json": ""}, "tokenizer.json"),
    "tokenizer.json, no text": ({"tokenizer.json": b"\xff\xfe\x00\x01"}, "tokenizer.json"),
    "tokenizer.json, a list": ({"tokenizer.json": []}, "tokenizer.json list"),
    "tokenizer.json, no model": ({"tokenizer.json": without(TOKENIZER, "model")}, "tokenizer.json"),
    "tokenizer.json, no such model": ({"tokenizer.json": with_model(type="Nope")}, "tokenizer.json"),
    "tokenizer.json, text as ids": ({"tokenizer.json": with_model(vocab={"a": "x"})}, "tokenizer.json"),
    "tokenizer.json, a list as vocabulary": ({"tokenizer.json": with_model(vocab=[1])}, "tokenizer.json"),
    "tokenizer.json, no vocabulary": ({"tokenizer.json": with_model(vocab=None)}, "tokenizer.json"),
    "tokenizer.json, tokens without ids": (
        {"tokenizer.json": {**TOKENIZER, "added_tokens": [{"content": "a"}]}},
        "tokenizer.json",
    ),
    "tokenizer.json, no such step": (
        {"tokenizer.json": {**TOKENIZER, "pre_tokenizer": {"type": "Nope"}}},
        "tokenizer.json",
    ),
    "tokenizer.json, padding": ({"tokenizer.json": {**TOKENIZER, "padding": {"x": 1}}}, "tokenizer.json"),
    "tokenizer_config.json, cut": ({"tokenizer_config.json": '{"tokenizer_class'}, "tokenizer_config.json"),
    "tokenizer_config.json, null": ({"tokenizer_config.json": "null"}, "tokenizer_config.json"),
    "tokenizer_config.json, a list": ({"tokenizer_config.json": []}, "tokenizer_config.json list"),
    "tokenizer_config.json, a class": (
        {"tokenizer_config.json": {**CONFIG, "tokenizer_class": 5}},
        "tokenizer_config.json",
    ),
    "tokenizer_config.json, a token": ({"tokenizer_config.json": {**CONFIG, "pad_token": 5}}, "tokenizer_config.json"),
    "tokenizer_config.json, a side": (
        {"tokenizer_config.json": {**CONFIG, "padding_side": "top"}},
        "tokenizer_config.json top",
    ),
    "special_tokens_map.json, a list": ({"special_tokens_map.json": []}, "special_tokens_map.json list"),
    "added_tokens.json, cut": ({"added_tokens.json": '{"a"'}, "added_tokens.json"),
    "vocab.json, cut": ({**GPT2, "vocab.json": '{"a":'}, "vocab.json"),
    "vocab.json, a list": ({**GPT2, "vocab.json": [1]}, "vocab.json list"),
    "merges.txt, no pairs": ({**GPT2, "merges.txt": "#version\na b c d\n"}, "merges.txt"),
    "merges.txt, unknown tokens": ({**GPT2, "merges.txt": "#version\nq z\n"}, "merges.txt"),
    "vocab.txt, no text": ({**BERT, "vocab.txt": b"\xff\xfe"}, "vocab.txt"),
}


UNKNOWN = {
    "words": with_model(unk_token="[none]"),
    "word pieces": with_model(
        type="WordPiece", unk_token="[none]", continuing_subword_prefix="##", max_input_chars_per_word=100
    ),
    "byte pairs": with_model(type="BPE", unk_token="[none]", merges=[]),
}


def write_tokenizer(files: dict[str, Any]) -> None:
    """Write a tokenizer to ``saved``.

    Args:
        files: Name -> another content: bytes, text, or a JSON value. None: there is no such file.
    """
    Path("saved").mkdir()
    for name, content in ({"tokenizer.json": TOKENIZER, "tokenizer_config.json": CONFIG} | files).items():
        file = Path("saved", name)
        if isinstance(content, bytes):
            file.write_bytes(content)
        elif isinstance(content, str):
            file.write_text(content)
        elif content is not None:
            file.write_text(json.dumps(content))


def build() -> None:
    """Build a run with the tokenizer in ``saved``."""
    rows = [f"{('a', 'new')[i % 2]} film,{('neg', 'pos')[i % 2]}\n" for i in range(8)]
    Path("train.csv").write_text("text,label\n" + "".join(rows))
    recipe = {
        "model": {"config": TINY, "tokenizer": "saved"},
        "data": {"files": {"train": "train.csv"}, "label": "label", "max_length": 8, "validation_fraction": 0},
        "plugins": ["text-classification", {"progress": False}],
        "train": {"device": "cpu", "max_steps": 1, "batch_size": 4},
    }
    with open_run(resolve(make_recipe(recipe))):
        pass


def test_the_tokenizer_works_without_damage():
    write_tokenizer({})
    build()


@pytest.mark.parametrize(("files", "expected"), DAMAGE.values(), ids=DAMAGE.keys())
def test_the_error_names_the_damaged_file(files, expected):
    write_tokenizer(files)
    with expect_problem(f"file-unreadable model.tokenizer: saved {expected}", RecipeError) as refused:
        build()
    assert "model.tokenizer=FOLDER" in refused.value.problem.remedy


@pytest.mark.parametrize("content", UNKNOWN.values(), ids=UNKNOWN.keys())
def test_the_token_for_unknown_words_must_be_in_the_vocabulary(content):
    write_tokenizer({"tokenizer.json": content})
    with expect_problem("file-unreadable model.tokenizer: saved tokenizer.json unk_token '[none]'", RecipeError):
        build()


def test_the_longest_text_must_be_a_number():
    write_tokenizer({"tokenizer_config.json": {**CONFIG, "model_max_length": "long"}})
    with expect_problem("wrong-type tokenizer_config.json: model_max_length: 'long' number", RecipeError):
        build()
