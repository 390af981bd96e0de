"""The ``data`` section of ``causal-lm``: texts, conversations, or prompts with their completions.

A conversation is kept as JSON in ``Rows.texts``, so that splits, limits and the cache of token ids work as for texts.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from fastloop import RecipeError, option
from fastloop_plugins.tasks._text_columns import Text
from fastloop_plugins.tasks._text_data import Data, TextData
from fastloop_plugins.tasks._text_files import Part, format_of, show

if TYPE_CHECKING:
    from fastloop import Run
    from fastloop.recipe import Recipe
    from fastloop_plugins.tasks._text_model import TextModel

EXAMPLE = '[{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]'
"""A conversation for messages."""


@dataclass(kw_only=True)
class LanguageData(Data):
    """The ``data`` section of ``causal-lm``."""

    messages: Annotated[str | None, option("The column of conversations, each a list of {role, content}. Replaces text.")] = None
    chat_template: Annotated[str | None, option("A Jinja file, or chatml; null: the template of the tokenizer.")] = None
    train_on: Annotated[Literal["assistant", "all"], option("The tokens of a conversation that have a loss.")] = "assistant"
    prompt: Annotated[str | None, option("The column of prompts, which have no loss. Replaces text, and needs completion.")] = None
    completion: Annotated[str | None, option("The column of completions. Only they have a loss.")] = None
    blocks: Annotated[
        bool, option("With streaming: put texts end to end, and cut them into blocks of max_length tokens, as without streaming.")
    ] = False


class LanguageTextData(TextData):
    """The ``data`` section of a language model. ``load`` returns each conversation, or prompt and completion, as JSON.

    Attributes:
        keys: The options that name the columns of a row: ``text``, ``messages``, or ``prompt`` and ``completion``.

    Raises:
        RecipeError: An option is invalid, options exclude each other, or a file does not exist.
    """

    section = LanguageData
    options: LanguageData

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe, labelled=False)
        options, self.names = self.options, dict[str, tuple[str, int]]()
        given = [key for key in ("text", "messages", "prompt") if recipe.data.get(key) is not None]
        if len(given) > 1:
            raise RecipeError(f"{self.where}: found {' and '.join(given)}, expected one of them.")
        if (options.prompt is None) != (options.completion is None):
            missing = "prompt" if options.prompt is None else "completion"
            raise RecipeError(f"{self.where}.{missing}: missing. Expected the names of both columns: data.prompt and data.completion.")
        for key in ("chat_template", "train_on"):
            if recipe.data.get(key) is not None and options.messages is None:
                raise RecipeError(f"{self.where}.{key}: it is for conversations, and data.messages is not there. Remove it.")
        self.keys = ("messages",) if options.messages else ("prompt", "completion") if options.prompt else ("text",)
        self.text_key, self.masked = self.keys[0], self.keys != ("text",)
        if options.blocks and (self.masked or not options.streaming):
            reason = (
                "it is for texts, and conversations and completions are not put end to end" if self.masked else "it is for data.streaming"
            )
            raise RecipeError(f"{self.where}.blocks: {reason}. Remove it.")
        if not self.masked:
            return
        options.text = options.messages or options.prompt or ""  # the column that files must have
        self.columns = [options.text]
        for path in self.every_file():
            if format_of(path)[0] in (".csv", ".tsv", ".txt"):
                raise RecipeError(f"{path}: data.{self.keys[0]} needs a file of type .jsonl, .json or .parquet.")

    def streamed(self, run: Run, datasets: Mapping[str, Any], model: TextModel) -> Mapping[str, Any]:
        if self.stream is None:
            return datasets
        from fastloop_plugins.tasks._streaming_samples import Documents, LanguageRows, blocks

        if self.options.blocks:
            known = None if model.options.trust_remote_code else model.fingerprint()  # the hash does not cover such code
            self.stream.put_end_to_end(run, Documents(self, model), self.options.max_length, known)
            return self.stream.datasets(run, datasets, blocks)
        encode = LanguageRows(self, model, datasets["train"][0])
        if not self.masked:
            encode.warn_about_length(self.stream.head.columns[self.columns[0]])
        return self.stream.datasets(run, datasets, encode)

    def name_of(self, row: str) -> str:
        """The name of a row in messages, given its JSON."""
        where, number = self.names[row]
        return f"{where}, row {number}"

    def text_columns(self) -> dict[str, str]:
        return {getattr(self.options, key): key for key in self.keys} if self.masked else super().text_columns()

    def problem(self, values: tuple[Any, ...]) -> str | None:
        """Why these values of ``keys`` are not a row; None if they are."""
        for key, value in zip(self.keys, values, strict=True):
            problem = problem_of_messages(value) if key == "messages" else problem_of_text(value)
            if problem:
                return f"column {getattr(self.options, key)!r} (data.{key}) {problem}"
        return None

    def _values(self, part: Part) -> list[tuple[Any, ...]]:
        return list(zip(*(part.column(key, getattr(self.options, key)) for key in self.keys), strict=True))

    def _readable(self, part: Part) -> Part:
        if not self.masked:
            return super()._readable(part)
        rows = self._values(part)
        good = [values for values in rows if self.problem(values) is None]
        if count := part.unreadable + len(rows) - len(good):
            self.messages.append((logging.WARNING, f"{part.where}: {count} rows cannot be read, and are skipped"))
            self.unreadable += count
        columns = {getattr(self.options, key): [values[index] for values in good] for index, key in enumerate(self.keys)}
        return Part(part.where, columns, notes=part.notes)

    def _texts(self, role: str, parts: list[Part]) -> list[Text]:
        if not self.masked:
            return super()._texts(role, parts)
        rows: list[Text] = []
        for part in parts:
            for number, values in enumerate(self._values(part), 1):
                if problem := self.problem(values):
                    raise RecipeError(f"{part.row(number)}: {problem}")
                rows.append(row := json.dumps(values[0] if len(values) == 1 else values, ensure_ascii=False))
                self.names.setdefault(row, (part.where, number))
        if not rows:
            where = ", ".join(part.where for part in parts)
            raise RecipeError(f"{where}: the {role} split is empty. Expected at least one row (data.files, data.splits).")
        return rows


def problem_of_text(value: Any) -> str | None:
    """Why a value is not a text; None if it is one."""
    if not isinstance(value, str):
        return f"holds {show(value)}, expected text."
    try:
        value.encode()
    except UnicodeEncodeError:
        return "holds half of a UTF-16 pair, which is no text."
    return None


def problem_of_messages(value: Any) -> str | None:
    """Why a value is not a conversation; None if it is one. A message may lack ``content`` if it has other keys, such as ``tool_calls``."""
    if not isinstance(value, list) or not value:
        return f"holds {show(value)}, expected a list of messages: {EXAMPLE}."
    for number, message in enumerate(value, 1):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            return f"has as message {number} {show(message)}, expected a mapping with role and content: {EXAMPLE}."
        content, others = message.get("content"), [key for key in message if key not in ("role", "content") and message[key] is not None]
        problem = None if content is None and others else problem_of_text(content)
        if problem:
            return f"has as message {number} one whose content {problem}"
    return None


def template_text(recipe: Recipe, name: str, built_in: Mapping[str, str]) -> str:
    """The text of ``data.chat_template``: a file, or the name of a built-in template.

    Raises:
        RecipeError: There is no such template, or the file cannot be read.
    """
    path = recipe.find(name)
    if name in built_in and not path.is_file():
        return built_in[name]
    if not path.is_file():
        names = ", ".join(built_in)
        raise RecipeError(f"{recipe.where}: data.chat_template: {name}: no such file. Expected a Jinja file, or a built-in name: {names}.")
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise RecipeError(f"{recipe.where}: data.chat_template: {path}: cannot be read: {error}.") from None
