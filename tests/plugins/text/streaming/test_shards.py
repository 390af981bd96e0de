"""``data.streaming`` with ``data.name``: datasets of a hub, which a local server stands for, and local folders.

Modules:
    plugins/fastloop_plugins/text/streaming/shards.py
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import datasets
import pytest
import yaml
from fault_runs import record, steps, summary
from hub_server import Hub, commit_of, hub_server
from package_helpers import ForkingPython
from streaming_helpers import KILL, MODEL, STREAM, ids_by_step, samples_of, write_lines
from text_helpers import make_run, rows

from fastloop.errors import RecipeError
from fastloop.testing import assert_problem, expect_problem

ROWS = 303
FEATURES = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["bad", "good"])})


def write_split(folder: Path, split: str, first: int, end: int) -> None:
    """Two Parquet shards, with row groups of 32 rows and names of classes."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, (start, stop) in enumerate(((first, (first + end) // 2), ((first + end) // 2, end))):
        part = datasets.Dataset.from_list(rows(end)[start:stop], features=FEATURES)
        part.to_parquet(str(folder / f"{split}-0000{number}-of-00002.parquet"), batch_size=32)


def write_hub(root: Path) -> None:
    """Datasets that stream, by themselves or through their Parquet copy, and others that do not."""
    write_split(root / "own/films/main/data", "train", 0, ROWS)
    write_split(root / "own/films/main/data", "validation", ROWS, ROWS + 24)
    for name in ("scripted", "partial", "archived"):
        (root / "own" / name / "main").mkdir(parents=True)
    for name in ("scripted", "partial"):
        (root / "own" / name / "main" / f"{name}.py").write_text("")
    (root / "own/archived/main/train.zip").write_bytes(b"PK\5\6" + bytes(18))
    for split, first, end in (("train", 0, ROWS), ("validation", ROWS, ROWS + 24)):
        write_split(root / "own/scripted/convert/default" / split, "0000", first, end)
        write_split(root / "own/partial/convert/default" / f"partial-{split}", "0000", first, end)


def trainer(url: str) -> ForkingPython:
    """A Python that has read the hub's address from its environment: huggingface_hub reads it when it is imported."""
    variables = {"HF_ENDPOINT": url, "HF_HOME": str(Path("home").resolve()), "HF_HUB_OFFLINE": "0"}
    return ForkingPython(sys.executable, os.environ | variables)


def train(python: ForkingPython, *arguments: str, **environment: str) -> tuple[int, str]:
    """The exit code and the output of ``fastloop train recipe.yaml`` in a process of its own."""
    done = python.run("train", "recipe.yaml", *arguments, cwd=Path.cwd(), **environment)
    return done.returncode, done.stdout + done.stderr


def write_recipe(**data: Any) -> None:
    section = {
        "name": "own/films",
        "streaming": True,
        "label": "label",
        "max_length": 16,
        "shuffle_buffer": 100,
        "lanes": 4,
    }
    recipe = {
        "model": MODEL,
        "data": section | data,
        "train": {"epochs": 2, "batch_size": 16, "lr": 1e-3, "device": "cpu", "save_every": 10, "log_every": 3},
        "plugins": ["./kill.py:Kill", "text-classification", "sample-audit", {"dataloader-workers": {"num_workers": 2}},
                    {"progress": False}],
        "output": "run",
    }  # fmt: skip
    Path("kill.py").write_text(KILL)
    Path("recipe.yaml").write_text(yaml.safe_dump(recipe))


def ranges(hub: Hub) -> int:
    """Requests for the content of shards."""
    return sum(request.startswith("GET") and request.endswith(".parquet") for request in hub.requests)


@pytest.mark.slow
def test_a_killed_run_on_a_dataset_of_the_hub_resumes_to_the_same_bits_and_what_cannot_be_streamed_is_named():
    write_hub(root := Path("hub").resolve())
    write_recipe()
    closed = {"own/private": "RepoNotFound", "own/gated": "GatedRepo"}
    with hub_server(root, closed) as (url, hub), trainer(url) as python:
        code, out = train(python, "output=whole")
        assert code == 0, out
        commit = commit_of(root / "own/films/main")
        assert f"data: own/films at commit {commit}\n" in out
        assert f"data: train {ROWS}, streamed from 10 row groups in 2 files, validation 24" in out
        assert ranges(hub) > 0
        assert not any("main/data" in request for request in hub.requests), "each request names the commit"
        assert train(python, KILL_AT="27")[0] == -9
        assert steps()[-1] == 20
        # the dataset gets other rows: the commit of the first start is still there
        shutil.copytree(root / "own/films/main", root / "own/films/earlier")
        write_split(root / "own/films/main/data", "train", 7, ROWS)
        code, out = train(python, "--resume")
        assert code == 2, out
        assert_problem(out, f"resume-differs data 'revision': '{commit}'")
        code, out = train(python, "--resume", f"data.revision={commit}")
        assert code == 0, out
        assert record() == record("whole")
        assert summary()["sample-audit"]["repeated"] == summary()["sample-audit"]["missing"] == 0

        # other datasets of the same hub
        code, out = train(python, "data.name=own/scripted", "train.max_steps=2", "output=scripted")
        assert code == 0, out
        assert f"data: own/scripted, the hub's Parquet copy at commit {commit_of(root / 'own/scripted/convert')}" in out
        assert f"data: train {ROWS}, streamed from 10 row groups in 2 files, validation 24" in out
        for change, problem in (
            ("data.name=own/partial", "the hub's Parquet copy has only a part of its rows (hf://datasets/own/partial@"),
            ("data.name=own/archived", "And the hub has no Parquet copy of it (refs/convert/parquet)."),
            (
                "data.name=own/private",
                "'own/private' is not a local folder, and cannot be loaded from the hub: Dataset 'own/",
            ),
            ("data.name=own/gated", "accept its terms on its page, and log in: hf auth login, or set HF_TOKEN."),
            ("data.revision=nowhere", "Revision 'nowhere' doesn't exist for dataset 'own/films' on the Hub"),
            ("data.splits.train=training", "data.splits.train: there is no split 'training'. There are: train, valid"),
            ("data.splits.validation=null", "data.validation_fraction: cannot hold with data.streaming"),
        ):
            code, out = train(python, change)
            assert code == 2, out
            assert problem in out.splitlines()[-1], out


@pytest.mark.slow
def test_without_a_hub_a_local_copy_is_proposed_and_works():
    write_split(Path("folder/data"), "train", 0, ROWS)
    write_split(Path("folder/data"), "validation", ROWS, ROWS + 24)
    write_recipe()
    files = ["data.files.train=folder/data/train-*.parquet", "data.files.validation=folder/data/validation-*.parquet"]
    with trainer(url := "http://127.0.0.1:9") as python:
        code, out = train(python)
        assert (code, out.count("\n")) == (2, 1), out
        assert (
            f"data.name: 'own/films' is not a local folder, and the hub ({url}), which data.streaming reads, cannot be"
            in out
        )
        for change in (["data.name=folder"], files):
            code, out = train(python, *change, "train.max_steps=2")
            assert code == 0, out
            assert f"data: train {ROWS}, streamed from 10 row groups in 2 files, validation 24" in out


def stream(**changes: Any) -> Any:
    data = STREAM | {"name": "folder", "label": "label"} | changes
    return make_run("text-classification", MODEL, {key: value for key, value in data.items() if value is not None})


@pytest.mark.parametrize("kind", ["saved", "parquet", "lines"])
def test_a_local_folder_streams_the_rows_that_it_has_in_memory(kind):
    splits = {"train": rows(90), "validation": rows(12)}
    if kind == "saved":
        parts = {split: datasets.Dataset.from_list(part, features=FEATURES) for split, part in splits.items()}
        datasets.DatasetDict(parts).save_to_disk("folder", num_shards={"train": 3, "validation": 1})
    elif kind == "parquet":
        write_split(Path("folder"), "train", 0, 90)
        write_split(Path("folder"), "validation", 0, 12)
    else:
        Path("folder").mkdir()
        for split, part in splits.items():
            write_lines(f"folder/{split}.jsonl", part)
    memory = stream(**dict.fromkeys(("streaming", "shuffle_buffer", "lanes")))
    run = stream(shuffle_buffer=0)
    assert samples_of(run.datasets["train"]) == samples_of(memory.datasets["train"])
    assert samples_of(run.datasets["validation"]) == samples_of(memory.datasets["validation"])
    assert run.model.config.id2label == memory.model.config.id2label
    shuffled = stream()
    whole = ids_by_step(shuffled, epoch=1)
    assert ids_by_step(shuffled, 2, 0, epoch=1, start=32) == whole[2:]


def test_a_folder_without_files_that_stream_is_named():
    Path("folder").mkdir()
    Path("folder/train.zip").write_bytes(b"PK\5\6" + bytes(18))
    with expect_problem("unreachable-url recipe.yaml: data.name:", RecipeError):
        stream()
