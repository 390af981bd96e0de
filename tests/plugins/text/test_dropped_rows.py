"""``data.deduplicate`` and ``data.drop``: rows that are left out, in memory and in streams, and counted in the log.

Modules:
    plugins/fastloop_plugins/rows/drop.py
    plugins/fastloop_plugins/text/dropped_rows.py
"""

from __future__ import annotations

import json
import logging
import re
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from checkpoint_helpers import tokenizer
from data_helpers import named_rows, problem_of, text_data, write
from interrupted_runs import Case, check_interrupted
from streaming_helpers import NAMES, classify, generate, ids_by_step, samples_of, write_lines, write_parquet
from text_helpers import TINY, make_run, rows

from fastloop.errors import RecipeError
from fastloop.recipe import make_recipe
from fastloop.testing import assert_problem, expect_problem, find_problems
from fastloop_plugins.data.token_cache import TokenCache
from fastloop_plugins.rows.drop import Condition, Drop
from fastloop_plugins.tasks.tags.data import TagTextData
from fastloop_plugins.text import tokens as _text_tokens
from fastloop_plugins.text.chat.data import LanguageTextData

FILMS = [("film 0", "neg"), ("film 1", "pos"), ("film 0", "neg"), ("film 0", "pos"), ("film 2", "neg")]


def csv(content: list[tuple[str, ...]], path: str = "train.csv", header: str = "text,label") -> str:
    return write(path, "\n".join([header, *map(",".join, content)]) + "\n")


# -- repeated rows -----------------------------------------------------------------------------------------------------


def test_the_first_of_repeated_rows_stays_with_its_label_over_all_files(caplog):
    caplog.set_level(logging.INFO, "fastloop")
    files = [csv(FILMS), csv([("film 1", "pos"), ("film 3", "pos")], "more.csv")]
    data = text_data({"train": files, "validation": csv([("film 9", "neg")] * 2, "v.csv")}, deduplicate=True)
    assert named_rows(data) == [("film 0", "neg"), ("film 1", "pos"), ("film 2", "neg"), ("film 3", "pos")]
    assert len(data.load()["validation"]) == 2, "an evaluation counts each of its rows"
    assert re.search(r"data: train: 3 of 7 .* \(data\.deduplicate\); 1 ", caplog.text)
    for problem in find_problems(caplog, "repeated-rows"):
        assert "(data.deduplicate)" in problem.text, "the warning finds nothing more"


def test_no_row_held_out_for_validation_repeats_one_of_train(caplog):
    path = csv([(f"film {index % 20}", NAMES[index % 2]) for index in range(200)])
    splits = text_data(path, deduplicate=True, validation_fraction=0.2).load()
    assert (len(splits["train"]), len(splits["validation"])) == (16, 4)
    assert not set(splits["train"].texts) & set(splits["validation"].texts)
    text_data(path, validation_fraction=0.2).load()
    assert_problem(caplog, "repeated-rows validation train")


def test_rows_of_train_in_other_splits_stay_and_give_the_warning(caplog):
    files = {"train": csv(FILMS), "test": csv([("film 1", "pos"), ("film 5", "neg")], "test.csv")}
    assert len(text_data(files, deduplicate=True).load()["train"]) == 3
    assert_problem(caplog, "repeated-rows data 1 2")


def test_lines_conversations_and_sentences_are_compared_by_their_texts():
    lines = write("lines.txt", "one line\nanother\n" * 3)
    assert list(text_data(lines, label=None, deduplicate=True).load()["train"].texts) == ["one line", "another"]
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    table = [{"messages": chat}, {"messages": chat}, {"messages": chat, "tools": "[]"}, {"messages": chat[::-1]}]
    assert len(load(LanguageTextData, table, deduplicate=True)) == 3, "tools are part of a conversation"
    words = [{"words": ["EU", "film"], "tags": ["B", "O"]}, {"words": ["EU", "film"], "tags": ["O", "O"]}]
    assert list(load(TagTextData, words, deduplicate=True).texts) == [(["EU", "film"], [0, 1])]


def load(section: Any, table: list[dict[str, Any]], **data: Any) -> Any:
    """The training rows of a section that reads ``table``."""
    data = {"files": {"train": write_lines("rows.jsonl", table)}, "validation_fraction": 0} | data
    return section(make_recipe({"data": data}, Path("recipe.yaml"))).load()["train"]


# -- conditions --------------------------------------------------------------------------------------------------------

TABLE = [("a fine film", "pos", "en", "1"), ("bad", "neg", "en", "2"), ("", "neg", "en", "2")]
TABLE += [("ein Film", "pos", "de", "3"), ("a dull and dreadful bore", "neg", "en", "1")]
COLUMNS = "text,label,lang,score"


@pytest.mark.parametrize(
    ("drop", "kept"),
    [
        ([{"column": "lang", "equals": "de"}], [0, 1, 2, 4]),
        ([{"column": "score", "equals": [2, 3.0]}], [0, 4]),
        ([{"column": "text", "shorter_than": 4}], [0, 3, 4]),
        ([{"column": "text", "longer_than": 11}], [0, 1, 2, 3]),
        ([{"column": "lang", "equals": "de"}, {"column": "text", "shorter_than": 1}], [0, 1, 4]),
    ],
)
def test_rows_that_meet_a_condition_are_left_out(drop, kept):
    data = text_data(csv(TABLE, header=COLUMNS), drop=drop)
    assert [text for text, _ in named_rows(data)] == [TABLE[row][0] for row in kept]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(("equals", "word"), [(False, "no"), (True, "Yes"), ([1, False], "off")])
def test_a_boolean_for_a_text_that_yaml_reads_as_one_is_refused(equals, word, streaming):
    table = [("a fine film", "pos", "maybe"), ("bad", "neg", word), ("dull", "neg", "x")]
    path = csv(table, header="text,label,seen")
    options = {"streaming": True} if streaming else {}
    problem = problem_of(path, drop=[{"column": "seen", "equals": equals}], **options)
    assert_problem(problem, f"ambiguous-yaml data.drop 'seen' '{word}' quotes")
    if not streaming:
        kept = named_rows(text_data(path, drop=[{"column": "seen", "equals": word}]))
        assert kept == [("a fine film", "pos"), ("dull", "neg")]


def test_a_boolean_drops_booleans_and_their_names():
    table = [{"text": "a", "label": "x", "seen": False}, {"text": "b", "label": "y", "seen": True}]
    table += [{"text": "c", "label": "x", "seen": "false"}, {"text": "d", "label": "x", "seen": True}]
    data = text_data(write_lines("rows.jsonl", table), drop=[{"column": "seen", "equals": False}])
    assert named_rows(data) == [("b", "y"), ("d", "x")]


def test_the_log_counts_the_rows_of_each_condition_and_split(caplog):
    caplog.set_level(logging.INFO, "fastloop")
    files = {"train": csv(TABLE, header=COLUMNS), "validation": csv(TABLE[:2], "v.csv", COLUMNS)}
    text_data(files, drop=[{"column": "lang", "equals": "de"}, {"column": "text", "shorter_than": 4}]).load()
    listed = "data: train: 3 of 5 rows are left out (data.drop): lang equals de 1, text shorter than 4 2"
    assert listed in caplog.messages
    listed = "data: validation: 1 of 2 rows is left out (data.drop): lang equals de 0, text shorter than 4 1"
    assert listed in caplog.messages
    caplog.clear()
    text_data(files, drop=[{"column": "lang", "equals": "DE"}]).load()
    lines = [line for line in caplog.messages if "(data.drop)" in line]
    assert lines == ["data: train: 0 of 5 rows are left out (data.drop): lang equals DE 0"], "a typing error is seen"


def test_messages_name_the_rows_that_are_left_by_their_numbers_in_the_file():
    table = [{"text": "x"}, {"text": "a film"}, {"text": 5}]
    problem = problem_of(write_lines("t.jsonl", table), label=None, drop=[{"column": "text", "equals": "x"}])
    assert_problem(problem, "invalid-row t.jsonl 3 'text' data.text 5")


def test_conditions_hold_for_rows_of_a_function_for_lists_and_for_missing_values():
    source = "def make():\n    return {'train': [{'text': 'a', 'n': [1]}, {'text': 'b', 'n': None}, {'text': 'c'}]}\n"
    Path("made.py").write_text(source.replace("'c'}", "'c', 'n': [1, 2]}"))
    data = text_data(None, label=None, module="made.py:make", drop=[{"column": "n", "shorter_than": 2}])
    assert list(data.load()["train"].texts) == ["c"]


@pytest.mark.parametrize(
    ("drop", "expected"),
    [
        (
            [{"column": "lnag", "equals": "de"}],
            "unknown-column train.csv 'lnag' data.drop[0].column",
        ),
        ([{"column": "lnag", "equals": "de"}], "unknown-column 'lang'"),
        ([{"column": "lang", "equal": "de"}], "unknown-option data.drop[0].equal 'equals'"),
        ([{"column": "lang"}], "invalid-value data.drop[0] 'lang'"),
        ([{"column": "lang", "equals": "de", "longer_than": 1}], "invalid-value data.drop[0] longer_than"),
        ([{"equals": "de"}], "missing-value data.drop[0].column"),
        ([{"column": "text", "shorter_than": 99}], "empty-split data.drop 5"),
    ],
)
def test_conditions_that_cannot_hold_are_refused_by_name(drop, expected):
    assert_problem(problem_of(csv(TABLE, header=COLUMNS), drop=drop), expected)


@pytest.mark.parametrize("value", [None, "", "  ", [], float("nan")])
def test_rows_without_a_value_are_left_out(value):
    table = [{"text": "a", "n": value}, {"text": "b", "n": "x"}, {"text": "c", "n": 0}, {"text": "d", "n": [0]}]
    data = text_data(write_lines("t.jsonl", table), label=None, drop=[{"column": "n", "empty": True}])
    assert list(data.load()["train"].texts) == ["b", "c", "d"]


def test_conversations_are_left_out_by_the_role_of_their_first_message():
    roles = ["user", "assistant", "Assistant", "gpt", "system", "human"]
    table = [{"messages": [{"role": role, "content": role}, {"role": "user", "content": "a"}]} for role in roles]
    table += [{"messages": [{"from": "gpt", "value": "Hi"}, {"from": "human", "value": "a"}]}, {"messages": []}]
    condition = Condition(column="messages", first_role="assistant")
    assert [condition.holds(row["messages"]) for row in table] == [False, True, True, True, False, False, True, False]
    assert Condition(column="messages", first_role=["Assistant"]).holds(table[2]["messages"])
    as_text = [json.dumps(row["messages"]) for row in table]
    assert [condition.holds(text) for text in as_text] == [condition.holds(row["messages"]) for row in table]
    path = write_lines("t.jsonl", [{"text": "a", "n": "b"}])
    problem = problem_of(path, label=None, drop=[{"column": "n", "first_role": "assistant"}])
    assert_problem(problem, "wrong-type t.jsonl 'n' 'b' data.drop[0].first_role")


# a row that can be read, one without a text, one without a label, and one whose label is a list
ODD = [{"text": "a", "label": "x"}, {"text": 5, "label": "x"}, {"text": "b", "label": ""}, {"text": "c", "label": [1]}]
ODD += [{"text": "d", "label": "y"}]


@pytest.mark.parametrize(
    ("options", "kept", "dropped", "unreadable"),
    [
        ({}, "ad", None, 3),
        ({"drop": [{"column": "label", "empty": True}]}, "ad", "label empty 1", 2),
        ({"drop": [{"column": "text", "equals": 5}]}, "ad", "text equals 5 1", 2),
        ({"drop": [{"column": "text", "shorter_than": 1}]}, "ad", "text shorter than 1 0", 3),
        ({"drop": [{"column": "text", "equals": "a"}, {"column": "text", "equals": "d"}]}, "", None, None),
        ({"label_map": {"": None}}, "ad", "'' 1", 2),
        ({"label_map": {"x": None, "": None}, "validation_fraction": 0}, "d", None, None),
        (
            {"label_map": {"": None}, "drop": [{"column": "text", "longer_than": 9}]},
            "ad",
            "text longer than 9 0",
            2,
        ),
    ],
    ids=str,
)
def test_rows_that_are_left_out_are_not_counted_as_unreadable(options, kept, dropped, unreadable, caplog):
    caplog.set_level(logging.INFO, "fastloop")
    data = text_data(write_lines("t.jsonl", ODD), **({"validation_fraction": 0} | options))
    data.skip_unreadable = True
    if unreadable is None:
        with pytest.raises(RecipeError):
            data.load()
        return
    assert "".join(data.load()["train"].texts) == kept
    assert data.unreadable == unreadable
    if dropped is not None:
        assert any(line.endswith(dropped) for line in caplog.messages)


def test_rows_of_a_file_with_lines_that_cannot_be_read_are_all_counted(caplog):
    content = [("a", "x", "1"), ("b", "y"), ("c", "", "2"), ("d", "y", "3"), ("e", "x", "4"), ("", "y", "5")]
    path = csv(content, header="text,label,n")
    data = text_data(path, drop=[{"column": "label", "empty": True}], validation_fraction=0)
    data.skip_unreadable = True
    assert "".join(data.load()["train"].texts) == "ade"
    assert data.unreadable == 1
    assert_problem(caplog, "rows-unreadable train.csv 1")


def test_repeats_are_found_among_the_rows_that_can_be_read():
    table = [{"text": 5}, {"text": "5"}, {"text": 5}, {"text": "5"}, {"text": "6"}]
    data = text_data(write_lines("t.jsonl", table), label=None, deduplicate=True)
    data.skip_unreadable = True
    assert list(data.load()["train"].texts) == ["5", "6"]
    assert data.unreadable == 2


def test_a_number_has_no_length():
    path = write_lines("t.jsonl", [{"text": "a film", "n": 5}])
    problem = problem_of(path, label=None, drop=[{"column": "n", "shorter_than": 2}])
    assert_problem(problem, "wrong-type t.jsonl 'n' 5 data.drop[0].shorter_than")


# -- streams -----------------------------------------------------------------------------------------------------------

DROP = [{"column": "label", "equals": "neutral"}, {"column": "text", "shorter_than": 34}]


def write_table() -> list[str]:
    """Parquet with row groups, one of them without a row to keep, and lines."""
    table = rows(403, (*NAMES,))
    for number, row in enumerate(table):
        row["label"] = "neutral" if number % 3 == 0 or 64 <= number < 96 else row["label"]
    return [write_parquet("a.parquet", table[:200]), write_lines("c.jsonl", table[200:])]


@pytest.mark.parametrize("make", [classify, generate])
def test_a_stream_has_the_rows_that_are_in_memory_and_counts_them(make, caplog):
    caplog.set_level(logging.INFO, "fastloop")
    files = write_table()
    tokenizer(path="c.jsonl").save_pretrained("words")
    data: dict[str, Any] = {"TOKENIZER": "words"} if make is classify else {"blocks": True}
    streamed, memory = (
        samples_of(make(files, drop=DROP, **(data | changes)).datasets["train"])
        for changes in ({}, {"streaming": None, "blocks": None})
    )
    if make is classify:
        assert sorted(map(str, streamed)) == sorted(map(str, memory))
    assert len(streamed) == len(memory)
    counts = "data: train: 181 of 403 rows are left out (data.drop): label equals neutral 157, text shorter than 34 24"
    assert [line for line in caplog.messages if "(data.drop)" in line] == [counts, counts]


def test_a_stream_without_rows_resumes_at_any_position_on_any_readers():
    run = classify(write_table(), drop=DROP)
    steps = ids_by_step(run)
    assert sorted(chain.from_iterable(steps)) == list(range(len(run.datasets["train"])))
    assert len(run.datasets["train"]) < 247
    assert ids_by_step(run, 2, 1) == steps
    assert ids_by_step(run, 2, 1, start=48) == steps[3:]


def test_the_kept_index_of_a_stream_depends_on_the_conditions(caplog):
    caplog.set_level(logging.INFO, "fastloop")
    files = write_table()
    sizes = [
        len(classify(files, [TokenCache(folder="cache")], **changes).datasets["train"])
        for changes in ({}, {"drop": DROP}, {"drop": DROP}, {"drop": DROP[:1]})
    ]
    assert sizes[0] == 403
    assert sizes[1] == sizes[2] < sizes[3] < 403
    counts = [line for line in caplog.messages if "(data.drop)" in line]
    assert counts[0] == counts[1] != counts[2]


def test_rows_of_a_stream_are_named_by_their_line():
    table = [{"text": "x" * 30, "label": "neutral"}, *rows(300, NAMES)]
    table[280] |= {"text": 5}
    path = write_lines("t.jsonl", table)
    with expect_problem("invalid-row t.jsonl, line 281 'text' data.text 5", RecipeError):
        samples_of(classify(path, drop=DROP[:1], shuffle_buffer=0).datasets["train"])


def test_a_stream_refuses_what_needs_all_rows():
    path = write_lines("t.jsonl", rows(40, NAMES))
    assert_problem(problem_of(path, streaming=True, deduplicate=True), "no-streaming data.deduplicate data.streaming")
    problem = problem_of(path, streaming=True, drop=[{"column": "text", "longer_than": 1}])
    assert_problem(problem, "empty-file t.jsonl data.drop data.files.train")
    problem = problem_of(path, streaming=True, drop=[{"column": "lable", "equals": "x"}])
    assert_problem(problem, "unknown-column 'lable' data.drop[0].column")


def test_blocks_skip_rows_that_are_kept(tmp_path):
    drop = Drop([Condition(column="n", equals=[0, 3, 4])])
    layout = text_data(write_lines("t.jsonl", [{"text": str(n), "n": n} for n in range(9)]), label=None).layout()
    for skip in range(7):
        with layout.open("t.jsonl") as file:
            blocks = list(drop.blocks(file, ["text"], 0, 2, skip))
        assert [text for block in blocks for text in block.columns["text"]] == ["1", "2", "5", "6", "7", "8"][skip:]
        assert [block.rows for block in blocks] == [len(block.columns["text"]) for block in blocks]


# -- runs --------------------------------------------------------------------------------------------------------------


def test_the_second_run_maps_the_token_ids_of_the_rows_that_are_left(monkeypatch, caplog):
    caplog.set_level(logging.INFO, "fastloop")
    table = rows(40, NAMES) + rows(6, NAMES)
    data = {"files": {"train": write_lines("t.jsonl", table)}, "label": "label", "max_length": 16}

    def samples(**changes: Any) -> list[dict[str, Any]]:
        model = {"config": TINY, "tokenizer": {"kind": "word"}}
        run = make_run("text-classification", model, data | changes, objects=[TokenCache(folder="cache")])
        return samples_of(run.datasets["train"])

    first = samples(deduplicate=True, drop=[{"column": "text", "longer_than": 50}])
    assert len(samples()) > len(first)
    monkeypatch.setattr(_text_tokens, "encode_marked", lambda *_: (pytest.fail("tokenized again") for _ in "1"))
    assert samples(deduplicate=True, drop=[{"column": "text", "longer_than": 50}]) == first


@pytest.mark.parametrize("streams", [False, True])
def test_a_run_without_some_rows_resumes_to_the_same_bits(streams):
    write_lines("t.jsonl", [*rows(60, NAMES), *([] if streams else rows(20, NAMES))])
    write_lines("v.jsonl", rows(8, NAMES))
    data: dict[str, Any] = {"files": {"train": "t.jsonl", "validation": "v.jsonl"}, "label": "label", "max_length": 16}
    data |= {"drop": [{"column": "text", "shorter_than": 26}]}
    data |= {"streaming": True, "shuffle_buffer": 20, "lanes": 2} if streams else {"deduplicate": True}
    task = {
        "model": {"config": TINY, "tokenizer": {"kind": "word"}},
        "data": data,
        "plugins": ["text-classification"],
    }
    check_interrupted(Case(task, train={"epochs": None, "max_steps": 12, "lr": 1e-2}), "limit", 5)


def test_labels_that_label_map_makes_equal_are_no_other_labels(caplog):
    caplog.set_level(logging.INFO, "fastloop")
    rows = [("film 1", "Ham"), ("film 1", "ham"), ("film 1", "spam"), ("film 2", "spam"), ("film 3", "ham")]
    label_map = {"Ham": "ham"}
    assert len(text_data({"train": csv(rows, "m.csv")}, deduplicate=True, label_map=label_map).load()["train"]) == 3
    assert re.search(r"data: train: 2 of 5 .*; 1 with another label", caplog.text)
    caplog.clear()
    text_data({"train": csv([rows[0], rows[1], *rows[3:]], "m.csv")}, deduplicate=True, label_map=label_map).load()
    assert "data: train: 1 of 4 rows" in caplog.text
    assert "another label" not in caplog.text
