"""Token ids of rows that another split has: they are copied, and only new rows are tokenized.

Modules:
    plugins/fastloop_plugins/text/known_tokens.py
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from text_helpers import TINY, make_run

from fastloop.runtime.files import write
from fastloop_plugins import _mapped
from fastloop_plugins.data.token_cache import TokenCache
from fastloop_plugins.rows.split_rows import hash_rows
from fastloop_plugins.text.known_tokens import CUT, HASHES, KnownTokens

GPT2 = {"model_type": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64}
TASKS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "labels": ("text-classification", TINY, {"label": "label"}),
    "pairs of texts": ("text-classification", TINY, {"label": "label", "text": ["text", "other"]}),
    "texts": ("causal-lm", GPT2, {}),
    "chats": ("causal-lm", GPT2, {"messages": "messages", "chat_template": "chatml", "max_length": 64}),
    "tags": ("token-classification", TINY, {"words": "words"}),
}


def write_rows(count: int) -> None:
    with Path("train.jsonl").open("w", encoding="utf-8") as file:
        for number in range(count):
            words = [f"w{number * k % 13}" for k in range(1 + number % 9)] + [f"n{number}"]
            messages = [{"role": "user", "content": f"w{number}"}, {"role": "assistant", "content": "w1 w2"}]
            row = {"text": " ".join(words), "other": f"w{number}", "label": "ab"[number % 2], "messages": messages}
            row |= {"words": words, "tags": ["OB"[index % 2] for index in range(len(words))]}
            file.write(json.dumps(row) + "\n")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a saved tokenizer: one that is trained depends on the rows of train."""
    from fastloop_plugins.text.tokenizers import TrainedTokenizer, train_tokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    texts = [f"w{number} n{number} user assistant" for number in range(60)]
    train_tokenizer(TrainedTokenizer(kind="bpe", vocab_size=300), texts, True).save_pretrained(folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    write(folder / "tokenizer_config.json", json.dumps(config | {"eos_token": "[SEP]"}))
    return str(folder)


@pytest.fixture
def read(tokenizer: str, caplog: pytest.LogCaptureFixture) -> Callable[..., tuple[list[Any], list[str]]]:
    """Returns the samples of all splits, and the warnings about the data."""

    def read_with(kind: str, cache: str | None, **changes: Any) -> tuple[list[Any], list[str]]:
        caplog.clear()
        samples = read_samples(kind, tokenizer, cache, **changes)
        return samples, [record.getMessage() for record in caplog.records if record.name == "fastloop"]

    return read_with


def read_samples(kind: str, tokenizer: str, cache: str | None, **changes: Any) -> list[dict[str, Any]]:
    task, config, options = TASKS[kind]
    data = {"files": {"train": "train.jsonl"}, "max_length": 8, **options, **changes}
    plugins = [] if cache is None else [TokenCache(folder=cache)]
    run = make_run(task, {"config": config, "tokenizer": tokenizer}, data, plugins)
    samples = []
    for dataset in run.datasets.values():
        for index in range(len(dataset)):
            samples.append({name: np.asarray(value).tolist() for name, value in dataset[index].items()})
    return samples


@pytest.mark.parametrize("kind", TASKS)
def test_other_splits_of_the_same_rows_are_not_tokenized_again(kind, read, encoded_rows):
    write_rows(60)
    read(kind, "cache")
    assert sum(encoded_rows) == 60
    for changes in ({"validation_fraction": 0.3}, {"limit": {"train": 20}}, {"limit": {"train": 30}}):
        encoded_rows.clear()
        found = read(kind, "cache", **changes)
        assert sum(encoded_rows) == 0
        assert found == read(kind, None, **changes), "messages about cut texts, too"


def test_only_new_rows_are_tokenized(read, encoded_rows):
    write_rows(40)
    read("labels", "cache", limit={"train": 10, "validation": 2})
    assert sum(encoded_rows) == 12
    encoded_rows.clear()
    read("labels", "cache")
    assert sum(encoded_rows) == 40 - 12
    encoded_rows.clear()
    write_rows(60)  # 20 rows are new
    found = read("labels", "cache")
    assert sum(encoded_rows) == 20
    assert found == read("labels", None)


def test_other_options_of_the_tokenizer_share_nothing(read, encoded_rows):
    write_rows(40)
    read("labels", "cache")
    encoded_rows.clear()
    read("labels", "cache", max_length=6)
    assert sum(encoded_rows) == 40


@pytest.mark.parametrize("name", [HASHES, CUT])
@pytest.mark.parametrize("content", [None, b"", b"\x93NUMPY\x01\x00v\x00"])
def test_an_entry_with_damaged_hashes_is_not_used(read, name, content):
    write_rows(40)
    read("labels", "cache")
    for path in Path("cache").glob(f"*/{name}"):
        path.unlink()
        if content is not None:
            path.write_bytes(content)
    expected = read("labels", None, validation_fraction=0.4)
    assert read("labels", "cache", validation_fraction=0.4) == expected


@pytest.mark.parametrize("at_once", [3, 1000])
def test_rows_of_several_entries_are_found_by_their_hash(monkeypatch, at_once):
    monkeypatch.setattr(_mapped, "AT_ONCE", at_once)
    monkeypatch.setattr("fastloop_plugins.text.known_tokens.AT_ONCE", at_once)
    for name, numbers in (("a", range(10)), ("b", range(20, 50))):
        folder = Path(name)
        folder.mkdir()
        lengths = np.array([number % 4 for number in numbers])
        np.save(folder / "lengths.npy", lengths)
        np.repeat(np.array(numbers, np.int32), lengths).tofile(folder / "ids.bin")
        np.save(folder / HASHES, hash_rows(map(str, numbers)))
        np.save(folder / CUT, np.flatnonzero(np.array(numbers) % 5 == 0))
    known = KnownTokens([Path("a"), Path("b")])
    places = known.find(hash_rows(map(str, range(60))))
    for number, place in enumerate(places.tolist()):
        if number in range(10) or number in range(20, 50):
            assert known.ids(place).tolist() == [number] * (number % 4)
            assert known.is_cut[place] == (number % 5 == 0)
        else:
            assert place == -1
