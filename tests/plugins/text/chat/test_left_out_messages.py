"""Messages, calls and contents that a chat template does not write.

Modules:
    plugins/fastloop_plugins/text/chat/left_out_contents.py
    plugins/fastloop_plugins/text/chat/traces.py
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from chat_helpers import (
    MODEL,
    ONLY_CALLS,
    QWEN,
    SPOKEN,
    SPOKEN_ROW,
    answer,
    call,
    chat_run,
    text_of,
    text_with_loss,
    tool_row,
    trained_text,
    user,
)
from streaming_helpers import data_section, samples_of
from text_helpers import make_run

from fastloop.errors import DataError, RecipeError
from fastloop.testing import assert_problem, expect_problem, find_problems
from fastloop_plugins.rows.table import RowError
from fastloop_plugins.text.chat.prompts import chat_chunks
from fastloop_plugins.text.chat.template import CHATML


def test_a_role_that_the_template_leaves_out_is_named():
    rows = [
        {"messages": [user("a"), answer("b")]},
        {"messages": [user("a"), {"role": "critic", "content": "no"}, answer("b")]},
    ]
    Path("qwen.jinja").write_text(QWEN)
    facts = "message 2, 'critic' user, assistant, tool, system."
    with expect_problem(f"invalid-row rows.jsonl, line 2: {facts}", RecipeError):
        chat_run(*rows, chat_template="qwen.jinja")
    assert trained_text(chat_run(*rows), 1) == "b<|im_end|>\n", "chatml writes every role"
    run = make_run(
        "causal-lm",
        MODEL,
        data_section("rows.jsonl", {"messages": "messages", "chat_template": "chatml", "max_length": 64}),
    )
    run.datasets["train"].encode.tokenizer.chat_template = QWEN
    with expect_problem(f"invalid-row rows.jsonl, line 2: {facts}", DataError):
        run.datasets["train"][1]


FIRST_SYSTEM = (
    "{% if messages[0]['role'] == 'system' %}{{ '<|im_start|>system\\n' + messages[0]['content'] }}"
    "{{ '<|im_end|>\\n' }}{% endif %}"
    "{% for message in messages %}{% if message['role'] in ('user', 'assistant') %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""A template that writes a system message only if it is the first message, as those of gpt-oss and SmolLM3."""
LAST_SYSTEM = (
    "{% set found = namespace(system='') %}{% for message in messages %}{% if message['role'] == 'system' %}"
    "{% set found.system = message['content'] %}{% endif %}{% endfor %}{{ found.system }}"
    + FIRST_SYSTEM.partition("{% endif %}")[2]
)
"""A template that writes the last system message, as that of DeepSeek-R1."""


def system(text):
    return {"role": "system", "content": text}


@pytest.mark.parametrize(
    ("template", "messages", "left_out"),
    [
        (FIRST_SYSTEM, [user("a"), answer("b"), system("c"), user("d"), answer("e")], 3),
        (LAST_SYSTEM, [system("a"), system("b"), user("c"), answer("d")], 1),
    ],
    ids=["only the first", "only the last"],
)
def test_a_message_that_the_template_writes_at_other_places_is_named(template, messages, left_out):
    """The first row has the same roles, and is written."""
    rows = [{"messages": [system("a"), user("b"), answer("c")]}, {"messages": messages}]
    Path("own.jinja").write_text(template)
    with expect_problem(f"invalid-row rows.jsonl, line 2: message {left_out}, 'system'. other places", RecipeError):
        chat_run(*rows, chat_template="own.jinja")
    assert trained_text(chat_run(rows[0], chat_template="own.jinja"), 0) == "c<|im_end|>\n"


READS_RESULTS = (
    "{% for m in messages %}{% if m.role == 'tool' and not m.content.startswith('{') %}"
    "{{ raise_exception('no JSON') }}{% endif %}{% endfor %}"
)
TWO_CALLS = [*call({"city": "Rome"}), *call({"city": "Oslo"})]
LEFT_OUT = {
    "the content beside a call": (
        ONLY_CALLS,
        answer("Let me look.", tool_calls=call({"city": "Rome"})),
        "content of message 2",
    ),
    "all calls but the first": (
        CHATML.replace("in message['tool_calls'] or []", "in (message['tool_calls'] or [])[:1]"),
        answer("", tool_calls=TWO_CALLS),
        "call 2 of message 2",
    ),
    "calls of another role": (CHATML, user("Rain?", tool_calls=call({"city": "Rome"})), "call 1 of message 2"),
    "calls of one that rejects probes": (
        READS_RESULTS + CHATML.replace("in message['tool_calls'] or []", "in (message['tool_calls'] or [])[:1]"),
        answer("", tool_calls=TWO_CALLS),
        "call 2 of message 2",
    ),
}
"""A template, a message, and the part of it that the template leaves out."""


@pytest.mark.parametrize("case", LEFT_OUT)
@pytest.mark.parametrize("train_on", ["assistant", "all"])
def test_a_part_of_a_message_that_the_template_leaves_out_is_named(case, train_on):
    template, message, part = LEFT_OUT[case]
    rest = [{"role": "tool", "content": "{}"}, answer("No.")]
    text_with_loss(template, user("a"), answer("", tool_calls=call({"city": "Rome"})), *rest, train_on=train_on)
    with pytest.raises(RowError, match=f"leaves out (the )?{part}"):
        text_with_loss(template, user("a"), message, *rest, train_on=train_on)


@pytest.mark.parametrize("markers", [True, False])
def test_contents_that_the_template_leaves_out_beside_calls_are_one_warning_with_their_number(markers, caplog):
    template = ONLY_CALLS if markers else re.sub(r"{% (end)?generation %}", "", ONLY_CALLS)
    Path("calls.jinja").write_text(template)
    Path("probes.jinja").write_text(READS_RESULTS.replace("'{'", "'dry'") + template)  # rejects all probes at once
    rows = [tool_row(), SPOKEN_ROW, tool_row(), SPOKEN_ROW]
    for name in ("calls.jinja", "probes.jinja"):
        run = chat_run(*rows, chat_template=name)
        assert_problem(caplog, "contents-left-out train 2 of 4 rows rows.jsonl, line 2.")
        assert len(find_problems(caplog, "contents-left-out data")) == 1
        assert ("weather" in trained_text(run, 1), "Let me look" in trained_text(run, 1)) == (True, False)
        caplog.clear()
    section = {"messages": "messages", "chat_template": "calls.jinja", "max_length": 1024}
    streamed = make_run("causal-lm", MODEL, data_section("rows.jsonl", section))
    assert_problem(caplog, "contents-left-out its first 4 rows 2 of 4 rows.jsonl, line 2.")
    assert len(samples_of(streamed.datasets["train"])) == 4
    caplog.clear()
    chat_run(*rows)
    assert not find_problems(caplog, "contents-left-out data"), "chatml writes the contents"


def test_contents_left_out_of_prompts_are_counted(caplog):
    Path("calls.jinja").write_text(ONLY_CALLS)
    run = chat_run(tool_row(), chat_template="calls.jinja")
    task = run.plugins.plugins[0]
    chunks = list(chat_chunks(task.data, task.text_model.tokenizer, ["Hi", [*SPOKEN], [*SPOKEN]], 0, 2))
    assert "Let me look" not in text_of(run, chunks[0][1]["input_ids"])
    assert_problem(caplog, "contents-left-out predict 2 of 3 row 2.")
