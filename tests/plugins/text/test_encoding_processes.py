"""Rows that several processes encode: the same result in the same order, whatever happens to a process.

Modules:
    plugins/fastloop_plugins/text/encoding_processes.py
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from standard_input import read_by_a_thread
from text_helpers import TINY, make_run

from fastloop import RecipeError
from fastloop.testing import expect_problem, find_problems
from fastloop_plugins.text import encoding, encoding_processes, split_encoder
from fastloop_plugins.text.encoding_processes import encode_in_processes

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes encode rows on Linux only")

GPT2 = {"model_type": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 32}
T5 = {"model_type": "t5", "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
TASKS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "labels": ("text-classification", TINY, {"label": "label"}),
    "two columns": ("text-classification", TINY, {"text": ["text", "other"], "label": "label"}),
    "texts": ("causal-lm", GPT2, {}),
    "chats": ("causal-lm", GPT2, {"messages": "messages", "chat_template": "chatml", "max_length": 32}),
    "prompts": ("causal-lm", GPT2, {"prompt": "text", "completion": "other", "max_length": 32}),
    "tags": ("token-classification", TINY, {"words": "words"}),
    "pairs": ("seq2seq", T5, {"target": "other", "max_target_length": 8}),
}  # fmt: skip


def write_rows(count: int) -> None:
    with Path("train.jsonl").open("w", encoding="utf-8") as file:
        for number in range(count):
            words = [f"w{number * k % 13}" for k in range(1 + number % 19)]
            messages = [{"role": "user", "content": f"w{number}"}, {"role": "assistant", "content": "w1 w2"}]
            row = {"text": " ".join(words), "other": f"w{number} w5", "label": "ab"[number % 2], "messages": messages}
            row |= {"words": words, "tags": ["OB"[index % 2] for index in range(len(words))]}
            file.write(json.dumps(row) + "\n")


def read(kind: str, caplog: pytest.LogCaptureFixture) -> tuple[list[Any], list[str]]:
    """The samples of all splits, and the warnings."""
    task, config, options = TASKS[kind]
    data = {"files": {"train": "train.jsonl"}, "max_length": 8, **options}
    caplog.clear()
    run = make_run(task, {"config": config, "tokenizer": {"kind": "bpe", "vocab_size": 300}}, data)
    samples = []
    for dataset in run.datasets.values():
        for index in range(len(dataset)):
            samples.append({name: np.asarray(value).tolist() for name, value in dataset[index].items()})
    return samples, [record.getMessage() for record in caplog.records if record.name == "fastloop"]


@pytest.mark.parametrize("kind", TASKS)
def test_several_processes_give_the_samples_and_warnings_of_one(kind, monkeypatch, caplog):
    write_rows(60)
    expected = read(kind, caplog)
    monkeypatch.setattr(encoding_processes, "AT_ONCE", 7)
    monkeypatch.setattr(split_encoder, "count_processes", lambda rows, characters: 3)
    assert read(kind, caplog) == expected


def test_a_forked_process_tokenizes_few_characters_at_once(monkeypatch):
    """Of long texts, a whole portion took 100 MiB in each process."""
    texts = [f"w{number} " * 3000 for number in range(60)]
    Path("train.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    monkeypatch.setattr(split_encoder, "count_processes", lambda rows, characters: 2)
    encode_batch = encoding.encode_batch
    log = Path("characters.txt")

    def logged(tokenizer: Any, texts: list[str], arguments: dict[str, Any]) -> Any:
        with log.open("a") as file:
            file.write(f"{os.getpid()} {sum(map(len, texts))}\n")
        return encode_batch(tokenizer, texts, arguments)

    monkeypatch.setattr(encoding, "encode_batch", logged)
    data = {"files": {"train": "train.jsonl"}, "max_length": 4096}
    make_run("causal-lm", {"config": GPT2 | {"n_positions": 4096}, "tokenizer": {"kind": "byte"}}, data)
    sizes = []
    for line in log.read_text().splitlines():
        process, size = line.split()
        assert int(process) != os.getpid()
        sizes.append(int(size))
    assert sum(sizes) > 2**19
    assert max(sizes) <= 2**17


TEMPLATE = """{% for message in messages -%}
{% if message.role == 'user' and not loop.first %}{{ raise_exception('twice') }}{% endif -%}
{{ message.role }}: {% if message.role == 'assistant' %}{% generation %}{{ message.content }}{% endgeneration -%}
{% else %}{{ message.content }}{% endif -%}
{% endfor %}"""


def test_an_error_names_its_row_and_comes_from_this_process(monkeypatch):
    write_rows(40)
    lines = Path("train.jsonl").read_text().splitlines()
    row = json.loads(lines[33])
    row["messages"] = [{"role": "user", "content": "one"}, {"role": "user", "content": "two"}]
    lines[33] = json.dumps(row)
    Path("train.jsonl").write_text("\n".join(lines))
    Path("chat.jinja").write_text(TEMPLATE)
    monkeypatch.setattr(encoding_processes, "AT_ONCE", 7)
    monkeypatch.setattr(split_encoder, "count_processes", lambda rows, characters: 2)
    data = {"files": {"train": "train.jsonl"}, "messages": "messages", "chat_template": "chat.jinja", "max_length": 32}
    with expect_problem("invalid-row train.jsonl, line 34", RecipeError):
        make_run("causal-lm", {"config": GPT2, "tokenizer": {"kind": "byte"}}, data)


def double(portion: list[int]) -> Iterator[tuple[list[int], bool]]:
    for number in portion:
        yield [number, number], number % 2 == 0


PORTIONS = [[3 * number, 3 * number + 1, 3 * number + 2] for number in range(5)]
EXPECTED = [([number, number], number % 2 == 0) for number in range(15)]


@pytest.mark.parametrize("processes", [2, 3, 9])
def test_rows_are_in_order(processes):
    rows = encode_in_processes(double, iter(PORTIONS), processes)
    assert [(list(ids), is_cut) for ids, is_cut in rows] == EXPECTED


@pytest.mark.parametrize("fault", [lambda: os._exit(1), lambda: os.kill(os.getpid(), signal.SIGKILL), lambda: 1 / 0])
def test_this_process_encodes_the_portions_of_one_that_ends(fault):
    here = os.getpid()

    def encode(portion: list[int]) -> Iterator[tuple[list[int], bool]]:
        if portion[0] == 3 and os.getpid() != here:
            fault()
        return double(portion)

    rows = encode_in_processes(encode, iter(PORTIONS), 2)
    assert [(list(ids), is_cut) for ids, is_cut in rows] == EXPECTED


@pytest.mark.parametrize("first", [0, 3, 6])
def test_this_process_encodes_the_portions_of_one_that_hangs(monkeypatch, caplog, first):
    """In its first portion, which it is forked with, and in one that was sent."""
    monkeypatch.setattr(encoding_processes, "PATIENCE", 0.2)
    here = os.getpid()

    def encode(portion: list[int]) -> Iterator[tuple[list[int], bool]]:
        if portion[0] == first and os.getpid() != here:
            threading.Event().wait()
        return double(portion)

    rows = encode_in_processes(encode, iter(PORTIONS), 2)
    assert [(list(ids), is_cut) for ids, is_cut in rows] == EXPECTED
    assert len(find_problems(caplog, "encoding-process-hangs")) == 1


def test_a_thread_that_reads_standard_input_lets_no_process_hang(monkeypatch, caplog):
    monkeypatch.setattr(encoding_processes, "PATIENCE", 1.0)
    with read_by_a_thread(monkeypatch):
        rows = [(list(ids), is_cut) for ids, is_cut in encode_in_processes(double, iter(PORTIONS), 2)]
    assert rows == EXPECTED
    assert find_problems(caplog, "encoding-process-hangs") == []


def test_rows_that_are_not_used_leave_no_process():
    before = _children(os.getpid())  # of other tests
    rows = encode_in_processes(double, iter(PORTIONS), 2)
    next(rows)
    children = set(_children(os.getpid())).difference(before)
    rows.close()
    assert children
    assert not any(Path(f"/proc/{pid}").exists() for pid in children)


def _children(parent: int) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]


PARENT = """
import time
from fastloop_plugins.text.encoding_processes import encode_in_processes

def encode(portion):
    for number in portion:
        if number:
            time.sleep(600)
        yield [number], False

rows = encode_in_processes(encode, ([n] for n in (0, 1, 1, 1)), 3)
next(rows)
print("started", flush=True)
next(rows)
"""


def test_no_process_outlives_a_parent_that_is_killed():
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        parent.stdout.readline()
        children = _children(parent.pid)
        parent.kill()
    assert len(children) == 3
    end = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in children):
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("rows", "characters", "world", "expected"),
    [(10, 100, "1", 1), (10**6, 100, "1", 8), (10, 2**30, "1", 8), (10**6, 100, "4", 2), (10**6, 100, "16", 1)],
)
def test_large_splits_are_encoded_by_all_cores(monkeypatch, rows, characters, world, expected):
    monkeypatch.setattr(encoding_processes, "cores", lambda: 8)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", world)
    assert encoding_processes.count_processes(rows, characters) == expected
