"""``data.sources``: rows of several sources with columns of other names in one run, mixed by weight.

Modules:
    plugins/fastloop_plugins/text/sources.py
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from data_helpers import named_rows, problem_of, text_data, write
from fault_runs import record, said, steps, summary, together
from interrupted_runs import Case, check_evaluation, check_interrupted
from log_lines import find_lines
from streaming_helpers import KILL, LANGUAGE, MODEL, NAMES, STREAM, ids_by_step, samples_of, write_lines
from text_helpers import TINY, make_run, rows

from fastloop.testing import assert_problem, find_problems
from fastloop_plugins.data.token_cache import TokenCache
from fastloop_plugins.text import tokens as _text_tokens

TRAIN = {"batch_size": 8, "lr": 1e-2, "device": "cpu", "max_steps": 12, "save_every": 5}


def write_sources(*weights: float) -> list[dict[str, Any]]:
    """Sources of 60 and 20 rows: a .jsonl file, and a .csv file with other names of columns."""
    write_lines("a.jsonl", rows(60, NAMES))
    content = "".join(f"review number {index},{NAMES[index % 2]}\n" for index in range(20))
    write("b.csv", "review,mark\n" + content)
    sources = [{"files": "a.jsonl"}, {"files": ["b.csv"], "text": "review", "label": "mark"}]
    return (
        [source | {"weight": weight} for source, weight in zip(sources, weights, strict=True)] if weights else sources
    )


def counted(data: Any) -> tuple[int, int]:
    found = Counter(text.startswith("review") for text, _ in named_rows(data))
    return found[False], found[True]


def test_sources_without_weights_have_each_row_once(caplog):
    caplog.set_level(logging.INFO, "fastloop")
    data = text_data(sources=write_sources())
    assert named_rows(data)[60:62] == [("review number 0", "bad"), ("review number 1", "good")]
    assert counted(data) == (60, 20)
    line = "data: train: rows of each source: data.sources[0] 60, 60 an epoch; data.sources[1] 20, 20 an epoch"
    assert line in caplog.messages


@pytest.mark.parametrize(("weights", "expected"), [((1, 1), (40, 40)), ((0.9, 0.1), (72, 8)), ((1, 7), (10, 70))])
def test_weights_are_shares_of_the_samples_of_an_epoch(weights, expected, caplog):
    data = text_data(sources=write_sources(*weights))
    assert counted(data) == expected
    assert named_rows(data) == named_rows(data), "the same rows each time"
    times = Counter(text for text, _ in named_rows(data) if text.startswith("review"))
    assert max(times.values()) - min(times.values()) <= 1
    assert not find_problems(caplog, "repeated-rows"), "no row of the files does"


def test_rows_held_out_are_not_repeated_and_come_once(caplog):
    splits = text_data(sources=write_sources(1, 7), validation_fraction=0.25).load()
    assert (len(splits["train"]), len(splits["validation"])) == (60, 20)
    assert not set(splits["train"].texts) & set(splits["validation"].texts)
    assert len(set(splits["validation"].texts)) == 20


def test_rows_that_are_left_out_count_for_no_source(caplog):
    caplog.set_level(logging.INFO, "fastloop")
    drop = [{"column": "text", "equals": "review number 3"}, {"column": "label", "equals": "other"}]
    assert counted(text_data(sources=write_sources(), drop=drop, deduplicate=True)) == (60, 19)
    assert find_lines(caplog, "text review number 3 1")
    sources = [*write_sources(), {"files": "a.jsonl"}]
    problem = problem_of(sources=sources, deduplicate=True)
    assert_problem(problem, "empty-split recipe.yaml data.sources[2]")


def test_other_splits_and_texts_in_columns_have_the_names_of_the_section():
    write_lines("v.jsonl", [{"one": "x", "two": "y", "label": "bad"}])
    write_lines("c.jsonl", [{"p": f"a {index}", "q": "b", "label": NAMES[index % 2]} for index in range(4)])
    sources = [{"files": "c.jsonl", "text": ["p", "q"]}]
    splits = text_data({"validation": "v.jsonl"}, sources=sources, text=["one", "two"]).load()
    assert splits["train"].texts[0] == ("a 0", "b")
    assert list(splits["validation"].texts) == [("x", "y")]


SMALL = {"sources": [{"files": "a.jsonl", "weight": 1.0}, {"files": "a.jsonl", "weight": 4e-4}]}
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "text": ({"text": "reviw"}, {}, "unknown-column b.csv: 'reviw' data.sources[1].text 'review'"),
    "label": ({"label": "lable"}, {}, "unknown-column b.csv: 'lable' data.sources[1].label"),
    "key": ({"txt": "review"}, {}, "unknown-option recipe.yaml: data.sources[1].txt: 'text'"),
    "file": ({"files": "c.csv"}, {}, "file-missing data.sources[1].files: c.csv:"),
    "columns": ({"text": ["a", "b"]}, {}, "wrong-type data.sources[1].text: ['a', 'b'] data.text: ['text']"),
    "weights": ({"weight": 2.0}, {}, "missing-value data.sources[0].weight:"),
    "zero": ({"weight": 0.0}, {}, "invalid-value data.sources[1].weight: 0.0"),
    "small share": ({}, SMALL, "wrong-weights data.sources[1].weight: 0.04% 120"),
    "small share of a stream": ({}, SMALL | {"streaming": True}, "wrong-weights data.sources[1].weight: 0.04% 1000"),
    "no label": ({}, {"label": None}, "unknown-option data.sources[1].label: data.label"),
    "both": ({}, {"files": {"train": "a.jsonl"}}, "exclusive-options data: files.train sources"),
    "module": ({}, {"module": "a.py:make"}, "exclusive-options data: files module"),
    "labels": ({}, {"label": ["x", "y"], "label_type": "classes"}, "unknown-option data.sources: data.files."),
    "mix": ({}, {"streaming": True, "mix": [1.0, 2.0]}, "unknown-option data.mix: data.files.train weight"),
    "stream": ({"text": "reviw"}, {"streaming": True}, "unknown-column b.csv: 'reviw' data.sources[1].text"),
    "none": ({}, {"sources": []}, "missing-value data.sources: {files: a.csv, text: review}"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_sources_that_cannot_be_read_are_refused_by_number(case):
    source, data, expected = REFUSED[case]
    sources = write_sources()
    sources[1] |= source
    assert_problem(problem_of(**{"sources": sources, **data}), expected)


def test_a_bad_row_is_named_with_its_source():
    sources = write_sources()
    write_lines("c.jsonl", [{"review": "x", "mark": "bad"}, {"review": 5, "mark": "bad"}])
    problem = problem_of(sources=[sources[0], sources[1] | {"files": "c.jsonl"}])
    assert_problem(problem, "invalid-row c.jsonl data.sources[1] 2 'text' data.text 5")


def test_a_file_without_a_header_gets_the_names_of_its_source():
    sources = write_sources()
    write("b.csv", "".join(f"a long review number {index},{NAMES[index % 2]}\n" for index in range(9)))
    assert_problem(problem_of(sources=sources), "unknown-column data.read.columns=[review,mark]")


@pytest.mark.parametrize("task", ["text-classification", "causal-lm"])
def test_the_second_run_maps_the_token_ids_of_all_sources(task, monkeypatch):
    classifies = task == "text-classification"
    model = {"config": TINY, "tokenizer": {"kind": "word"}} if classifies else LANGUAGE
    sources = write_sources(1, 3)

    def samples() -> list[dict[str, Any]]:
        data = {"sources": sources, "max_length": 16} | ({"label": "label"} if classifies else {})
        return samples_of(make_run(task, model, data, [TokenCache(folder="cache")]).datasets["train"])

    if not classifies:
        sources[1].pop("label")
    first = samples()
    monkeypatch.setattr(_text_tokens, "encode_marked", lambda *_: (pytest.fail("tokenized again") for _ in "1"))
    assert samples() == first


@pytest.mark.slow
def test_a_run_of_sources_resumes_to_the_same_bits_and_evaluates(cli):
    data = {"sources": write_sources(1, 3), "label": "label", "max_length": 16}
    model = {"config": TINY, "tokenizer": {"kind": "word"}}
    task = {"model": model, "data": data, "plugins": ["text-classification"]}
    check_interrupted(Case(task, train=TRAIN | {"epochs": None}), "limit", 5)
    check_evaluation(cli)
    write("few.csv", "text,label\na fine film,good\na dull bore,bad\n")
    code, out, err = cli("evaluate", "cut", "--file", "few.csv")
    assert code == 0, out + err
    code, out, err = cli("plan", "cut/recipe.yaml", "--samples", "2")
    assert code == 0, out + err
    code, out, err = cli("predict", "cut", "a fine and lovely film")
    assert code == 0, out + err


def streamed(*weights: float, **changes: Any) -> Any:
    """A run that streams 300 rows of a .jsonl file and 100 of a .csv file with other names of columns."""
    write_lines("a.jsonl", rows(300, NAMES))
    write("b.csv", "review,mark\n" + "".join(f"review number {index},{NAMES[index % 2]}\n" for index in range(100)))
    sources: list[dict[str, Any]] = [{"files": "a.jsonl"}, {"files": "b.csv", "text": "review", "label": "mark"}]
    for source, weight in zip(sources, weights, strict=False):
        source["weight"] = weight
    data = STREAM | {"sources": sources, "label": "label"} | changes
    data = {name: value for name, value in data.items() if value is not None}
    return make_run("text-classification", MODEL, data)


@pytest.mark.slow
def test_streamed_sources_have_their_shares_and_resume_exactly_on_any_readers(caplog):
    caplog.set_level(logging.INFO, "fastloop")
    run = streamed(1, 3)
    line = "2 files (data.sources[0] 300, 25.0% of the samples; data.sources[1] 100, 75.0% of the samples)"
    assert f"data: train 400, streamed from 2 row groups in {line}" in caplog.messages
    steps = ids_by_step(run, epoch=1)
    ids = [number % 400 for step in steps for number in step]
    assert len(ids) == 400
    assert abs(sum(number >= 300 for number in ids) - 300) <= 30
    assert ids_by_step(run, epoch=2) != steps
    assert ids_by_step(run, 2, 1, epoch=1) == ids_by_step(run, 4, 0, epoch=1) == steps
    assert ids_by_step(run, 2, 2, epoch=1, start=160) == steps[10:]
    passes = [number for epoch in range(2) for step in ids_by_step(run, epoch=epoch) for number in step]
    assert len(set(passes)) == len(passes) == 800, "a row comes once in each pass over its source"


@pytest.mark.slow
def test_streamed_sources_without_weights_have_each_row_once_and_those_of_memory():
    drop = [{"column": "text", "equals": "review number 3"}, {"column": "label", "equals": "other"}]
    for changes in ({}, {"drop": drop}):
        memory = streamed(**changes, streaming=None, **dict.fromkeys(("shuffle_buffer", "lanes")))
        run = streamed(**changes, shuffle_buffer=0)
        assert samples_of(run.datasets["train"]) == samples_of(memory.datasets["train"])
        assert len(run.datasets["train"]) == 400 - len(changes)
    assert sorted(number for step in ids_by_step(streamed()) for number in step) == list(range(400))


@pytest.mark.slow
def test_a_killed_run_of_streamed_sources_resumes_to_the_same_bits():
    write_lines("a.jsonl", rows(300, NAMES))
    write("b.csv", "review,mark\n" + "".join(f"review number {index},{NAMES[index % 2]}\n" for index in range(100)))
    sources = [{"files": "a.jsonl", "weight": 1}, {"files": "b.csv", "text": "review", "label": "mark", "weight": 3}]
    Path("kill.py").write_text(KILL)
    recipe = {
        "model": MODEL,
        "data": STREAM | {"sources": sources, "label": "label"},
        "train": TRAIN | {"batch_size": 16, "max_steps": 30},
        "plugins": ["text-classification", "ddp", "./kill.py:Kill", "sample-audit",
                    {"dataloader-workers": {"num_workers": 1}}, {"progress": False}],
        "output": "run",
    }  # fmt: skip
    Path("recipe.yaml").write_text(json.dumps(recipe))
    assert [run.wait() for run in together("output=whole")] == [0, 0], said()
    assert [run.wait() for run in together(environment={"KILL_AT": "17"})] != [0, 0]
    assert steps()[-1] == 15
    assert [run.wait() for run in together("--resume")] == [0, 0], said()
    assert record() == record("whole")
    assert summary()["sample-audit"]["repeated"] == 0
