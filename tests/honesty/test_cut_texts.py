"""Texts that are longer than ``data.max_length`` are counted in the log, exactly.

Modules:
    plugins/fastloop_plugins/text/encoding.py
"""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from text_helpers import TINY, make_run
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from fastloop.testing import assert_problem, find_problems
from fastloop_plugins.data.token_cache import TokenCache
from fastloop_plugins.text.chunks import token_chunks
from fastloop_plugins.text.encoding import encode

TASK = "text-classification"
LENGTHS = [3, 4, 5, 20, 9, 2, 6, 4]
"""Words of each row. With two special tokens, four words fit into six tokens: four rows are longer."""


def write_rows(path: str, pairs: bool = False, streamed: int = 0) -> str:
    rows = [
        {"text": " ".join(f"w{i}x{j}" for j in range(count)), "label": "ab"[i % 2]} for i, count in enumerate(LENGTHS)
    ]
    if pairs:
        rows = [
            {"text": " ".join(row["text"].split()[1:]), "other": row["text"].split()[0], "label": row["label"]}
            for row in rows
        ]
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows * (streamed or 1)))
    return path


def run(path: str, cache: bool = False, **data):
    section = {"files": {"train": path}, "label": "label", "max_length": 6, "validation_fraction": 0} | data
    model = {"config": TINY, "tokenizer": {"kind": "word"}}
    return make_run(TASK, model, section, objects=[TokenCache(folder="cache")] if cache else [])


def cut_lines(caplog) -> list[str]:
    return [str(problem) for problem in find_problems(caplog, "texts-cut")]


@pytest.mark.parametrize("pairs", [False, True])
def test_texts_cut_at_max_length_are_counted(pairs, caplog):
    more = {"text": ["text", "other"], "max_length": 7} if pairs else {}
    run(write_rows("a.jsonl", pairs), **more)
    assert len(cut_lines(caplog)) == 1
    assert_problem(caplog, f"texts-cut train: 4 8 {6 + pairs} data.max_length 50.0%")
    caplog.clear()
    run("a.jsonl", **more | {"max_length": 32})
    assert cut_lines(caplog) == []


def test_transformers_does_not_warn_of_texts_that_are_cut(caplog):
    library = logging.getLogger("transformers")
    library.addHandler(caplog.handler)
    try:
        run(write_rows("a.jsonl"))
    finally:
        library.removeHandler(caplog.handler)
    assert cut_lines(caplog)
    assert [record.getMessage() for record in caplog.records if record.name.startswith("transformers")] == []


def test_cached_token_ids_keep_the_count(caplog):
    for _ in range(2):
        run(write_rows("a.jsonl"), cache=True)
    assert len(cut_lines(caplog)) == 2
    assert len(set(cut_lines(caplog))) == 1


@pytest.mark.slow
def test_a_huge_text_and_a_tokenizer_in_python_are_counted_too():
    from transformers import CanineTokenizer

    facts: dict[str, int] = {}
    texts = ["a" * 8, "a" * 9, "a " * 5000, "abc"]
    found = list(encode(CanineTokenizer(), texts, {"truncation": True, "max_length": 10}, facts))
    assert [len(ids) for ids in found] == [10, 10, 10, 5]
    assert facts == {"cut": 2}


def test_the_log_of_a_stream_names_its_first_rows(caplog):
    run(write_rows("a.jsonl", streamed=4), streaming=True, lanes=1)
    (line,) = cut_lines(caplog)
    assert line.startswith("data: train, ")


def test_texts_to_predict_are_counted(caplog):
    plugin = run(write_rows("a.jsonl"), max_length=32).plugins.plugins[0]
    arguments = {"truncation": True, "max_length": 6}
    plugin.data.options.max_length = 6
    list(token_chunks(plugin.data, plugin.text_model, Path("a.jsonl"), 0, 3, arguments))
    assert len(cut_lines(caplog)) == 1
    assert_problem(caplog, "texts-cut predict 1 3 6 data.max_length 33.3%")


class Loud(PreTrainedTokenizerFast):
    def _encode_plus(self, text, *args, **arguments):
        return super()._encode_plus([each.upper() for each in text], *args, **arguments)


@pytest.mark.parametrize("own", [PreTrainedTokenizerFast, Loud])
def test_the_backend_gives_the_ids_of_the_tokenizer_unless_its_class_has_code_of_its_own(own):
    words = Tokenizer(WordLevel({"[UNK]": 0, "a": 1, "b": 2, "A": 3, "B": 4, "[CLS]": 5}, unk_token="[UNK]"))
    words.pre_tokenizer = Whitespace()
    words.post_processor = TemplateProcessing(single="[CLS] $A", special_tokens=[("[CLS]", 5)])
    tokenizer = own(tokenizer_object=words, unk_token="[UNK]")
    texts = ["a b b a", "", "a", "b c", " ".join("ab" * 1000)]
    cut = {"truncation": True, "max_length": 4}
    for arguments in (cut, {"add_special_tokens": False, "verbose": False}, cut | {"max_length": 2}):
        expected = tokenizer(texts, **arguments)["input_ids"]
        assert expected[2] == [5] * ("max_length" in arguments) + [3 if own is Loud else 1]
        assert list(encode(tokenizer, texts, arguments)) == expected
