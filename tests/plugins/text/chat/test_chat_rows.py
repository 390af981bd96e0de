"""Forms of chat data: messages, ShareGPT and Alpaca rows, tools, weights and unknown keys.

Memory, streams and predict read the same."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from interrupted_runs import Case, check_interrupted
from pyarrow import parquet
from streaming_helpers import data_section, samples_of, write_lines
from test_chat import CHATML, GPT, TRL, UNMARKED, byte_tokenizer
from text_helpers import make_run
from training_runs import execute

from fastloop.errors import DataError, RecipeError
from fastloop.lifecycle import build
from fastloop.plugins.resolve import resolve
from fastloop.recipe import Inference, load_recipe, make_recipe
from fastloop.testing import assert_problem, expect_problem, find_problems
from fastloop_plugins.data.packing import Packing
from fastloop_plugins.rows.table import RowError
from fastloop_plugins.text.chat.data import LanguageTextData
from fastloop_plugins.text.chat.prompts import chat_chunks
from fastloop_plugins.text.chat.rows import Chat, read_chat
from fastloop_plugins.text.chat.template import ChatRenderer
from fastloop_plugins.text.tokenizers import TrainedTokenizer, train_tokenizer

MODEL = {"config": GPT | {"n_positions": 1024}, "tokenizer": {"kind": "bpe", "vocab_size": 300}}
CHATS = {"chat_template": "chatml", "max_length": 1024, "validation_fraction": 0, "files": {"train": "rows.jsonl"}}
QWEN = TRL["qwen2_5"]["template"]
IM = ["<|im_start|>", "<|im_end|>"]
SHAREGPT, ALPACA = ["conversations"], ["instruction", "input", "output"]
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}


def user(text: Any, **more: Any) -> dict[str, Any]:
    return {"role": "user", "content": text, **more}


def answer(text: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def call(arguments: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "weather", "arguments": arguments}}]


def tool_row(city: str = "Rome", said: str = "dry") -> dict[str, Any]:
    messages = [
        user(f"Rain in {city}?"),
        answer(None, tool_calls=call({"city": city})),
        {"role": "tool", "content": said},
        answer("No."),
    ]
    return {"messages": messages, "tools": [WEATHER]}


def text_of(run: Any, ids: Any) -> str:
    text: str = run.plugins.plugins[0].text_model.tokenizer.decode(ids)
    return text


def trained(run: Any, index: int = 0) -> str:
    """The text of the tokens that have a loss."""
    targets = run.datasets["train"][index]["targets"]
    return text_of(run, [token for token in targets if token >= 0])


def memory(*rows: Any, **data: Any) -> Any:
    write_lines("rows.jsonl", rows)
    return make_run("causal-lm", MODEL, CHATS | data)


def encoded(template: str, *messages: dict[str, Any], tools: Any = None, train_on: str = "assistant") -> str:
    """The text that has a loss."""
    tokenizer = byte_tokenizer(template, IM)
    chat = read_chat({"messages": list(messages), "tools": tools}, ["messages"])
    ids, mask = ChatRenderer(tokenizer, train_on).encode(chat)
    return str(tokenizer.decode([token for token, own in zip(ids, mask, strict=True) if own]))


# -- tools -------------------------------------------------------------------------------------------------------------


def test_tool_calls_are_trained_and_tools_are_in_the_prompt():
    run = memory(tool_row(), {"messages": [user("Hi"), answer("Hello")]})
    assert (
        trained(run)
        == '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call><|im_end|>\nNo.<|im_end|>\n'
    )
    assert json.dumps(WEATHER) in text_of(run, run.datasets["train"][0]["input_ids"])
    assert "tools" not in text_of(run, run.datasets["train"][1]["input_ids"])
    assert execute(run)["steps"] == 1


@pytest.mark.parametrize("template", [QWEN, re.sub(r"{%-? (end)?generation %}", "", QWEN)])
def test_tool_calls_have_a_loss_with_and_without_markers(template):
    text = encoded(template, *tool_row()["messages"], tools=json.dumps([WEATHER]))
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
        encoded("{% for m in messages %}{{ m.role + ': ' + (m.content or '') }}{% endfor %}", *tool_row()["messages"])


def test_arguments_in_json_text_are_not_encoded_twice():
    messages = [user("a"), answer("", tool_calls=call('{"city": "Rome"}'))]
    for template in (QWEN, CHATML):  # which write arguments | tojson
        assert '"arguments": {"city": "Rome"}}' in encoded(template, *messages)
    assert '"arguments": {"city":"K"}}' in encoded(
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
    text = encoded(template, user("a"), answer("", tool_calls=call(arguments)))
    assert expected in text.replace("\n", "")


# -- keys of a message -------------------------------------------------------------------------------------------------


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
    kept = encoded(template, *messages)
    assert (kept.strip(), "weight" in kept) == ("two<|im_end|>", False)
    both = encoded(template, *messages, train_on="all")
    assert [word in both for word in ("one", "two", "three", "a<|im_end|>")] == [False, True, False, True]
    without = [{key: value for key, value in message.items() if key != "weight"} for message in messages]
    assert all(word in encoded(template, *without) for word in ("one", "two", "three"))


def test_weight_0_with_several_blocks_of_an_answer_is_refused():
    template = CHATML.replace("{% generation %}", "{% generation %}>{% endgeneration %}{% generation %}")
    assert "one" in encoded(template, user("a"), answer("one"))
    with pytest.raises(RowError, match=r"^message 2 .*weight 0.* 4 .*{% generation %}.* 2 "):
        encoded(template, user("a"), answer("one", weight=0), user("b"), answer("two"))


def test_reasoning_is_trained_if_the_template_reads_it(caplog):
    reasoned = {"messages": [user("2+2?"), answer("4", reasoning_content="two and two")]}
    Path("qwen3.jinja").write_text(TRL["qwen3"]["template"])
    run = memory(reasoned, chat_template="qwen3.jinja")
    assert trained(run) == "<think>\ntwo and two\n</think>\n\n4<|im_end|>\n"
    assert "does not read" not in caplog.text
    run = memory(reasoned)
    assert trained(run) == "4<|im_end|>\n"
    assert (
        "data: train: keys that the chat template does not read, so they have no effect: reasoning_content (1)"
        in caplog.text
    )


def test_keys_that_the_template_does_not_read_are_one_warning_with_counts(caplog):
    named = [user("a", id=1, weight=1), answer("b", id=2, score=None)]
    Path("short.jinja").write_text(
        UNMARKED[UNMARKED.index("{% for message") :].replace("tools and", "").replace("loop.first", "false")
    )
    memory(
        {"messages": named},
        {"messages": [user("c"), answer("d", id=3)], "tools": [WEATHER]},
        chat_template="short.jinja",
    )
    (problem,) = find_problems(caplog, "unread-keys train: tools")
    assert problem.text.endswith(": id (3), weight of role user (1), tools (1).")
    write_lines("rows.jsonl", [{"messages": named}] * 64)
    make_run("causal-lm", MODEL, data_section("rows.jsonl", {"chat_template": "chatml", "max_length": 64}))
    assert_problem(caplog, "unread-keys train, 64 id (128)")


def test_parts_of_text_are_joined_unless_the_template_reads_them():
    parts = [{"type": "text", "text": "Sleep"}, {"type": "text", "text": ", now", "image": None}]
    assert encoded(CHATML, user(parts), answer(parts)) == "Sleep, now<|im_end|>\n"
    trims = "{% for m in messages %}{{ '<|im_start|>' + m.role + m.content | trim }}{% endfor %}"
    trims += "{{ '<|im_start|>assistant' * add_generation_prompt }}"
    said = encoded(trims, user("a"), answer(parts))  # it ends at the next turn
    assert said == "Sleep, now<|im_start|>", "a filter would write the list as Python does"


# -- rows that are refused ---------------------------------------------------------------------------------------------

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
        memory({"messages": [user("a"), answer("b")]}, {"messages": [user("a"), message]})


@pytest.mark.parametrize("tools", ["weather", ["weather"], "{}", 3])
def test_tools_that_are_none_are_named(tools):
    with pytest.raises(RowError, match=r"column 'tools' .* JSON"):
        read_chat(tool_row() | {"tools": tools}, ["messages"])


def test_a_role_that_the_template_leaves_out_is_named():
    rows = [
        {"messages": [user("a"), answer("b")]},
        {"messages": [user("a"), {"role": "critic", "content": "no"}, answer("b")]},
    ]
    Path("qwen.jinja").write_text(QWEN)
    facts = "message 2, 'critic' user, assistant, tool, system."
    with expect_problem(f"invalid-row rows.jsonl, line 2: {facts}", RecipeError):
        memory(*rows, chat_template="qwen.jinja")
    assert trained(memory(*rows), 1) == "b<|im_end|>\n", "chatml writes every role"
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
        memory(*rows, chat_template="own.jinja")
    assert trained(memory(rows[0], chat_template="own.jinja"), 0) == "c<|im_end|>\n"


READS_RESULTS = (
    "{% for m in messages %}{% if m.role == 'tool' and not m.content.startswith('{') %}"
    "{{ raise_exception('no JSON') }}{% endif %}{% endfor %}"
)
TWO_CALLS = [*call({"city": "Rome"}), *call({"city": "Oslo"})]
ONLY_CALLS = CHATML.replace(
    "{{ message['content'] or '' }}", "{{ '' if message['tool_calls'] else message['content'] or '' }}"
)
"""A template that leaves out the content beside a call, as those of Llama 3 and Mistral."""
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
    encoded(template, user("a"), answer("", tool_calls=call({"city": "Rome"})), *rest, train_on=train_on)
    with pytest.raises(RowError, match=f"leaves out (the )?{part}"):
        encoded(template, user("a"), message, *rest, train_on=train_on)


SPOKEN = user("Rain?"), answer("Let me look.", tool_calls=call({"city": "Rome"})), {"role": "tool", "content": "dry"}
SPOKEN_ROW = {"messages": [*SPOKEN, answer("No.")]}


@pytest.mark.parametrize("markers", [True, False])
def test_contents_that_the_template_leaves_out_beside_calls_are_one_warning_with_their_number(markers, caplog):
    template = ONLY_CALLS if markers else re.sub(r"{% (end)?generation %}", "", ONLY_CALLS)
    Path("calls.jinja").write_text(template)
    Path("probes.jinja").write_text(READS_RESULTS.replace("'{'", "'dry'") + template)  # rejects all probes at once
    rows = [tool_row(), SPOKEN_ROW, tool_row(), SPOKEN_ROW]
    for name in ("calls.jinja", "probes.jinja"):
        run = memory(*rows, chat_template=name)
        assert_problem(caplog, "contents-left-out train 2 of 4 rows rows.jsonl, line 2.")
        assert len(find_problems(caplog, "contents-left-out data")) == 1
        assert ("weather" in trained(run, 1), "Let me look" in trained(run, 1)) == (True, False)
        caplog.clear()
    section = {"messages": "messages", "chat_template": "calls.jinja", "max_length": 1024}
    streamed = make_run("causal-lm", MODEL, data_section("rows.jsonl", section))
    assert_problem(caplog, "contents-left-out its first 4 rows 2 of 4 rows.jsonl, line 2.")
    assert len(samples_of(streamed.datasets["train"])) == 4
    caplog.clear()
    memory(*rows)
    assert not find_problems(caplog, "contents-left-out data"), "chatml writes the contents"


def test_contents_left_out_of_prompts_are_counted(caplog):
    Path("calls.jinja").write_text(ONLY_CALLS)
    run = memory(tool_row(), chat_template="calls.jinja")
    task = run.plugins.plugins[0]
    chunks = list(chat_chunks(task.data, task.text_model.tokenizer, ["Hi", [*SPOKEN], [*SPOKEN]], 0, 2))
    assert "Let me look" not in text_of(run, chunks[0][1]["input_ids"])
    assert_problem(caplog, "contents-left-out predict 2 of 3 row 2.")


# -- forms -------------------------------------------------------------------------------------------------------------

SHARED: dict[str, tuple[list[str], dict[str, Any]]] = {
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
    assert read_chat(SHARED["sharegpt"][1], SHAREGPT) == read_chat(tool_row(), ["messages"])


@pytest.mark.parametrize("form", SHARED)
def test_columns_that_may_belong_to_a_conversation_are_a_warning(form, caplog):
    _, row = SHARED[form]
    memory(row | {"id": 1})
    assert not find_problems(caplog, "unread-columns rows.jsonl")
    empty = row | {"system": "", "history": [], "functions": None, "id": 1}
    memory(empty, empty)
    assert not find_problems(caplog, "unread-columns rows.jsonl"), "they are empty in each row"
    memory(empty, row | {"system": "Be brief.", "history": [], "functions": [{"name": "weather"}], "id": 1})
    assert_problem(caplog, "unread-columns rows.jsonl conversations: system, functions. 'tools'")
    caplog.clear()
    memory(row | {"system": "Be brief."}, drop=[{"column": "system", "empty": True}])
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


@pytest.mark.parametrize("form", SHARED)
def test_a_form_is_found_by_its_columns_and_read_alike_everywhere(form, caplog):
    columns, row = SHARED[form]
    given = columns if len(columns) > 1 else columns[0]
    rows = [json.loads(json.dumps(row).replace("Rome", city)) for city in ("Rome", "Bonn", "Köln", "Oslo") * 20]
    with caplog.at_level(logging.INFO, "fastloop"):
        run = memory(*rows)
    named = given if isinstance(given, str) else "[" + ",".join(given) + "]"
    assert f": data.messages={named}" in caplog.text
    assert run.recipe.data["messages"] == given, "the run's recipe names it, so that predict needs no training file"
    found = samples_of(run.datasets["train"])
    assert (len(found), trained(run, 1).endswith("No.<|im_end|>\n")) == (80, True)
    assert samples_of(memory(*rows, messages=given).datasets["train"]) == found
    parquet.write_table(pyarrow.Table.from_pylist(rows), "rows.parquet", row_group_size=16)
    Path("rows.json").write_text(json.dumps(rows))
    for file in ("rows.parquet", "rows.json"):
        assert samples_of(memory(*rows, files={"train": file}).datasets["train"]) == found
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
        assert len(prompts) == 79
        assert text_of(run, prompts[0]) + "No.<|im_end|>\n" == text_of(run, run.datasets["train"][1]["input_ids"])


def test_a_text_to_predict_is_a_message_in_every_file():
    run = memory({"messages": [user("Hi"), answer("Hello")]})
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
    task = memory(SHARED["alpaca"][1]).plugins.plugins[0]
    Path("new.csv").write_text("instruction,input\nHi,you\n")
    with expect_problem("unknown-format new.csv", RecipeError):
        list(chat_chunks(task.data, task.text_model.tokenizer, Path("new.csv"), 0, 8))


def test_a_recipe_without_the_key_predicts_with_the_form_of_its_training_file():
    write_lines("rows.jsonl", [SHARED["alpaca"][1]])
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
    run = memory({"instruction": "a", "output": "b"}, {"instruction": "c", "input": "d", "output": "e"})
    assert "user\nc\nd<|im_end|>" in text_of(run, run.datasets["train"][1]["input_ids"])


def test_several_forms_in_a_file_need_a_name_and_each_proposal_works():
    row = {
        "messages": [user("a"), answer("b")],
        "conversations": [{"from": "human", "value": "c"}, {"from": "gpt", "value": "d"}],
    }
    with expect_problem("ambiguous-column", RecipeError) as error:
        memory(row | SHARED["alpaca"][1])
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
        assert trained(build(resolve(recipe))) == expected[proposal] + "<|im_end|>\n"
    assert memory(row | {"text": "words and words"}, chat_template=None).recipe.data.get("messages") is None, (
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
    assert trained(make_run("causal-lm", MODEL, section)) == "d<|im_end|>\n"


# -- files of several kinds --------------------------------------------------------------------------------------------


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
    memory(files={"train": "rows.parquet"})
    assert_problem(caplog, "null-arguments train 2")
    memory(*rows)
    assert caplog.text.count("have null") == 1


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


# -- whole runs --------------------------------------------------------------------------------------------------------


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
            len(run.plugins.plugins[0].text_model.tokenizer(trained(run, index))["input_ids"]) for index in range(12)
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
