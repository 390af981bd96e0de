"""Prompts that a language model continues: conversations to answer, and batches."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fastloop import Batch, RecipeError
from fastloop_plugins._cache import flat
from fastloop_plugins.rows.paths import format_of
from fastloop_plugins.rows.table import RowError
from fastloop_plugins.text.batches import Sequences, mask, padded
from fastloop_plugins.text.chat.rows import Chat, other_keys, read_chat, unread_keys
from fastloop_plugins.text.chat.template import ChatRenderer
from fastloop_plugins.text.chunks import read_chunks
from fastloop_plugins.text.special_tokens import end_of

if TYPE_CHECKING:
    from fastloop_plugins.text.chat.data import LanguageTextData

logger = logging.getLogger("fastloop")


def chat_chunks(
    data: LanguageTextData, tokenizer: Any, source: Path | Iterable[str], start: int, size: int
) -> Iterator[Sequences]:
    """Conversations as token ids, with the prompt for an answer at the end: see ``read_chunks``. A text is a message of
    a user.

    At the end, logs the keys of messages that have no effect.

    Raises:
        RecipeError: The file or a row cannot be read, or the template rejects a conversation.
    """
    if isinstance(source, Path) and format_of(source)[0] in (".csv", ".tsv") and len(data.chat_columns) > 1:
        raise RecipeError(f"{source}: instructions and inputs need a file of type .jsonl, .json or .parquet.")
    renderer, keys = ChatRenderer(tokenizer), Counter[str]()
    names = [*data.columns, *data.optional_columns()]
    for rows, bad in read_chunks(data, source, start, size):
        prompts = []
        for index, values in enumerate(rows):
            try:
                chat = _to_answer(dict(zip(names, values, strict=False)), data.chat_columns)
                keys.update(other_keys(chat))
                prompts.append(renderer.prompt(chat))
            except RowError as error:
                bad(index, str(error))
        yield Sequences(*flat(prompts))
    if warning := unread_keys("predict", keys, renderer.names()):
        logger.warning("%s", warning)


def _to_answer(row: dict[str, Any], columns: Sequence[str]) -> Chat:
    """The conversation of a row, without answers at its end."""
    if len(columns) == 1 and isinstance(row[columns[0]], str):
        row[columns[0]] = [{"role": "user", "content": row[columns[0]]}]
    chat = read_chat(row, columns)
    asked = max((index for index, message in enumerate(chat.messages, 1) if message["role"] != "assistant"), default=0)
    if not asked:
        raise RowError("every message is from the assistant. Expected a message to answer.")
    return Chat(chat.messages[:asked], chat.tools)


class PromptCollator:
    """Pads prompts on the left, so that all of them end where generation begins. An empty prompt becomes an end token.

    Args:
        room: Tokens of a prompt at most: of a longer one, its end is kept. None: no limit.

    Attributes:
        generates: True: the model continues the batch. Packed rows cannot be continued.
    """

    generates = True
    deterministic = True

    def __init__(self, tokenizer: Any, room: int | None) -> None:
        self.pad_token_id, self.room, self.empty = tokenizer.pad_token_id, room, np.array(end_of(tokenizer))

    def __call__(self, samples: list[dict[str, Any]]) -> Batch:
        rows = [sample["input_ids"] for sample in samples]
        rows = [row[-(self.room or len(row)) :] if len(row) else self.empty for row in rows]
        width = max(map(len, rows))
        inputs = {
            "input_ids": padded(rows, width, self.pad_token_id, left=True),
            "attention_mask": mask(rows, width, left=True),
        }
        return Batch(inputs, tokens=sum(map(len, rows)))
