"""Files of other people's making: hints, options and splits. The files themselves are a table: ``broken_files``.

Modules:
    plugins/fastloop_plugins/rows/csv.py
    plugins/fastloop_plugins/rows/options.py
    plugins/fastloop_plugins/rows/paths.py
"""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path
from typing import Any

import pytest
from broken_files import FILES
from data_helpers import named_rows, problem_of, refusal, text_data, write
from log_lines import find_lines

from fastloop.errors import RecipeError
from fastloop.lifecycle import build
from fastloop.plugins.resolve import resolve
from fastloop.recipe import make_recipe
from fastloop.testing import assert_problem, expect_problem

ROWS = [(f"{('a dull', 'a fine')[i % 2]} film, number {i}", ("neg", "pos")[i % 2]) for i in range(12)]


def table(
    rows: list[tuple[str, ...]] = ROWS,
    delimiter: str = ",",
    header: tuple[str, ...] = ("text", "label"),
    end: str = "\n",
) -> str:
    """Rows as csv, quoted where the delimiter asks for it."""
    lines = [
        tuple(f'"{cell}"' if delimiter in cell else cell for cell in row) for row in ([header] if header else []) + rows
    ]
    return "".join(delimiter.join(line) + end for line in lines)


def reviews(count: int = 80) -> list[str]:
    return [
        "text\tlabel",
        *(f"film number {i} is {('dull', 'fine')[i % 2]}\t{('neg', 'pos')[i % 2]}" for i in range(count)),
    ]


# -- the header --------------------------------------------------------------------------------------------------------


COLUMNS_HINT = (
    " If line 1 is data and not column names, give 'data.read.columns=[{}]', with the names in the order of the file."
)


def test_a_file_without_header_is_refused_with_the_columns_to_give():
    path = write("train.csv", table(header=()))
    problem = problem_of(path)
    assert_problem(problem, "unknown-column train.csv 'text' data.text 0")
    assert str(problem).endswith(COLUMNS_HINT.format("text,label"))
    assert named_rows(text_data(path, read={"columns": ["text", "label"]})) == ROWS


@pytest.mark.parametrize(
    ("header", "hint"),
    [
        ("lovely,fine", COLUMNS_HINT.format("text,label")),
        ("7,lovely,x,fine", COLUMNS_HINT.format("text,label,column3,column4")),
        ("review,label", ""),  # it has one of the columns
        ("texts,sentiment", " Did you mean 'texts'?"),
    ],
)
def test_a_first_line_that_may_be_data_gives_a_hint(header, hint):
    message = refusal(write("train.csv", f"{header}\ndull,bad\nsuperb,good\n"))
    assert message.endswith(f"Its columns: {header.replace(',', ', ')}.{hint}")


# -- delimiters, encodings, compression --------------------------------------------------------------------------------


@pytest.mark.parametrize(("delimiter", "name"), [("\t", "tab"), (";", "semicolon"), ("|", "bar")])
def test_a_delimiter_that_the_header_shows_is_used_and_logged(delimiter, name, caplog):
    caplog.set_level(logging.INFO, "fastloop")
    rows = [*ROWS, ('"', "neg")]
    path = write("train.csv", table(rows[:-1], delimiter) + f'""""{delimiter}neg\n')
    assert named_rows(text_data(path)) == rows
    assert find_lines(caplog, f"train.csv: {name}")


def test_another_delimiter_is_offered_and_can_be_given():
    path = write("train.csv", table(delimiter=";", header=("review", "class")))
    assert_problem(problem_of(path), "unknown-column train.csv 'text' data.read.delimiter=';'")
    assert named_rows(text_data(path, text="review", label="class")) == ROWS
    path = write("train.csv", table([(text.replace(",", ""), label) for text, label in ROWS], "\t", header=()))
    problem = problem_of(path, read={"columns": ["text", "label"]})
    assert_problem(problem, "invalid-row train.csv line 1 2 data.read.delimiter=tab")
    for tab in ("tab", "\\t", "\t"):
        assert len(named_rows(text_data(path, read={"columns": ["text", "label"], "delimiter": tab}))) == 12
    path = write("train.csv", table(delimiter="^"))
    assert named_rows(text_data(path, read={"delimiter": "^"})) == ROWS


def test_folders_of_csv_files_are_read_like_files():
    write("folder/train.csv", 'text,label\nNA,01\n007,02\n"null",01\n')
    write("folder/test.csv", "text,label\nNA,02\n")
    data = text_data(name="folder")
    assert named_rows(data) == [("NA", "01"), ("007", "02"), ("null", "01")]
    assert named_rows(data, "test") == [("NA", "02")]
    write("folder/train.csv", "text,label\n" + table())
    assert_problem(problem_of(name="folder"), "invalid-row folder/train.csv line 2")


def test_a_missing_text_is_empty_and_warns_with_the_row(caplog):
    path = write("train.jsonl", '{"text": "a", "label": 0}\n{"txt": "b", "label": 1}\n{"text": null, "label": 1}\n')
    assert [text for text, _ in named_rows(text_data(path))] == ["a", "", ""]
    assert_problem(caplog, "empty-texts 2 3 train.jsonl, line 2: 'text' data.text")


# -- what is not a file ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (
            {"files": "https://example.org/a/train.csv"},
            "wrong-url data.files.train https://example.org/a/train.csv",
        ),
        ({"files": "s3://bucket/train.csv"}, "wrong-url data.files.train s3://bucket/train.csv data.streaming"),
        ({"files": "hf://datasets/o/n/train.csv"}, "wrong-url data.name=OWNER/NAME"),
        (
            {"files": "file:///data/train.csv"},
            "wrong-url data.files.train file:///data/train.csv",
        ),
        (
            {"name": "https://huggingface.co/datasets/stanfordnlp/imdb"},
            "wrong-url data.name https://huggingface.co/datasets/stanfordnlp/imdb data.name=stanfordnlp/imdb",
        ),
    ],
)
def test_a_url_is_named_as_given(data, expected):
    assert_problem(problem_of(**data), expected)


def test_a_folder_is_refused_with_the_pattern_of_its_files():
    for number in range(3):
        write(f"data/train-0000{number}.parquet", b"")
    write("data/validation-00000.parquet", b"")
    write("data/README.md", b"")
    problem = problem_of("data")
    assert_problem(problem, "not-a-file recipe.yaml: data.files.train: 3 .parquet")
    assert problem.proposals == ["data.files.train=data/train-*.parquet"]
    write("more/a.csv.gz", b"")
    write("more/b.csv.gz", b"")
    problem = problem_of("more")
    assert_problem(problem, "not-a-file 2 .csv.gz")
    assert problem.proposals == ["data.files.train=more/*.csv.gz"]


# -- data.read ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("read", "expected"),
    [
        ({"delimeter": ";"}, "unknown-option recipe.yaml: data.read.delimeter 'delimiter'"),
        ({"delimiter": "::"}, "invalid-value recipe.yaml: data.read delimiter '::'"),
        (
            {"columns": ["text", "text"]},
            "invalid-value data.read columns ['text', 'text']",
        ),
        (
            {"columns": ["text", "y"]},
            "unknown-column data.read.columns ['text', 'y'] 'label' data.label",
        ),
        ({"encoding": "utf9"}, "invalid-value data.read encoding 'utf9'"),
        ({"encoding": "base64"}, "invalid-value data.read encoding 'base64'"),
        ({"quoting": "single"}, "invalid-value data.read.quoting 'single' (str)"),
        ({"compression": "zip"}, "invalid-value data.read.compression 'zip' (str)"),
    ],
)
def test_wrong_options_are_refused_before_a_file_is_read(read, expected):
    write("train.csv", "not,even\nright")
    with pytest.raises(RecipeError) as caught:
        text_data("train.csv", read=read)
    assert_problem(caught.value.problem, expected)


def test_options_that_no_file_is_read_with_are_refused():
    write("train.parquet", b"")
    write("train.jsonl", b"")
    problem = problem_of("train.parquet", read={"encoding": "cp1252"})
    assert_problem(problem, "unknown-option data.read.encoding: .csv, .json, .jsonl, .tsv, .txt .parquet")
    problem = problem_of("train.jsonl", read={"delimiter": ";"})
    assert_problem(problem, "unknown-option data.read.delimiter: .csv, .tsv .jsonl")
    problem = problem_of(name="imdb", read={"delimiter": ";"})
    assert_problem(problem, "unknown-option data.read: data.files")


def test_a_split_that_is_left_out_is_not_read():
    write("train.csv", table())
    write("test.csv", "nothing of this\nis right")
    assert list(text_data({"train": "train.csv", "test": "test.csv"}, splits={"test": None}).load()) == ["train"]


def test_the_identity_of_data_depends_on_how_it_is_read():
    path = write("train.csv", table([(text, str(i % 2 + 1)) for i, (text, _) in enumerate(ROWS)]))
    options: list[dict[str, Any]] = [
        {"label_offset": 1},
        {"label_map": {1: "neg", "2": "pos"}},
        {"label_map": {1: 0, 2: 1}},
        {"label_offset": 1, "read": {"quoting": "none"}},
        {"label_offset": 1, "read": {"encoding": "cp1252"}},
    ]
    assert len({text_data(path, **chosen).identity() for chosen in options}) == len(options)
    write("train.csv.gz", Path(path).read_bytes())
    assert text_data("train.csv.gz").identity() != text_data(path).identity()


def test_a_run_is_refused_before_its_model_is_built():
    write("train.tsv", "\n".join([*reviews()[:10], '"oh\tneg', '"oh\tpos', ""]))
    tree = {
        "model": {
            "config": {"model_type": "distilbert", "dim": 16, "n_layers": 1, "n_heads": 2, "hidden_dim": 32},
            "tokenizer": {"kind": "word"},
        },
        "data": {"files": {"train": "train.tsv"}, "label": "label"},
        "train": {"device": "cpu"},
        "plugins": ["text-classification", {"progress": False}],
        "output": "run",
    }
    recipe = make_recipe(tree, Path("recipe.yaml"))
    with expect_problem("invalid-row train.tsv, line 11: 12 data.read.quoting=none", RecipeError):
        build(resolve(recipe))
    assert not Path("run").exists()


def test_a_file_that_is_listed_twice_is_refused():
    """Its rows would count twice, and a language model would not notice."""
    write("a.csv", table())
    write("b.csv", table())
    for paths in (["a.csv", "a.csv"], ["a.csv", "*.csv"]):
        assert_problem(problem_of({"train": paths}), "listed-twice recipe.yaml: data.files.train a.csv")
        assert_problem(problem_of({"train": paths}, streaming=True), "listed-twice recipe.yaml: data.files.train a.csv")
    assert_problem(problem_of({"train": "a.csv", "test": ["b.csv", "b.csv"]}), "listed-twice data.files.test b.csv")


def test_a_file_without_rows_among_others_warns(caplog):
    write("a.csv", table())
    for path, content in {"empty.csv": "", "header.csv": "text,label\n", "packed.csv.gz": b""}.items():
        write(path, content)
        caplog.clear()
        assert named_rows(text_data({"train": ["a.csv", path]})) == ROWS
        assert_problem(caplog, f"empty-file {path} 1 2")


@pytest.mark.parametrize("kind", ["a folder", "a dead link", "a loop of links", "a pipe", "a device"])
def test_a_path_without_a_regular_file_is_refused_at_once(kind):
    path = Path("train.csv")
    if kind == "a folder":
        path.mkdir()
    elif kind == "a pipe":
        os.mkfifo(path)
    else:
        target = {"a dead link": "nowhere.csv", "a loop of links": "train.csv", "a device": "/dev/null"}[kind]
        path.symlink_to(target)
    assert problem_of("train.csv").code in ("not-a-file", "file-missing")


@pytest.mark.parametrize(
    "path", ["a[1].csv", "it's here.csv", "two\nlines.csv", "UP.CSV", "a.txt.csv", "*.csv", "\u00e9\u0301.csv"]
)
def test_a_path_with_odd_characters_is_read(path):
    assert named_rows(text_data(write(path, table()))) == ROWS


def test_files_of_other_columns_orders_delimiters_and_encodings_are_read_side_by_side():
    parts = [ROWS[:3], ROWS[3:6], ROWS[6:9], ROWS[9:]]
    write("a.csv", table(parts[0]))
    write("b.csv", table([row[::-1] for row in parts[1]], header=("label", "text")))
    write("c.csv", table(parts[2], ";").encode("utf-16"))
    write("d.csv", table([("1", *row) for row in parts[3]], header=("id", "text", "label")))
    assert named_rows(text_data({"train": ["a.csv", "b.csv", "c.csv", "d.csv"]})) == ROWS


def test_the_table_of_checks_names_tests_that_exist():
    here = Path(__file__).parent
    page = here.parents[1] / "docs" / "checks" / "data.md"
    files = [*here.glob("test_*.py"), *(here.parent / "plugins" / "tasks").rglob("test_*.py")]
    defined = {name for file in files for name in re.findall(r"(?m)^def (test_\w+)", file.read_text())}
    named = set(re.findall(r"`(test_\w+)`", page.read_text()))
    assert len(named) > 20
    assert named <= defined
    assert set(re.findall(r"case `([^`]+)`", page.read_text())) <= FILES.keys()
