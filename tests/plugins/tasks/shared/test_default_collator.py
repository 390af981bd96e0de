"""``DefaultCollator``: samples of equal shapes are stacked, and a tokenizer pads token ids and labels."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from fastloop.errors import DataError
from fastloop.testing import expect_problem
from fastloop_plugins.tasks.shared.collate import DefaultCollator

SAMPLES = [{"input_ids": [5], "labels": [5]}, {"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}]
"""Samples of 1 and 3 tokens, with a label for each."""


def make_tokenizer(padding_side: str) -> PreTrainedTokenizerFast:
    """A tokenizer whose padding has the id 0."""
    words = Tokenizer(WordLevel({"<pad>": 0}, unk_token="<pad>"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", padding_side=padding_side)


@pytest.mark.parametrize(
    ("padding_side", "arguments", "ids", "labels"),
    [
        ("right", {}, [[5, 0, 0], [5, 6, 7]], [[5, -100, -100], [-100, 6, 7]]),
        ("left", {}, [[0, 0, 5], [5, 6, 7]], [[-100, -100, 5], [-100, 6, 7]]),
        ("left", {"pads_right": True}, [[5, 0, 0], [5, 6, 7]], [[5, -100, -100], [-100, 6, 7]]),
        ("right", {"multiple": 4}, [[5, 0, 0, 0], [5, 6, 7, 0]], [[5, -100, -100, -100], [-100, 6, 7, -100]]),
    ],
)
def test_labels_of_tokens_are_padded_as_the_ids(
    padding_side: str, arguments: dict[str, Any], ids: list[list[int]], labels: list[list[int]]
) -> None:
    batch = DefaultCollator(make_tokenizer(padding_side), "", **arguments)(SAMPLES)
    assert batch["input_ids"].tolist() == ids
    assert batch["labels"].tolist() == labels
    assert batch["attention_mask"].tolist() == [[int(token != 0) for token in row] for row in ids]


def test_labels_of_a_decoder_are_padded_on_the_right() -> None:
    samples = [{"input_ids": [5], "labels": [6, 7]}, {"input_ids": [5, 6, 7], "labels": [6]}]
    batch = DefaultCollator(make_tokenizer("left"), "")(samples)
    assert batch["input_ids"].tolist() == [[0, 0, 5], [5, 6, 7]]
    assert batch["labels"].tolist() == [[6, 7], [6, -100]]


def test_a_column_label_becomes_labels() -> None:
    samples = [{"input_ids": [5], "label": 1}, {"input_ids": [6], "label": 0}]
    batch = DefaultCollator(make_tokenizer("right"), "", names_labels=True)(samples)
    assert batch["labels"].tolist() == [1, 0]
    assert "label" not in batch


def test_without_a_tokenizer_shapes_must_be_equal() -> None:
    with expect_problem("wrong-shape 'input_ids' (1,) (3,) Pad them.", DataError):
        DefaultCollator(None, "Pad them.")(SAMPLES)
