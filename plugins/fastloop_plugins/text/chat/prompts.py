"""Prompts that a language model continues: conversations to answer, and batches."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fastloop import Batch, Problem, RecipeError
from fastloop.problem import agree, counted_of
from fastloop_plugins._mapped import flat
from fastloop_plugins.rows.suffixes import format_of
from fastloop_plugins.rows.table import RowError
from fastloop_plugins.text.batches import mask, padded
from fastloop_plugins.text.chat.left_out_contents import LeftOutContents
from fastloop_plugins.text.chat.rows import Chat, other_keys, read_chat, text_of, unread_keys
from fastloop_plugins.text.chat.template import ChatRenderer
from fastloop_plugins.text.chunks import EmptyTexts, read_chunks
from fastloop_plugins.text.sequences import Sequences
from fastloop_plugins.text.special_tokens import end_of, special_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from fastloop_plugins.text.chat.data import LanguageTextData

logger = logging.getLogger("fastloop")


def chat_chunks(
    data: LanguageTextData,
    tokenizer: PreTrainedTokenizerBase,
    source: Path | Iterable[str],
    start: int,
    size: int,
    room: int | None = None,
) -> Iterator[Sequences]:
    """Conversations as token ids, with the prompt for an answer at the end: see ``read_chunks``. A text is a message of
    a user.

    At the end, logs how many messages to answer are empty, the keys of messages that have no effect, and how many rows
    have a content that the template leaves out.

    Args:
        room: Tokens of a prompt at most, see ``shortened_prompt``; None: no limit.

    Raises:
        RecipeError: The file or a row cannot be read, or the template rejects a conversation.
    """
    if isinstance(source, Path) and format_of(source)[0] in (".csv", ".tsv") and len(data.chat_columns) > 1:
        raise RecipeError(
            "instructions and inputs need a file of type .jsonl, .json or .parquet.",
            code="unknown-format",
            place=str(source),
        )
    renderer = ChatRenderer(tokenizer, counts_contents=True)
    left_out = LeftOutContents(renderer)
    keys = Counter[str]()
    empty = EmptyTexts()
    cut = CutPrompts(room)
    names = [*data.columns, *data.optional_text_columns()]
    for rows, bad in read_chunks(data, source, start, size):
        prompts = []
        for index, values in enumerate(rows):
            try:
                # texts by themselves have no optional columns
                chat = _to_answer(dict(zip(names, values, strict=False)), data)
                keys.update(other_keys(chat))
                left_out.add([chat], f"row {start + left_out.total + 1}")
                empty.add(text_of(chat.messages[-1]))
                prompts.append(cut.shorten(chat, renderer))
            except RowError as error:
                bad(index, str(error))
        yield Sequences(*flat(prompts))
    for warning in (unread_keys("predict", keys, renderer.names()), left_out.problem("predict")):
        if warning is not None:
            logger.warning(warning)
    empty.warn("messages to answer")
    cut.warn("Their system message stays, and their oldest turns are left out")


class CutPrompts:
    """Shortens prompts that leave no room for an answer, and counts them.

    Args:
        room: Tokens of a prompt at most; None: no limit.
    """

    def __init__(self, room: int | None) -> None:
        self.room = room
        self.total = 0
        self.cut = 0

    def shorten(self, chat: Chat, renderer: ChatRenderer) -> list[int]:
        """The token ids of a conversation with its prompt for an answer, without as many of its oldest turns as the
        room needs. A turn begins with a message of the user.

        The system message and the last turn stay. If these two are too long, the text after the system message is cut
        at its beginning, see ``cut_tokens``.

        Raises:
            RowError: See ``ChatRenderer.prompt``.
        """
        ids = renderer.prompt(chat)
        self.total += 1
        if self.room is None or len(ids) <= self.room:
            return ids
        self.cut += 1
        roles = [message["role"] for message in chat.messages]
        system = 0
        while roles[system] == "system" and system < len(roles) - 1:
            system += 1
        shorter = chat
        for start in range(system + 1, len(roles)):
            if roles[start] != "user":
                continue
            shorter = Chat(chat.messages[:system] + chat.messages[start:], chat.tools)
            ids = renderer.prompt(shorter)
            if len(ids) <= self.room:
                return ids
        return cut_tokens(ids, self._beginning(shorter, system, ids, renderer), self.room)

    def count(self, prompts: Sequences) -> Sequences:
        """The same prompts, which the collator cuts."""
        self.total += len(prompts)
        if self.room is not None:
            self.cut += int((prompts.lengths > self.room).sum())
        return prompts

    def warn(self, how: str) -> None:
        """Log how many prompts are cut."""
        if self.cut:
            logger.warning(
                Problem(
                    f"{counted_of(self.cut, self.total, 'prompts')} {agree(self.cut, 'has', 'have')} more than "
                    f"{self.room} tokens, the positions of the model less max_new_tokens, and "
                    f"{agree(self.cut, 'is', 'are')} cut. {how}.",
                    code="texts-cut",
                    place="data: predict",
                )
            )

    @staticmethod
    def _beginning(chat: Chat, system: int, ids: list[int], renderer: ChatRenderer) -> int:
        """The tokens of a prompt before the text of its first message after the system message: also special tokens
        and a system message that only the template writes. 0 if it rejects an empty message.

        Args:
            chat: The conversation of the prompt.
            system: How many system messages begin it.
            ids: The tokens of the prompt.
        """
        empty = {"role": chat.messages[system]["role"], "content": ""}
        try:
            empty_ids = renderer.prompt(Chat([*chat.messages[:system], empty], chat.tools))
        except RowError:
            return 0
        size = 0
        for token, empty_token in zip(ids, empty_ids, strict=False):  # the shorter prompt ends the comparison
            if token != empty_token:
                break
            size += 1
        return size


def counted_prompts(chunks: Iterator[Sequences], room: int | None) -> Iterator[Sequences]:
    """Texts to continue. At the end, logs how many the collator cuts."""
    cut = CutPrompts(room)
    for chunk in chunks:
        yield cut.count(chunk)
    cut.warn("Their end stays, after the token that begins a text")


def cut_tokens(ids: list[int], beginning: int, room: int) -> list[int]:
    """The first ``beginning`` tokens, and as many of the last ones as ``room`` has for them; only the last ones if the
    first ones take more than half of it.

    For ids ``[1, 2, 3, 4, 5, 6]``, a beginning of 2 and room for 4: ``[1, 2, 5, 6]``.
    """
    if beginning > room // 2:
        return ids[-room:]
    last = room - beginning
    return ids[:beginning] + ids[len(ids) - last :]


def _to_answer(row: dict[str, Any], data: LanguageTextData) -> Chat:
    """The conversation of a row, without answers at its end."""
    columns = data.chat_columns
    if len(columns) == 1 and isinstance(row[columns[0]], str):
        row[columns[0]] = [{"role": "user", "content": row[columns[0]]}]
    chat = read_chat(row, columns, data.options.roles)
    # of the roles [system, user, assistant, user, assistant], the first four messages are to answer
    end = len(chat.messages)
    while end > 0 and chat.messages[end - 1]["role"] == "assistant":
        end -= 1
    if end == 0:
        raise RowError("every message is from the assistant. Expected a message to answer.")
    return Chat(chat.messages[:end], chat.tools)


class PromptCollator:
    """Pads prompts on the left, so that all of them end where generation begins. An empty prompt becomes an end token.

    A batch is as wide as its longest prompt, without ``pad_to_multiple_of``: the answers change its width anyway.

    Args:
        room: Tokens of a prompt at most: of a longer one, the token that begins a text and its end are kept. None: no
            limit.

    Attributes:
        generates: True: the model continues the batch. Packed rows cannot be continued.
    """

    generates = True
    deterministic = True

    def __init__(self, tokenizer: PreTrainedTokenizerBase, room: int | None) -> None:
        self.pad_token_id = tokenizer.pad_token_id
        self.room = room
        self.beginning = len(special_tokens(tokenizer).beginning)
        self.empty = np.array(end_of(tokenizer))

    def __call__(self, samples: list[dict[str, Any]]) -> Batch:
        rows = [self._prompt(sample["input_ids"]) for sample in samples]
        width = max(map(len, rows))
        inputs = {
            "input_ids": padded(rows, width, self.pad_token_id, left=True),
            "attention_mask": mask(rows, width, left=True),
        }
        return Batch(inputs, tokens=sum(map(len, rows)))

    def _prompt(self, ids: Any) -> Any:
        """The token ids of a prompt, as an array."""
        if not len(ids):
            return self.empty
        if self.room is None or len(ids) <= self.room:
            return ids
        return np.array(cut_tokens(list(ids), self.beginning, self.room))
