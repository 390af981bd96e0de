"""Counts the conversations of which a chat template leaves out a content beside tool calls, as those of Llama 3 do."""

from __future__ import annotations

from fastloop import Problem
from fastloop.problem import agree, counted_of
from fastloop_plugins.text.chat.rows import Chat
from fastloop_plugins.text.chat.template import ChatRenderer


class LeftOutContents:
    """Counts such conversations.

    Args:
        renderer: None: there is no chat template, which is reported elsewhere.
    """

    def __init__(self, renderer: ChatRenderer | None) -> None:
        self.renderer = renderer
        self.total = 0
        self.count = 0
        self.first = ""

    def add(self, chat: Chat, row: str) -> None:
        """Count a conversation.

        Args:
            row: The name of its row in messages.
        """
        self.total += 1
        if self.renderer is None or not self.renderer.contents_left_out(chat):
            return
        self.count += 1
        if self.count == 1:
            self.first = row

    def problem(self, split: str, remedy: str = "") -> Problem | None:
        """The warning about them; None: there are none."""
        if not self.count:
            return None
        return Problem(
            f"{counted_of(self.count, self.total, 'rows')} {agree(self.count, 'has', 'have')} a content beside "
            f"tool_calls that the chat template leaves out, so the model does not read it. The first is {self.first}.",
            code="contents-left-out",
            place=f"data: {split}",
            remedy=remedy,
        )
