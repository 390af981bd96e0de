"""Counts the conversations with a message that spells a special token of the chat template.

A tokenizer makes the token of ``<|im_end|>`` in a message, too. A model then learns to end its answer there. Such
messages come from logs of rendered prompts.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from fastloop import Problem
from fastloop.problem import agree, counted_of
from fastloop_plugins.text.chat.rows import Chat, text_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from fastloop_plugins.text.chat.template import ChatRenderer


class SpelledTokens:
    """Counts such conversations.

    Args:
        renderer: None: there is no chat template, which is reported elsewhere.
    """

    def __init__(self, renderer: ChatRenderer | None) -> None:
        self.pattern: re.Pattern[str] | None = None
        if renderer is not None:
            tokens = template_tokens(renderer.tokenizer, renderer.templates())
            if tokens:
                self.pattern = re.compile("|".join(map(re.escape, tokens)))
        self.count = 0
        self.token = ""
        self.first = ""

    def add(self, chat: Chat, row: str) -> None:
        """Count a conversation.

        Args:
            row: The name of its row in messages.
        """
        if self.pattern is None:
            return
        for message in chat.messages:
            match = self.pattern.search(text_of(message))
            if match is None:
                continue
            self.count += 1
            if self.count == 1:
                self.token = match[0]
                self.first = row
            return

    def problem(self, split: str, total: int) -> Problem | None:
        """The warning about them; None: there are none.

        Args:
            total: Rows of the split.
        """
        if not self.count:
            return None
        return Problem(
            f"{counted_of(self.count, total, 'rows')} {agree(self.count, 'has', 'have')} a message that spells a "
            f"special token of the chat template, such as {self.token!r}. It becomes that token, and no text. "
            f"The first is {self.first}.",
            code="spelled-tokens",
            place=f"data: {split}",
            remedy="Remove it from the messages: the template writes it.",
        )


def template_tokens(tokenizer: PreTrainedTokenizerBase, templates: list[str]) -> list[str]:
    """The special tokens that a chat template writes, by their names in its text, and the end token."""
    special = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    tokens: set[str] = set()
    for template in templates:
        tokens.update(token for token in special if token in template)
    if tokenizer.eos_token is not None:
        tokens.add(str(tokenizer.eos_token))
    return sorted(tokens)
