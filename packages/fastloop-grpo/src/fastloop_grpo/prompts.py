"""Rows as prompts: the tokens of each prompt, and the values that reward functions get."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from fastloop_plugins.text import Chat, ChatRenderer, RowError, Sequences, Split, TextTask

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MARK = "\0"
"""The first character of a prompt that is a conversation and no text."""


def read_prompt(value: Any, name: str, key: str) -> str:
    """A text as it is, and messages as ``MARK`` and the JSON of a ``Chat``.

    Raises:
        RowError: The value is neither.
    """
    if isinstance(value, str) and not value.startswith(MARK):
        return value
    if not isinstance(value, list):
        raise RowError(f"column {name!r} (data.{key}) holds {value!r}, expected a text or a list of messages.")
    return MARK + TextTask.read_conversation(value, name, key)


def encode(
    tokenizer: PreTrainedTokenizerBase, rows: Sequence[Any], arguments: Mapping[str, Any]
) -> Iterator[list[int]]:
    """Yield a list for each row: the number of tokens of its prompt, these tokens, and the bytes of the JSON of the
    prompt and of its further values.

    For the prompt "1+1=" with the tokens 7 and 8, and the value 2, it is ``[2, 7, 8, *b'["1+1=", 2]']``.

    Args:
        arguments: ``template`` is the text of a chat template or None, and ``render`` whether texts are rendered, too.
            ``leaves_out``: ``Prompts`` leaves out prompts that are too long. In prediction, each row has a result.

    Raises:
        RowError: A conversation cannot be rendered; or in prediction, a prompt is too long or has no token.
    """
    if arguments["template"] is not None:
        tokenizer.chat_template = arguments["template"]
    renderer = ChatRenderer(tokenizer, "all", counts_contents=True)
    for row in rows:
        text, *values = (row,) if isinstance(row, str) else row
        prompt: Any = text
        tools = None
        if text.startswith(MARK):
            chat = Chat.loads(text[1:])
            prompt = chat.messages
            tools = chat.tools
        ids = encode_prompt(tokenizer, renderer, prompt, arguments["render"], tools)
        if not arguments["leaves_out"]:
            check_length(ids, arguments["max_length"])
        content = json.dumps([prompt, *map(json.loads, values)])
        yield [len(ids), *ids, *content.encode()]


def chats_of(row: Any, arguments: Mapping[str, Any]) -> list[Chat]:
    """The prompt of a row, if it is a conversation."""
    text = row if isinstance(row, str) else row[0]
    return [Chat.loads(text[1:])] if text.startswith(MARK) else []


def check_length(ids: Sequence[int], max_length: int) -> None:
    """Raise an error for a prompt to predict that has no token, or more than ``max_length``."""
    if not 1 <= len(ids) <= max_length:
        raise RowError(f"the prompt has {len(ids)} tokens, expected 1 to {max_length}: data.max_length.")


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase,
    renderer: ChatRenderer,
    prompt: Any,
    render: bool,
    tools: list[Any] | None = None,
) -> list[int]:
    """The tokens of a text or of messages, after which the completion follows.

    Args:
        render: Whether a text is rendered by the chat template, too.
        tools: The functions that may be called.

    Raises:
        RowError: There is no chat template, or it does not read the tools.
    """
    if isinstance(prompt, str) and not render:
        ids: list[int] = tokenizer(prompt, verbose=False)["input_ids"]
        end = tokenizer.eos_token_id
        if ids and ids[-1] == end and not prompt.endswith(tokenizer.eos_token):
            return ids[:-1]  # the tokenizer ends each text, and the completion belongs to this one
        return ids
    if tokenizer.chat_template is None:
        raise RowError("the tokenizer has no chat template. Give one: data.chat_template=chatml, or a file.")
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    chat = Chat(messages, tools)
    renderer.check_tools(chat)
    return renderer.prompt(chat)


def last_text(prompt: Any) -> str:
    """The text of a prompt, or of its last message; empty if that has only tool calls."""
    if isinstance(prompt, str):
        return prompt
    content = prompt[-1].get("content") or ""
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


class Prompts(Sequences):
    """The prompts of a split. A sample has ``input_ids`` of a prompt, int32, and ``row``, its number among the prompts
    of all splits.

    Args:
        split: The rows of ``encode``, end to end.
        max_length: Tokens of a prompt at most: longer prompts, and those without a token, are left out.

    Attributes:
        left_out: The numbers of these rows in the split, from 0.
        first: The number of its first prompt among those of all splits.
    """

    def __init__(self, split: Split, max_length: int) -> None:
        super().__init__(split.ids, split.lengths)
        starts = self.ends - split.lengths
        sizes = split.ids[starts].astype(np.int64)
        fits = (sizes > 0) & (sizes <= max_length)
        self.left_out = np.flatnonzero(~fits)
        self.first = 0
        self.starts = starts[fits]
        self.ends = self.ends[fits]
        self.lengths = sizes[fits]

    def __getitem__(self, index: int) -> dict[str, Any]:
        start = self.starts[index] + 1
        return {"input_ids": self.ids[start : start + self.lengths[index]], "row": self.first + index}

    def values(self, index: int) -> list[Any]:
        """The prompt as the file has it, a text or messages, and the values of ``data.columns``."""
        start = self.starts[index] + 1 + self.lengths[index]
        content = bytes(self.ids[start : self.ends[index]].astype(np.uint8))
        values: list[Any] = json.loads(content)
        return values


def find_prompt(splits: Sequence[Prompts], row: int) -> tuple[Prompts, int]:
    """The split of a prompt and its number in there, of its number among the prompts of all splits.

    With splits of 10 and 4 prompts, prompt 12 is number 2 of the second.
    """
    for split in splits:
        if split.first <= row < split.first + len(split):
            return split, row - split.first
    raise IndexError(f"prompt {row} belongs to no split")
