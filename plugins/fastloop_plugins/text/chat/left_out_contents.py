"""Counts the rows of which a chat template leaves out a content beside tool calls, as those of Llama 3 do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fastloop import Problem
from fastloop.problem import agree, counted_of
from fastloop_plugins.text.chat.rows import Chat
from fastloop_plugins.text.chat.template import ChatRenderer
from fastloop_plugins.text.columns import Text, each_text
from fastloop_plugins.text.tokenizers import TrainedTokenizer, train_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from fastloop_plugins.text.task import TextTask

GIVE_TEMPLATE = "Give a template that writes it: data.chat_template=FILE."
"""The remedy in a run that trains. A trained model keeps its template."""


def counting_renderer(tokenizer: PreTrainedTokenizerBase, template: str | None, train_on: str) -> ChatRenderer | None:
    """A renderer for ``LeftOutContents``, also before a tokenizer is trained. None: there is no chat template.

    Args:
        tokenizer: With its chat template; None: it is not trained yet.
        template: The chat template that a tokenizer to be trained will have.
        train_on: As in the ``data`` section.
    """
    if tokenizer is None:  # the text depends only on the template and special tokens, which all kinds share
        tokenizer = train_tokenizer(TrainedTokenizer(kind="byte"), [], classify=False)
        tokenizer.chat_template = template
    if not tokenizer.chat_template:
        return None
    return ChatRenderer(tokenizer, train_on, counts_contents=True)


class LeftOutContents:
    """Counts such rows.

    Args:
        renderer: None: there is no chat template, which is reported elsewhere.
    """

    def __init__(self, renderer: ChatRenderer | None) -> None:
        self.renderer = renderer
        self.total = 0
        self.count = 0
        self.first = ""

    def add(self, chats: Sequence[Chat], row: str) -> None:
        """Count a row.

        Args:
            chats: Its conversations, such as two that begin with the same prompt.
            row: The name of the row in messages.
        """
        self.total += 1
        if self.renderer is None or not any(map(self.renderer.contents_left_out, chats)):
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


class ContentsOfRows(LeftOutContents):
    """Counts such rows of a ``TextTask``, as its ``encode`` gets them.

    Args:
        task: With its tokenizer loaded, which gets the template of the task.
        arguments: Those of ``encode``.
    """

    def __init__(self, task: TextTask, arguments: Mapping[str, Any]) -> None:
        tokenizer = task.text_model.tokenizer
        if tokenizer is not None and task.chat_template is not None:
            tokenizer.chat_template = task.chat_template
        super().__init__(counting_renderer(tokenizer, task.chat_template, "all"))
        self.find_chats = task.chats_of
        self.arguments = arguments

    def add_row(self, row: Text, name: str) -> None:
        """Count a row.

        Args:
            name: Its name in messages.
        """
        has_calls = any("tool_calls" in text for text in each_text([row]))  # parsing the JSON of all rows takes long
        self.add(self.find_chats(row, self.arguments) if has_calls else [], name)
