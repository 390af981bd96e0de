"""The parser of chat data: the columns of a row -> a conversation.

Rows in memory, streamed rows and rows to predict all pass through it.

A row has one of three forms; docs/tasks/chat.md lists them, and the keys of a message:

- a list of messages: ``{role, content}``
- a list of messages as ShareGPT writes them: ``{from, value}``
- Alpaca's columns: an instruction, its input and its output

A column ``tools`` holds the functions that the assistant may call.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from fastloop import Problem
from fastloop_plugins.rows.message_roles import ROLES, SENDERS, meant_role, parse_messages
from fastloop_plugins.rows.table import Bad, RowError, Table, is_missing, problem_of_text, show

T = TypeVar("T")
EXAMPLE = '[{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]'
"""A conversation for messages."""
ALPACA = ["instruction", "input", "output"]
"""The columns of an Alpaca row."""
TOOLS = "tools"
"""The column of functions that the assistant may call."""
OPTIONAL = ("input", TOOLS)
"""Columns that a file may lack: most rows have no value there."""
UNREAD = ("system", "system_prompt", "history", "functions", "documents", "chat_template_kwargs")
"""Columns in which other programs expect a part of the conversation."""
REASONING = ("reasoning_content", "thinking", "reasoning")
"""Keys of an assistant's reasoning. transformers gives each one to the template as ``reasoning_content`` and
``thinking``."""
DEEPEST = 64
"""Levels of lists and mappings in a column at most: ``json`` recurses into each level."""


@dataclass(frozen=True)
class Chat:
    """A conversation, in the form that chat templates read.

    Attributes:
        messages: Each has a ``role``, and ``content`` (text, or a list of text parts) unless it has tool calls or
            reasoning. Its ``weight``, if there, is 0 or 1. No value is None.
        tools: The functions that the assistant may call; None: the row names none.
    """

    messages: list[dict[str, Any]]
    tools: list[Any] | None = None

    def dumps(self) -> str:
        """The JSON that ``loads`` reads.

        Raises:
            RowError: A text is no UTF-8.
        """
        text = json.dumps([self.messages, self.tools], ensure_ascii=False, default=str)
        problem = problem_of_text(text)
        if problem:
            raise RowError(problem)
        return text

    @classmethod
    def loads(cls, text: str) -> Chat:
        """A conversation from its JSON."""
        return cls(*json.loads(text))


def chat_columns(names: Iterable[str]) -> list[str | list[str]]:
    """The values for ``data.messages`` that fit a file with these columns."""
    names = set(names)
    columns: list[str | list[str]] = [name for name in ("messages", "conversations") if name in names]
    if {"instruction", "output"} <= names:
        columns.append(ALPACA)
    return columns


def read_chat(row: Mapping[str, Any], columns: Sequence[str], roles: Mapping[str, str] | None = None) -> Chat:
    """The conversation of a row. Without its column of answers, a row of Alpaca's form ends with the instruction.

    Args:
        row: Column -> value; columns that are not chat data are ignored.
        columns: The columns of ``data.messages``: one of conversations, or those of instructions, inputs (if any) and
            answers.
        roles: Role, or sender of a ShareGPT message, as in the data -> role that the message gets.

    Raises:
        RowError: The row is no conversation.
    """
    for name in (*columns, TOOLS):
        check_depth(row.get(name), name)
    if len(columns) > 1:
        messages = _instruction(row, columns)
    else:
        conversation = parse_messages(row.get(columns[0]))
        check_depth(conversation, columns[0])
        messages = read_messages(conversation, f"column {columns[0]!r} (data.messages)", roles or {})
    return Chat(messages, read_tools(row.get(TOOLS)))


def dump_chats(rows: Iterable[T], read: Callable[[T], Chat], bad: Bad) -> list[str]:
    """The JSON of the conversation that ``read`` returns for each row; empty for a row that ``bad`` is called with."""
    texts = []
    for index, row in enumerate(rows):
        try:
            texts.append(read(row).dumps())
        except RowError as error:
            bad(index, str(error))
            texts.append("")
    return texts


def text_of(message: Mapping[str, Any]) -> str:
    """The text of a message; empty if it has only tool calls or reasoning."""
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def is_empty_answer(message: Mapping[str, Any]) -> bool:
    """Whether a message is an answer with a loss, but without a text, tool calls or reasoning."""
    if message["role"] != "assistant" or message.get("weight", 1) == 0:
        return False
    has_more = any(message.get(key) for key in ("tool_calls", *REASONING))
    return not has_more and not text_of(message).strip()


def other_keys(chat: Chat) -> Iterator[str]:
    """Yield each key of each message that has an effect only if the template reads it, and ``tools`` if the row has
    tools."""
    for message in chat.messages:
        for key in message:
            if key == "weight" and message["role"] != "assistant":
                yield f"weight of role {message['role']}"
            elif key not in ("role", "content", "weight", "tool_calls"):
                yield key
    if chat.tools:
        yield TOOLS


def unread_keys(split: str, keys: Mapping[str, int], names: Collection[str]) -> Problem | None:
    """A warning about keys that have no effect; None if all have one.

    Args:
        keys: Key -> its number of messages or rows, see ``other_keys``.
        names: All names that the template reads.
    """
    unread = [
        f"{key} ({count})"
        for key, count in keys.items()
        if key not in names and not (key in REASONING and {*REASONING} & {*names})
    ]
    if not unread:
        return None
    return Problem(
        f"keys that the chat template does not read, so they have no effect: {', '.join(unread)}.",
        code="unread-keys",
        place=f"data: {split}",
    )


def unread_columns(parts: Iterable[Table], read: Collection[str], options: Collection[str] = ()) -> Problem | None:
    """A warning about columns that other programs read as a part of the conversation, of the first source that has such
    columns with a value; None: no source has.

    Args:
        parts: The sources, with their columns of ``UNREAD``.
        read: The columns that the section reads.
        options: The options of ``data``, of which one may name such a column.
    """
    for part in parts:
        unread = []
        for name, values in part.columns.items():
            if name in UNREAD and name not in read and not all(is_missing(value) for value in values):
                unread.append(name)
        if not unread:
            continue
        remedy = f"A system message and earlier turns are messages, and functions are in the column {TOOLS!r}."
        for name in unread:
            if name in options:
                remedy += f" Or give data.{name}={name}."
        return Problem(
            f"columns that are not read, although they may belong to the conversations: {', '.join(unread)}.",
            code="unread-columns",
            place=part.where,
            remedy=remedy,
        )
    return None


def other_roles(chat: Chat) -> Iterator[str]:
    """Yield the role of each message that has none of ``ROLES``."""
    for message in chat.messages:
        if message["role"] not in ROLES:
            yield message["role"]


def unknown_roles(split: str, roles: Mapping[str, int], names: Collection[str]) -> Problem | None:
    """A warning about roles that neither ``ROLES`` nor the template has; None if there are none.

    Args:
        roles: Role -> its number of messages, see ``other_roles``.
        names: All names that the template reads.
    """
    unknown = [f"{role} ({count})" for role, count in roles.items() if role not in names]
    if not unknown:
        return None
    return Problem(
        "roles that the chat template does not name, so their messages are no answers and have no loss: "
        f"{', '.join(unknown)}.",
        code="unknown-roles",
        place=f"data: {split}",
    )


def chat_start(text: str) -> int | None:
    """Where the JSON of a conversation begins in a text that a task has read: at 0, or after the character by which a
    task marks it. None: the text is no conversation."""
    start = text.find("[[{", 0, 4)
    return start if start in (0, 1) else None


def with_tools(text: str, value: Any) -> str:
    """A conversation, as ``Chat.dumps`` writes it, with the tools of its row. Another text stays as it is.

    Args:
        value: The column of tools.

    Raises:
        RowError: It holds no tools.
    """
    start = chat_start(text)
    if start is None:
        return text
    try:
        chat = Chat.loads(text[start:])
    except (ValueError, TypeError):  # a text that only begins like a conversation
        return text
    check_depth(value, TOOLS)
    return text[:start] + Chat(chat.messages, read_tools(value)).dumps()


def describe_chat(text: str) -> str:
    """The messages of a conversation as ``Chat.dumps`` writes it, such as ``user: Hi | assistant: Hello``. Another text
    stays as it is. A task may mark a conversation by a character before it."""
    start = chat_start(text)
    if start is None:
        return text
    try:
        chat = Chat.loads(text[start:])
        return " | ".join(f"{message['role']}: {text_of(message)}" for message in chat.messages)
    except (ValueError, TypeError, KeyError, RecursionError):
        return text


def has_null(chat: Chat) -> bool:
    """Whether there is a null inside of the tools, or of the arguments of a call."""
    arguments = []
    for message in chat.messages:
        for call in message.get("tool_calls", ()):
            arguments.append(call.get("function", call).get("arguments", ""))
    return _contains_null([chat.tools or [], arguments])


def _contains_null(value: Any) -> bool:
    return value is None or any(map(_contains_null, _items(value)))


def _items(value: Any) -> Iterable[Any]:
    """The values of a mapping or a list; none for another value."""
    if isinstance(value, Mapping):
        return value.values()
    if isinstance(value, list):
        return value
    return ()


def check_depth(value: Any, column: str) -> None:
    """Raise a ``RowError`` for a value with too many levels of lists and mappings."""
    level = [value]
    for _ in range(DEEPEST):
        next_level: list[Any] = []
        for item in level:
            next_level += _items(item)
        if not next_level:
            return
        level = next_level
    raise RowError(f"column {column!r} is nested deeper than {DEEPEST}, expected less.")


def rename_role(name: str) -> str:
    """The override of ``data.roles`` that gives messages from ``name`` the role that it means: the user's, unless the
    name shows another one."""
    return f"data.roles={{{role_key(name)}: {meant_role(name) or 'user'}}}"


def role_key(name: str) -> str:
    """A role as a key in YAML."""
    return name if re.fullmatch(r"[A-Za-z_][\w-]*", name) else repr(name)


# -- messages ----------------------------------------------------------------------------------------------------------


def read_messages(value: Any, where: str, roles: Mapping[str, str] | None = None) -> list[dict[str, Any]]:
    """The messages of a conversation. Raises a ``RowError`` for a value that is none; ``where`` names it.

    Args:
        roles: As in ``read_chat``; None: the task does not have ``data.roles``.
    """
    if not isinstance(value, list) or not value:
        raise RowError(f"{where} holds {show(value)}, expected a list of messages: {EXAMPLE}.")
    messages = []
    for number, message in enumerate(value, 1):
        messages.append(_message(message, f"{where} has as message {number}", roles))
    return messages


def _message(value: Any, where: str, roles: Mapping[str, str] | None) -> dict[str, Any]:
    """A message without the keys that are null, whose ``from`` and ``value`` are ``role`` and ``content``."""
    message: dict[str, Any] = _without_nulls(value) if isinstance(value, Mapping) else {}
    if "role" not in message:
        sender = message.pop("from", None)
        if isinstance(sender, str):
            message = _from_sender(sender, message, where, roles)
    if not isinstance(message.get("role"), str):
        raise RowError(f"{where} {show(value)}, expected a mapping with role and content: {EXAMPLE}.")
    if roles:
        message["role"] = roles.get(message["role"], message["role"])
    if message.get("weight", 1) not in (0, 1):
        raise RowError(
            f"{where} one whose weight is {show(message['weight'])}. Expected 1, or 0 for an answer without a loss."
        )
    message["tool_calls"] = _calls(message.get("tool_calls"), where)
    message["content"] = _content(message.get("content"), where)
    message = _without_nulls(message)
    if not message.keys() & {"content", "tool_calls", *REASONING}:
        raise RowError(f"{where} one whose content holds None (NoneType), expected text.")
    return message


def _from_sender(
    sender: str, message: Mapping[str, Any], where: str, roles: Mapping[str, str] | None
) -> dict[str, Any]:
    """A ShareGPT message as one with a role, and with content or tool calls.

    Args:
        message: Its keys without ``from``.
    """
    senders = {**SENDERS, **(roles or {})}
    if sender not in senders:
        remedy = "" if roles is None else f" To rename it: {rename_role(sender)}."
        raise RowError(f"{where} one that is from {sender!r}. Expected {', '.join(senders)}.{remedy}")
    others = dict(message)
    value = others.pop("value", None)
    if sender == "function_call":
        return {"role": senders[sender], "tool_calls": _called(value, where), **others}
    return {"role": senders[sender], "content": value, **others}


def _content(value: Any, where: str) -> Any:
    """The content of a message: text, a list of ``{type: text, text}``, or None."""
    if value is None:
        return None
    if not isinstance(value, list):
        problem = problem_of_text(value)
        if problem:
            raise RowError(f"{where} one whose content {problem}")
        return value
    parts = [_without_nulls(part) for part in value]
    for part in parts:
        if not isinstance(part, Mapping) or part.get("type") != "text" or problem_of_text(part.get("text")):
            raise RowError(
                f"{where} one whose content has the part {show(part)}. Expected {{'type': 'text', 'text': 'Hello'}}."
            )
    return parts or None


def _calls(value: Any, where: str) -> Any:
    """The tool calls of a message, without the keys that are null, which Parquet adds; None if there are none."""
    if value is None:
        return None
    expected = json.dumps([_call("search", {"text": "owls"})])
    if not isinstance(value, list):
        raise RowError(f"{where} one whose tool_calls are {show(value)}. Expected a list, such as {expected}.")
    calls = [_without_nulls(call) for call in value]
    for call in calls:
        function = _without_nulls(call.get("function", call)) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RowError(f"{where} one whose tool_calls hold {show(call)}. Expected such as {expected}.")
        if "function" in call:
            call["function"] = function
    return calls or None


def _call(name: str, arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def _called(value: Any, where: str) -> list[dict[str, Any]]:
    """The calls of a ShareGPT message from ``function_call``: its JSON has a name and arguments, or is a list of
    such."""
    try:
        calls = json.loads(value) if isinstance(value, str) else value
        if not isinstance(calls, list):
            calls = [calls]
        return [_call(call["name"], call["arguments"]) for call in calls]
    except (ValueError, TypeError, KeyError, RecursionError):
        raise RowError(
            f"{where} one from function_call that holds {show(value)}. Expected JSON with a name and arguments: "
            '{"name": "search", "arguments": {"text": "owls"}}.'
        ) from None


def _without_nulls(value: Any) -> Any:
    """A mapping without the keys whose value is None; another value as it is."""
    if not isinstance(value, Mapping):
        return value
    return {key: item for key, item in value.items() if item is not None}


def read_tools(value: Any) -> list[Any] | None:
    """The tools of a row, from a list or its JSON; None: it has none.

    Raises:
        RowError: The value is neither.
    """
    tools = value
    if isinstance(value, str):
        with contextlib.suppress(ValueError, RecursionError):
            tools = json.loads(value) if value.strip() else None
        check_depth(tools, TOOLS)
    if tools is None:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise RowError(
            f"column {TOOLS!r} holds {show(value)}. Expected a list of functions, or its JSON. If it holds something "
            "else, rename it."
        )
    return tools


# -- Alpaca ------------------------------------------------------------------------------------------------------------


def _instruction(row: Mapping[str, Any], columns: Sequence[str]) -> list[dict[str, Any]]:
    """The messages of a row of Alpaca's form. The instruction and its input are one message, with a line break between
    them."""
    texts: dict[str, Any] = {name: row[name] for name in columns if name in row}
    for name in columns[1:-1]:
        texts[name] = texts.get(name) or ""
    for name, value in texts.items():
        problem = problem_of_text(value)
        if problem is not None:
            raise RowError(f"column {name!r} (data.messages) {problem}")
    asked = "\n".join(texts[name] for name in columns[:-1] if texts[name])
    answer = [{"role": "assistant", "content": texts[columns[-1]]}] if columns[-1] in texts else []
    return [{"role": "user", "content": asked}, *answer]
