"""``data.streaming`` of every text task: without shuffling, one pass gives the samples of the same data in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from checkpoint_helpers import BERT, tokenizer
from streaming_helpers import (
    data_section,
    every_column,
    ids_by_step,
    loader,
    samples_of,
    write_lines,
    write_parquet,
)
from tag_helpers import write_conll
from text_helpers import TINY, TINY_GPT, make_run

from fastloop.errors import RecipeError
from fastloop.run import Run
from fastloop.testing import expect_problem

ROWS = 150
T5 = {"model_type": "t5", "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "dropout_rate": 0.0}
GPT = TINY_GPT | {"n_positions": 64}
BPE = {"kind": "bpe", "vocab_size": 300}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "text": ("text-classification", {"config": TINY, "tokenizer": "words"}, {"label": "label"}),
    "pairs": (
        "text-classification",
        {"config": BERT, "tokenizer": "words"},
        {"text": ["text", "other"], "label": "label"},
    ),
    "seq2seq": (
        "seq2seq",
        {"config": T5, "tokenizer": "words"},
        {"target": "short", "prefix": "a ", "max_target_length": 3},
    ),
    "tags": ("token-classification", {"config": TINY, "tokenizer": "words"}, {"words": "words", "tags": "tags"}),
    "blocks": ("causal-lm", {"config": GPT, "tokenizer": "words"}, {"blocks": True}),
    "chat": (
        "causal-lm",
        {"config": GPT, "tokenizer": BPE},
        {"messages": "messages", "chat_template": "chatml", "max_length": 64},
    ),
    "completions": ("causal-lm", {"config": GPT, "tokenizer": "words"}, {"prompt": "prompt", "completion": "short"}),
}


@pytest.fixture(autouse=True)
def _files():
    """Two files, and a tokenizer of their words."""
    table = every_column(ROWS)
    write_parquet("a.parquet", table[:90], group=32)
    write_lines("b.jsonl", table[90:])
    tokenizer(path=write_lines("all.jsonl", table)).save_pretrained("words")


def stream(case: str, **changes: Any) -> Run:
    """A run of a case that streams both files; with ``streaming=None``, they are in memory."""
    task, model, section = CASES[case]
    if "streaming" in changes:
        section = {name: value for name, value in section.items() if name != "blocks"}
    return make_run(task, model, data_section(["a.parquet", "b.jsonl"], section | changes))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_one_pass_without_shuffling_equals_the_data_in_memory(case):
    memory, run = samples_of(stream(case, streaming=None).datasets["train"]), stream(case, shuffle_buffer=0)
    assert samples_of(run.datasets["train"]) == memory
    ids = list(range(len(memory)))
    assert [number for step in ids_by_step(run, 2, 2) for number in step] == ids
    assert [number for step in ids_by_step(run, 1, 1, start=48) for number in step] == ids[48:]


@pytest.mark.slow
@pytest.mark.parametrize("case", ["seq2seq", "tags", "blocks"])
def test_shuffled_samples_are_those_of_memory_on_any_readers(case):
    memory, run = samples_of(stream(case, streaming=None).datasets["train"]), stream(case)
    found = dict(pair for part in run.datasets["train"].read_ranges(1, [range(len(memory))]) for pair in part)
    assert sorted(found) == list(range(len(memory))) != list(found)
    assert samples_of([found[number] for number in sorted(found)]) == memory
    assert ids_by_step(run, 2, 1, epoch=1, start=16) == ids_by_step(run, epoch=1)[1:]


@pytest.mark.slow
def test_a_long_sentence_is_several_rows_of_its_batch():
    table = [{"words": ["number"] * length, "tags": ["A", "B"] * (length // 2)} for length in (2, 40, 4, 6)] * 4
    write_lines("long.jsonl", table)
    task, model, section = CASES["tags"]
    run = make_run(task, model, data_section("long.jsonl", section))
    batches = list(loader(run).batches())
    assert sum(int((batch.inputs["labels"] >= 0).sum()) for batch in batches) == sum(len(row["words"]) for row in table)
    assert sum(len(batch.inputs["input_ids"]) for batch in batches) > len(table)


@pytest.mark.slow
def test_sentences_without_words_have_no_effect():
    table = [
        {"words": ["number"] * (number % 2), "tags": ["A" if number % 4 == 1 else "B"] * (number % 2)}
        for number in range(64)
    ]
    write_lines("gaps.jsonl", sorted(table, key=lambda row: len(row["words"])))
    task, model, section = CASES["tags"]
    run = make_run(task, model, data_section("gaps.jsonl", section | {"shuffle_buffer": 0}))
    batches = list(loader(run, batch_size=4).batches())
    # micro-batches of empty sentences have a spare one
    assert [batch.loss_weight for batch in batches] == [1] * 8 + [4] * 8


@pytest.mark.slow
def test_tags_beyond_the_first_rows_are_known(monkeypatch):
    from fastloop_plugins.text.streaming import split as _streaming

    monkeypatch.setattr(_streaming, "HEAD", 16)
    table = every_column(ROWS)
    table[140]["tags"][0] = "RARE"
    write_lines("b.jsonl", table[90:])
    assert sorted(stream("tags").model.config.id2label.values()) == ["NUMBER", "O", "RARE"]
    with expect_problem("unknown-label b.jsonl 51 'RARE' data.tag_names", RecipeError):
        stream("tags", tag_names=["O", "NUMBER"])


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "blocks in memory": (
        "completions",
        {"prompt": None, "completion": None, "streaming": False, "blocks": True},
        "unknown-option data.blocks: data.streaming",
    ),
    "blocks of chats": ("chat", {"blocks": True}, "unknown-option data.blocks:"),
    "chats in csv": ("chat", {"files": {"train": "c.csv"}}, "unknown-format c.csv: data.messages .jsonl"),
    "tags in csv": ("tags", {"files": {"train": "c.csv"}}, "unknown-format c.csv: data.words"),
    "conll": (
        "tags",
        {"files": {"train": "c.tsv"}, "format": "conll", "words": None, "tags": None},
        "invalid-row c.tsv, line 1:",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_settings_that_cannot_hold_are_refused_by_name(case):
    of, changes, expected = REFUSED[case]
    for name in ("c.csv", "c.tsv"):
        Path(name).write_text("text\na\n")
    task, model, section = CASES[of]
    with expect_problem(expected, RecipeError):
        make_run(task, model, data_section(["a.parquet"], section | changes))


@pytest.mark.slow
def test_a_row_with_other_columns_names_its_file_and_row():
    table = every_column(ROWS)
    table[140]["tags"].pop()
    table[141]["short"] = 7
    write_lines("b.jsonl", table[90:])
    for case, expected in (("tags", "b.jsonl, line 51:"), ("seq2seq", "b.jsonl, line 52: 'short'")):
        with expect_problem(f"invalid-row {expected}"):
            list(loader(stream(case)).batches())


@pytest.mark.slow
def test_a_streamed_conll_file_gives_the_samples_of_memory():
    write_conll("a.conll", [row for row in every_column(ROWS) if row["words"]])
    section = {"words": None, "tags": None}
    task, model, _ = CASES["tags"]
    memory = make_run(task, model, data_section(["a.conll"], section | {"streaming": None}))
    run = make_run(task, model, data_section(["a.conll"], section | {"shuffle_buffer": 0}))
    assert samples_of(run.datasets["train"]) == samples_of(memory.datasets["train"])
