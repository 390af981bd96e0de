"""Files whose name or place is another one's: the error names their format, and the next step, which works.

Modules:
    plugins/fastloop_plugins/rows/contents.py
"""

from __future__ import annotations

import bz2
import gzip
import json
import re
import shutil
import sqlite3
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from data_helpers import named_rows, problem_of, refusal, text_data, write
from streaming_helpers import write_arrow, write_lines, write_parquet

from fastloop.errors import RecipeError
from fastloop.testing import assert_problem
from fastloop_plugins.text.chunks import text_chunks

ROWS = [{"text": f"film {number}", "label": ("neg", "pos")[number % 2]} for number in range(20)]
CSV = "text,label\n" + "".join(f"{row['text']},{row['label']}\n" for row in ROWS)
WRONG = {
    "parquet": [".csv", ".tsv", ".jsonl", ".json", ".txt", ".arrow"],
    "arrow": [".csv", ".jsonl", ".txt", ".parquet"],
    "zip": [".csv", ".jsonl", ".parquet", ".arrow", ".csv.gz"],
    "sqlite": [".csv", ".jsonl", ".txt", ".parquet"],
    "gzip": [".parquet", ".arrow"],
    "csv": [".parquet", ".arrow"],
}


def write_zip(path: str) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("train.csv", CSV)


def write_sqlite(path: str) -> None:
    connection = sqlite3.connect(path)
    connection.execute("create table films(text, label)")
    connection.commit()
    connection.close()


WRITERS: dict[str, Callable[[str], object]] = {
    "parquet": lambda path: write_parquet(path, ROWS),
    "arrow": lambda path: write_arrow(path, ROWS),
    "zip": write_zip,
    "sqlite": write_sqlite,
    "gzip": lambda path: write(path, gzip.compress(CSV.encode())),
    "csv": lambda path: write(path, CSV),
}


@pytest.mark.parametrize(("kind", "suffix"), [(kind, suffix) for kind, found in WRONG.items() for suffix in found])
def test_a_file_with_the_name_of_another_format_is_named_by_every_reader(kind, suffix):
    path = f"train{suffix}"
    WRITERS[kind](path)
    problem = problem_of(path)
    assert problem == problem_of(path, streaming=True)
    assert_problem(problem, f"wrong-contents {path}")
    data = text_data(write("good.csv", CSV))
    with pytest.raises(RecipeError) as error:
        list(text_chunks(data, Path(path), 0, 8))
    assert error.value.problem == problem
    if renamed := re.search(r"Rename it to .*?(\S+)\.$", problem.remedy):
        shutil.move(path, renamed[1])
        assert len(named_rows(text_data(renamed[1]))) == 20


def test_files_compressed_as_their_first_bytes_show_are_read():
    assert len(named_rows(text_data(write("a.csv", gzip.compress(CSV.encode()))))) == 20
    path = write("b.csv", bz2.compress(CSV.encode()))
    assert_problem(problem_of(path), "wrong-contents bz2")
    assert len(named_rows(text_data(path, read={"compression": "bz2"}))) == 20
    assert len(named_rows(text_data(write("c.txt", "PAR1 is no Parquet file\n"), label=None))) == 1


# -- what `datasets` saves ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("streaming", [False, True])
def test_a_single_saved_dataset_is_the_training_split(streaming):
    import datasets

    found = datasets.Dataset.from_list(ROWS)
    found.save_to_disk("one")
    datasets.DatasetDict(train=found, test=found).save_to_disk("two")
    for folder in ("one", "two/train"):
        data = text_data(None, name=folder, streaming=streaming)
        assert {text for text, _ in named_rows(data)} == {row["text"] for row in ROWS}
        message = refusal(folder, streaming=streaming)
        file = re.search(r"data\.files\.train=(\S+)\.$", message)
        assert file is not None, message
        assert len({text for text, _ in named_rows(text_data(file[1], streaming=streaming))}) == 20
    assert_problem(problem_of("two", streaming=streaming), "not-a-file data.name=two data.files")
    assert len(text_data(None, name="two").load()["test"]) == 20


@pytest.mark.parametrize("split", ["train", "validation", "test"])
def test_a_split_as_a_key_of_data_names_the_key_of_its_files(split):
    path = write("train.csv", CSV)
    files = {} if split == "train" else {"train": path}
    problem = problem_of(files or None, **{split: path})
    assert_problem(problem, f"unknown-option data.{split}")
    assert problem.proposals == [f"data.files.{split}=train.csv"]
    assert len(text_data(files | {split: path}).load()[split]) == 20


# -- positions in JSON -------------------------------------------------------------------------------------------------

MALFORMED = {
    '{"text": "a" "label": 1}': '"label": 1}',
    '{"text": "a", "label": }': "}",
    '{"text": "a", "n": [1, 2}': "}",
    '{"text": nonsense}': "nonsense}",
    '{"text": "a"} x': "x",
}


@pytest.mark.parametrize("padding", [0, 30_000])  # a list is read in pieces
@pytest.mark.parametrize("line", MALFORMED)
def test_malformed_json_is_named_by_line_and_character(line, padding):
    good = json.dumps(ROWS[0] | {"more": "x" * padding})
    character = 3 + line.rindex(MALFORMED[line])
    for path, content in (
        ("a.jsonl", f"{good}\n{good}\n  {line}\n{good}\n"),
        ("a.json", f"[{good},\n{good},\n  {line},\n{good}]\n"),
    ):
        problem = problem_of(write(path, content), label=None)
        assert_problem(problem, f"invalid-row JSON {character}:")
        assert problem.place == f"{path}, line 3"
        assert repr(MALFORMED[line])[:-1] in str(problem)


def test_json_that_ends_too_early_names_the_end():
    write_lines("a.jsonl", ROWS)
    cut = Path("a.jsonl").read_text().rstrip()[:-1]
    assert_problem(problem_of(write("a.jsonl", cut), label=None), "invalid-row a.jsonl line 20 JSON the end.")
    assert_problem(problem_of(write("a.json", f"[{json.dumps(ROWS[0])}"), label=None), "invalid-row the end.")
