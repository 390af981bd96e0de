"""Rows of a file to predict are read as those of a split. test_broken_files.py has files that cannot be read.

Modules:
    plugins/fastloop_plugins/text/chunks.py
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from fastloop.errors import RecipeError
from fastloop.recipe import make_recipe
from fastloop_plugins.tasks.tags.data import TagTextData
from fastloop_plugins.text.chunks import text_chunks
from fastloop_plugins.text.data import TextData


def problem(read: Callable[[], Any]) -> tuple[str, str]:
    """The place and the first sentence of an error."""
    with pytest.raises(RecipeError) as error:
        read()
    place, _, text = str(error.value).partition(": ")
    return place, text.partition(". ")[0].rstrip(".")


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_a_bad_row_of_a_later_chunk_has_its_place_in_the_file(name):
    rows = [{"text": "a film"}] * 5 + [{"text": "\x00"}]
    if name == "a.jsonl":
        lines = "".join(json.dumps(row) + "\n\n" for row in rows).replace('"\\u0000"', "5")
        Path(name).write_text(lines)
    else:
        texts = pa.array([b"a film"] * 5 + [b"\xff"], pa.binary()).view(pa.string())
        parquet.write_table(pa.table({"text": texts}), name)
    data = TextData(make_recipe({"data": {"files": {"train": name}}}), labelled=False)
    trained = problem(data.load)
    assert trained[0] == ("a.jsonl, line 11" if name == "a.jsonl" else name)
    for start in (0, 3):
        assert problem(lambda start=start: list(text_chunks(data, Path(name), start, 2))) == trained


def test_a_sentence_that_is_no_list_of_words_has_the_same_error():
    rows = [{"words": ["a"], "tags": ["O"]}, {"words": ["b"], "tags": ["B"]}, {"words": "c d", "tags": ["O"]}]
    Path("a.jsonl").write_text("\n\n".join(map(json.dumps, rows)))
    data = TagTextData(make_recipe({"data": {"files": {"train": "a.jsonl"}}}))
    trained = problem(data.load)
    assert trained[0] == "a.jsonl, line 5"
    assert problem(lambda: list(data.sentences(Path("a.jsonl"), 0, 2))) == trained


def test_sentences_of_a_split_and_of_texts_are_those_of_its_files():
    rows = [{"words": ["a", "b"], "tags": ["O", "B"]}, {"words": ["c"], "tags": ["O"]}, {"words": [], "tags": []}]
    Path("a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = TagTextData(make_recipe({"data": {"files": {"train": "a.jsonl"}, "validation_fraction": 0}}))
    assert [words for words, _ in data.sentences(Path("a.jsonl"), 1, 1)] == [[["c"]], [[]]]
    assert [words for words, _ in data.sentences(["a b", "c"], 0, 8)] == [[["a", "b"], ["c"]]]


@pytest.mark.parametrize("skip", [False, True], ids=["", "skip-unreadable"])
@pytest.mark.parametrize(
    "options",
    [{"label_map": {"": None}}, {"drop": [{"column": "text", "equals": "b"}]}, {"deduplicate": True}],
    ids=["label_map", "drop", "deduplicate"],
)
def test_no_row_is_left_out_of_a_prediction(options, skip):
    rows = [{"text": "a", "label": "x"}, {"text": "b", "label": ""}, {"text": "a", "label": "y"}]
    Path("a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    section = {"files": {"train": "a.jsonl"}, "label": "label", **options}
    data = TextData(make_recipe({"data": section}), labelled=True)
    data.skip_unreadable = skip
    assert [texts for texts, _ in text_chunks(data, Path("a.jsonl"), 0, 2)] == [["a", "b"], ["a"]]
