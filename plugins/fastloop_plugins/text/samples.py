"""Samples of the text tasks for `fastloop plan --samples`: rows as read, their tokens, and which tokens have a loss.

The rows go through the code that encodes them for training. ``fastloop_tools.samples`` declares the hook.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fastloop_plugins.text.columns import Text
    from fastloop_plugins.text.data import TextData
    from fastloop_plugins.text.model import TextModel
    from fastloop_plugins.text.tokens import Split

    Token = tuple[str, str | None]
    """The text of a token; its target: None without a loss, empty if it is the token itself."""
    Sample = list[tuple[str, str | list[Token]]]
    """Names and contents of the parts of a sample, see the hook."""


def labelled_samples(data: TextData, model: TextModel, split: Split) -> Iterator[Sample]:
    """Rows with labels. Their tokens have no loss of their own."""
    assert split.labels is not None
    for row, ids, label in zip(split.texts, split_rows(split), split.labels, strict=True):
        if data.label_type == "class":
            name = data.classes[int(label)]
        elif data.label_type == "classes":
            name = ", ".join(name for name, has in zip(data.classes, label, strict=True) if has)
        else:
            name = f"{label:g}"
        own = ids[: len(ids) // 2] if split.typed else ids
        yield [*_text_parts(row, data.columns), ("label", name), ("tokens", show_tokens(model.tokenizer, own))]


def column_samples(
    model: TextModel, split: Split, dataset: Any, columns: Sequence[str], keys: Sequence[str]
) -> Iterator[Sample]:
    """Rows of a ``TextTask``, with the tokens of each column. Their tokens have no loss of their own.

    Args:
        columns: The columns of texts.
        keys: The names of their ids in a sample.
    """
    for index, row in enumerate(split.texts):
        found = dataset[index]
        tokens = [(f"tokens of {key}", show_tokens(model.tokenizer, found[key])) for key in keys if key in found]
        yield [*_text_parts(row, columns), *tokens]


def split_rows(split: Split) -> list[NDArray[np.int32]]:
    """The ids of each row, which are end to end in a split."""
    return np.split(split.ids, np.cumsum(split.lengths)[:-1])


def _text_parts(row: Text, columns: Sequence[str]) -> Sample:
    texts = [row] if isinstance(row, str) else row
    return [*zip(columns if len(texts) == len(columns) else [", ".join(columns)], texts, strict=True)]


def show_tokens(tokenizer: Any, ids: Iterable[int], targets: Iterable[str | None] | None = None) -> list[Token]:
    """The text of each token and its target; None: no token has one. A token that is no text of its own, such as a part
    of a character or of a word, has its name in the vocabulary."""
    ids = [int(token) for token in ids]
    found = []
    for token, name in zip(ids, tokenizer.convert_ids_to_tokens(ids), strict=True):
        text = tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if name.startswith("\u2581") and not text.startswith(" "):  # the decoder strips the first space of a text
            text = f" {text}"
        found.append(name if not text or "\ufffd" in text or name.startswith("##") else text)
    return list(zip(found, [None] * len(ids) if targets is None else targets, strict=True))
