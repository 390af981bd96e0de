"""How an answer ends, by the text that a chat template renders.

Most templates write a special token after an answer. GLM's write none: there, the first token of the next turn, such as
``<|user|>``, ends an answer. Others, such as Alpaca's, end an answer with nothing that a model could learn to stop at.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PROBE = "31415926535"
"""A text that templates leave as it is."""
QUESTION = {"role": "user", "content": "Hello"}
ANSWER = {"role": "assistant", "content": PROBE}
FOLLOWING = (QUESTION, {"role": "tool", "content": "Hello"})
"""Messages that may follow an answer."""

END_ANSWERS = (
    "{%- set answers = namespace(ended=[]) -%}"
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'assistant' and message['content'] is string"
    " and not message['content'].endswith(END) -%}"
    "{%- set answers.ended = answers.ended + [dict(message, content=message['content'] + END)] -%}"
    "{%- elif message['role'] == 'assistant' and message['content'] and message['content'] is not string -%}"
    "{%- set part = {'type': 'text', 'text': END} -%}"
    "{%- set answers.ended = answers.ended + [dict(message, content=message['content'] + [part])] -%}"
    "{%- else -%}{%- set answers.ended = answers.ended + [message] -%}{%- endif -%}"
    "{%- endfor -%}{%- set messages = answers.ended -%}"
)
"""The beginning of a template that adds an end token to the content of each answer. ``END`` is the variable of the
token."""


@dataclass(frozen=True)
class AnswerEnd:
    """The end of an answer in a chat template.

    Attributes:
        tokens: Ids of the special tokens, any of which ends an answer; empty: there is none.
        next_turn: If the next turn ends an answer, the first ids of a turn up to its special token: those of a user,
            then those of other roles. Empty otherwise.
        is_known: Whether the template renders a question and its answer. False: ``tokens`` is empty.
    """

    tokens: list[int] = field(default_factory=list)
    next_turn: list[list[int]] = field(default_factory=list)
    is_known: bool = True


def find_answer_end(
    tokenizer: PreTrainedTokenizerBase, render: Callable[[list[dict[str, Any]]], str | None]
) -> AnswerEnd:
    """The end of an answer.

    Args:
        render: Returns the text of messages; None if the template rejects them.
    """
    text = render([QUESTION, ANSWER])
    if text is None or PROBE not in text:
        return AnswerEnd(is_known=False)
    rest = text.rpartition(PROBE)[2]
    special = _special_tokens(tokenizer)
    ids = tokenizer(rest, add_special_tokens=False)["input_ids"]
    for token in ids:
        if token in special:
            return AnswerEnd([token])
    if ids and ids[0] in tokenizer.get_added_vocab().values():
        return AnswerEnd([ids[0]])
    turns = []
    for message in FOLLOWING:
        longer = render([QUESTION, ANSWER, message])
        after = "" if longer is None else longer.rpartition(PROBE)[2].removeprefix(rest)
        turns.append(_first_special(tokenizer, after, special))
    if not turns[0]:
        return AnswerEnd()
    turns = [turn for index, turn in enumerate(turns) if turn and turn not in turns[:index]]
    return AnswerEnd([turn[-1] for turn in turns], turns)


def with_end(template: Any, variable: str) -> Any:
    """A chat template, or templates by name, with an end token added to the content of each answer.

    Args:
        variable: The variable of the token in templates: ``eos_token`` or ``sep_token``.
    """
    if isinstance(template, Mapping):
        return {name: with_end(text, variable) for name, text in template.items()}
    return END_ANSWERS.replace("END", variable) + template


def _special_tokens(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    special = set(tokenizer.all_special_ids)
    special.update(token for token, added in tokenizer.added_tokens_decoder.items() if added.special)
    return special


def _first_special(tokenizer: PreTrainedTokenizerBase, text: str, special: set[int]) -> list[int]:
    """The ids at the beginning of a text up to its first special token; empty if more than white space is before it."""
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    for place, token in enumerate(ids):
        if token in special:
            before = str(tokenizer.decode(ids[:place]))
            return [] if before.strip() else ids[: place + 1]
    return []
