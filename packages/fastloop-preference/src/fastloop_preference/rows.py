"""Rows as tokens: a prompt and its completions. Tokens and their division equal those of TRL."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, pairwise
from os.path import commonprefix
from typing import TYPE_CHECKING, Any

import numpy as np
from fastloop_plugins.text import Chat, ChatRenderer, RowError, Sequences, Split, TextTask

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

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


def encode(
    tokenizer: PreTrainedTokenizerBase, rows: Sequence[Any], arguments: Mapping[str, Any]
) -> Iterator[list[int]]:
    """Yield a list for each row: the numbers of tokens of its prompt and of each completion, then these tokens.

    A completion begins where its tokens and those of the prompt alone differ. ``arguments`` has the ``columns``, the
    text of a chat ``template`` or None, and ``render``: whether texts are rendered, too.
    """
    if arguments["template"] is not None:
        tokenizer.chat_template = arguments["template"]
    renderer = ChatRenderer(tokenizer, "all", counts_contents=True)
    for row in rows:
        system, prompt, completions = read_row(row, arguments)
        has_chats = any(text.startswith(MARK) for text in (prompt or "", *completions))
        if arguments["render"] or has_chats:
            if tokenizer.chat_template is None:
                raise RowError("the tokenizer has no chat template. Give one: data.chat_template=chatml, or a file.")
            prompt_ids, wholes = encode_chats(renderer, system, prompt, completions)
        else:
            prompt_ids, wholes = encode_texts(tokenizer, prompt, completions)
        size = len(commonprefix([prompt_ids, *wholes]))
        parts = [prompt_ids[:size]]
        parts += [whole[size:] for whole in wholes]
        yield [len(part) for part in parts] + list(chain.from_iterable(parts))


def read_row(row: Any, arguments: Mapping[str, Any]) -> tuple[str, str | None, list[str]]:
    """The system message of a row, its prompt and its completions."""
    texts = (row,) if isinstance(row, str) else row
    values = dict(zip(arguments["columns"], texts, strict=True))
    system = values.pop("system", "")
    prompt = values.pop("prompt", None)
    return system, prompt, list(values.values())


def encode_texts(
    tokenizer: PreTrainedTokenizerBase, prompt: str | None, completions: list[str]
) -> tuple[list[int], list[list[int]]]:
    """The ids of a prompt, and of the prompt with each completion and the end token."""
    if prompt is None:
        prompt = ""
        if len(completions) == 2:
            prompt, completions = divide(completions)
    end = tokenizer.eos_token or ""
    texts = [prompt]
    for completion in completions:
        text = prompt + completion
        texts.append(text if completion.endswith(end) else text + end)
    prompt_ids, *wholes = tokenizer(texts, verbose=False)["input_ids"]
    for ids in wholes:
        if ids[-2:] == [tokenizer.eos_token_id] * 2:  # the tokenizer ends each text, too
            ids.pop()
    return prompt_ids, wholes


def encode_chats(
    renderer: ChatRenderer, system: str, prompt: str | None, completions: list[str]
) -> tuple[list[int], list[list[int]]]:
    """The same of conversations, with the tools that they have.

    Raises:
        RowError: The template does not read the tools.
    """
    asked, answered = build_chats(system, prompt, completions)
    renderer.check_tools(asked)
    prompt_ids = renderer.prompt(asked) if asked.messages else []
    return prompt_ids, [renderer.encode(chat)[0] for chat in answered]


def chats_of(row: Any, arguments: Mapping[str, Any]) -> list[Chat]:
    """The prompt of a row with each of its completions, as conversations."""
    return build_chats(*read_row(row, arguments))[1]


def build_chats(system: str, prompt: str | None, completions: list[str]) -> tuple[Chat, list[Chat]]:
    """The prompt of a row, and the prompt with each completion, as conversations."""
    tools = find_tools([prompt or "", *completions])
    asked = messages(prompt, "user")
    answers = [messages(text, "assistant") for text in completions]
    if prompt is None and len(answers) == 2:
        asked, answers = divide(answers)
    elif prompt is None:  # the last message is the completion
        asked = answers[0][:-1]
        answers = [answers[0][-1:]]
    before = [{"role": "system", "content": system}] if system else []
    before += asked
    return Chat(before, tools), [Chat(before + answer, tools) for answer in answers]


def find_tools(values: Sequence[str]) -> list[Any] | None:
    """The tools of a row, which each of its conversations has; None: there are none."""
    for value in values:
        if value.startswith(MARK):
            return Chat.loads(value[1:]).tools
    return None


def messages(value: str | None, role: str) -> list[dict[str, Any]]:
    """The messages of a value: those of a conversation, or a text as one of ``role``."""
    if value is None or not value.startswith(MARK):
        return [{"role": role, "content": value}] if value else []
    return Chat.loads(value[1:]).messages


def divide(pair: Sequence[Any]) -> tuple[Any, list[Any]]:
    """The beginning that two texts or conversations share, without a space at its end, and the rest of each.

    ``the sky is blue`` and ``the sky is red`` share ``the sky is``. If one is the beginning of the other, its last
    character or message is no part of the beginning.
    """
    first, second = pair
    shorter = min(len(first), len(second))
    size = 0
    while size < shorter and first[size] == second[size]:
        size += 1
    if size == shorter:
        size = max(shorter - 1, 0)
    elif size and first[size - 1] == " ":
        size -= 1
    return first[:size], [first[size:], second[size:]]


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
        self.names = tuple(names)
        self.most = most
        # A row [2 3 1 | 7 8 | 4 5 6 | 9]: a prompt of 2 tokens, and completions of 3 and 1. Its borders are the
        # positions of 7, 4 and 9, and the end.
        count = len(names) + 1
        starts = self.ends - split.lengths
        parts = split.ids[starts[:, None] + np.arange(count)].astype(np.int64)  # (rows, count): [2 3 1] of this row
        borders = np.cumsum(np.column_stack([starts + count, parts]), axis=1)
        whole = parts[:, :1] + parts[:, 1:]  # each prompt with each completion
        is_empty = np.zeros(len(parts), dtype=bool)
        fits = np.ones(len(parts), dtype=bool)
        if keep == "begun":
            is_empty = (parts[:, 1:] == 0).any(1)
            fits = parts[:, 0] < most
        elif keep == "whole":
            fits = (whole <= most).all(1)
        is_kept = fits & ~is_empty
        same = np.zeros(len(parts), dtype=bool)
        same_after_cut = np.zeros(len(parts), dtype=bool)
        if len(names) == 2:
            for row, (first, second, end) in enumerate(borders[:, -3:]):
                chosen = split.ids[first:second]
                rejected = split.ids[second:end]
                same[row] = np.array_equal(chosen, rejected)
                room = max(most - parts[row, 0], 0)
                same_after_cut[row] = np.array_equal(chosen[:room], rejected[:room])
        self.findings = {
            f"are cut at {most} tokens (data.max_length)": np.flatnonzero((whole > most).any(1) & is_kept),
            f"are left out: more than {most} tokens (data.max_length)": np.flatnonzero(~fits),
            "are left out: a completion has no token": np.flatnonzero(fits & is_empty),
            "have the same completion twice": np.flatnonzero(same),
            f"have the same completion twice after the cut at {most} tokens (data.max_length)": np.flatnonzero(
                same_after_cut & ~same & is_kept
            ),
        }
        self.borders = borders[is_kept]
        self.sizes = np.minimum(whole, most)[is_kept]
        self.ends = self.ends[is_kept]
        if self.labels is not None:
            self.labels = self.labels[is_kept]
        self.lengths = self.sizes.sum(1)

    def __getitem__(self, index: int) -> dict[str, Any]:
        start, *borders = self.borders[index]
        prompt = ~self.ids[start : borders[0]]
        completions = {}
        for name, (begin, end) in zip(self.names, pairwise(borders), strict=True):
            completions[name] = self.ids[begin:end]
        if self.labels is not None:
            begin, end = self.borders[index - 1, 1:3]  # of the completion of the row before
            completions["other"] = self.ids[begin:end]
        sample = {name: np.concatenate([prompt, ids])[: self.most] for name, ids in completions.items()}
        return sample | self.label(index)
