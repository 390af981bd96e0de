"""The ``data`` section of ``causal-lm``: texts, conversations, or prompts with their completions.

A conversation is one column of JSON: its messages and tools differ in form from row to row.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from fastloop import Problem, RecipeError, option
from fastloop.problem import agree, counted_of
from fastloop_plugins.rows.drop import drop_line, with_drop_line
from fastloop_plugins.rows.formats import FileLayout
from fastloop_plugins.rows.paths import find_files
from fastloop_plugins.rows.split_rows import Rows, RowsBuilder
from fastloop_plugins.rows.suffixes import format_of
from fastloop_plugins.rows.table import Bad, RowError, Table, text_column
from fastloop_plugins.text.chat.left_out_contents import GIVE_TEMPLATE, LeftOutContents
from fastloop_plugins.text.chat.rows import (
    OPTIONAL,
    TOOLS,
    UNREAD,
    Chat,
    chat_columns,
    dump_chats,
    has_null,
    is_empty_answer,
    other_keys,
    other_roles,
    read_chat,
    role_key,
    unknown_roles,
    unread_columns,
    unread_keys,
)  # fmt: skip
from fastloop_plugins.text.chat.spelled_tokens import SpelledTokens
from fastloop_plugins.text.chat.template import (
    MARKER,
    NO_PROMPT,
    ChatRenderer,
    describe_misnamed,
    last_answer,
    misnamed_roles,
    names_in,
    starts_with_answer,
)
from fastloop_plugins.text.columns import check_texts, column_names, refuse_empty
from fastloop_plugins.text.data import TextData
from fastloop_plugins.text.options import DataOptions
from fastloop_plugins.text.tokens import ENCODING

if TYPE_CHECKING:
    from fastloop import Run
    from fastloop.recipe import Recipe
    from fastloop_plugins.text.model import TextModel

logger = logging.getLogger("fastloop")


@dataclass(kw_only=True)
class LanguageData(DataOptions):
    """The ``data`` section of ``causal-lm``."""

    messages: str | list[str] | None = option(
        "The column of conversations; or the columns of instructions, inputs and answers. Replaces text. null: as "
        "the files show.",
        default=None,
    )
    chat_template: str | None = option("A Jinja file, or chatml; null: the template of the tokenizer.", default=None)
    train_on: Literal["assistant", "last", "all"] = option(
        "The tokens of a conversation that have a loss: all answers, the last answer, or everything.",
        default="assistant",
    )
    roles: dict[str, str] | None = option(
        "Role as in the data -> its role for the chat template, such as {bot: assistant}; others stay.", default=None
    )
    prompt: str | None = option(
        "The column of prompts, which have no loss. Replaces text, and needs completion.", default=None
    )
    completion: str | None = option("The column of completions. Only they have a loss.", default=None)
    blocks: bool = option(
        "With streaming: put texts end to end, and cut them into blocks of max_length tokens, as without streaming.",
        default=False,
    )


class LanguageTextData(TextData):
    """The ``data`` section of a language model. ``load`` returns texts, conversations as JSON, or
    prompts and completions.

    Attributes:
        masked: Whether rows are conversations, or prompts with completions.
        chat_columns: The columns of ``data.messages``; empty without.
        templates: Returns the chat template, or all templates of the tokenizer. Not called before ``load``.
        renderer: Returns a renderer of the conversations; None: there is no chat template. Not called before ``load``.

    Raises:
        RecipeError: An option is invalid, options exclude each other, or a file does not exist.
    """

    section = LanguageData
    options: LanguageData

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe, labelled=False)
        self.templates: Callable[[], list[str]] = list
        self.renderer: Callable[[], ChatRenderer | None] = no_renderer
        has_column = self._check_text_options()
        if not has_column and self.options.sources is None:
            self.options.messages = self._find_messages()
        self.chat_columns = self._check_chat_options()
        self.text_key = "text"
        if self.chat_columns:
            self.text_key = "messages"
        elif self.options.prompt:
            self.text_key = "prompt"
        self.masked = self.text_key != "text"
        self._check_blocks()
        if self.masked:
            self._set_columns()
            self._refuse_plain_files()

    def _check_text_options(self) -> bool:
        """Whether the recipe names a column of texts, of messages or of prompts.

        Raises:
            RecipeError: It names several, or prompts without completions.
        """
        named = [key for key in ("text", "messages", "prompt") if self.recipe.data.get(key) is not None]
        if len(named) > 1:
            raise RecipeError(
                code="exclusive-options", place=self.where, found=" and ".join(named), expected="one of them"
            )
        if (self.options.prompt is None) != (self.options.completion is None):
            missing = "prompt" if self.options.prompt is None else "completion"
            raise RecipeError(
                "missing.",
                code="missing-value",
                place=f"{self.where}.{missing}",
                expected="the names of both columns: data.prompt and data.completion",
            )
        return bool(named)

    def _check_chat_options(self) -> list[str]:
        """The columns of ``data.messages``; empty without.

        Raises:
            RecipeError: The option names too many columns, or another one is for conversations.
        """
        messages = self.options.messages
        if messages is None:
            for key in ("chat_template", "train_on", "roles"):
                if self.recipe.data.get(key) is not None:
                    raise RecipeError(
                        "it is for conversations, and data.messages is not there.",
                        code="unknown-option",
                        place=f"{self.where}.{key}",
                        remedy="Remove it.",
                    )
            return []
        columns = column_names(messages, f"{self.where}.messages")
        if len(columns) > 3:
            raise RecipeError(
                code="wrong-type",
                place=f"{self.where}.messages",
                found=str(columns),
                expected=f"a column, or those of {FORM}",
            )
        return columns

    def _check_blocks(self) -> None:
        """Check that ``data.blocks`` is for streamed texts.

        Raises:
            RecipeError: Rows are conversations or completions, or nothing is streamed.
        """
        if not self.options.blocks:
            return
        if self.masked:
            reason = "it is for texts, and conversations and completions are not put end to end"
        elif not self.options.streaming:
            reason = "it is for data.streaming"
        else:
            return
        raise RecipeError(f"{reason}.", code="unknown-option", place=f"{self.where}.blocks", remedy="Remove it.")

    def _set_columns(self) -> None:
        """Set ``columns`` of conversations or prompts: those that a file to predict must have, so not the answers."""
        if len(self.chat_columns) > 1:
            asked = self.chat_columns[:-1]  # the last one has the answers
        elif self.chat_columns:
            asked = self.chat_columns
        else:
            asked = [self.options.prompt or ""]
        self.columns = [name for name in asked if name not in OPTIONAL]
        self.options.text = self.columns[0]

    def _refuse_plain_files(self) -> None:
        """Raise a ``RecipeError`` for a file whose format holds no conversations or pairs."""
        for path in self.every_file():
            if format_of(path)[0] in (".csv", ".tsv", ".txt"):
                raise RecipeError(
                    f"data.{self.text_key} needs a file of type .jsonl, .json or .parquet.",
                    code="unknown-format",
                    place=str(path),
                )

    def _find_messages(self) -> str | list[str] | None:
        """``data.messages`` of a recipe that names no column, from the columns of its first file. Sets it in the
        recipe.

        Raises:
            RecipeError: The file has several forms of conversations.
        """
        paths = self.every_file()
        # predict reads no split, but a text is a message if the others are
        if not paths and self.options.files is not None:
            with contextlib.suppress(RecipeError, TypeError):
                paths = find_files(
                    self.recipe,
                    self.options.files.get("train") or [],
                    "train",
                    f"{self.where}.files.train",
                    self.formats,
                )
        if not paths:
            return None
        names = FileLayout(self.how, {"text": "text"}).first_names(str(paths[0]))
        if "text" in names:
            return None
        columns = chat_columns(names)
        if not columns:
            return None
        if len(columns) > 1:
            choices = " or ".join(map(_override, columns))
            raise RecipeError(
                f"has several columns of conversations: {', '.join(names)}.",
                code="ambiguous-column",
                place=str(paths[0]),
                remedy=f"Name one: {choices}.",
            )
        logger.info("data: %s holds conversations: %s", paths[0], _override(columns[0]))
        self.recipe.data["messages"] = columns[0]  # the run's recipe has it, so that predict needs no training file
        return columns[0]

    def streamed(self, run: Run, datasets: Mapping[str, Any], model: TextModel) -> Mapping[str, Any]:
        if self.stream is None:
            return datasets
        from fastloop_plugins.text.chat.tokens import DocumentEncoder, LanguageRows, block_samples, warn_about_long_rows

        if self.options.blocks:
            # the hash does not cover such code
            known = None if model.options.trust_remote_code else f"{ENCODING} {model.fingerprint()}"
            self.stream.put_end_to_end(run, DocumentEncoder(self, model.tokenizer), self.options.max_length, known)
            return self.stream.datasets(run, datasets, block_samples)
        if not self.masked:
            warn_about_long_rows(self, model.tokenizer, self.stream.head.columns[self.columns[0]])
        return self.stream.datasets(run, datasets, LanguageRows(self, model.tokenizer, datasets["train"][0]))

    def encoding_arguments(self) -> dict[str, Any]:
        """The arguments of ``chat.tokens.encode_rows``."""
        return {"form": self.text_key, "train_on": self.options.train_on}

    def text_columns(self) -> dict[str, str]:
        if self.chat_columns:
            return {name: "messages" for name in self.chat_columns if name not in OPTIONAL}
        if self.options.prompt and self.options.completion:
            return {self.options.prompt: "prompt", self.options.completion: "completion"}
        return super().text_columns()

    def optional_text_columns(self) -> list[str]:
        if not self.chat_columns:
            return []
        return [name for name in OPTIONAL if name == TOOLS or name in self.chat_columns]

    def layout(self, predicts: bool = False) -> FileLayout:
        layout = super().layout(predicts)
        if not self.chat_columns or predicts:
            return layout
        return replace(layout, optional=[*layout.optional, *UNREAD])  # for a warning about those with a value

    def parse(self, columns: Sequence[Sequence[Any]], bad: Bad) -> dict[str, list[Any]]:
        keys = self.row_columns()
        if not self.chat_columns:
            texts = dict[str, list[Any]]()
            for name, values in zip(keys, columns, strict=True):
                explain = with_drop_line(bad, name, values)
                texts[name] = text_column(values, name, keys[name], explain, required=self.masked)
            return texts
        names = [*keys, *self.optional_text_columns()]
        templates = self.templates()
        marked = any(MARKER.search(text) for text in templates)
        needs_prompt = bool(templates) and not marked and self.options.train_on != "all"

        def read(values: Sequence[Any]) -> Chat:
            chat = read_chat(dict(zip(names, values, strict=True)), self.chat_columns, self.options.roles)
            self._check_chat(chat, templates, needs_prompt)
            return chat

        explain = with_drop_line(bad, names[0], columns[0])
        return {"chat": dump_chats(zip(*columns, strict=True), read, explain)}

    def _check_chat(self, chat: Chat, templates: Sequence[str], needs_prompt: bool) -> None:
        """Raise a ``RowError`` for a conversation whose answers would have no loss, or of which the template does not
        show where its first answer begins.

        Args:
            needs_prompt: Whether only the prompt before an answer shows where it begins.
        """
        roles = misnamed_roles(chat, templates)
        if roles:
            pairs = ", ".join(f"{role_key(name)}: {meant}" for name, meant in roles.items())
            raise RowError(f"{describe_misnamed(roles)} Or give data.roles={{{pairs}}}.")
        is_trained = self.options.train_on == "assistant" or last_answer(chat) == 0
        if needs_prompt and is_trained and starts_with_answer(chat):
            line = drop_line(self.chat_columns[0], "first_role: assistant")
            raise RowError(f"{NO_PROMPT} {line}")

    def _rows(self, role: str, parts: list[Table]) -> Rows:
        if not self.masked:
            if self.recipe.data.get("text") is None:
                self._refuse_conversations(parts)
            return super()._rows(role, parts)
        rows = RowsBuilder()
        renderer = self.renderer() if self.chat_columns else None
        findings = ChatFindings(renderer, self.options.train_on)
        for part in parts:
            number = 0
            for block in self.parse_blocks(part):
                rows.add(block)
                for text in block.get("chat", ()):
                    number += 1
                    if text:  # else the row cannot be read, which ends the loop with an error
                        findings.add(Chat.loads(text), part.row(number))
        if not rows.count:
            raise refuse_empty(role, parts)
        completion = self.options.completion
        if completion in rows.blank and self.reports(role):
            keys = {completion: "completion"}
            self.messages += check_texts({completion: rows.blank[completion]}, rows.count, parts, keys)
        if self.chat_columns:
            self._report(role, findings, rows.count)
            if role == "train" and self.inference is None:
                self._warn_about_untrained_calls(findings.called, renderer)
            if self.reports(role):
                warning = unread_columns(parts, {*self.chat_columns, *self.labels, *self.drop.columns()})
                if warning is not None:
                    self.messages.append(warning)
        return rows.finish()

    def _refuse_conversations(self, parts: Sequence[Table]) -> None:
        """Raise a ``RecipeError`` for a file without the column of texts, but with conversations."""
        for part in parts:
            names = part.all_names()
            columns = chat_columns(names)
            if self.options.text in names or not columns:
                continue
            raise RecipeError(
                f"has no column {self.options.text!r}, but conversations: {', '.join(names)}.",
                code="unknown-column",
                place=part.where,
                remedy=f"Give {' or '.join(map(_override, columns))}.",
            )

    def _report(self, split: str, findings: ChatFindings, total: int) -> None:
        """Add warnings about keys that have no effect, about roles without a loss, about contents that the template
        leaves out, about empty answers, and about nulls in tools."""
        names = frozenset[str]().union(*map(names_in, self.templates()))
        if self.stream is not None and split == "train":
            split = f"{split}, its first {total} rows"
        keys = findings.keys
        roles = findings.roles
        nulls = findings.nulls
        without_loss = None if self.options.train_on == "all" else unknown_roles(split, roles, names)
        remedy = GIVE_TEMPLATE if self.inference is None else ""
        left_out = findings.left_out.problem(split, remedy)
        empty = findings.empty_answers(split, total)
        spelled = findings.spelled.problem(split, total)
        for warning in (unread_keys(split, keys, names), without_loss, left_out, empty, spelled):
            if warning is not None:
                self.messages.append(warning)
        if nulls and (
            self.options.name is not None or any(format_of(path)[0] == ".parquet" for path in self.every_file())
        ):
            problem = Problem(
                f"{counted_of(nulls, total, 'rows')} {agree(nulls, 'has', 'have')} null in their tools or in the "
                "arguments of a call. Parquet stores null for each key that only another row has, and the "
                "template writes it.",
                code="null-arguments",
                place=f"data: {split}",
                remedy="Store the tools and arguments as JSON text.",
            )
            self.messages.append(problem)

    def _warn_about_untrained_calls(self, chat: Chat | None, renderer: ChatRenderer | None) -> None:
        """Add a warning if {% generation %} leaves out the tool calls of a conversation.

        Args:
            chat: The first conversation with calls; None: there is none.
        """
        if chat is None or renderer is None or renderer.trains_calls(chat):
            return
        problem = Problem(
            "tool calls are outside of {% generation %}: they have no loss, so the model does not learn them.",
            code="calls-without-loss",
            place="data.chat_template",
            remedy="Write them before {% endgeneration %}.",
        )
        self.messages.append(problem)


class ChatFindings:
    """Counts keys, roles and nulls in the conversations of a split, for warnings.

    Args:
        renderer: See ``LeftOutContents``.
        train_on: As in the ``data`` section.

    Attributes:
        keys: Key -> its number, see ``other_keys``.
        roles: Role -> its number of messages, see ``other_roles``.
        nulls: Conversations with a null in their tools or calls.
        called: The first conversation with a tool call; None: there is none.
        left_out: The rows with a content that the template leaves out.
        empty: Conversations with an empty answer that has a loss.
        first_empty: The name of the first of their rows in messages.
        spelled: The rows that spell a token of the template.
    """

    def __init__(self, renderer: ChatRenderer | None, train_on: str) -> None:
        self.train_on = train_on
        self.keys = Counter[str]()
        self.roles = Counter[str]()
        self.nulls = 0
        self.called: Chat | None = None
        self.left_out = LeftOutContents(renderer)
        self.empty = 0
        self.first_empty = ""
        self.spelled = SpelledTokens(renderer)

    def add(self, chat: Chat, row: str) -> None:
        """Count those of a conversation.

        Args:
            row: The name of its row in messages.
        """
        self.left_out.add([chat], row)
        self.spelled.add(chat, row)
        self.keys.update(other_keys(chat))
        self.roles.update(other_roles(chat))
        self.nulls += has_null(chat)
        if self.called is None and any("tool_calls" in message for message in chat.messages):
            self.called = chat
        answers = chat.messages
        if self.train_on == "last":
            last = last_answer(chat)
            answers = [] if last is None else [chat.messages[last]]
        if any(map(is_empty_answer, answers)):
            self.empty += 1
            self.first_empty = self.first_empty or row

    def empty_answers(self, split: str, total: int) -> Problem | None:
        """The warning about empty answers; None: there are none.

        Args:
            total: Rows of the split.
        """
        if not self.empty:
            return None
        return Problem(
            f"{counted_of(self.empty, total, 'rows')} {agree(self.empty, 'has', 'have')} an empty answer, which the "
            f"model learns to give. The first is {self.first_empty}.",
            code="empty-texts",
            place=f"data: {split}",
            remedy="Remove such rows, or give the message a weight of 0.",
        )


FORM = "instructions, inputs and answers, such as [instruction, input, output]"
"""Several columns of ``data.messages``."""


def no_renderer() -> None:
    """The renderer of a section before its model is known."""


def _override(messages: str | list[str]) -> str:
    """The command line's form of ``data.messages``."""
    if isinstance(messages, str):
        return f"data.messages={messages}"
    return f"data.messages=[{','.join(messages)}]"
