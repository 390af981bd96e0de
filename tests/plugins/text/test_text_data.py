"""Data of the text tasks: accepted and rejected files. Every message names the file and the key.

Modules:
    plugins/fastloop_plugins/rows/table.py
    plugins/fastloop_plugins/text/data.py
    plugins/fastloop_plugins/text/parts.py
    plugins/fastloop_plugins/text/source_files.py
"""

from __future__ import annotations

import io
import json
import logging
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from checkpoint_helpers import save_checkpoint
from huggingface_hub import constants
from log_lines import find_lines
from text_helpers import TINY, make_run, rows, write_rows
from transformers import AutoModel

from fastloop.errors import RecipeError
from fastloop.problem import Problem
from fastloop.recipe import make_recipe
from fastloop.testing import assert_problem, find_problems
from fastloop_plugins.text.data import TextData
from fastloop_plugins.text.model import TextModel


def read(labelled: bool = True, **data):
    recipe = make_recipe({"data": ({"label": "label"} if labelled else {}) | data}, Path("recipe.yaml"))
    return TextData(recipe, labelled=labelled)


def problem_of(labelled: bool = True, **data) -> Problem:
    with pytest.raises(RecipeError) as caught:
        read(labelled, **data).load()
    return caught.value.problem


def refusal(labelled: bool = True, **data) -> str:
    """The message of ``problem_of``."""
    return str(problem_of(labelled, **data))


# -- what can be read --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["csv", "tsv", "json", "jsonl", "parquet"])
def test_every_file_type_gives_the_same_rows(suffix):
    content = [
        *rows(6),
        {"text": 'a "quoted"\ntwo-line, tabbed\ttext', "label": 1},
        {"text": "NA", "label": 0},
        {"text": "007", "label": 1},
    ]
    found = read(
        files={"train": write_rows(f"train.{suffix}", content), "validation": write_rows(f"v.{suffix}", rows(4))}
    ).load()
    assert list(found["train"].texts) == [row["text"] for row in content]
    assert found["train"].labels.tolist() == [row["label"] for row in content]
    assert len(found["validation"].texts) == 4
    assert "test" not in found


def test_files_replace_dataset_of_shipped_recipe_with_a_message(caplog):
    caplog.set_level(logging.INFO, "fastloop")
    write_rows("train.csv", rows(4))
    assert len(read(name="imdb", files={"train": "train.csv"}, validation_fraction=0).load()["train"].texts) == 4
    assert find_lines(caplog, "data: data.name imdb")


def test_txt_gives_paragraphs_or_else_lines(caplog):
    caplog.set_level(logging.INFO, "fastloop")
    Path("paragraphs.txt").write_text("one\ntwo\n\n\nthree\n")
    Path("lines.txt").write_text("one\ntwo\nthree\n")
    found = read(labelled=False, files={"train": "paragraphs.txt", "validation": "lines.txt"}).load()
    assert list(found["train"].texts) == ["one\ntwo", "three"]
    assert list(found["validation"].texts) == ["one", "two", "three"]
    (line,) = find_lines(caplog, "paragraphs.txt:")
    assert re.findall(r"\d+", line) == ["2", "2"], "paragraphs, and the blank lines between them"
    assert find_lines(caplog, "lines.txt: 3")


def test_many_files_do_not_fill_the_log(caplog):
    caplog.set_level(logging.INFO, "fastloop")
    for number in range(20):
        Path(f"{number}.txt").write_text("one\n\ntwo\n")
    read(labelled=False, files={"train": "*.txt"}, validation_fraction=0).load()
    assert sum(".txt: " in line for line in caplog.messages) == 8
    assert find_lines(caplog, "data: 12")


def test_lists_and_patterns_of_files_are_read_together():
    for name in ("b", "a"):
        write_rows(f"part-{name}.csv", [{"text": f"{name} {row['text']}", "label": row["label"]} for row in rows(2)])

    def texts(given):
        return list(read(files={"train": given}, validation_fraction=0).load()["train"].texts)

    by_pattern = texts("part-*.csv")
    assert [text[0] for text in by_pattern] == ["a", "a", "b", "b"]
    assert texts(["part-a.csv", "part-b.csv"]) == by_pattern
    assert texts(f"{Path.cwd()}/part-*.csv") == by_pattern


def test_paths_are_also_looked_for_beside_the_recipe(monkeypatch):
    write_rows("here/data/train.csv", rows(4))
    recipe = make_recipe(
        {"data": {"files": {"train": "data/*.csv"}, "label": "label", "validation_fraction": 0}},
        Path("here/recipe.yaml"),
    )
    assert len(TextData(recipe, labelled=True).load()["train"].texts) == 4


def test_a_python_function_gives_rows():
    Path("mine.py").write_text(
        "def make(n):\n    return {'train': [{'body': f'text {i}', 'y': 'ab'[i % 2]} for i in range(n)]}\n"
    )
    found = read(module="mine.py:make", arguments={"n": 6}, text="body", label="y", validation_fraction=0)
    assert found.load()["train"].labels.tolist() == [0, 1, 0, 1, 0, 1]
    assert found.classes == ["a", "b"]


def test_a_saved_dataset_gives_its_class_names_and_splits():
    import datasets

    features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["neg", "pos"])})
    train = datasets.Dataset.from_list(rows(8), features=features)
    datasets.DatasetDict({"train": train, "dev": train.select([1, 0])}).save_to_disk("saved")
    data = read(name="saved", splits={"validation": "dev"})
    found = data.load()
    assert data.classes == ["neg", "pos"]
    assert list(found["validation"].texts) == [rows()[1]["text"], rows()[0]["text"]]
    assert_problem(problem_of(name="saved", subset="a"), "unknown-option recipe.yaml: data.subset saved")
    assert_problem(problem_of(name="saved", revision="a"), "unknown-option recipe.yaml: data.revision saved")
    problem = problem_of(name="saved", splits={"validation": "nix"})
    assert_problem(problem, "unknown-split recipe.yaml: data.splits.validation: 'nix' train, dev")


def test_a_folder_of_files_is_a_dataset(tmp_path, monkeypatch):
    import datasets.config

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    write_rows("folder/train.csv", rows(8))
    write_rows("folder/test.csv", rows(4))
    found = read(name="folder").load()
    assert (len(found["train"].texts) + len(found["validation"].texts), len(found["test"].texts)) == (8, 4)


def test_a_folder_of_webdataset_archives_is_a_dataset(tmp_path, monkeypatch):
    import datasets.config

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    Path("folder").mkdir()
    with tarfile.open("folder/train.tar", "w") as archive:
        for number, row in enumerate(rows(8)):
            for ending, content in (("txt", row["text"]), ("json", json.dumps({"label": row["label"]}))):
                member = tarfile.TarInfo(f"{number:04}.{ending}")
                member.size = len(content.encode())
                archive.addfile(member, io.BytesIO(content.encode()))
    found = read(name="folder", text="txt", label=None, labelled=False, validation_fraction=0).load()
    assert list(found["train"].texts) == [row["text"] for row in rows(8)]


# -- splits ------------------------------------------------------------------------------------------------------------


def test_validation_split_is_held_out_with_a_message(caplog):
    caplog.set_level(logging.INFO, "fastloop")
    write_rows("train.csv", rows(40))
    first, again = (read(files={"train": "train.csv"}, validation_fraction=0.25).load() for _ in range(2))
    assert (len(first["train"].texts), len(first["validation"].texts)) == (30, 10)
    assert {*first["train"].texts, *first["validation"].texts} == {row["text"] for row in rows(40)}
    assert list(first["validation"].texts) == list(again["validation"].texts)
    assert set(first["validation"].labels) == {0, 1}
    assert find_lines(caplog, "25% train")


def test_no_held_out_share_is_no_evaluation():
    write_rows("train.csv", rows(4))
    assert list(read(files={"train": "train.csv"}, validation_fraction=0).load()) == ["train"]


def test_limit_draws_from_everywhere_so_sorted_files_keep_all_classes():
    write_rows("train.csv", sorted(rows(100), key=lambda row: row["label"]))
    found = read(
        files={"train": "train.csv", "test": "train.csv"}, limit={"train": 20, "validation": 4, "test": 1000}
    ).load()
    assert [len(split.texts) for split in found.values()] == [20, 100, 4]
    assert set(found["train"].labels) == {0, 1}


def test_string_labels_are_numbered_in_sorted_order():
    write_rows("train.jsonl", rows(6, labels=("pos", "neg")))
    data = read(files={"train": "train.jsonl"}, validation_fraction=0)
    assert data.load()["train"].labels.tolist() == [1, 0] * 3
    assert data.classes == ["neg", "pos"]


# -- what is refused before anything is loaded -------------------------------------------------------------------------


def check(labelled: bool = True, **data) -> Problem:
    with pytest.raises(RecipeError) as caught:
        read(labelled, **data)
    return caught.value.problem


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ({"files": {"train": "nix.csv"}}, "file-missing recipe.yaml data.files.train nix.csv"),
        ({"files": {"train": "nix*.csv"}}, "file-missing recipe.yaml data.files.train nix*.csv"),
        ({"files": {"train": "."}}, "not-a-file data.files.train"),
        ({"files": {"train": []}}, "missing-value data.files.train"),
        (
            {"files": {"train": "a.xlsx"}},
            "unknown-format data.files.train a.xlsx '.xlsx'",
        ),
        ({"files": {"trian": "a.csv"}}, "unknown-option data.files.trian 'train'"),
        ({"files": {"test": "a.csv"}}, "missing-value data.files.train"),
        ({"files": {"train": "a.csv"}, "lable": "y"}, "unknown-option data.lable 'label'"),
        ({"files": {"train": "a.csv"}, "max_length": "long"}, "invalid-value data.max_length 'long'"),
        ({"files": {"train": "a.csv"}, "limit": {"train": 0}}, "invalid-value data.limit.train 0"),
        ({"files": {"train": "a.csv"}, "splits": {"dev": "x"}}, "unknown-option data.splits.dev"),
        ({"files": {"train": "a.csv"}, "validation_fraction": 1.0}, "invalid-value data.validation_fraction 1.0"),
        (
            {"files": {"train": "a.csv"}, "arguments": {"n": 1}},
            "unknown-option data.arguments data.module",
        ),
        ({"files": {"train": "a.csv"}, "label": None}, "missing-value data.label"),
        ({}, "exclusive-options recipe.yaml data"),
        ({"files": {"train": "a.csv"}, "module": "m:f"}, "exclusive-options data"),
        ({"name": "a.csv"}, "not-a-name data.name a.csv data.files.train=a.csv"),
        ({"name": "no/such/folder"}, "file-missing data.name no/such/folder"),
        ({"module": "nonsense"}, "wrong-format data.module 'nonsense' file.py:name package.module:name"),
        ({"module": "nix.py:f"}, "file-missing data.module nix.py"),
        ({"module": "nixpackage.m:f"}, "not-installed data.module 'nixpackage'"),
    ],
)
def test_a_wrong_data_section_is_refused_before_anything_is_loaded(data, expected):
    write_rows("a.csv", rows(2))
    Path("a.xlsx").touch()
    assert_problem(check(**data), expected)


def test_a_language_model_refuses_labels():
    write_rows("a.csv", rows(2))
    assert_problem(check(labelled=False, files={"train": "a.csv"}, label="label"), "unknown-option data.label")


# -- what is refused when it is read -----------------------------------------------------------------------------------


def test_missing_columns_are_named_with_those_there_are():
    write_rows("train.csv", [{"texts": "a", "label": 0}])
    problem = problem_of(files={"train": "train.csv"})
    assert_problem(problem, "unknown-column train.csv 'text' data.text 'texts'")


def test_a_label_column_that_only_test_lacks_is_named_with_the_file():
    write_rows("train.csv", rows(4))
    write_rows("test.csv", [{"text": "a"}])
    assert_problem(
        problem_of(files={"train": "train.csv", "test": "test.csv"}), "unknown-column test.csv 'label' data.label"
    )


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        ([0, None, 1], "missing-label train.jsonl 2 'label' data.label"),
        (
            [0, 0.5, 1],
            "wrong-label train.jsonl 2 'label' data.label 0.5 0",
        ),
        ([1, 2, 1], "gaps-in-labels train.jsonl 'label' data.label 1 2 0"),
        ([-1, 0, 1], "gaps-in-labels -1 0 1 2"),
        ([0, 2, 0], "gaps-in-labels 0 2 1"),
        (
            [0, "a", 1],
            "mixed-labels train.jsonl 2 'label' data.label 'a' 1 0",
        ),
        (["a", "a", "a"], "one-class train.jsonl 'label' data.label 'a'"),
        ([["a"], "b", "c"], "wrong-label train.jsonl 1 'label' data.label 'a'"),
    ],
)
def test_invalid_labels_error_has_file_row_and_key(labels, expected):
    write_rows("train.jsonl", [{"text": "some text", "label": label} for label in labels])
    assert_problem(problem_of(files={"train": "train.jsonl"}), expected)


def test_a_label_never_seen_in_training_is_refused_with_the_way_out():
    write_rows("train.csv", rows(4))
    write_rows("test.csv", [{"text": "a", "label": 1}, {"text": "b", "label": -1}])
    problem = problem_of(files={"train": "train.csv", "test": "test.csv"})
    assert_problem(problem, "unknown-label test.csv 3 'label' data.label -1 0 1")
    assert "data.splits.test=null" in str(problem)
    assert "test" not in read(files={"train": "train.csv", "test": "test.csv"}, splits={"test": None}).load()


def test_empty_splits_are_rejected_and_few_empty_texts_logged(caplog):
    write_rows("train.csv", rows(4))
    Path("header.csv").write_text("text,label\n")
    Path("nothing.csv").write_text("")
    Path("nothing.jsonl").write_text("")
    for empty in ("header.csv", "nothing.csv", "nothing.jsonl"):
        problem = problem_of(files={"train": "train.csv", "test": empty})
        assert_problem(problem, f"empty-split {empty}: test")
    write_rows("blank.jsonl", [{"text": "", "label": 0}, {"text": None, "label": 1}])
    assert_problem(problem_of(files={"train": "blank.jsonl"}), "empty-column blank.jsonl 2 'text' data.text")
    write_rows("some.jsonl", [*rows(4), {"text": " \n", "label": 1}, {"text": "", "label": 1}])
    read(files={"train": "some.jsonl"}).load()
    assert_problem(caplog, "empty-texts some.jsonl 2 6 'data.drop=[{column: text, empty: true}]'")
    caplog.clear()
    datasets = read(files={"train": "some.jsonl"}, drop=[{"column": "text", "empty": True}]).load()
    assert sum(map(len, datasets.values())) == 4
    assert not find_problems(caplog, "empty-texts")


def test_non_string_texts_are_rejected():
    write_rows("train.jsonl", [{"text": "a", "label": 0}, {"text": 3, "label": 1}])
    assert_problem(problem_of(files={"train": "train.jsonl"}), "invalid-row train.jsonl 2 'text' data.text 3")


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("bad.jsonl", b'{"text": "a", "label": 0}\n{"text": \n', "invalid-row bad.jsonl line 2 JSON"),
        ("bad.json", b'[{"text": "a"},\n]', "invalid-row bad.json line 2 JSON"),
        ("bad.json", b'["a", "b"]', "invalid-row bad.json 1 'a'"),
        ("bad.parquet", b"not parquet at all", "wrong-contents bad.parquet"),
        ("bad.parquet", b"PAR1\x15damaged", "file-unreadable bad.parquet"),
        ("bad.csv", b"text,label\na,0\nb,1,2\n", "invalid-row bad.csv line 3 2"),
        ("bad.txt", b"\xff\x00bad", "invalid-row bad.txt line 1 UTF-8"),
    ],
)
def test_a_file_that_is_not_what_its_suffix_says_is_refused(name, content, expected):
    Path(name).write_bytes(content)
    assert_problem(problem_of(files={"train": name}), expected)


def test_a_function_called_or_answering_wrongly_is_refused():
    Path("mine.py").write_text("def one(n): ...\ndef two(): return [1]\ndef three(): return {'train': ['a']}\n")
    assert_problem(problem_of(module="mine.py:one"), "call-failed data.arguments mine.py:one 'n'")
    assert_problem(problem_of(module="mine.py:two"), "wrong-result data.module mine.py:two")
    assert_problem(problem_of(module="mine.py:three"), "invalid-row mine.py:three split train 1 'a'")
    assert "data.module: mine.py has no 'tow'. Did you mean 'two'?" in refusal(module="mine.py:tow")
    assert_problem(
        problem_of(module="fastloop_plugins.nix:f"),
        "import-failed data.module fastloop_plugins.nix ModuleNotFoundError",
    )


def test_one_row_cannot_be_held_out_from():
    Path("one.txt").write_text("only one")
    assert_problem(problem_of(labelled=False, files={"train": "one.txt"}), "too-few-rows data.validation_fraction 1")


# -- the hub -----------------------------------------------------------------------------------------------------------


def test_a_hub_model_is_refused_before_the_data_is_read():
    Path("train.csv").write_text("this is,not even\nright,")
    with pytest.raises(RecipeError) as caught:
        make_run("text-classification", {"name": "no-such-model"}, {"files": {"train": "train.csv"}, "label": "label"})
    message = str(caught.value)
    assert message.startswith("recipe.yaml: model.name: 'no-such-model' ")
    assert_problem(caught.value.problem, "file-unreadable model.name=FOLDER model.config HF_HOME HF_ENDPOINT")


def cache_repository(cache: Path, name: str, folder: str, branch: str) -> None:
    """Make a folder the only branch of a repository that was downloaded from the hub."""
    repository = cache / f"models--{name.replace('/', '--')}"
    (repository / "snapshots").mkdir(parents=True)
    (repository / "snapshots" / ("0" * 40)).symlink_to(Path(folder).resolve())
    (repository / "refs").mkdir()
    (repository / "refs" / branch).write_text("0" * 40)


@pytest.mark.parametrize(
    "model",
    [
        {"name": "owner/model"},
        {"name": "owner/model", "tokenizer": "owner/model"},
        {"name": "owner/model", "tokenizer": "owner/words"},
        {"config": TINY, "tokenizer": "owner/model"},
    ],
)
def test_a_revision_is_not_one_of_a_tokenizer_in_another_repository(model, tmp_path, monkeypatch):
    write_rows("rows.jsonl", rows(4))
    save_checkpoint(AutoModel, TINY)
    cache_repository(tmp_path, "owner/model", "checkpoint", branch="v2")
    cache_repository(tmp_path, "owner/words", "checkpoint", branch="main")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    recipe = make_recipe({"model": {**model, "revision": "v2"}, "data": {"max_length": 32}}, Path("recipe.yaml"))
    text_model = TextModel(recipe, classify=True)
    text_model.load_tokenizer(32)
    assert "fine" in text_model.tokenizer.get_vocab()


def test_a_hub_dataset_is_refused_with_what_to_do_instead():
    with pytest.raises(RecipeError) as caught:
        make_run(
            "text-classification", {"config": TINY}, {"name": "no-such-dataset", "label": "label", "max_length": 32}
        )
    assert str(caught.value).startswith("recipe.yaml: data.name: 'no-such-dataset' ")
    assert_problem(caught.value.problem, "file-unreadable data.files.train=FILE")


@pytest.mark.slow
def test_unreachable_hub_fails_without_retry_messages(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "empty"))
    monkeypatch.setenv("HF_ENDPOINT", "http://192.0.2.1")  # an address that no machine has
    Path("recipe.yaml").write_text(
        "model: {name: no-such-model}\ndata: {name: imdb, label: label}\n"
        "plugins: [text-classification, {log: false}, {progress: false}, {module: false}]\n"
    )
    result = subprocess.run(
        [sys.executable, "-m", "fastloop", "train", "recipe.yaml"], capture_output=True, text=True, timeout=600
    )
    assert result.returncode == 2, result.stderr
    assert result.stderr.startswith("error: recipe.yaml: model.name: 'no-such-model' ")
    assert_problem(result.stderr, "file-unreadable")
    assert result.stderr.count("\n") == 1
