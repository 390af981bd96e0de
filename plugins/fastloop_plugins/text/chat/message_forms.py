"""Forms of a message: another text, a text as parts, other arguments, and arguments as mappings or as JSON text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def with_content(message: Mapping[str, Any], text: str) -> dict[str, Any]:
    """A message with another text, in the form that it has."""
    return {**message, "content": text_parts(text) if isinstance(message.get("content"), list) else text}


def with_argument(message: Mapping[str, Any], number: int, name: str) -> dict[str, Any]:
    """A message with another call: its only argument has this name, which is its value, too. The arguments keep their
    form.

    Args:
        number: The place of the call in the message.
    """
    calls = list(message["tool_calls"])
    call = calls[number]
    function = call.get("function", call)
    arguments: Any = {name: name}
    if isinstance(function.get("arguments"), str):
        arguments = json.dumps(arguments)
    calls[number] = _with_arguments(call, arguments)
    return {**message, "tool_calls": calls}


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
    return _with_arguments(call, arguments)


def encode_arguments(call: Mapping[str, Any]) -> Mapping[str, Any]:
    """A call with its arguments as JSON text, if they are a mapping."""
    arguments = call.get("function", call).get("arguments")
    if not isinstance(arguments, Mapping):
        return call
    return _with_arguments(call, json.dumps(arguments, ensure_ascii=False))


def _with_arguments(call: Mapping[str, Any], arguments: Any) -> dict[str, Any]:
    """A call with other arguments. Its function may be the call itself."""
    if "function" not in call:
        return {**call, "arguments": arguments}
    return {**call, "function": {**call["function"], "arguments": arguments}}
