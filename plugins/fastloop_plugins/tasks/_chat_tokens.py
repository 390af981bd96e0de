"""Token ids of conversations, and which of them have a loss.

Ids are kept as signed numbers, so that the cache of token ids holds both: ``id`` for a token with a loss, ``~id`` (negative) for another.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from fastloop import RecipeError
from fastloop_plugins.tasks._chat_data import template_text
from fastloop_plugins.tasks._text_model import TextModel

if TYPE_CHECKING:
    from fastloop.recipe import Recipe

logger = logging.getLogger("fastloop")

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>\\n' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
BUILT_IN = {"chatml": CHATML}
"""Name -> chat template, with markers of the assistant's tokens."""
MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")
"""The statement before the assistant's tokens, as transformers finds it."""
SPECIAL = re.compile(r"<\|[^|<>\s]+\|>")
"""Special tokens in a chat template."""
REMEDY = "Mark its answers by {% generation %} in a template (data.chat_template=FILE), or give data.train_on=all."


class ChatModel(TextModel):
    """The ``model`` section, with a tokenizer that has a chat template."""

    def __init__(self, recipe: Recipe, template: str | None) -> None:
        super().__init__(recipe, classify=False)
        self.template = template_text(recipe, template, BUILT_IN) if template is not None and recipe.inference is None else None
        self.marks = sorted(set(SPECIAL.findall(self.template or "")))
        if self.trained is not None and self.trained.vocab_size - len(self.marks) > 8:
            self.trained.vocab_size -= len(self.marks)  # which are added after training

    def load_tokenizer(self, max_length: int) -> None:
        super().load_tokenizer(max_length)
        if self.tokenizer is not None:
            self._set_template()
            if unknown := [mark for mark in self.marks if mark not in self.tokenizer.get_vocab()]:
                logger.warning("data.chat_template: the tokenizer has no token %s, so each is split into several", ", ".join(unknown))

    def finish_tokenizer(self, texts: list[str], max_length: int, types: bool = False) -> None:
        if self.trained is not None:
            contents = [message.get("content") or "" for text in texts for message in json.loads(text)]
            super().finish_tokenizer(contents, max_length)
            self.tokenizer.add_tokens(self.marks, special_tokens=True)
            self._set_template()

    def _set_template(self) -> None:
        if self.template is not None:
            self.tokenizer.chat_template = self.template
        if not self.tokenizer.chat_template:
            raise RecipeError(
                f"{self.recipe.where}: data.messages: the tokenizer has no chat template. Give one: data.chat_template=FILE.jinja, "
                f"or a built-in name ({', '.join(BUILT_IN)})."
            )


class CompletionModel(TextModel):
    """The ``model`` section, for prompts with completions."""

    def finish_tokenizer(self, texts: list[str], max_length: int, types: bool = False) -> None:
        if self.trained is not None:
            super().finish_tokenizer(["".join(json.loads(text)) for text in texts], max_length)


def encode_rows(
    tokenizer: Any, rows: list[str], end: list[int], arguments: Mapping[str, Any], name_of: Callable[[str], str]
) -> Iterator[list[int]]:
    """Yield the signed ids of each row, without truncation.

    Args:
        rows: JSON of a conversation (a list of messages), or of ``[prompt, completion]``.
        end: Ids after each row; they have a loss.
        arguments: ``train_on``, as in the ``data`` section.
        name_of: Row -> its name in messages.

    Raises:
        RecipeError: The template rejects a conversation, or does not show which tokens are the assistant's. Names the row.
    """
    for row in rows:
        value = json.loads(row)
        if isinstance(value[0], str):
            prompt, completion = tokenizer(value, add_special_tokens=False, verbose=False)["input_ids"]
            ids, mask = prompt + completion, [0] * len(prompt) + [1] * len(completion)
        else:
            ids, mask = chat_ids(tokenizer, value, arguments["train_on"], partial(name_of, row))
        yield [token if trained else ~token for token, trained in zip(ids, mask, strict=True)] + end


def chat_ids(tokenizer: Any, messages: list[dict[str, Any]], train_on: str, where: Callable[[], str]) -> tuple[list[int], list[int]]:
    """Token ids of a conversation, and a 1 for each one that has a loss, else 0.

    With ``{% generation %}`` in the template, these are the tokens inside. Otherwise they are the tokens from the prompt for an answer to
    the end of that answer. The function finds both ends by rendering the conversation up to each of them.

    Raises:
        RecipeError: As ``encode_rows``.
    """
    import jinja2

    try:
        if train_on == "all":
            ids = tokenizer.apply_chat_template(messages, return_dict=True, tokenizer_kwargs={"verbose": False})["input_ids"]
            return ids, [1] * len(ids)
        if not tokenizer.is_fast:
            raise RecipeError(f"{where()}: {type(tokenizer).__name__} does not map tokens to characters. Use a fast tokenizer.")
        if MARKER.search(tokenizer.get_chat_template()):
            found = tokenizer.apply_chat_template(
                messages, return_dict=True, return_assistant_tokens_mask=True, tokenizer_kwargs={"verbose": False}
            )
            return found["input_ids"], found["assistant_masks"]
        text, spans = answers(tokenizer, messages, where)
    except (jinja2.TemplateError, ValueError, TypeError) as error:
        raise RecipeError(f"{where()}: the chat template rejects the conversation: {error}.") from None
    trained = bytearray(len(text))
    for start, end in spans:
        trained[start:end] = b"\1" * (end - start)
    found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    return found["input_ids"], [int(trained.find(1, start, end) >= 0) for start, end in found["offset_mapping"]]


def answers(tokenizer: Any, messages: list[dict[str, Any]], where: Callable[[], str]) -> tuple[str, list[tuple[int, int]]]:
    """The rendered conversation, and where each answer of the assistant begins and ends in it.

    Raises:
        RecipeError: The conversation up to an answer does not render to the beginning of the whole.
    """
    text, spans = tokenizer.apply_chat_template(messages, tokenize=False), list[tuple[int, int]]()
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        if not index:
            raise RecipeError(f"{where()}: the first message is from the assistant, so no prompt shows where its text begins. {REMEDY}")
        before = tokenizer.apply_chat_template(messages[:index], tokenize=False, add_generation_prompt=True)
        after = tokenizer.apply_chat_template(messages[: index + 1], tokenize=False)
        if not (text.startswith(after) and after.startswith(before)):
            raise RecipeError(
                f"{where()}: the chat template renders message {index + 1} differently when other messages follow, or does not begin it "
                f"with its prompt for an answer. {REMEDY}"
            )
        spans.append((len(before), len(after)))
    return text, spans
