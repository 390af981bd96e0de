"""Forms of chat data: messages, ShareGPT and Alpaca rows. Memory, streams and predict read the same.

Modules:
    plugins/fastloop_plugins/text/chat/data.py
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from chat_helpers import (
    ALPACA,
    CHATS,
    IM,
    MODEL,
    ONLY_CALLS,
    SHAREGPT,
    SPOKEN_ROW,
    WEATHER,
    answer,
    byte_tokenizer,
    chat_run,
    text_of,
    tool_row,
    trained_text,
    user,
)
from pyarrow import parquet
from streaming_helpers import data_section, samples_of, write_lines
from text_helpers import make_run

from fastloop.errors import RecipeError
from fastloop.lifecycle import build
from fastloop.plugins.resolve import resolve
from fastloop.recipe import Inference, load_recipe, make_recipe
from fastloop.testing import assert_problem, expect_problem, find_problems
from fastloop_plugins.rows.table import RowError
from fastloop_plugins.text.chat.data import LanguageTextData
from fastloop_plugins.text.chat.prompts import chat_chunks
from fastloop_plugins.text.chat.rows import Chat, read_chat
from fastloop_plugins.text.chat.template import ChatRenderer

FORMS: dict[str, tuple[list[str], dict[str, Any]]] = {
    "messages": (["messages"], tool_row()),
    "sharegpt": (
        SHAREGPT,
        {
            "conversations": [
                {"from": "human", "value": "Rain in Rome?"},
                {"from": "function_call", "value": json.dumps({"name": "weather", "arguments": {"city": "Rome"}})},
                {"from": "observation", "value": "dry"},
                {"from": "gpt", "value": "No."},
            ],
            "tools": json.dumps([WEATHER]),
        },
    ),
    "alpaca": (ALPACA, {"instruction": "Rain?", "input": "in Rome", "output": "No.", "tools": None}),
}


def test_sharegpt_is_the_conversation_that_its_messages_are():
    assert read_chat(FORMS["sharegpt"][1], SHAREGPT) == read_chat(tool_row(), ["messages"])


@pytest.mark.parametrize("form", FORMS)
def test_columns_that_may_belong_to_a_conversation_are_a_warning(form, caplog):
    _, row = FORMS[form]
    chat_run(row | {"id": 1})
    assert not find_problems(caplog, "unread-columns rows.jsonl")
    empty = row | {"system": "", "history": [], "functions": None, "id": 1}
    chat_run(empty, empty)
    assert not find_problems(caplog, "unread-columns rows.jsonl"), "they are empty in each row"
    chat_run(empty, row | {"system": "Be brief.", "history": [], "functions": [{"name": "weather"}], "id": 1})
    assert_problem(caplog, "unread-columns rows.jsonl conversations: system, functions. 'tools'")
    caplog.clear()
    chat_run(row | {"system": "Be brief."}, drop=[{"column": "system", "empty": True}])
    assert not find_problems(caplog, "unread-columns rows.jsonl")


@pytest.mark.parametrize("held_out", [True, False])
def test_a_command_on_a_trained_model_repeats_no_warning_about_columns(held_out, caplog):
    """The rows that it reads are held out of train, which the run has described, or a file of their own."""
    rows = [row | {"system": "Be brief."} for row in (SPOKEN_ROW, tool_row(), SPOKEN_ROW, tool_row())]
    write_lines("rows.jsonl", rows)
    files = {"train": "rows.jsonl"} if held_out else {"train": "rows.jsonl", "validation": "rows.jsonl"}
    options = {"files": files, "messages": "messages", "validation_fraction": 0.5 if held_out else 0}
    recipe = make_recipe({"model": MODEL, "data": CHATS | options, "plugins": ["causal-lm"]})
    recipe.inference = Inference(model=None, split="validation", source=None, chunk=8)
    data = LanguageTextData(recipe)
    data.renderer = lambda: ChatRenderer(byte_tokenizer(ONLY_CALLS, IM), counts_contents=True)
    assert len(data.load()["validation"]) == (2 if held_out else 4)
    assert len(find_problems(caplog, "unread-columns rows.jsonl system.")) == int(not held_out)
    (problem,) = find_problems(caplog, "contents-left-out 2 of 4 rows.jsonl, line 1.")
    assert problem.remedy == "", "a trained model keeps its template"


@pytest.mark.parametrize("form", FORMS)
def test_a_form_is_found_by_its_columns_and_read_alike_everywhere(form, caplog):
    columns, row = FORMS[form]
    given = columns if len(columns) > 1 else columns[0]
    rows = [json.loads(json.dumps(row).replace("Rome", city)) for city in ("Rome", "Bonn", "Köln", "Oslo") * 5]
    with caplog.at_level(logging.INFO, "fastloop"):
        run = chat_run(*rows)
    named = given if isinstance(given, str) else "[" + ",".join(given) + "]"
    assert f": data.messages={named}" in caplog.text
    assert run.recipe.data["messages"] == given, "the run's recipe names it, so that predict needs no training file"
    found = samples_of(run.datasets["train"])
    assert (len(found), trained_text(run, 1).endswith("No.<|im_end|>\n")) == (20, True)
    assert samples_of(chat_run(*rows, messages=given).datasets["train"]) == found
    parquet.write_table(pyarrow.Table.from_pylist(rows), "rows.parquet", row_group_size=4)
    Path("rows.json").write_text(json.dumps(rows))
    for file in ("rows.parquet", "rows.json"):
        assert samples_of(chat_run(*rows, files={"train": file}).datasets["train"]) == found
    for file in ("rows.parquet", "rows.jsonl"):
        section = data_section(file, {"chat_template": "chatml", "max_length": 1024, "shuffle_buffer": 0})
        assert samples_of(make_run("causal-lm", MODEL, section).datasets["train"]) == found
    task = run.plugins.plugins[0]
    without = [{key: value for key, value in row.items() if key != "output"} for row in rows]
    write_lines("new.jsonl", without)
    parquet.write_table(pyarrow.Table.from_pylist(without), "new.parquet")
    for file in ("new.jsonl", "new.parquet"):
        chunks = list(chat_chunks(task.data, task.text_model.tokenizer, Path(file), 1, 32))
        prompts = [chunk[index]["input_ids"] for chunk in chunks for index in range(len(chunk))]
        assert len(prompts) == 19
        assert text_of(run, prompts[0]) + "No.<|im_end|>\n" == text_of(run, run.datasets["train"][1]["input_ids"])


def test_a_text_to_predict_is_a_message_in_every_file():
    run = chat_run({"messages": [user("Hi"), answer("Hello")]})
    task = run.plugins.plugins[0]
    Path("new.txt").write_text("Hi\nHo\n")
    Path("new.csv").write_text("messages\nHi\nHo\n")
    write_lines("new.jsonl", [{"messages": "Hi"}, {"messages": "Ho"}])
    for source in (Path("new.txt"), Path("new.csv"), Path("new.jsonl"), ["Hi", "Ho"]):
        (chunk,) = chat_chunks(task.data, task.text_model.tokenizer, source, 0, 8)
        assert text_of(run, chunk[0]["input_ids"]) + "Hello<|im_end|>\n" == text_of(
            run, run.datasets["train"][0]["input_ids"]
        )
        assert len(chunk) == 2
    task = chat_run(FORMS["alpaca"][1]).plugins.plugins[0]
    Path("new.csv").write_text("instruction,input\nHi,you\n")
    with expect_problem("unknown-format new.csv", RecipeError):
        list(chat_chunks(task.data, task.text_model.tokenizer, Path("new.csv"), 0, 8))


def test_a_recipe_without_the_key_predicts_with_the_form_of_its_training_file():
    write_lines("rows.jsonl", [FORMS["alpaca"][1]])
    recipe = make_recipe({"model": MODEL, "data": CHATS, "plugins": ["causal-lm"]})
    recipe.inference = Inference(model=None, split="predict", source=["Hi"], chunk=8)
    assert LanguageTextData(recipe).chat_columns == ALPACA


def test_an_instruction_and_its_input_are_one_message():
    chat = read_chat({"instruction": "Add.", "input": "1 and 2", "output": "3"}, ALPACA)
    assert chat == Chat([user("Add.\n1 and 2"), answer("3")])
    for row in ({"instruction": "Add.", "input": None, "output": "3"}, {"instruction": "Add.", "output": "3"}):
        assert read_chat(row, ALPACA).messages[0] == user("Add.")
    assert read_chat({"ask": "Add.", "say": "3"}, ["ask", "say"]) == Chat([user("Add."), answer("3")])
    with pytest.raises(RowError, match=r"column 'output' \(data.messages\) .*None"):
        read_chat({"instruction": "Add.", "output": None}, ALPACA)
    run = chat_run({"instruction": "a", "output": "b"}, {"instruction": "c", "input": "d", "output": "e"})
    assert "user\nc\nd<|im_end|>" in text_of(run, run.datasets["train"][1]["input_ids"])


def test_several_forms_in_a_file_need_a_name_and_each_proposal_works():
    row = {
        "messages": [user("a"), answer("b")],
        "conversations": [{"from": "human", "value": "c"}, {"from": "gpt", "value": "d"}],
    }
    with expect_problem("ambiguous-column", RecipeError) as error:
        chat_run(row | FORMS["alpaca"][1])
    proposals = error.value.problem.proposals
    expected = {
        "data.messages=messages": "b",
        "data.messages=conversations": "d",
        "data.messages=[instruction,input,output]": "No.",
    }
    assert proposals == list(expected)
    Path("recipe.yaml").write_text(
        json.dumps({"model": MODEL, "data": CHATS, "train": {"device": "cpu"}, "plugins": ["causal-lm"]})
    )
    for proposal in proposals:
        recipe = load_recipe("recipe.yaml", [proposal])
        assert trained_text(build(resolve(recipe))) == expected[proposal] + "<|im_end|>\n"
    assert chat_run(row | {"text": "words and words"}, chat_template=None).recipe.data.get("messages") is None, (
        "text is read as ever"
    )


def test_a_function_that_returns_conversations_names_the_key():
    messages = [{"from": "human", "value": "c"}, {"from": "gpt", "value": "d"}]
    Path("rows.py").write_text(f"def rows():\n    return {{'train': [{{'conversations': {messages}}}]}}\n")
    with expect_problem("unknown-column 'text' data.messages=conversations", RecipeError):
        make_run("causal-lm", MODEL, {"module": "rows.py:rows", "validation_fraction": 0})
    section = {
        "module": "rows.py:rows",
        "validation_fraction": 0,
        "messages": "conversations",
        "chat_template": "chatml",
    }
    assert trained_text(make_run("causal-lm", MODEL, section)) == "d<|im_end|>\n"
