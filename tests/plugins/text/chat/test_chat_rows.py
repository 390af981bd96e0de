"""Keys of the messages of a conversation, and rows that are refused.

Modules:
    plugins/fastloop_plugins/text/chat/rows.py
    plugins/fastloop_plugins/text/chat/spelled_tokens.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from chat_helpers import (
    CHATS,
    IM,
    MODEL,
    QWEN,
    TRL,
    UNMARKED,
    WEATHER,
    answer,
    byte_tokenizer,
    call,
    chat_run,
    text_with_loss,
    tool_row,
    trained_text,
    user,
)
from streaming_helpers import data_section, samples_of, write_lines, write_parquet
from text_helpers import make_run

from fastloop.errors import DataError, RecipeError
from fastloop.testing import assert_problem, expect_problem, find_problems
from fastloop_plugins.rows.table import RowError
from fastloop_plugins.text.chat.rows import read_chat
from fastloop_plugins.text.chat.template import CHATML


@pytest.mark.parametrize("template", [CHATML, UNMARKED, QWEN])
def test_an_answer_of_weight_0_has_no_loss(template):
    messages = [
        user("a"),
        answer("one", weight=0),
        user("b", weight=0),
        answer("two", weight=1),
        user("c"),
        answer("three", weight=0),
    ]
    kept = text_with_loss(template, *messages)
    assert (kept.strip(), "weight" in kept) == ("two<|im_end|>", False)
    both = text_with_loss(template, *messages, train_on="all")
    assert [word in both for word in ("one", "two", "three", "a<|im_end|>")] == [False, True, False, True]
    without = [{key: value for key, value in message.items() if key != "weight"} for message in messages]
    assert all(word in text_with_loss(template, *without) for word in ("one", "two", "three"))


@pytest.mark.parametrize("streaming", [False, True])
def test_messages_may_be_json_text_in_a_table(streaming):
    rows = [{"messages": [user("a"), answer("b")], "tools": [WEATHER]}, {"messages": [user("c"), answer("d")]}] * 4
    texts = [{name: json.dumps(value) for name, value in row.items()} for row in rows]
    write_lines("rows.jsonl", rows)
    write_parquet("rows.parquet", [{"tools": None, **row} for row in texts])
    samples = []
    for path in ("rows.jsonl", "rows.parquet"):
        changes = {"messages": "messages", "chat_template": "chatml", "max_length": 512}
        data = data_section(path, changes if streaming else changes | {"streaming": None})
        samples.append(samples_of(make_run("causal-lm", MODEL, data).datasets["train"]))
    assert samples[0] == samples[1]


@pytest.mark.parametrize("text", ["[", '"a"', "[1]", '{"role": "user"}', "[" * 5000, "[]"])
def test_a_text_that_is_no_json_of_messages_is_refused(text):
    with pytest.raises(RowError, match="messages"):
        read_chat({"messages": text}, ["messages"])


def test_weight_0_with_several_blocks_of_an_answer_is_refused():
    template = CHATML.replace("{% generation %}", "{% generation %}>{% endgeneration %}{% generation %}")
    assert "one" in text_with_loss(template, user("a"), answer("one"))
    with pytest.raises(RowError, match=r"^message 2 .*weight 0.* 4 .*{% generation %}.* 2 "):
        text_with_loss(template, user("a"), answer("one", weight=0), user("b"), answer("two"))


def test_reasoning_is_trained_if_the_template_reads_it(caplog):
    reasoned = {"messages": [user("2+2?"), answer("4", reasoning_content="two and two")]}
    Path("qwen3.jinja").write_text(TRL["qwen3"]["template"])
    run = chat_run(reasoned, chat_template="qwen3.jinja")
    assert trained_text(run) == "<think>\ntwo and two\n</think>\n\n4<|im_end|>\n"
    assert "does not read" not in caplog.text
    run = chat_run(reasoned)
    assert trained_text(run) == "4<|im_end|>\n"
    assert (
        "data: train: keys that the chat template does not read, so they have no effect: reasoning_content (1)"
        in caplog.text
    )


def test_keys_that_the_template_does_not_read_are_one_warning_with_counts(caplog):
    named = [user("a", id=1, weight=1), answer("b", id=2, score=None)]
    Path("short.jinja").write_text(
        UNMARKED[UNMARKED.index("{% for message") :].replace("tools and", "").replace("loop.first", "false")
    )
    chat_run(
        {"messages": named},
        {"messages": [user("c"), answer("d", id=3)], "tools": [WEATHER]},
        chat_template="short.jinja",
    )
    (problem,) = find_problems(caplog, "unread-keys train: tools")
    assert problem.text.endswith(": id (3), weight of role user (1), tools (1).")
    write_lines("rows.jsonl", [{"messages": named}] * 64)
    make_run("causal-lm", MODEL, data_section("rows.jsonl", {"chat_template": "chatml", "max_length": 64}))
    assert_problem(caplog, "unread-keys train, 64 id (128)")


EMPTY: list[Any] = [
    [user("a"), answer("b"), user("c"), answer(" ")],
    [user("a"), answer(""), user("c"), answer("d")],
    [user("a"), answer("", weight=0), user("c"), answer("d")],
    [user(""), answer(None, tool_calls=call({})), {"role": "tool", "content": ""}, answer("d")],
]


@pytest.mark.parametrize(("train_on", "count"), [("assistant", 2), ("last", 1)])
def test_empty_answers_with_a_loss_are_counted(caplog, train_on, count):
    rows = [{"messages": messages, "tools": [WEATHER]} for messages in EMPTY]
    chat_run(*rows, train_on=train_on)
    (problem,) = find_problems(caplog, "empty-texts train")
    assert problem.text.startswith(f"{count} of 4 rows ")
    assert "rows.jsonl, line 1." in problem.text


def test_messages_that_spell_a_token_of_the_template_are_counted(caplog):
    byte_tokenizer(None, IM).save_pretrained("tokenizer")
    spelled = [user("a <|im_end|> b"), answer("<|im_start|>")]
    write_lines("rows.jsonl", [{"messages": [user("a"), answer("b")]}, {"messages": spelled}])
    make_run("causal-lm", MODEL | {"tokenizer": "tokenizer"}, CHATS)
    assert_problem(caplog, "spelled-tokens train '<|im_end|>' 1 of 2 rows.jsonl, line 2")


def test_parts_of_text_are_joined_unless_the_template_reads_them():
    parts = [{"type": "text", "text": "Sleep"}, {"type": "text", "text": ", now", "image": None}]
    assert text_with_loss(CHATML, user(parts), answer(parts)) == "Sleep, now<|im_end|>\n"
    trims = "{% for m in messages %}{{ '<|im_start|>' + m.role + m.content | trim }}{% endfor %}"
    trims += "{{ '<|im_start|>assistant' * add_generation_prompt }}"
    said = text_with_loss(trims, user("a"), answer(parts))  # it ends at the next turn
    assert said == "Sleep, now<|im_start|>", "a filter would write the list as Python does"


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "weight": (
        answer("b", weight=0.5),
        "weight 0.5 (float)",
    ),
    "no content": (answer(None), "content None"),
    "no calls": (answer(None, tool_calls=[]), "content None"),
    "an image": (
        answer([{"type": "image", "url": "a.png"}]),
        "content {'type': 'image'",
    ),
    "calls": (
        answer("b", tool_calls="weather()"),
        "tool_calls 'weather()' (str)",
    ),
    "a call without a list": (answer("b", tool_calls=call({"city": "Rome"})[0]), "tool_calls 'function' (dict)"),
    "a function without a list": (answer("b", tool_calls={"name": "f", "arguments": {}}), "tool_calls 'name' (dict)"),
    "no name": (answer("b", tool_calls=[{"function": {"arguments": {}}}]), "tool_calls"),
    "sender": ({"from": "bing", "value": "b"}, "'bing' human user gpt"),
    "call": (
        {"from": "function_call", "value": "weather()"},
        "function_call 'weather()'",
    ),
    "surrogate": (answer("b", note="\ud800"), "UTF-16"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_message_that_is_none_is_named(case):
    message, facts = REFUSED[case]
    with expect_problem(f"invalid-row rows.jsonl, line 2: {facts}", RecipeError):
        chat_run({"messages": [user("a"), answer("b")]}, {"messages": [user("a"), message]})


def test_a_bad_row_of_a_stream_is_named_and_skip_unreadable_leaves_out_bad_rows():
    from fastloop_plugins.data.skip_unreadable import SkipUnreadable

    good = [tool_row(f"{number}") for number in range(9)]
    write_lines("rows.jsonl", [*good, {"messages": [user("a"), answer("b", weight=7)]}])
    run = make_run("causal-lm", MODEL, CHATS, [SkipUnreadable()])
    assert (len(run.datasets["train"]), run.state.unreadable) == (9, 1)
    write_lines("rows.jsonl", good * 8)
    run = make_run(
        "causal-lm",
        MODEL,
        data_section("rows.jsonl", {"messages": "messages", "chat_template": "chatml", "max_length": 1024}),
    )
    with expect_problem("invalid-row 5 7", DataError):
        run.datasets["train"].encode([([user("a"), answer("b", weight=7)], None)], ["row 5"])
