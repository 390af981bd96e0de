"""Roles of messages: those that a language model trains on, and what other names of them mean."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from fastloop.errors import find_close_match

SENDERS = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "tool": "tool",
    "system": "system",
}
"""``from`` of a ShareGPT message -> role."""
ROLES = ("user", "assistant", "tool", "system")
"""The roles whose meaning is fixed: the tokens of the assistant have a loss, and those of the others have none."""
MEANINGS = {
    "human": "user",
    "prompter": "user",
    "gpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "chatbot": "assistant",
    "ai": "assistant",
}
"""Other name of a role, in lower case -> role."""
ALIKE = 0.8
"""The similarity from which a name is a misspelled role, such as ``asistant``."""


@lru_cache
def meant_role(name: str) -> str | None:
    """The role of ``ROLES`` that another name means: ``Assistant``, ``model`` and ``asistant`` mean ``assistant``. None
    for a role of ``ROLES``, and for a name of a role of its own, such as ``developer``."""
    if name in ROLES:
        return None
    plain = name.strip().casefold()
    if plain in MEANINGS:
        return MEANINGS[plain]
    return find_close_match(plain, ROLES, ALIKE)


def parse_messages(value: Any) -> Any:
    """The list of messages of a text that is its JSON, as tables hold it; another value as it is."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        with contextlib.suppress(ValueError, RecursionError):
            return json.loads(value)
    return value


def first_roles(messages: Any) -> set[str]:
    """The names of the role of a conversation's first message: as the data has it, and as a template reads it. Empty
    for a conversation without messages.

    Raises:
        TypeError: The value is no list of messages.
    """
    messages = parse_messages(messages)
    if not messages and (messages is None or isinstance(messages, list)):
        return set()
    if not isinstance(messages, list) or not isinstance(messages[0], Mapping):
        raise TypeError("no list of messages")
    message = messages[0]
    name = message.get("role")
    if name is None:
        sender = message.get("from")
        return {str(sender), SENDERS.get(str(sender), str(sender))}
    return {str(name), meant_role(str(name)) or str(name)}
