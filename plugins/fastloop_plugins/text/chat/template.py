"""Chat templates: conversations -> token ids, and which of them have a loss."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from fastloop import RecipeError
from fastloop.problem import clause
from fastloop.recipe.paths import nothing_at
from fastloop_plugins.rows.message_roles import ROLES, meant_role
from fastloop_plugins.rows.table import RowError
from fastloop_plugins.text.chat.endings import PROBE, AnswerEnd, find_answer_end
from fastloop_plugins.text.chat.message_forms import decode_arguments, encode_arguments, text_parts
from fastloop_plugins.text.chat.rows import TOOLS, Chat, text_of
from fastloop_plugins.text.chat.time_limit import FAILURES, limited_rendering
from fastloop_plugins.text.chat.traces import Traces, parts_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from fastloop.recipe import Recipe

CHATML = (
    "{% if tools %}{{ '<|im_start|>system\\n' }}{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] + "
    "'\\n\\n' }}{% endif %}"
    "{{ 'You may call functions. Their signatures are within <tools></tools>:\\n<tools>\\n' }}"
    "{% for tool in tools %}{{ (tool | tojson) + '\\n' }}{% endfor %}"
    "{{ '</tools>\\nTo call one, answer with its name and arguments as JSON:\\n<tool_call>\\n' }}"
    '{{ \'{"name": <name>, "arguments": <arguments>}\\n</tool_call><|im_end|>\\n\' }}{% endif %}'
    "{% for message in messages %}{% if not (tools and loop.first and message['role'] == 'system') %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] or '' }}"
    "{% for call in message['tool_calls'] or [] %}{% set call = call['function'] or call %}"
    "{{ ('\\n' if message['content'] or not loop.first else '') + '<tool_call>\\n{\"name\": ' + (call['name'] | "
    "tojson) }}"
    "{{ ', \"arguments\": ' + (call['arguments'] | default({}) | tojson) + '}\\n</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>\\n' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>\\n' }}{% endif %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
BUILT_IN = {"chatml": CHATML}
"""Name -> chat template, with markers of the assistant's tokens."""
MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")
"""The statement before the assistant's tokens, as transformers finds it."""
MARKERS = re.compile(r"\{%[-+]?\s*(?:end)?generation\s*[-+]?%\}")
"""All such statements, which jinja alone does not know."""
REMEDY = "Mark its answers by {% generation %} in a template (data.chat_template=FILE), or give data.train_on=all."
NO_PROMPT = f"the first message is from the assistant, so no prompt shows where its text begins. {REMEDY}"
STARTS_WITH_ASSISTANT = (
    "It starts with the assistant: a condition of data.drop with first_role: assistant leaves out such rows."
)


def template_text(recipe: Recipe, name: str) -> str:
    """The text of ``data.chat_template``: a file, or the name of a built-in template.

    Raises:
        RecipeError: There is no such template, or the file cannot be read.
    """
    path = recipe.find(name)
    if name in BUILT_IN and not path.is_file():
        return BUILT_IN[name]
    if not path.is_file():
        names = ", ".join(BUILT_IN)
        raise RecipeError(
            f"{nothing_at(path)}.",
            code="file-missing",
            place=f"{recipe.where}: data.chat_template: {name}",
            expected=f"a Jinja file, or a built-in name: {names}",
        )
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise RecipeError(
            f"cannot be read: {clause(error)}.",
            code="file-unreadable",
            place=f"{recipe.where}: data.chat_template: {path}",
        ) from None


@lru_cache
def names_in(template: str) -> frozenset[str]:
    """All names in the statements of a template: variables, attributes, and texts such as the ``x`` of
    ``message['x']``. All its words, if it cannot be parsed."""
    import jinja2
    from jinja2 import nodes

    try:
        tree = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).parse(MARKERS.sub("", template))
    except jinja2.TemplateError:
        return frozenset(re.findall(r"\w+", template))
    variables = {node.name for node in tree.find_all(nodes.Name)}
    attributes = {node.attr for node in tree.find_all(nodes.Getattr)}
    texts = {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
    return frozenset(variables | attributes | texts)


def misnamed_roles(chat: Chat, templates: Sequence[str]) -> dict[str, str]:
    """The roles of a conversation that have another name of a known role: name -> the role that it means.

    A template that marks its answers, and names such a role, trains on it as it likes. Other templates write such a
    role, or reject it, and its answers have no loss.
    """
    misnamed: dict[str, str] = {}
    for message in chat.messages:
        name = message["role"]
        if name in ROLES or name in misnamed:
            continue
        meant = meant_role(name)
        if meant is not None and not _trains_on(name, templates):
            misnamed[name] = meant
    return misnamed


def _trains_on(role: str, templates: Sequence[str]) -> bool:
    """Whether a template marks its answers, and names the role."""
    return any(MARKER.search(template) and role in names_in(template) for template in templates)


def describe_misnamed(roles: Mapping[str, str]) -> str:
    """The problem of a conversation with ``misnamed_roles``."""
    pairs = ", ".join(f"{name!r}, which means {meant!r}" for name, meant in roles.items())
    return f"found the role {pairs}. Only answers of the role 'assistant' have a loss. Rename the role in the data."


def starts_with_answer(chat: Chat) -> bool:
    """Whether the first message is an answer that has a loss."""
    first = chat.messages[0]
    return bool(first["role"] == "assistant" and first.get("weight", 1) != 0)


def last_answer(chat: Chat) -> int | None:
    """The index of the last message of the assistant; None: there is none."""
    for index in range(len(chat.messages) - 1, -1, -1):
        if chat.messages[index]["role"] == "assistant":
            return index
    return None


@dataclass(frozen=True)
class RenderedAnswers:
    """A rendered conversation, and answers of the assistant in it.

    Attributes:
        text: The conversation.
        spans: The start and the end of each answer in ``text``, in characters.
    """

    text: str
    spans: list[tuple[int, int]]


class ChatRenderer:
    """Renders conversations with the template of a tokenizer.

    Args:
        tokenizer: A tokenizer with a chat template.
        train_on: As in the ``data`` section.
        counts_contents: Whether the caller counts contents that the template leaves out beside tool calls, see
            ``contents_left_out`` and ``TextTask.chats_of``. Otherwise, each of them is an error.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, train_on: str = "assistant", counts_contents: bool = False
    ) -> None:
        self.tokenizer = tokenizer
        self.train_on = train_on
        self.counts_contents = counts_contents
        self._traces = Traces(self.names, self._try)

    def encode(self, chat: Chat) -> tuple[list[int], list[int]]:
        """Token ids of a conversation, and a 1 for each one that has a loss, else 0.

        With ``{% generation %}`` in the template, these are the tokens inside. Otherwise they are the tokens from the
        prompt for an answer to the end of that answer. The function finds both ends by rendering the conversation up to
        each of them. An answer of weight 0 has no loss, and with ``train_on: last`` only the last answer has one.

        Where the next turn ends an answer (see ``endings``), the first tokens of that turn have a loss, too, and
        they are added after the last answer.

        Raises:
            RowError: The template rejects the conversation, leaves out a part of it, does not show which tokens are the
                assistant's, or takes too long.
        """
        answers = _answer_indices(chat.messages)
        muted = [index for index in answers if self._is_muted(chat, index, last=answers[-1])]
        trained = [index for index in answers if index not in muted]
        starts_with_assistant = bool(chat.messages) and chat.messages[0]["role"] == "assistant"
        with limited_rendering(STARTS_WITH_ASSISTANT if starts_with_assistant else ""):
            messages = self._prepare(chat)
            is_marked = self._is_marked(chat.tools)
            if self.train_on == "all":
                ids = self._apply(messages, chat.tools)["input_ids"]
                mask = [1] * len(ids)
            elif is_marked:
                text, blocks = self._marked_blocks(messages, chat.tools)
                ids, mask = self._tokenize(RenderedAnswers(text, blocks))
            else:
                ids, mask = self._locate(messages, chat.tools, trained)
            if muted and (is_marked or self.train_on == "all"):
                _, is_muted = self._locate(messages, chat.tools, muted)
                mask = [int(has_loss and not without) for has_loss, without in zip(mask, is_muted, strict=True)]
            return self._end_answers(ids, mask, ends_with_answer=len(messages) - 1 in trained)

    def _is_muted(self, chat: Chat, index: int, last: int) -> bool:
        """Whether an answer has no loss.

        Args:
            index: The index of its message.
            last: That of the last answer.
        """
        if self.train_on == "last" and index != last:
            return True
        return chat.messages[index].get("weight") == 0

    def _end_answers(self, ids: list[int], mask: list[int], ends_with_answer: bool) -> tuple[list[int], list[int]]:
        """Where the next turn ends an answer, give the beginning of that turn a loss, and add it after the last answer.

        For ids ``[<user> 7 <assistant> 8 <user> 9 <assistant> 5]`` with a loss at 8 and 5, the second ``<user>`` gets a
        loss, and a third one is added.
        """
        turns = self._answer_end.next_turn
        if not turns:
            return ids, mask
        # with a loss at 8 and 5, the mask is [0 0 0 1 0 0 0 1], and the only end of an answer inside is at place 4
        ends = [place for place in range(1, len(ids)) if mask[place - 1] and not mask[place]]
        for place in ends:
            for turn in turns:
                if ids[place : place + len(turn)] == turn:
                    mask[place : place + len(turn)] = [1] * len(turn)
        if ends_with_answer:
            ids = ids + turns[0]
            mask = mask + [1] * len(turns[0])
        return ids, mask

    def prompt(self, chat: Chat) -> list[int]:
        """Token ids of a conversation and of the prompt for its next answer.

        Raises:
            RowError: The template rejects the conversation, leaves out a part of it, or takes too long.
        """
        with limited_rendering():
            ids: list[int] = self._apply(self._prepare(chat), chat.tools, add_generation_prompt=True)["input_ids"]
            return ids

    def contents_left_out(self, chat: Chat) -> list[int]:
        """The numbers of the messages, from 1, whose content the template leaves out because they have tool calls.
        Empty for a conversation that it does not render, see ``encode``."""
        if not any(message.get("tool_calls") and text_of(message) for message in chat.messages):
            return []
        try:
            with limited_rendering():
                messages = [self._message(message) for message in chat.messages]
                return [index + 1 for index in self._traces.check(messages, chat.tools)]
        except RowError:
            return []

    def check_tools(self, chat: Chat) -> None:
        """Check that the template reads the tools of a conversation.

        Raises:
            RowError: There are tools, and the template does not read them.
        """
        if chat.tools and TOOLS not in self.names():
            raise RowError(
                f"the row has {TOOLS}, which the chat template does not read. Give one that does: "
                f"data.chat_template=FILE. Or rename the column {TOOLS!r}."
            )

    def names(self) -> frozenset[str]:
        """``names_in`` the template, or in all templates that the tokenizer has."""
        return frozenset().union(*map(names_in, self.templates()))

    def templates(self) -> list[str]:
        """The template, or all templates that the tokenizer has."""
        template = self.tokenizer.chat_template
        if isinstance(template, Mapping):
            return list(template.values())
        return [template]

    def trains_calls(self, chat: Chat) -> bool:
        """Whether a tool call of a conversation has a loss. A template can leave calls out of ``{% generation %}``.

        Also True if the template does not show it: it has no such markers, or it rejects probes in place of arguments.
        """
        if self.train_on == "all" or not self._is_marked(chat.tools):
            return True
        try:
            with limited_rendering():
                messages = [self._message(message) for message in chat.messages]
                probed: Sequence[Mapping[str, Any]] = messages
                for part in parts_of(messages):
                    if part.call is not None:
                        probed = part.replaced(probed, PROBE)
                text, blocks = self._marked_blocks(probed, chat.tools)
        except RowError:
            return True
        is_inside = any(PROBE in text[start:end] for start, end in blocks)
        return is_inside or PROBE not in text

    # -- messages ------------------------------------------------------------------------------------------------------

    def _prepare(self, chat: Chat) -> list[dict[str, Any]]:
        """The messages as the template takes them, without weights.

        Raises:
            RowError: A role is misnamed, or the template does not read tool calls or leaves out a part of a message.
        """
        messages = [self._message(message) for message in chat.messages]
        misnamed = misnamed_roles(chat, self.templates())
        if misnamed:
            raise RowError(describe_misnamed(misnamed))
        for number, message in enumerate(messages, 1):
            if message.get("tool_calls") and "tool_calls" not in self.names():
                raise RowError(
                    f"message {number} has tool_calls, which the chat template does not read. Give one that does: "
                    f"data.chat_template=FILE, or a built-in name ({', '.join(BUILT_IN)})."
                )
        left_out = self._traces.check(messages, chat.tools)
        if left_out and not self.counts_contents:
            raise RowError(
                f"the chat template leaves out the content of message {left_out[0] + 1}, because it has tool_calls. "
                "Remove the content, or give a template that writes it: data.chat_template=FILE."
            )
        return messages

    def _message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """A message with the form of content and of arguments that the template takes."""
        prepared = {key: value for key, value in message.items() if key != "weight"}
        content = prepared.get("content")
        if isinstance(content, list) and not self._takes_parts:
            prepared["content"] = text_of(message)
        elif isinstance(content, str) and self._takes_parts and not self._takes_text:
            prepared["content"] = text_parts(content)
        if "tool_calls" in prepared and self._converts_arguments is not None:
            prepared["tool_calls"] = [self._converts_arguments(call) for call in prepared["tool_calls"]]
        return prepared

    # -- what a template takes -----------------------------------------------------------------------------------------

    @cached_property
    def _answer_end(self) -> AnswerEnd:
        """How the template ends an answer. Not known of a template that takes too long, which the first conversation
        reports."""

        def render(messages: list[dict[str, Any]]) -> str | None:
            return self._try([self._message(message) for message in messages])

        try:
            with limited_rendering():
                return find_answer_end(self.tokenizer, render)
        except RowError:
            return AnswerEnd(is_known=False)

    @cached_property
    def _takes_text(self) -> bool:
        return PROBE in (self._try([{"role": "user", "content": PROBE}]) or "")

    @cached_property
    def _takes_parts(self) -> bool:
        """Whether the template reads the parts of a content, and does not write them as Python or JSON."""
        text = self._try([{"role": "user", "content": text_parts(PROBE)}]) or ""
        return PROBE in text and not re.search(f"['\"]{PROBE}", text)

    @cached_property
    def _converts_arguments(self) -> Callable[[Mapping[str, Any]], Mapping[str, Any]] | None:
        """Gives the arguments of a call the form that the template takes; None: it takes both forms, or neither.

        A template that writes arguments as JSON would encode JSON text twice. Another one joins them to its text, and
        would write a mapping as Python does.
        """
        of_text = self._render_arguments(json.dumps({PROBE: PROBE}))
        of_mapping = self._render_arguments({PROBE: PROBE})
        takes_text = PROBE in of_text and f'\\"{PROBE}\\"' not in of_text
        takes_mapping = PROBE in of_mapping and f"'{PROBE}'" not in of_mapping
        if takes_text == takes_mapping:
            return None
        return encode_arguments if takes_text else decode_arguments

    def _render_arguments(self, arguments: Any) -> str:
        """The text of a call with these arguments; empty if the template rejects it."""
        calls = [{"id": "123456789", "type": "function", "function": {"name": "probe", "arguments": arguments}}]
        answer = {"role": "assistant", "content": "", "tool_calls": calls}
        return self._try([{"role": "user", "content": "a"}, answer]) or ""

    def _try(self, messages: Sequence[Mapping[str, Any]], tools: Any = None) -> str | None:
        """The rendered text; None if the template rejects it."""
        import jinja2

        try:
            return self._render(messages, tools)
        except (jinja2.TemplateError, *FAILURES):
            return None

    # -- rendering -----------------------------------------------------------------------------------------------------

    def _render(self, messages: Sequence[Mapping[str, Any]], tools: Any, **arguments: Any) -> str:
        conversation = cast("list[dict[str, str]]", messages)  # transformers also renders other values than text
        return str(self.tokenizer.apply_chat_template(conversation, tools=tools, tokenize=False, **arguments))

    def _apply(self, messages: list[dict[str, Any]], tools: Any, **arguments: Any) -> Any:
        return self.tokenizer.apply_chat_template(
            messages, tools=tools, return_dict=True, tokenizer_kwargs={"verbose": False}, **arguments
        )

    def _check_fast(self) -> None:
        if not self.tokenizer.is_fast:
            raise RowError(f"{type(self.tokenizer).__name__} does not map tokens to characters. Use a fast tokenizer.")

    def _is_marked(self, tools: Any) -> bool:
        return MARKER.search(self.tokenizer.get_chat_template(tools=tools)) is not None

    def _locate(self, messages: list[dict[str, Any]], tools: Any, wanted: Sequence[int]) -> tuple[list[int], list[int]]:
        """Token ids of a conversation, and a 1 for each that has a character of a wanted answer, see ``_answers``."""
        return self._tokenize(self._answers(messages, tools, wanted))

    def _tokenize(self, answers: RenderedAnswers) -> tuple[list[int], list[int]]:
        """Token ids of a conversation, and a 1 for each that has a character of an answer.

        An answer may begin with white space that no token has. transformers then gives it, and later ones, no loss.

        In ``<user>Hi<assistant>Yes``, the answer is at the characters 19 to 22. The token ``>Y``, at 18 to 20, has one
        of them, and counts.
        """
        self._check_fast()
        is_inside = bytearray(len(answers.text))  # a 1 for each character of an answer
        for start, end in answers.spans:
            is_inside[start:end] = b"\1" * (end - start)
        encoded = self.tokenizer(answers.text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        mask = [int(is_inside.find(1, start, end) >= 0) for start, end in encoded["offset_mapping"]]
        return encoded["input_ids"], mask

    def _answers(self, messages: list[dict[str, Any]], tools: Any, wanted: Sequence[int]) -> RenderedAnswers:
        """The rendered conversation with the wanted answers of the assistant.

        Args:
            wanted: The indices of their messages.

        Raises:
            RowError: The template does not show where they are.
        """
        if self._is_marked(tools):
            return self._marked_answers(messages, tools, wanted)
        text = self._render(messages, tools)
        spans: list[tuple[int, int]] = []
        for index in wanted:
            if index == 0:
                raise RowError(NO_PROMPT)
            before = self._render(messages[:index], tools, add_generation_prompt=True)
            after = self._render(messages[: index + 1], tools)
            if not (text.startswith(after) and after.startswith(before)):
                raise RowError(
                    f"the chat template renders message {index + 1} differently when other messages follow, "
                    f"or does not begin it with its prompt for an answer. {REMEDY}"
                )
            spans.append((len(before), len(after)))
        return RenderedAnswers(text, spans)

    def _marked_answers(self, messages: list[dict[str, Any]], tools: Any, wanted: Sequence[int]) -> RenderedAnswers:
        """``_answers`` of a template with ``{% generation %}``."""
        text, blocks = self._marked_blocks(messages, tools)
        answers = _answer_indices(messages)
        if len(blocks) != len(answers):
            reason = "data.train_on is last" if self.train_on == "last" else f"message {wanted[0] + 1} has weight 0"
            raise RowError(
                f"{reason}, and the chat template has {len(blocks)} blocks {{% generation %}} for {len(answers)} "
                "answers. Expected one block for each answer. Give such a template: data.chat_template=FILE."
            )
        spans = [block for index, block in zip(answers, blocks, strict=True) if index in wanted]
        return RenderedAnswers(text, spans)

    def _marked_blocks(self, messages: Sequence[Any], tools: Any) -> tuple[str, list[tuple[int, int]]]:
        """The rendered conversation, and the start and the end of each ``{% generation %}`` in it."""
        from transformers.utils.chat_template_utils import render_jinja_template

        template = self.tokenizer.get_chat_template(tools=tools)
        special_tokens: dict[str, Any] = self.tokenizer.special_tokens_map
        rendered: Any = render_jinja_template(
            [list(messages)], tools, None, template, return_assistant_tokens_mask=True, **special_tokens
        )
        (text,), (blocks,) = rendered  # of one conversation
        return text, blocks


def answer_end(tokenizer: PreTrainedTokenizerBase) -> AnswerEnd:
    """How the chat template of a tokenizer ends an answer."""
    return ChatRenderer(tokenizer)._answer_end


def _answer_indices(messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """The indices of the messages of the assistant."""
    return [index for index, message in enumerate(messages) if message["role"] == "assistant"]
