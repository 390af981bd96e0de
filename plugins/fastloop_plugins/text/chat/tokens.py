"""Token ids of conversations and completions, and the tokenizer of a chat model.

Ids are kept as signed numbers, so that the cache of token ids holds both: ``id`` for a token with a loss, ``~id``
(negative) for another.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from fastloop import RecipeError
from fastloop_plugins.text.chat.rows import Chat
from fastloop_plugins.text.chat.template import BUILT_IN, ChatRenderer, names_in, template_text
from fastloop_plugins.text.decoder_model import DecoderModel

if TYPE_CHECKING:
    from fastloop.recipe import Recipe

logger = logging.getLogger("fastloop")

SPECIAL = re.compile(r"<\|[^|<>\s]+\|>")
"""Special tokens in a chat template."""


class ChatModel(DecoderModel):
    """The ``model`` section, with a tokenizer that has a chat template."""

    def __init__(self, recipe: Recipe, template: str | None) -> None:
        super().__init__(recipe)
        self.template = template_text(recipe, template) if template is not None and recipe.inference is None else None
        if self.trained is not None and self.trained.kind == "char":
            raise RecipeError(
                f"{self.where}.tokenizer.kind: char has the characters of the messages, and a chat template adds "
                "others. Use kind: byte or bpe."
            )
        self.marks = sorted(set(SPECIAL.findall(self.template or "")))
        if self.trained is not None and self.trained.vocab_size - len(self.marks) > 8:
            self.trained.vocab_size -= len(self.marks)  # which are added after training

    def load_tokenizer(self, max_length: int) -> None:
        super().load_tokenizer(max_length)
        if self.tokenizer is not None:
            self._set_template()
            if unknown := [mark for mark in self.marks if mark not in self.tokenizer.get_vocab()]:
                logger.warning(
                    "data.chat_template: the tokenizer has no token %s, so each is split into several",
                    ", ".join(unknown),
                )

    def finish_tokenizer(self, texts: list[Any], max_length: int, types: bool = False) -> None:
        if self.trained is not None:
            super().finish_tokenizer([text for row in texts for text in _texts(Chat.loads(row))], max_length)
            self.tokenizer.add_tokens(self.marks, special_tokens=True)
            self._set_template()

    def template_names(self) -> frozenset[str]:
        """All names that the template reads. Call it after ``load_tokenizer``."""
        return ChatRenderer(self.tokenizer).names() if self.tokenizer is not None else names_in(self.template or "")

    def _set_template(self) -> None:
        if self.template is not None:
            self.tokenizer.chat_template = self.template
        if not self.tokenizer.chat_template:
            raise RecipeError(
                f"{self.recipe.where}: data.messages: the tokenizer has no chat template. Give one: "
                f"data.chat_template=FILE.jinja, or a built-in name ({', '.join(BUILT_IN)})."
            )


class CompletionModel(DecoderModel):
    """The ``model`` section, for prompts with completions."""

    def finish_tokenizer(self, texts: list[Any], max_length: int, types: bool = False) -> None:
        if self.trained is not None:
            super().finish_tokenizer(["".join(row) for row in texts], max_length)


def _texts(chat: Chat) -> Iterator[str]:
    """The texts of a conversation that a tokenizer is trained on."""
    for message in chat.messages:
        content = message.get("content") or ""
        yield content if isinstance(content, str) else "".join(part["text"] for part in content)
        if "tool_calls" in message:
            yield json.dumps(message["tool_calls"], ensure_ascii=False)


class RowEncoder:
    """Token ids of a row, as signed numbers, without truncation.

    Args:
        end: Ids after each row; they have a loss.
        train_on: As in the ``data`` section.
    """

    def __init__(self, tokenizer: Any, end: list[int], train_on: str) -> None:
        self.tokenizer, self.end, self.renderer = tokenizer, end, ChatRenderer(tokenizer, train_on)

    def __call__(self, row: str | tuple[str, str], where: Callable[[], str]) -> list[int]:
        """The signed ids of a row.

        Args:
            row: JSON of a ``Chat``, or a prompt and its completion.
            where: Returns the name of the row in messages.

        Raises:
            RecipeError: See ``ChatRenderer.encode``.
        """
        if isinstance(row, tuple):
            prompt, completion = self.tokenizer(list(row), add_special_tokens=False, verbose=False)["input_ids"]
            ids, mask = prompt + completion, [0] * len(prompt) + [1] * len(completion)
        else:
            ids, mask = self.renderer.encode(Chat.loads(row), where)
        return [token if trained else ~token for token, trained in zip(ids, mask, strict=True)] + self.end


def encode_rows(
    tokenizer: Any, rows: list[Any], end: list[int], arguments: Mapping[str, Any], name_of: Callable[[Any], str]
) -> Iterator[list[int]]:
    """Yield the signed ids of each row. See ``RowEncoder``.

    Args:
        arguments: ``train_on``, as in the ``data`` section.
        name_of: Row -> its name in messages.
    """
    encode = RowEncoder(tokenizer, end, arguments["train_on"])
    for row in rows:
        yield encode(row, partial(name_of, row))
