"""Conversations to continue, read in chunks, and the tokens that end an answer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastloop.errors import RecipeError
from fastloop_plugins._cache import flat
from fastloop_plugins.tasks._chat_data import problem_of_messages
from fastloop_plugins.tasks._text_batches import Sequences
from fastloop_plugins.tasks._text_files import explain_reading
from fastloop_plugins.tasks._text_paths import find_files
from fastloop_plugins.tasks._text_stream import read_values

if TYPE_CHECKING:
    from fastloop_plugins.tasks._chat_data import LanguageTextData


def chat_chunks(data: LanguageTextData, tokenizer: Any, source: Path | Iterable[str], start: int, size: int) -> Iterator[Sequences]:
    """The conversations of a file as token ids, with the prompt for an answer at the end: ``size`` at a time, from row ``start``.

    Args:
        source: A file, or messages of a user.

    Raises:
        RecipeError: The file or a row cannot be read, or the template rejects a conversation.
    """
    chats = islice(conversations(data, source), start, None)
    while chunk := list(islice(chats, size)):
        yield Sequences(*flat(prompt_ids(tokenizer, messages, where) for where, messages in chunk))


def conversations(data: LanguageTextData, source: Path | Iterable[str]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield the name of each row and its messages, without those of the assistant at the end. A text is one message of a user."""
    if isinstance(source, Path):
        path = find_files(data.recipe, str(source), "predict", "FILE")[0]
        with explain_reading(path, data.how):
            yield from _checked(data, f"{path}, row", (values[0] for values in read_values(path, data)))
    else:
        yield from _checked(data, "text", source)


def _checked(data: LanguageTextData, where: str, values: Iterable[Any]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    for number, value in enumerate(values, 1):
        messages = [{"role": "user", "content": value}] if isinstance(value, str) else value
        if problem := problem_of_messages(messages):
            raise RecipeError(f"{where} {number}: column {data.options.messages!r} (data.messages) {problem}")
        while messages and messages[-1]["role"] == "assistant":
            messages = messages[:-1]
        if not messages:
            raise RecipeError(f"{where} {number}: every message is from the assistant. Expected a message to answer.")
        yield f"{where} {number}", messages


def prompt_ids(tokenizer: Any, messages: list[dict[str, Any]], where: str) -> list[int]:
    """Token ids of a conversation and of the prompt for its next answer.

    Raises:
        RecipeError: The template rejects the conversation.
    """
    import jinja2

    try:
        found = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, tokenizer_kwargs={"verbose": False})
    except (jinja2.TemplateError, ValueError, TypeError) as error:
        raise RecipeError(f"{where}: the chat template rejects the conversation: {error}.") from None
    ids: list[int] = found["input_ids"]
    return ids


def end_tokens(tokenizer: Any) -> list[int]:
    """The tokens that end an answer: the end token, and the special token that the template writes after an answer, if there is one."""
    ends = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    text: str = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "answer"}], tokenize=False
    )
    after = tokenizer(text.rpartition("answer")[2], add_special_tokens=False)["input_ids"]
    if after and after[0] in tokenizer.get_added_vocab().values():
        ends.append(after[0])
    return sorted(set(ends))
