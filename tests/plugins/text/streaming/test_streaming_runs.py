"""Whole runs with ``data.streaming``: audited on several processes and workers, killed and resumed, in flat memory."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Mapping
from itertools import chain, product
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
import yaml
from fault_runs import Forked, ranks, record, said, steps, summary, times, together, train
from long_form import LONG
from pyarrow import parquet
from streaming_helpers import (
    KILL,
    LANGUAGE,
    MODEL,
    NAMES,
    classify,
    every_column,
    write_lines,
    write_parquet,
    write_shards,
)
from text_helpers import rows

from fastloop.testing import assert_problem
from fastloop_plugins.rows.order import Order

pytestmark = pytest.mark.slow

ROWS = 403
MIB = 2**20
T5: dict[str, Any] = {
    "config": {"model_type": "t5", "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2},
    "tokenizer": {"kind": "word", "vocab_size": 60},
}
FLAT = 48 * MIB
"""Growth of the peak memory that five times as many rows may cause. The rows themselves are 120 MB more."""


def write_recipe(
    *plugins: Any, model: Mapping[str, Any] = MODEL, data: Mapping[str, Any] | None = None, **train: Any
) -> None:
    """``recipe.yaml``, which streams three files of 403 rows, and a plugin that kills its process at the step
    KILL_AT."""
    Path("kill.py").write_text(KILL)
    files = {"train": write_shards(ROWS), "validation": write_lines("validation.jsonl", rows(24, NAMES))}
    section = {"files": files, "label": "label", "streaming": True, "max_length": 16, "shuffle_buffer": 100, "lanes": 4}
    section = {name: value for name, value in (section | dict(data or {})).items() if value is not None}
    recipe = {
        "model": dict(model),
        "data": section,
        "train": {"epochs": 2, "batch_size": 16, "lr": 1e-3, "device": "cpu", "save_every": 10, "log_every": 3} | train,
        "plugins": ["./kill.py:Kill", "sample-audit", *plugins, {"progress": False}],
        "output": "run",
    }
    Path("recipe.yaml").write_text(yaml.safe_dump(recipe))


def recorded(folder: str = "run") -> list[int]:
    """The ids of all samples of the last epoch, over all processes."""
    lines = [
        json.loads(line) for path in Path(folder, "sample-audit").iterdir() for line in path.read_text().splitlines()
    ]
    return sorted(
        chain.from_iterable(batch["ids"] for line in lines if line["epoch"] == 1 for batch in line["batches"])
    )


@pytest.mark.parametrize(
    ("processes", "workers"), [*product((1, 2, 4), (0, 1, 2))] if LONG else [(1, 2), (2, 0), (4, 1)]
)
def test_the_audit_finds_every_row_once_an_epoch(processes, workers, monkeypatch):
    # the main process may use threads, which do not survive a fork
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    write_recipe("ddp", {"dataloader-workers": {"num_workers": workers}})
    assert [run.wait() for run in together(count=processes)] == [0] * processes, said()
    audit = summary()["sample-audit"]
    assert {name: audit[name] for name in ("samples", "epochs", "missing", "repeated", "unknown")} == {
        "samples": 2 * ROWS, "epochs": 2, "missing": 0, "repeated": 0, "unknown": 0
    }  # fmt: skip
    assert len(audit["by_rank"]) == processes
    assert all(len(of) == max(workers, 1) for of in audit["by_worker"])
    assert recorded() == list(range(ROWS))


@pytest.mark.parametrize(
    ("task", "plugins"),
    [("classify", ["packing"]), ("generate", []), *([("classify", []), ("generate", ["packing"])] if LONG else [])],
    ids=lambda value: value if isinstance(value, str) else "packed" if value else "padded",
)
def test_a_killed_run_resumes_to_the_same_bits(task, plugins):
    changes: dict[str, Any] = {} if task == "classify" else {"model": LANGUAGE, "data": {"label": None}}
    monitor = {"monitor": "loss"}
    write_recipe(
        {"dataloader-workers": {"num_workers": 2}}, {"checkpoint-best": monitor},
        {"early-stopping": monitor | {"patience": 9}}, *plugins, evaluate_every=8, **changes,
    )  # fmt: skip
    assert train("output=whole") == 0, said()
    assert train(environment={"KILL_AT": "37"}) == -9
    assert steps()[-1] == 30
    assert train("--resume") == 0, said()
    assert record() == record("whole")


def test_a_run_resumes_exactly_on_other_processes_and_workers():
    write_recipe("ddp", {"dataloader-workers": {"num_workers": 0}})
    assert train(environment={"KILL_AT": "33"}) == -9
    more = together("--resume", "plugins.dataloader-workers.num_workers=1")
    assert [run.wait() for run in more] == [0, 0], said()
    assert recorded() == list(range(ROWS))
    assert summary()["sample-audit"]["missing"] == summary()["sample-audit"]["repeated"] == 0


TASKS: dict[str, tuple[Mapping[str, Any], dict[str, Any]]] = {
    "blocks": (LANGUAGE, {"label": None, "blocks": True}),
    "chat": (LANGUAGE, {"label": None, "messages": "messages", "chat_template": "chatml", "max_length": 48}),
    "seq2seq": (T5, {"label": None, "target": "short", "max_target_length": 8}),
    "tags": (MODEL, {"label": None, "words": "words", "tags": "tags"}),
}


@pytest.mark.parametrize("task", TASKS if "FASTLOOP_RELIABILITY" in os.environ else ["blocks", "seq2seq"])
def test_a_killed_run_of_each_task_resumes_to_the_same_bits(task):
    """Two processes, with two workers each before the kill and none after it. FASTLOOP_RELIABILITY=1 kills every
    task."""
    model, data = TASKS[task]
    table = every_column(200)
    files = {"train": [write_parquet("x.parquet", table[:120]), write_lines("y.jsonl", table[120:])]}
    files["validation"] = [write_lines("few.jsonl", table[:16])]
    write_recipe(
        "ddp",
        {"dataloader-workers": {"num_workers": 0}},
        model=model,
        data=data | {"files": files, "validation_fraction": 0},
        max_steps=9,
        save_every=4,
        evaluate_every=4,
    )
    for end, changes in ((9, ["output=whole"]), (6, [])):
        environment = {"KILL_AT": "6"} if end == 6 else None
        codes = [
            run.wait()
            for run in together("plugins.dataloader-workers.num_workers=2", *changes, environment=environment)
        ]
        assert (codes == [0, 0]) == (end == 9), said()
    assert steps()[-1] == 4
    assert [run.wait() for run in together("--resume")] == [0, 0], said()
    assert record() == record("whole")
    assert summary()["sample-audit"]["repeated"] == summary()["sample-audit"]["missing"] == 0


def repeat_a_row_group() -> None:
    """Make the order of each epoch have its first row group twice, and its second never."""
    stream = Order._group_order

    def planted(order: Order, source: int, turn: int) -> Any:
        groups, ends = stream(order, source, turn)
        return np.concatenate([groups[:1], groups[:1], groups[2:]]), ends

    Order._group_order = planted  # type: ignore[method-assign]


def test_the_audit_reports_a_row_group_that_comes_twice_and_one_that_never_comes():
    write_recipe(
        "ddp", data={"files": {"train": write_parquet("x.parquet", rows(320, NAMES))}, "validation_fraction": 0}
    )
    found = [Forked(environment=each, first=repeat_a_row_group) for each in ranks(2)]
    assert all(run.wait() for run in found)
    assert "plugin 'sample-audit': epoch 0: 32 of 320 samples are missing" in said()
    assert "32 came more than once" in said()


def test_the_audit_reports_a_row_that_comes_twice_in_a_pass_over_a_source_of_a_mix():
    files = {"train": [write_parquet("x.parquet", rows(160, NAMES)), write_parquet("y.parquet", rows(320, NAMES))]}
    write_recipe(data={"files": files, "mix": [1, 1], "validation_fraction": 0}, epochs=1)
    assert train() == 0, said()
    assert {name: summary()["sample-audit"][name] for name in ("samples", "epochs", "missing", "repeated")} == {
        "samples": 480, "epochs": 1, "missing": 0, "repeated": 0
    }  # fmt: skip
    assert Forked("output=planted", first=repeat_a_row_group).wait() != 0
    assert "came more than once" in said()


def test_processes_that_find_other_files_stop_before_training():
    write_recipe("ddp", data={"files": {"train": "shards/*.jsonl"}, "validation_fraction": 0})
    table = rows(60, NAMES)
    for folder, names in (("shards", "ab"), ("other/shards", "a")):
        Path(folder).mkdir(parents=True)
        for number, name in enumerate(names):
            write_lines(f"{folder}/{name}.jsonl", table[number * 30 : number * 30 + 30])
    for name in ("recipe.yaml", "kill.py"):
        Path("other", name).write_text(Path(name).read_text())
    first, second = ranks(2)
    found = [Forked(environment=first), Forked("output=../run", environment=second, first=lambda: os.chdir("other"))]
    assert all(run.wait() for run in found)
    assert "data.files.train: process 1 found 1 file with 30 rows, and process 0 2 with 60" in said()


def test_changed_files_stop_a_resumed_run():
    write_recipe()
    assert train(environment={"KILL_AT": "33"}) == -9
    write_lines("c.jsonl", rows(137, ("worse", "better")))
    assert train("--resume") != 0
    assert_problem(said(), "data-changed train:")


def test_amp_trains_on_streamed_rows():
    write_recipe({"amp": {"dtype": "bf16"}}, "packing", data={"mix": [2, 1, 1], "shuffle_buffer": 20}, max_steps=30)
    assert train("--without", "sample-audit") == 0, said()
    assert summary()["steps"] == 30


def peak_memory(path: str) -> int:
    """Stream a file once, and return the peak memory of this process in bytes."""
    run = classify(path, shuffle_buffer=500, lanes=8, DEVICE="cpu")  # a forked process cannot use CUDA
    for _ in run.train_loader.batches():
        pass
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def write_long_rows(path: str, count: int) -> None:
    """Rows of 10,000 characters, most of them different."""
    generator = np.random.default_rng(0)
    words = np.array(["fine", "dull", "film", "bore", "lovely", "number", "indeed", "a", "and", "of"])
    base = " ".join(generator.choice(words, 400_000))
    schema = pyarrow.schema({"text": pyarrow.string(), "label": pyarrow.string()})
    with parquet.ParquetWriter(path, schema, use_dictionary=False, compression="none") as file:
        for first in range(0, count, 1000):
            starts = generator.integers(0, len(base) - 10_000, min(1000, count - first))
            table = {
                "text": [base[start : start + 10_000] for start in starts],
                "label": [NAMES[start % 2] for start in starts],
            }
            file.write_table(pyarrow.table(table, schema), row_group_size=1000)


def test_memory_stays_flat(processes, record_property):
    """30 MB and 150 MB of text; FASTLOOP_RELIABILITY=140 streams 20 GB.

    Each process is new: one that is forked from this test process begins with its memory, used and freed."""
    small, large = 3000, 3000 * times(5)
    for name, count in (("small", small), ("large", large)):
        write_long_rows(f"{name}.parquet", count)

    def peak(path: str) -> int:
        (ended,) = processes(1, peak_memory, path)
        return ended.result

    least = min(peak("small.parquet") for _ in range(2))
    for _ in range(3):  # threads that fall behind on a busy machine hold more rows
        peaks = [least, peak("large.parquet")]
        if peaks[1] - least < FLAT:
            break
    record_property("peaks", peaks)
    assert Path("large.parquet").stat().st_size > 9.9 * large * 1000
    assert peaks[1] - peaks[0] < FLAT, f"peaks: {[f'{peak / MIB:.0f} MiB' for peak in peaks]}"
