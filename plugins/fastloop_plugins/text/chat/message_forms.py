"""Forms of a message: another text, a text as parts, other arguments, and arguments as mappings or as JSON text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def with_content(message: Mapping[str, Any], text: str) -> dict[str, Any]:
    """A message with another text, in the form that it has."""
    return {**message, "content": text_parts(text) if isinstance(message.get("content"), list) else text}


def with_argument(message: Mapping[str, Any], number: int, text: str, name: str | None = None) -> dict[str, Any]:
    """A message with other arguments of a call: each value is this text, or is made of it. A call without arguments
    gets one. The arguments keep their form.

    Args:
        number: The place of the call in the message.
        text: Digits, so that a number remains a number.
        name: Change only the argument of this name.
    """
    calls = list(message["tool_calls"])
    call = calls[number]
    arguments: Any = dict(_arguments(call)) or {text: text}
    for key, value in arguments.items():
        if name is None or key == name:
            arguments[key] = _filled(value, text)
    if isinstance(call.get("function", call).get("arguments"), str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    calls[number] = _with_arguments(call, arguments)
    return {**message, "tool_calls": calls}


def argument_names(message: Mapping[str, Any], number: int) -> list[str]:
    """The names of the arguments of a call.

    Args:
        number: The place of the call in the message.
    """
    return list(_arguments(message["tool_calls"][number]))


def _arguments(call: Mapping[str, Any]) -> Mapping[str, Any]:
    """The arguments of a call, which may be JSON text; empty if they are no mapping."""
    decoded = decode_arguments(call)
    arguments = decoded.get("function", decoded).get("arguments")
    return arguments if isinstance(arguments, Mapping) else {}


def _filled(value: Any, text: str) -> Any:
    """A value of the same kind that is made of a text: a template may read its kind, its keys or its items."""
    if isinstance(value, Mapping) and value:
        return {key: _filled(item, text) for key, item in value.items()}
    if isinstance(value, list) and value:
        return [_filled(item, text) for item in value]
    if isinstance(value, int | float) and not isinstance(value, bool):
        return type(value)(text)
    return text


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
