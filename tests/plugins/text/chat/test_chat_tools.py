"""Tools and their calls in chat data: tokens that have a loss, arguments, files and whole runs.

Modules:
    plugins/fastloop_plugins/text/chat/message_forms.py
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from chat_helpers import (
    CHATS,
    MODEL,
    QWEN,
    TRL,
    UNMARKED,
    WEATHER,
    answer,
    call,
    chat_run,
    text_of,
    text_with_loss,
    tool_row,
    trained_text,
    user,
)
from interrupted_runs import Case, check_interrupted
from pyarrow import parquet
from streaming_helpers import data_section, samples_of, write_lines
from text_helpers import make_run
from training_runs import execute

from fastloop.testing import assert_problem, find_problems
from fastloop_plugins.data.packing import Packing
from fastloop_plugins.rows.table import RowError
from fastloop_plugins.text.chat.rows import Chat, read_chat
from fastloop_plugins.text.chat.template import CHATML, ChatRenderer
from fastloop_plugins.text.tokenizers import TrainedTokenizer, train_tokenizer


def test_tool_calls_are_trained_and_tools_are_in_the_prompt():
    run = chat_run(tool_row(), {"messages": [user("Hi"), answer("Hello")]})
    assert (
        trained_text(run)
        == '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call><|im_end|>\nNo.<|im_end|>\n'
    )
    assert json.dumps(WEATHER) in text_of(run, run.datasets["train"][0]["input_ids"])
    assert "tools" not in text_of(run, run.datasets["train"][1]["input_ids"])
    assert execute(run)["steps"] == 1


@pytest.mark.parametrize("template", [QWEN, re.sub(r"{%-? (end)?generation %}", "", QWEN)])
def test_tool_calls_have_a_loss_with_and_without_markers(template):
    text = text_with_loss(template, *tool_row()["messages"], tools=json.dumps([WEATHER]))
    assert '"arguments": {"city": "Rome"}}\n</tool_call><|im_end|>' in text
    assert text.endswith("No.<|im_end|>\n")
    assert "dry" not in text


CALLS = "{% for call in message['tool_calls'] or [] %}"
END = "{{ '<|im_end|>\\n' }}{% endgeneration %}"
APART = CHATML.replace(CALLS, "{% endgeneration %}" + CALLS).replace(END, "{% generation %}" + END)
"""A template that gives calls no loss."""
WORDS = {"kind": "word", "vocab_size": 300}
WITHOUT_LOSS: dict[str, tuple[str, Any, dict[str, Any], int]] = {
    "calls that are apart": (APART, MODEL["tokenizer"], {}, 1),
    "calls that are apart, as words": (APART, WORDS, {}, 1),
    "calls that are apart, with everything trained": (APART, WORDS, {"train_on": "all"}, 0),
    "calls inside": (CHATML, MODEL["tokenizer"], {}, 0),
    "calls inside, as words": (CHATML, WORDS, {}, 0),
    "calls inside, as words of a saved tokenizer": (CHATML, "words", {}, 0),
    "calls that are apart, as words of a saved tokenizer": (APART, "words", {}, 1),
    "calls that are apart, with a template that joins special tokens": ("{{ bos_token + '' }}" + APART, WORDS, {}, 1),
}
"""A template, a tokenizer, options of data, and the number of warnings. No words of the rows have digits."""


@pytest.mark.parametrize("case", WITHOUT_LOSS)
def test_a_template_that_gives_calls_no_loss_is_a_warning_if_the_data_has_calls(case, caplog):
    template, tokenizer, options, count = WITHOUT_LOSS[case]
    Path("own.jinja").write_text(template)
    train_tokenizer(TrainedTokenizer(**WORDS), ["Rain in Rome?"], classify=False).save_pretrained("words")
    model = MODEL | {"tokenizer": tokenizer}
    data = CHATS | {"messages": "messages", "chat_template": "own.jinja"} | options
    plain = {"messages": [user("a"), answer("b")]}
    for rows, expected in (([plain], 0), ([plain, tool_row()], count)):
        write_lines("rows.jsonl", rows)
        make_run("causal-lm", model, data)
        assert len(find_problems(caplog, "calls-without-loss data.chat_template")) == expected


@pytest.mark.parametrize("template", [CHATML, UNMARKED])
def test_an_answer_that_begins_with_a_character_without_a_token_has_a_loss(template):
    tokenizer = train_tokenizer(TrainedTokenizer(**WORDS), ["one two three"], classify=False)
    tokenizer.chat_template = template
    ids, mask = ChatRenderer(tokenizer).encode(Chat([user("three"), answer(" one"), user("three"), answer("two")]))
    text = tokenizer.decode([token for token, own in zip(ids, mask, strict=True) if own])
    assert re.findall("one|two|three", text) == ["one", "two"]


def test_a_template_that_does_not_read_tool_calls_is_refused():
    with pytest.raises(RowError, match=r"^message 2 .*tool_calls.*data\.chat_template=FILE.*chatml"):
        text_with_loss(
            "{% for m in messages %}{{ m.role + ': ' + (m.content or '') }}{% endfor %}", *tool_row()["messages"]
        )


def test_arguments_in_json_text_are_not_encoded_twice():
    messages = [user("a"), answer("", tool_calls=call('{"city": "Rome"}'))]
    for template in (QWEN, CHATML):  # which write arguments | tojson
        assert '"arguments": {"city": "Rome"}}' in text_with_loss(template, *messages)
    assert '"arguments": {"city":"K"}}' in text_with_loss(
        TRL["qwen3"]["template"], user("a"), answer("", tool_calls=call('{"city":"K"}'))
    )


CITY = {"city": "Zürich"}
STAY = {"city": "Zürich", "days": 12, "names": ["Uto", "Zoo"]}


def for_weather(statement: str) -> str:
    """Writes the arguments of this function by a statement, and those of others as JSON."""
    branch = "{% if call['name'] == 'weather' %}" + statement + "{% else %}{{ given | tojson }}{% endif %}"
    return "' }}{% set given = call['arguments'] %}" + branch + "{{ '"


WRITTEN_ARGUMENTS: dict[str, tuple[str, dict[str, Any], str]] = {
    "as JSON": (", \"arguments\": ' + (call['arguments'] | tojson) + '}", CITY, '"arguments": {"city": "Zürich"}}'),
    "joined as text": (", \"arguments\": ' + call['arguments'] + '}", CITY, '"arguments": {"city": "Zürich"}}'),
    "as Python writes them": (", \"arguments\": ' ~ call['arguments'] ~ '}", CITY, '"arguments": {"city": "Zürich"}}'),
    "one by one": (
        "' }}{% for k in call['arguments'].keys() %}{{ k + '=' + call['arguments'][k] }}{% endfor %}{{ '",
        CITY,
        "city=Zürich",
    ),
    "one of a function": (for_weather("{{ given.city }}"), STAY, "Zürich</tool_call>"),
    "a number": (for_weather("{{ '%05d' | format(given.days) }}"), STAY, "00012</tool_call>"),
    "items of a list": (
        for_weather("{% for item in given.names %}{{ item }};{% endfor %}"),
        STAY,
        "Uto;Zoo;</tool_call>",
    ),
    "one beside a value": (
        for_weather("{% if given.city == 'Zürich' %}{{ given.days }}{% endif %}"),
        STAY,
        "12</tool_call>",
    ),
}
"""How a template writes arguments, some arguments, and their text."""


@pytest.mark.parametrize("form", ["mapping", "JSON"])
@pytest.mark.parametrize("how", WRITTEN_ARGUMENTS)
def test_arguments_have_the_form_that_the_template_takes(how, form):
    statement, values, expected = WRITTEN_ARGUMENTS[how]
    arguments = json.dumps(values, ensure_ascii=False) if form == "JSON" else values
    template = CHATML.replace(", \"arguments\": ' + (call['arguments'] | default({}) | tojson) + '}", statement)
    assert template != CHATML
    text = text_with_loss(template, user("a"), answer("", tool_calls=call(arguments)))
    assert expected in text.replace("\n", "")


@pytest.mark.parametrize("tools", ["weather", ["weather"], "{}", 3])
def test_tools_that_are_none_are_named(tools):
    with pytest.raises(RowError, match=r"column 'tools' .* JSON"):
        read_chat(tool_row() | {"tools": tools}, ["messages"])


def test_streamed_files_may_lack_tools_and_null_keys_of_parquet_are_no_keys(caplog):
    plain = [{"messages": [user("a"), answer(f"b{number}")]} for number in range(40)]
    tools = [tool_row(f"{number}") | {"tools": json.dumps([WEATHER])} for number in range(40)]
    for number, rows in enumerate((plain, tools)):
        parquet.write_table(pyarrow.Table.from_pylist(rows), f"{number}.parquet", row_group_size=8)
        write_lines(f"{number}.jsonl", rows)
    found = {}
    for kind in ("parquet", "jsonl"):
        section = data_section(
            [f"0.{kind}", f"1.{kind}"], {"chat_template": "chatml", "max_length": 1024, "shuffle_buffer": 0}
        )
        found[kind] = samples_of(make_run("causal-lm", MODEL, section).datasets["train"])
        write_lines("rows.jsonl", plain + tools)
        section = data_section(
            [f"0.{kind}", f"1.{kind}"], {"chat_template": "chatml", "max_length": 1024, "streaming": None}
        )
        assert samples_of(make_run("causal-lm", MODEL, section).datasets["train"]) == found[kind]
    assert found["parquet"] == found["jsonl"]
    assert "does not read" not in caplog.text
    assert "null" not in caplog.text


def test_nulls_that_parquet_adds_to_arguments_are_a_warning(caplog):
    rows = [{"messages": [user("a"), answer(None, tool_calls=call({name: "x"}))]} for name in ("city", "town")]
    parquet.write_table(pyarrow.Table.from_pylist(rows), "rows.parquet")
    chat_run(files={"train": "rows.parquet"})
    assert_problem(caplog, "null-arguments train 2")
    chat_run(*rows)
    assert caplog.text.count("have null") == 1


def mixed(count: int) -> list[dict[str, Any]]:
    """Rows with tools, weights and reasoning."""
    rows: list[dict[str, Any]] = []
    for number in range(count):
        rows.append(tool_row(f"{number}", "wet" * (number % 3 + 1)))
        if number % 2:
            rows[-1]["messages"][1]["weight"] = 0
    return rows


def test_packed_rows_with_tools_are_the_same_training():
    write_lines("rows.jsonl", mixed(12))
    losses = []
    for objects in ([], [Packing()]):
        run = make_run(
            "causal-lm", MODEL, CHATS | {"files": {"train": "rows.jsonl", "validation": "rows.jsonl"}}, objects
        )
        losses.append(execute(run)["validation"]["loss"])
        assert sum(int((run.datasets["train"][index]["targets"] >= 0).sum()) for index in range(12)) == sum(
            len(run.plugins.plugins[0].text_model.tokenizer(trained_text(run, index))["input_ids"])
            for index in range(12)
        )
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"streaming": True, "lanes": 2}], ids=["mapped", "streamed"])
def test_a_run_resumes_predicts_and_evaluates_with_tools(cli, changes):
    write_lines("rows.jsonl", mixed(64))
    write_lines("few.jsonl", mixed(8))
    data = CHATS | {"files": {"train": "rows.jsonl", "validation": "few.jsonl"}} | changes
    task = {"model": MODEL, "data": data, "plugins": ["causal-lm"]}
    check_interrupted(Case(task, ["packing"], {"lr": 1e-2}), "limit", 8)
    Path("rows.jsonl").rename("gone.jsonl")
    code, out, err = cli("predict", "whole", "few.jsonl", "plugins.causal-lm.max_new_tokens=4")
    assert (code, len(out.splitlines())) == (0, 8), err
    code, out, err = cli("evaluate", "whole", "--file", "few.jsonl")
    assert code == 0, err
    loss = json.loads(Path("whole/summary.json").read_text())["validation"]["loss"]
    assert f"{loss:.4f}" in out + err
