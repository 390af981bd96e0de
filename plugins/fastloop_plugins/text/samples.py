"""Samples of the text tasks for `fastloop plan --samples`: rows as read, their tokens, and which tokens have a loss.

The rows go through the code that encodes them for training. ``fastloop_tools.samples`` declares the hook.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fastloop_plugins.text.chat.rows import Chat

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fastloop_plugins.text.chat.data import LanguageTextData
    from fastloop_plugins.text.columns import Text
    from fastloop_plugins.text.data import TextData
    from fastloop_plugins.text.model import TextModel
    from fastloop_plugins.text.tokens import Split

    Token = tuple[str, str | None]
    """The text of a token; its target: None without a loss, empty if it is the token itself."""
    Sample = list[tuple[str, str | list[Token]]]
    """Names and contents of the parts of a sample, see the hook."""


def language_samples(data: LanguageTextData, model: TextModel, split: Split) -> Iterator[Sample]:
    """Rows of a language model. A block's first token has no loss, nor has a conversation's."""
    size, before = data.options.max_length, 0
    for row, ids in zip(split.texts, split_rows(split), strict=True):
        if data.masked:
            loss, rest = ids >= 0, f"the tokens after data.max_length={size}: {len(ids) - size}"
            loss[:1] = False
            sample = _chat_parts(row)
        else:
            loss, rest = (before + np.arange(len(ids))) % size > 0, f"the row's other tokens: {len(ids) - size}"
            sample, before = [("text", str(row))], before + len(ids)
        shown = np.where(ids < 0, ~ids, ids)[:size]
        sample.append(("tokens", show_tokens(model.tokenizer, shown, ("" if one else None for one in loss[:size]))))
        if len(ids) > size:
            sample.append(("not shown" if not data.masked else "left out", rest))
        if data.masked and not loss[:size].any():
            sample.append(("left out", "the row: none of its tokens has a loss"))
        yield sample


def column_samples(data: TextData, model: TextModel, split: Split, dataset: Any) -> Iterator[Sample]:
    """Rows of a ``TextTask``, with their labels and the tokens of each text. Their tokens have no loss of their own.

    Args:
        dataset: The samples of ``split``.
    """
    for index, row in enumerate(split.texts):
        sample, parts = dataset[index], _text_parts(row, [*data.text_columns()])
        if split.labels is not None:
            parts.append(("label", _name_label(data, split.labels[index])))
        for name, ids in sample.items():
            if name in ("input_ids", *data.text_columns().values()):
                what = "tokens" if name == "input_ids" else f"tokens of {name}"
                parts.append((what, show_tokens(model.tokenizer, ids)))
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
    return [*zip(columns if len(texts) == len(columns) else [", ".join(columns)], texts, strict=True)]


def _chat_parts(row: Any) -> Sample:
    """The messages of a conversation, each by its role; or prompt and completion."""
    if isinstance(row, tuple):
        return [*zip(("prompt", "completion"), row, strict=True)]
    chat = Chat.loads(row)
    parts: Sample = [("tools", json.dumps(chat.tools, ensure_ascii=False))] if chat.tools else []
    for message in chat.messages:
        more = {key: value for key, value in message.items() if key not in ("role", "content")}
        content = message.get("content") or ""
        text = content if isinstance(content, str) else "".join(part["text"] for part in content)
        parts.append((message["role"], text + (json.dumps(more, ensure_ascii=False) if more else "")))
    return parts


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
