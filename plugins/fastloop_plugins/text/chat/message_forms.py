"""Forms of a message: another text, a text as parts, and the arguments of calls as mappings."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def with_content(message: Mapping[str, Any], text: str) -> dict[str, Any]:
    """A message with another text, in the form that it has. One with tool calls stays as it is."""
    if message.get("tool_calls"):
        return dict(message)
    return {**message, "content": text_parts(text) if isinstance(message.get("content"), list) else text}


def text_parts(text: str) -> list[dict[str, str]]:
    """A text as the only part of a content."""
    return [{"type": "text", "text": text}]


def decode_arguments(call: Mapping[str, Any]) -> Mapping[str, Any]:
    """A call with its arguments as a mapping, if they are JSON text of one."""
    function = call.get("function", call)
    try:
        arguments = json.loads(function["arguments"])
    except (KeyError, TypeError, ValueError, RecursionError):
        return call
    if not isinstance(arguments, dict):
        return call
    decoded = {**function, "arguments": arguments}
    if "function" in call:
        return {**call, "function": decoded}
    return decoded
