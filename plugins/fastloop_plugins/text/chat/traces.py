"""Checks that a chat template writes each part of a conversation. A part that it leaves out would be lost without a
word."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastloop_plugins.rows.message_roles import ROLES
from fastloop_plugins.rows.table import RowError
from fastloop_plugins.text.chat.endings import PROBE
from fastloop_plugins.text.chat.message_forms import argument_names, with_argument, with_content
from fastloop_plugins.text.chat.rows import text_of

Messages = Sequence[Mapping[str, Any]]
Shape = tuple[str, bool, int]
"""The role of a message, whether its content is checked, and its number of calls."""
KNOWN_ORDERS = 1024
"""Orders of shapes that are remembered at most: each long chat with tools may have one of its own."""
FILE = "give a template that writes it: data.chat_template=FILE."


@dataclass(frozen=True)
class Part:
    """A part of a message.

    Attributes:
        message: The index of its message.
        call: The index of a tool call in there; None: the part is the content.
    """

    message: int
    call: int | None = None

    def replaced(self, messages: Messages, probe: str, argument: str | None = None) -> list[Mapping[str, Any]]:
        """The messages with a probe for this part.

        Args:
            argument: Put the probe into this argument of the call alone.
        """
        message = messages[self.message]
        if self.call is None:
            message = with_content(message, probe)
        else:
            message = with_argument(message, self.call, probe, argument)
        return [*messages[: self.message], message, *messages[self.message + 1 :]]


def shape_of(message: Mapping[str, Any]) -> Shape:
    """The shape of a message. A content without text beside tool calls is not checked."""
    calls = len(message.get("tool_calls") or ())
    return message["role"], not calls or bool(text_of(message)), calls


def parts_of(messages: Messages) -> list[Part]:
    """The parts of a conversation."""
    parts = []
    for index, message in enumerate(messages):
        _, has_content, calls = shape_of(message)
        if has_content:
            parts.append(Part(index))
        for call in range(calls):
            parts.append(Part(index, call))
    return parts


class Traces:
    """Finds parts of conversations that leave no trace in the text of a template.

    A template may write a role at some places alone, such as a system message that comes first. So each order of
    shapes is tried once, with a probe for each part. A template may reject that, because it reads contents such as
    JSON. Then each part is tried alone.

    Args:
        names: Returns all names that the template reads.
        render: Returns the text of messages with tools; None if the template rejects them.
    """

    def __init__(self, names: Callable[[], frozenset[str]], render: Callable[[Messages, Any], str | None]) -> None:
        self._names = names
        self._render = render
        self._written: dict[tuple[Any, ...], list[int]] = {}  # order of shapes -> result of ``check``
        self._tried: dict[tuple[Any, ...], bool] = {}  # see _is_written_alone

    def check(self, messages: Messages, tools: Any) -> list[int]:
        """Check each part of a conversation. Returns the indices of the messages whose content the template leaves out
        because they have tool calls.

        Raises:
            RowError: Another part leaves no trace.
        """
        order = (*map(shape_of, messages), bool(tools))
        if order in self._written:
            return self._written[order]
        parts = parts_of(messages)
        probes = [f"{PROBE}{number:04}" for number in range(len(parts))]
        probed = messages
        for part, probe in zip(parts, probes, strict=True):
            probed = part.replaced(probed, probe)
        text = self._render(probed, tools)
        if text is None and self._render(messages, tools) is None:
            return []  # the template rejects the conversation itself, which its own rendering reports
        without_content = []
        for part, probe in zip(parts, probes, strict=True):
            if text is None:
                is_written = self._is_written_alone(messages, part, tools, probe)
            else:
                is_written = probe in text or self._has_written_argument(messages, part, tools, probe)
            if is_written:
                continue
            if part.call is not None or not messages[part.message].get("tool_calls"):
                raise self._error(messages, part)
            without_content.append(part.message)
        if len(self._written) >= KNOWN_ORDERS:
            self._written.clear()
        self._written[order] = without_content
        return without_content

    def _is_written_alone(self, messages: Messages, part: Part, tools: Any, probe: str) -> bool:
        """Whether a part leaves a trace in the text of a conversation with a single probe.

        If the template rejects this, too, it says nothing about the part.

        A rendering for each part of each conversation takes too long. So each shape is tried once between the same
        neighbors: in ``user, assistant, user, assistant, user``, four of the five messages.
        """
        index = part.message
        before = shape_of(messages[index - 1]) if index else None
        after = shape_of(messages[index + 1]) if index + 1 < len(messages) else None
        place = (before, shape_of(messages[index]), part.call, after, bool(tools))
        if place not in self._tried:
            text = self._render(part.replaced(messages, probe), tools)
            is_written = text is None or probe in text or self._has_written_argument(messages, part, tools, probe)
            self._tried[place] = is_written
        return self._tried[place]

    def _has_written_argument(self, messages: Messages, part: Part, tools: Any, probe: str) -> bool:
        """Whether the part is a call of which an argument leaves a trace beside its others as they are: the template
        may write an argument only if another one has a certain value."""
        if part.call is None:
            return False
        for name in argument_names(messages[part.message], part.call):
            text = self._render(part.replaced(messages, probe, name), tools)
            if text is not None and probe in text:
                return True
        return False

    def _error(self, messages: Messages, part: Part) -> RowError:
        """The error about a part that leaves no trace."""
        message = messages[part.message]
        role = message["role"]
        number = part.message + 1
        if part.call is not None:
            return RowError(
                f"the chat template leaves out call {part.call + 1} of message {number}, whose role is {role!r}. Put "
                f"each call in a message of the assistant of its own, or {FILE}"
            )
        begin = f"the chat template leaves out message {number}, whose role is {role!r}."
        if role in self._names():
            return RowError(
                f"{begin} It writes this role at other places of a conversation. Put the message there, or {FILE}"
            )
        known = [name for name in (*ROLES, "developer", "ipython") if name in self._names()]
        return RowError(
            f"{begin} It names the roles {', '.join(known) or 'none'}. Rename the role in the data, or {FILE}"
        )
