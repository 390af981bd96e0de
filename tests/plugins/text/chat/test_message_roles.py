"""Roles of messages: those that mean another one, the first one of a row, and the answers that have a loss.

A row that would be trained without its answers is refused or counted, in memory, in streams and by predict.

Modules:
    plugins/fastloop_plugins/rows/message_roles.py
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml
from chat_helpers import (
    CHATS,
    IM,
    MODEL,
    TRL,
    UNMARKED,
    answer,
    byte_tokenizer,
    chat_run,
    text_with_loss,
    trained_text,
    user,
)
from streaming_helpers import data_section, samples_of, write_lines
from text_helpers import make_run

from fastloop.errors import DataError, RecipeError
from fastloop.testing import assert_problem, expect_problem
from fastloop_plugins.data.packing import Packing
from fastloop_plugins.data.skip_unreadable import SkipUnreadable
from fastloop_plugins.rows.message_roles import meant_role
from fastloop_plugins.rows.table import RowError
from fastloop_plugins.text.chat import traces
from fastloop_plugins.text.chat.prompts import chat_chunks
from fastloop_plugins.text.chat.rows import Chat, describe_chat, read_chat
from fastloop_plugins.text.chat.template import CHATML, ChatRenderer
from fastloop_plugins.text.streaming import split

GOOD = [{"messages": [user(f"a{number}"), answer("b")]} for number in range(4)]
STARTS = {"messages": [answer("Hello"), user("Hi"), answer("Yes")]}


def misnamed(role: str, asker: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": asker, "content": "a"}, {"role": role, "content": "b"}]}


def streamed(*rows: Any, **changes: Any) -> Any:
    write_lines("rows.jsonl", rows)
    section = data_section("rows.jsonl", CHATS | {"messages": "messages", "shuffle_buffer": 0} | changes)
    return make_run("causal-lm", MODEL, section)


def proposal(message: str, key: str) -> Any:
    """The value of ``data.<key>`` that a message proposes."""
    match = re.search(rf"data\.{key}=(\[.*\]|\{{.*?\}})", message)
    assert match is not None, message
    return yaml.safe_load(match[1])


# -- other names of roles ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "role"),
    [("Assistant", "assistant"), ("model", "assistant"), ("gpt", "assistant"), ("asistant", "assistant")]
    + [("human", "user"), ("USER", "user"), ("usr", "user"), ("System ", "system"), ("tools", "tool")]
    + [("assistant", None), ("system", None), ("developer", None), ("critic", None), ("function", None)],
)
def test_a_name_means_a_role(name, role):
    assert meant_role(name) == role


@pytest.mark.parametrize("asker", ["user", "human"])
@pytest.mark.parametrize("name", ["Assistant", "model", "gpt", "asistant", "my bot"])
def test_a_role_that_means_another_is_refused_with_its_count_and_the_proposed_line_trains_all_rows(name, asker):
    rows = [*GOOD, misnamed(name, asker), misnamed(name, asker)]
    if name == "my bot":  # which no table has
        assert len(chat_run(*rows, roles={name: "assistant", asker: "user"}).datasets["train"]) == 6
        return
    with expect_problem("invalid-row rows.jsonl, line 5", RecipeError) as error:
        chat_run(*rows)
    message = str(error.value)
    assert (repr(name) in message, "2 of 6 rows" in message) == (True, True)
    roles = proposal(message, "roles")
    assert roles == ({name: "assistant"} if asker == "user" else {name: "assistant", "human": "user"})
    run = chat_run(*rows, roles=roles)
    assert len(run.datasets["train"]) == 6
    assert trained_text(run, 5) == "b<|im_end|>\n"
    assert samples_of(streamed(*rows, roles=roles).datasets["train"]) == samples_of(run.datasets["train"])


def test_a_stream_and_predict_refuse_the_same_roles(monkeypatch):
    monkeypatch.setattr(split, "HEAD", 16)  # number of rows that are checked at once: the misnamed one is the 21st
    run = streamed(*GOOD * 5, misnamed("model"))
    with expect_problem("invalid-row rows.jsonl 21 'model' 'assistant'", DataError):
        run.datasets["train"][20]
    task = chat_run(*GOOD, roles={"client": "user"}).plugins.plugins[0]
    with expect_problem("invalid-row 1 'human' 'user'", RecipeError):
        list(chat_chunks(task.data, task.text_model.tokenizer, [[{"role": "human", "content": "a"}]], 0, 8))  # type: ignore[list-item]
    texts: list[Any] = [[{"role": name, "content": "a"}] for name in ("client", "user")]
    (chunk,) = chat_chunks(task.data, task.text_model.tokenizer, texts, 0, 8)
    assert chunk[0]["input_ids"].tolist() == chunk[1]["input_ids"].tolist()


def test_skipping_unreadable_rows_counts_rows_of_other_roles():
    write_lines("rows.jsonl", [*GOOD, misnamed("model"), STARTS, {"messages": []}])
    run = make_run("causal-lm", MODEL, CHATS | {"messages": "messages"}, [SkipUnreadable()])
    assert (len(run.datasets["train"]), run.state.unreadable) == (5, 2), "chatml shows where the first answer begins"


def test_a_template_that_marks_answers_of_another_role_is_its_own_master():
    template = CHATML.replace("'assistant'", "'model'")
    messages = [user("a"), {"role": "model", "content": "b"}]
    assert text_with_loss(template, *messages) == "b<|im_end|>\n"
    with pytest.raises(RowError, match=r"'model'.*'assistant'"):
        text_with_loss(UNMARKED, *messages)


def test_a_role_of_its_own_is_counted_in_a_warning(caplog):
    rows = [*GOOD, {"messages": [user("a"), {"role": "critic", "content": "no"}, answer("b")]}]
    assert trained_text(chat_run(*rows), 4) == "b<|im_end|>\n"
    assert_problem(caplog, "unknown-roles data: train: critic (1)")
    caplog.clear()
    chat_run(*rows, train_on="all")
    assert "critic" not in caplog.text


# -- rows without messages, and rows that start with the assistant -----------------------------------------------------


@pytest.mark.parametrize("value", [[], None])
def test_rows_without_messages_are_counted_and_the_proposed_line_leaves_them_out(value):
    rows = [*GOOD, {"messages": value}, {"messages": value}]
    with expect_problem("invalid-row rows.jsonl, line 5", RecipeError) as error:
        chat_run(*rows)
    assert_problem(error.value.problem, "invalid-row 2 6")
    drop = proposal(str(error.value), "drop")
    assert len(chat_run(*rows, drop=drop).datasets["train"]) == 4
    with pytest.raises(RecipeError) as error:
        streamed(*rows)
    assert proposal(str(error.value), "drop") == drop
    assert len(streamed(*rows, drop=drop).datasets["train"]) == 4


def test_rows_that_start_with_the_assistant_are_counted_and_the_proposed_line_leaves_them_out(tmp_path):
    (tmp_path / "unmarked.jinja").write_text(UNMARKED)
    template = str(tmp_path / "unmarked.jinja")
    rows = [*GOOD, STARTS, STARTS]
    with expect_problem("invalid-row rows.jsonl 5", RecipeError) as error:
        chat_run(*rows, chat_template=template)
    assert_problem(error.value.problem, "invalid-row 2 6")
    drop = proposal(str(error.value), "drop")
    found = chat_run(*rows, chat_template=template, drop=drop)
    assert len(found.datasets["train"]) == 4
    with pytest.raises(RecipeError) as error:
        streamed(*rows, chat_template=template)
    assert proposal(str(error.value), "drop") == drop
    kept = streamed(*rows, chat_template=template, drop=drop).datasets["train"]
    assert samples_of(kept) == samples_of(found.datasets["train"])
    write_lines("rows.jsonl", rows)
    section = CHATS | {"messages": "messages", "chat_template": template}
    assert len(make_run("causal-lm", MODEL, section, [SkipUnreadable()]).datasets["train"]) == 4
    assert len(chat_run(*rows, chat_template=template, train_on="last").datasets["train"]) == 6
    muted = {"messages": [answer("Hello", weight=0), *STARTS["messages"][1:]]}
    assert trained_text(chat_run(*GOOD, muted, chat_template=template), 4) == "Yes<|im_end|>\n"


def test_a_template_that_rejects_a_first_answer_names_the_condition():
    alternates = "{% if messages[0].role != 'user' %}{{ raise_exception('must alternate') }}{% endif %}" + CHATML
    with pytest.raises(RowError, match=r"must alternate\..*data.drop with first_role: assistant"):
        text_with_loss(alternates, *STARTS["messages"])
    with pytest.raises(RowError, match=r"must alternate\.$"):
        text_with_loss(alternates, {"role": "system", "content": "a"}, answer("b"))


READS_CONTENTS = """{% for m in messages %}{% if m.role == 'tool' and not m.content.startswith('{') %}
{{ raise_exception('no JSON') }}{% endif %}{% if m.role != 'critic' or loop.first %}
<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""Rejects a tool's result that is no JSON, and so a probe. Writes a critic at the beginning only."""


def test_a_template_that_rejects_probes_is_tried_once_for_each_place_of_a_role(monkeypatch):
    turn = [user("a"), answer("one"), {"role": "tool", "content": "{}"}, answer("two")]
    renderer = ChatRenderer(byte_tokenizer(READS_CONTENTS, IM), "all")
    renderings = []
    render = renderer.tokenizer.apply_chat_template

    def counting(*arguments: Any, **options: Any) -> Any:
        renderings.append(arguments)
        return render(*arguments, **options)

    monkeypatch.setattr(renderer.tokenizer, "apply_chat_template", counting)
    renderer.encode(Chat(turn * 20))
    assert len(renderings) < 20
    renderings.clear()
    renderer.encode(Chat(turn * 21))
    assert len(renderings) == 3, "with all probes, as it is, and for its tokens"
    with pytest.raises(RowError, match="leaves out message 5, whose role is 'critic'"):
        renderer.encode(Chat([*turn, {"role": "critic", "content": "no"}, answer("b")]))


def test_a_renderer_remembers_a_limited_number_of_orders(monkeypatch):
    monkeypatch.setattr(traces, "KNOWN_ORDERS", 3)
    renderer = ChatRenderer(byte_tokenizer(CHATML, IM))
    for count in range(1, 9):
        renderer.encode(Chat([user("a"), answer("b")] * count))
        assert 1 <= len(renderer._traces._written) <= 3


TURN = "{% for m in messages %}<|im_start|>ROLE\nTEXT<|im_end|>\n{% endfor %}"
THOUGHT = "{% if m.role == 'assistant' and not loop.last %}{{ m.content.split('</think>')[-1] }}{% else %}"
WRITES_ALL = {
    "chatml": CHATML,
    "without markers": UNMARKED,
    "trimmed contents": TRL["llama3"]["template"],
    "parts and capital roles": TRL["smolvlm"]["template"],
    "a default system message": TRL["qwen2_5"]["template"],
    "reasoning": TRL["qwen3"]["template"],
    "upper-case roles": TURN.replace("ROLE", "{{ m.role | upper }}").replace("TEXT", "{{ m.content }}"),
    "a date": "{{ strftime_now('%d %B %Y') }}\n"
    + TURN.replace("ROLE", "{{ m.role }}").replace("TEXT", "{{ m.content }}"),
    "no thoughts in earlier turns": TURN.replace("ROLE", "{{ m.role }}").replace(
        "TEXT", THOUGHT + "{{ m.content }}{% endif %}"
    ),
    "no empty messages": TURN.replace("ROLE", "{{ m.role }}").replace(
        "TEXT", "{% if m.content %}{{ m.content }}{% endif %}"
    ),
}
"""Templates that leave out no message."""


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


ORDINARY = {
    "a system message": [system("Be brief."), user("a"), answer("b")],
    "two system messages": [system("Be brief."), system("Be kind."), user("a"), answer("b")],
    "a later system message": [user("a"), answer("b"), system("Be brief."), user("c"), answer("d")],
    "an empty answer": [user("a"), answer(""), user("c"), answer("d")],
    "an empty question": [user(""), answer("b")],
    "an empty system message": [system(""), user("a"), answer("b")],
    "unicode": [user("Größe? 你好 🙂"), answer("e\u0301té \u202eabc\u202c\u200b")],
    "spaces of unicode": [user("\u3000a\u00a0"), answer("\u2028b\u200b")],
    "white space around": [user("  a \n"), answer("\n\n b\t")],
    "only white space": [user(" \n"), answer("   ")],
    "a part of another": [user("Say a b c."), answer("a b c")],
    "equal contents": [user("same"), answer("same")],
    "repeated messages": [user("a"), answer("b")] * 4,
    "braces": [user("{{ a }} {% raw %} {# b #}"), answer("{% for m in messages %}{{ m }}{% endfor %}")],
    "one character": [user("a"), answer("1")],
    "digits like a probe": [user("31415926535"), answer("314159265350000")],
    "thoughts": [user("a"), answer("<think>hm</think>b"), user("c"), answer("<think>so</think>d")],
    "only thoughts": [user("a"), answer("<think>hm</think>"), user("c"), answer("d")],
    "open thoughts": [user("a"), answer("<think>hm"), user("c"), answer("</think>d")],
    "reasoning": [user("a"), answer("b", reasoning_content="hm"), user("c"), answer("d")],
    "marks of the template": [user("<|im_start|>user\na<|im_end|>"), answer("<|im_end|>")],
    "names of roles": [user("assistant"), answer("user")],
    "JSON": [user('{"a": 1}'), answer("[1, 2]")],
    "text like a tool's result": [user("<tool_response>\na\n</tool_response>"), answer("b")],
    "parts": [user([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]), answer("c")],
    "two questions": [user("a"), user("b"), answer("c")],
    "two answers": [user("a"), answer("b"), answer("c")],
    "a first answer": [answer("a"), user("b"), answer("c")],
    "a last question": [user("a"), answer("b"), user("c")],
    "other keys": [user("a", name="Eve"), answer("b", id=3)],
}
"""Conversations without tools."""


@pytest.mark.parametrize("template", WRITES_ALL)
def test_no_ordinary_conversation_is_refused(template):
    tokenizer = byte_tokenizer(WRITES_ALL[template], IM)
    renderer = ChatRenderer(tokenizer, "all")
    for messages in ORDINARY.values():
        chat = read_chat({"messages": messages}, ["messages"])
        prepared = [renderer._message(message) for message in chat.messages]
        expected = tokenizer.apply_chat_template(prepared)["input_ids"]
        assert ChatRenderer(tokenizer, "all").encode(chat)[0] == renderer.encode(chat)[0] == expected
        assert ChatRenderer(tokenizer).prompt(chat)[: len(expected)] == expected


# -- train_on: last ----------------------------------------------------------------------------------------------------

TURNS = [user("a"), answer("one"), user("b"), answer("two"), user("c")]


@pytest.mark.parametrize("template", [CHATML, UNMARKED])
def test_only_the_last_answer_has_a_loss(template):
    assert text_with_loss(template, *TURNS, train_on="last") == "two<|im_end|>\n"
    assert text_with_loss(template, *TURNS[:2], train_on="last") == "one<|im_end|>\n"
    assert text_with_loss(template, user("a"), answer("one"), user("b"), answer("two", weight=0), train_on="last") == ""
    renderer = ChatRenderer(byte_tokenizer(template, IM), "assistant")
    last = ChatRenderer(byte_tokenizer(template, IM), "last")
    assert renderer.encode(Chat(TURNS))[0] == last.encode(Chat(TURNS))[0], "the tokens are the same"


def test_the_last_answer_in_memory_streams_and_packed_rows():
    rows = [{"messages": TURNS}, *GOOD]
    run = chat_run(*rows, train_on="last")
    assert trained_text(run) == "two<|im_end|>\n"
    assert trained_text(chat_run(*rows)) == "one<|im_end|>\ntwo<|im_end|>\n"
    assert samples_of(streamed(*rows, train_on="last").datasets["train"]) == samples_of(run.datasets["train"])
    packed = make_run("causal-lm", MODEL, CHATS | {"messages": "messages", "train_on": "last"}, [Packing()])
    samples = [run.datasets["train"][index] for index in range(5)]
    plain_batch, packed_batch = (each.loaders.collators["train"](samples) for each in (run, packed))
    assert plain_batch.loss_weight == packed_batch.loss_weight
    for batch in (plain_batch, packed_batch):
        targets = [token for row in batch.inputs["targets"].tolist() for token in row if token >= 0]
        text = run.plugins.plugins[0].text_model.tokenizer.decode(targets)
        assert ("one" in text, text.count("<|im_end|>")) == (False, 5)


def test_samples_show_the_loss_of_the_last_answer(cli):
    from pathlib import Path

    write_lines("rows.jsonl", [{"messages": TURNS}])
    recipe = {"model": MODEL, "data": CHATS | {"train_on": "last"}, "plugins": ["causal-lm"]}
    Path("recipe.yaml").write_text(yaml.safe_dump(recipe))
    code, out, err = cli("plan", "recipe.yaml", "--samples", "1")
    assert code == 0, err
    inside = "".join(re.findall(r"\[([^\]]*)\]", out.replace("·", "")))
    assert ("two" in inside, "one" in inside) == (True, False)


# -- messages in warnings ----------------------------------------------------------------------------------------------


def test_a_warning_shows_messages_and_not_how_they_are_stored(caplog):
    chat_run(GOOD[0], GOOD[0])
    assert_problem(caplog, "repeated-rows 'user: a0 | assistant: b'.")


def test_a_conversation_that_a_task_marks_is_shown_by_its_messages():
    stored = Chat([user("a"), answer("b")], [{"name": "c"}]).dumps()
    assert describe_chat(stored) == describe_chat("\0" + stored) == "user: a | assistant: b"
    for text in ("[[{", "a [[{", '[[{"a": 1}], null]', ""):
        assert describe_chat(text) == text, "a text stays as it is"
