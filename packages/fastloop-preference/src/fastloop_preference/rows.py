"""Rows as tokens: a prompt and its completions. Tokens and their division equal those of TRL."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from os.path import commonprefix
from typing import Any

import numpy as np
from fastloop_plugins.text import Chat, ChatRenderer, RowError, Sequences, Split, TextTask

COMPLETIONS = ("chosen", "rejected", "completion")
"""Options of ``data`` that name columns of completions."""
MARK = "\0"
"""The first character of a value that is a conversation and no text."""


def read_value(value: Any, name: str, key: str) -> str:
    """A text as it is, and messages, or a single one, as ``MARK`` and the JSON of a ``Chat``."""
    if value is None or isinstance(value, int | float):
        raise RowError(f"column {name!r} (data.{key}) holds {value!r}, expected a text or a list of messages.")
    if isinstance(value, str) and not value.startswith(MARK):
        return value
    return MARK + TextTask.read_conversation([value] if isinstance(value, Mapping) else value, name, key)


def encode(tokenizer: Any, rows: Sequence[Any], arguments: Mapping[str, Any]) -> Iterator[list[int]]:
    """Yield a list for each row: the numbers of tokens of its prompt and of each completion, then these tokens.

    A completion begins where its tokens and those of the prompt alone differ. ``arguments`` has the ``columns``, the
    text of a chat ``template`` or None, and ``render``: whether texts are rendered, too.
    """
    if arguments["template"] is not None:
        tokenizer.chat_template = arguments["template"]
    renderer = ChatRenderer(tokenizer, "all")
    for row in rows:
        values = dict(zip(arguments["columns"], (row,) if isinstance(row, str) else row, strict=True))
        system, prompt = values.pop("system", ""), values.pop("prompt", None)
        completions = [*values.values()]
        if arguments["render"] or any(text.startswith(MARK) for text in (prompt or "", *completions)):
            if tokenizer.chat_template is None:
                raise RowError("the tokenizer has no chat template. Give one: data.chat_template=chatml, or a file.")
            start, wholes = encode_chats(renderer, system, prompt, completions)
        else:
            start, wholes = encode_texts(tokenizer, prompt, completions)
        size = len(commonprefix([start, *wholes]))
        parts = [start[:size], *(whole[size:] for whole in wholes)]
        yield [*map(len, parts), *chain(*parts)]


def encode_texts(tokenizer: Any, prompt: str | None, completions: list[str]) -> tuple[list[int], list[list[int]]]:
    """The ids of a prompt, and of the prompt with each completion and the end token."""
    if prompt is None:
        prompt, completions = divide(completions) if len(completions) == 2 else ("", completions)
    end = tokenizer.eos_token or ""
    whole = [prompt + (text if text.endswith(end) else text + end) for text in completions]
    start, *wholes = tokenizer([prompt, *whole], verbose=False)["input_ids"]
    return start, wholes


def encode_chats(
    renderer: ChatRenderer, system: str, prompt: str | None, completions: list[str]
) -> tuple[list[int], list[list[int]]]:
    """The same of conversations."""
    before = [{"role": "system", "content": system}] if system else []
    asked, answers = messages(prompt, "user"), [messages(text, "assistant") for text in completions]
    if prompt is None:
        asked, answers = divide(answers) if len(answers) == 2 else (answers[0][:-1], [answers[0][-1:]])
    before += asked
    start = renderer.prompt(Chat(before)) if before else []
    return start, [renderer.encode(Chat(before + answer))[0] for answer in answers]


def messages(value: str | None, role: str) -> list[dict[str, Any]]:
    """The messages of a value: those of a conversation, or a text as one of ``role``."""
    if value is None or not value.startswith(MARK):
        return [{"role": role, "content": value}] if value else []
    return Chat.loads(value[1:]).messages


def divide(pair: Sequence[Any]) -> tuple[Any, list[Any]]:
    """The beginning that two texts or conversations share, without a space at its end, and the rest of each."""
    one, other = pair
    size = next((place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
    if size is None:
        size = max(min(len(one), len(other)) - 1, 0)
    elif size and one[size - 1] == " ":
        size -= 1
    return one[:size], [one[size:], other[size:]]


class Completions(Sequences):
    """Rows of completions of a prompt. A sample has the ids of prompt and completion by the name of each column: int32,
    ``~id`` for a token of the prompt, up to ``most``. With labels, it also has ``other``: the prompt of the row with
    the completion of the row before.

    Args:
        split: The rows of ``encode``, end to end.
        names: The columns of completions.
        most: Tokens of a prompt with a completion at most; the end is cut off.
        keep: The rows that stay: ``all``; ``begun``, with a token of each completion; ``whole``, without a cut.

    Attributes:
        sizes: Tokens of each prompt with each completion, (rows, completions).
        findings: Text of a warning -> the numbers of its rows in the split, from 0.
    """

    def __init__(self, split: Split, names: Sequence[str], most: int, keep: str) -> None:
        super().__init__(split.ids, split.lengths, split.labels)
        self.names, self.most, count = tuple(names), most, len(names) + 1
        starts = self.ends - split.lengths
        parts = split.ids[starts[:, None] + np.arange(count)].astype(np.int64)
        whole = parts[:, :1] + parts[:, 1:]
        kept = {"all": parts[:, 0] >= 0, "begun": parts[:, 0] < most, "whole": (whole <= most).all(1)}[keep]
        borders = np.cumsum(np.column_stack([starts + count, parts]), axis=1)
        same = [bool(count == 3) and np.array_equal(*np.split(split.ids[a:c], [b - a])) for a, b, c in borders[:, -3:]]
        self.findings = {
            f"are cut at {most} tokens (data.max_length)": np.flatnonzero((whole > most).any(1) & kept),
            f"are left out: more than {most} tokens (data.max_length)": np.flatnonzero(~kept),
            "have the same completion twice": np.flatnonzero(same),
        }
        self.borders = borders[kept]
        self.sizes, self.ends = np.minimum(whole, most)[kept], self.ends[kept]
        self.labels = None if self.labels is None else self.labels[kept]
        self.lengths = self.sizes.sum(1)

    def __getitem__(self, index: int) -> dict[str, Any]:
        start, *ends = self.borders[index]
        prompt, sample = ~self.ids[start : ends[0]], self.label(index)
        parts = {name: self.ids[a:b] for name, a, b in zip(self.names, ends, ends[1:], strict=False)}
        if self.labels is not None:
            parts["other"] = self.ids[slice(*self.borders[index - 1, 1:3])]
        return {name: np.concatenate([prompt, part])[: self.most] for name, part in parts.items()} | sample
