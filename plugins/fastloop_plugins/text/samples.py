"""Samples of the text tasks for `fastloop plan --samples`: rows as read, their tokens, and which tokens have a loss.

The rows go through the code that encodes them for training. ``fastloop_tools.plan.samples`` declares the hook.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from transformers import PreTrainedTokenizerBase

    from fastloop_plugins.text.columns import Text
    from fastloop_plugins.text.data import TextData
    from fastloop_plugins.text.model import TextModel
    from fastloop_plugins.text.tokens import Split

    Token = tuple[str, str | None]
    """The text of a token; its target: None without a loss, empty if it is the token itself."""
    Sample = list[tuple[str, str | list[Token]]]
    """Names and contents of the parts of a sample, see the hook."""


def column_samples(data: TextData, model: TextModel, split: Split, dataset: Any) -> Iterator[Sample]:
    """Rows of a ``TextTask``, with their labels and the tokens of each text. Their tokens have no loss of their own.

    Args:
        dataset: The samples of ``split``.
    """
    for index, row in enumerate(split.texts):
        sample = dataset[index]
        parts = _text_parts(row, [*data.text_columns()])
        if split.labels is not None:
            parts.append(("label", _name_label(data, split.labels[index])))
        for name, ids in sample.items():
            if name in ("input_ids", *data.text_columns().values()):
                title = "tokens" if name == "input_ids" else f"tokens of {name}"
                parts.append((title, show_tokens(model.tokenizer, ids)))
        yield parts


def _name_label(data: TextData, label: Any) -> str:
    if data.label_type == "class":
        return data.classes[int(label)]
    if data.label_type == "classes":
        return ", ".join(name for name, has in zip(data.classes, label, strict=True) if has)
    return f"{label:g}"


def split_rows(split: Split) -> list[NDArray[np.int32]]:
    """The ids of each row, which are end to end in a split."""
    return np.split(split.ids, np.cumsum(split.lengths)[:-1])


def _text_parts(row: Text, columns: Sequence[str]) -> Sample:
    texts = [row] if isinstance(row, str) else row
    if len(texts) != len(columns):  # the texts of several columns were joined
        columns = [", ".join(columns)]
    return [*zip(columns, texts, strict=True)]


def show_tokens(
    tokenizer: PreTrainedTokenizerBase, ids: Iterable[int], targets: Iterable[str | None] | None = None
) -> list[Token]:
    """The text of each token and its target; None: no token has one. A token that is no text of its own, such as a part
    of a character or of a word, has its name in the vocabulary."""
    ids = [int(token) for token in ids]
    shown = []
    for token, name in zip(ids, tokenizer.convert_ids_to_tokens(ids), strict=True):
        text = str(tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False))
        if name.startswith("\u2581") and not text.startswith(" "):  # the decoder strips the first space of a text
            text = f" {text}"
        has_own_text = bool(text) and "\ufffd" not in text and not name.startswith("##")
        shown.append(text if has_own_text else name)
    if targets is None:
        targets = [None] * len(ids)
    return list(zip(shown, targets, strict=True))
