"""Conversations to continue, read in chunks, and the tokens that end an answer."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastloop.errors import RecipeError
from fastloop_plugins._cache import flat
from fastloop_plugins.rows.paths import find_files, format_of
from fastloop_plugins.rows.table import RowError
from fastloop_plugins.text.batches import Sequences
from fastloop_plugins.text.chat.rows import Chat, other_keys, read_chat, unread_keys
from fastloop_plugins.text.chat.template import ChatRenderer

if TYPE_CHECKING:
    from fastloop_plugins.text.chat.data import LanguageTextData

logger = logging.getLogger("fastloop")


def chat_chunks(
    data: LanguageTextData, tokenizer: Any, source: Path | Iterable[str], start: int, size: int
) -> Iterator[Sequences]:
    """The conversations of a file as token ids, with the prompt for an answer at the end: ``size`` at a time, from row
    ``start``.

    At the end, logs the keys of messages that have no effect.

    Args:
        source: A file, or messages of a user.

    Raises:
        RecipeError: The file or a row cannot be read, or the template rejects a conversation.
    """
    renderer, keys = ChatRenderer(tokenizer), Counter[str]()
    chats = islice(conversations(data, source), start, None)
    while chunk := list(islice(chats, size)):
        keys.update(key for _, chat in chunk for key in other_keys(chat))
        yield Sequences(*flat(renderer.prompt(chat, partial(str, where)) for where, chat in chunk))
    if warning := unread_keys("predict", keys, renderer.names()):
        logger.warning("%s", warning)


def conversations(data: LanguageTextData, source: Path | Iterable[str]) -> Iterator[tuple[str, Chat]]:
    """Yield the name of each row and its conversation, without answers at the end. A text is one message of a user."""
    if not isinstance(source, Path):
        for number, text in enumerate(source, 1):
            yield f"text {number}", _prompt({data.chat_columns[0]: text}, data, f"text {number}")
        return
    path = find_files(data.recipe, str(source), "predict", "FILE")[0]
    if format_of(path)[0] in (".csv", ".tsv") and len(data.chat_columns) > 1:
        raise RecipeError(f"{path}: instructions and inputs need a file of type .jsonl, .json or .parquet.")
    names = [*data.columns, *data.optional_columns()]
    for number, values in enumerate(data.layout(predicts=True).rows(str(path)), 1):
        where = f"{path}, row {number}"
        yield where, _prompt(dict(zip(names, values, strict=True)), data, where)


def _prompt(row: dict[str, Any], data: LanguageTextData, where: str) -> Chat:
    """The conversation to answer."""
    first = data.chat_columns[0]
    if len(data.chat_columns) == 1 and isinstance(row[first], str):
        row[first] = [{"role": "user", "content": row[first]}]
    try:
        chat = read_chat(row, data.chat_columns)
    except RowError as error:
        raise RecipeError(f"{where}: {error}") from None
    asked = max((index for index, message in enumerate(chat.messages, 1) if message["role"] != "assistant"), default=0)
    if not asked:
        raise RecipeError(f"{where}: every message is from the assistant. Expected a message to answer.")
    return Chat(chat.messages[:asked], chat.tools)


def end_tokens(tokenizer: Any) -> list[int]:
    """The tokens that end an answer: the end token, and the special token that the template writes after an answer, if
    there is one."""
    ends = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    text: str = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "answer"}], tokenize=False
    )
    after = tokenizer(text.rpartition("answer")[2], add_special_tokens=False)["input_ids"]
    if after and after[0] in tokenizer.get_added_vocab().values():
        ends.append(after[0])
    return sorted(set(ends))
