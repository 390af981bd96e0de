"""Files of other people's making: each trains on exactly its rows, or is refused with file, line, key and remedy."""

from __future__ import annotations

import bz2
import csv
import gzip
import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
from data_helpers import named_rows, problem_of, refusal, text_data, write

from fastloop.errors import RecipeError
from fastloop.lifecycle import build
from fastloop.plugins.resolve import resolve
from fastloop.recipe import make_recipe
from fastloop.testing import assert_problem

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


# -- quotes ------------------------------------------------------------------------------------------------------------


def reviews(count: int = 80) -> list[str]:
    return [
        "text\tlabel",
        *(f"film number {i} is {('dull', 'fine')[i % 2]}\t{('neg', 'pos')[i % 2]}" for i in range(count)),
    ]


@pytest.mark.parametrize(
    ("strays", "message"),
    [
        (
            {10: '"never closed\tneg', 33: '"another one\tpos'},
            "line 11: 34",
        ),
        (
            {10: '"never closed\tneg', 33: 'it is 5"\tpos'},
            "line 11: 34",
        ),
        ({10: '"never closed\tneg'}, "line 11: 81"),
        (
            {10: '"Great" film\tneg'},
            "line 11: 11",
        ),
    ],
    ids=["closed by another", "closed at a cell's end", "never closed", "a quoted word"],
)
@pytest.mark.parametrize("suffix", ["tsv", "csv"])
def test_stray_quotes_do_not_swallow_rows(strays, message, suffix):
    lines = reviews()
    for number, line in strays.items():
        lines[number] = line
    delimiter = "\t" if suffix == "tsv" else ","
    path = write(f"train.{suffix}", "\n".join(lines).replace("\t", delimiter) + "\n")
    problem = problem_of(path)
    assert_problem(problem, f"invalid-row train.{suffix}, {message}")
    assert "data.read.quoting=none" in problem.proposals
    rows = named_rows(text_data(path, read={"quoting": "none"}))
    assert len(rows) == 80
    assert rows == [tuple(line.split("\t")) for line in lines[1:]]


def test_stray_quotes_are_detected_without_labels():
    lines = [f"{i}\tfilm number {i}" for i in range(40)]
    lines[7], lines[20] = '7\t"never closed', '20\tit is 5"'
    path = write("train.tsv", "id\ttext\n" + "\n".join(lines) + "\n")
    assert "train.tsv, line 9: a quote opens a cell here that closes in line 22" in refusal(path, label=None)
    assert len(named_rows(text_data(path, label=None, read={"quoting": "none"}))) == 40


def test_texts_over_several_lines_are_one_row_each():
    rows = [(f"film {i}, fine\r\nand, long\n\n", ("neg", "pos")[i % 2]) for i in range(8)] + [('so "so"\n,', "neg")]
    with Path("train.csv").open("w", newline="") as stream:
        csv.writer(stream, lineterminator="\n").writerows([("text", "label"), *rows])
    assert named_rows(text_data("train.csv")) == rows


def test_a_text_that_looks_like_rows_is_read_where_quoting_is_given():
    rows = [*ROWS, ("one,neg\ntwo", "pos")]
    path = write("train.csv", table(rows[:-1]) + '"one,neg\ntwo",pos\n')
    assert "train.csv, line 14: a quote opens a cell here that closes in line 15" in refusal(path, text="text")
    assert named_rows(text_data(path, read={"quoting": "double"})) == rows


def test_cells_longer_than_the_csv_modules_limit_are_read():
    limit = csv.field_size_limit()
    rows = [("x" * 200_000, "neg"), ("y", "pos")]
    assert named_rows(text_data(write("train.csv", table(rows)))) == rows
    assert csv.field_size_limit() == limit


def test_a_line_with_other_cells_is_refused_with_its_number():
    path = write("train.csv", table() + "one, two,neg\n")
    assert refusal(path) == (
        "train.csv, line 14: found 3 cells, expected 2 (text, label). Put quotes around a text that holds a comma or a "
        "line end."
    )


@pytest.mark.parametrize("other", ["\r\n", "\r"])
def test_other_line_ends_in_the_middle_are_refused(other):
    path = write("train.csv", table() + f"one{other}two,neg\nthree,pos\n")
    kind = {"\r\n": "CRLF", "\r": "CR"}[other]
    assert f"train.csv, line 14: ends with {kind}, the lines before it with LF." in refusal(path)
    for end in ("\n", "\r\n", "\r", "\r\r\n"):
        assert named_rows(text_data(write("train.csv", table(end=end)))) == ROWS


# -- the header --------------------------------------------------------------------------------------------------------


def test_a_header_in_the_middle_is_refused():
    joined = table() + table()
    assert "train.csv, line 14: found the column names (text, label) again, as where files were joined." in refusal(
        write("train.csv", joined)
    )
    swapped = table() + table([row[::-1] for row in ROWS], header=("label", "text"))
    assert "train.csv, line 14: found the column names (label, text) again" in refusal(write("train.csv", swapped))
    numbers = table([(text, str(i % 2)) for i, (text, _) in enumerate(ROWS)])
    assert "train.csv, line 14: found the column names" in refusal(write("train.csv", numbers * 2))
    assert "train.csv, line 4: found the column names (text)" in refusal(
        write("train.csv", "text\na\nb\ntext\n"), label=None
    )


@pytest.mark.parametrize(("suffix", "unit"), [("jsonl", "line"), ("parquet", "row")])
def test_a_header_among_the_rows_of_other_formats_is_refused(suffix, unit):
    rows = [{"text": text, "label": label} for text, label in [*ROWS, ("text", "label"), *ROWS]]
    if suffix == "jsonl":
        write("train.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    else:
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(rows), "train.parquet")
    assert f"train.{suffix}, {unit} 13: found the column names (text, label), as where files were joined." in refusal(
        f"train.{suffix}"
    )


def test_a_repeated_column_name_is_refused():
    path = write("train.csv", "text,label,text\na,neg,b\nc,pos,d\n")
    assert (
        refusal(path)
        == "train.csv, line 1: the column name 'text' is repeated in: text, label, text. Rename or remove one of them."
    )
    assert named_rows(text_data(write("train.csv", "text,label,,\na,neg,,\nc,pos,,\n"))) == [("a", "neg"), ("c", "pos")]

    import pyarrow
    from pyarrow import parquet

    parquet.write_table(
        pyarrow.table([["a", "b"], ["x", "y"], ["c", "d"]], names=["text", "label", "text"]), "train.parquet"
    )
    assert "train.parquet: the column name 'text' is repeated in: text, label, text." in refusal("train.parquet")


@pytest.mark.parametrize("suffix", ["jsonl", "json"])
def test_a_repeated_key_is_refused(suffix):
    lines = ['{"text": "a", "label": "neg"}', '{"text": "b", "label": "neg", "label": "pos"}']
    path = write(f"train.{suffix}", "\n".join(lines) if suffix == "jsonl" else f"[{', '.join(lines)}]")
    assert (
        f"train.{suffix}, line {2 if suffix == 'jsonl' else 1}: the key 'label' is repeated in one object."
        in refusal(path)
    )


COLUMNS_HINT = (
    " If line 1 is data and not column names, give data.read.columns=[{}], with the names in the order of the file."
)


def test_a_file_without_header_is_refused_with_the_columns_to_give():
    path = write("train.csv", table(header=()))
    message = refusal(path)
    assert message.startswith(
        "train.csv: there is no column 'text', which data.text names. Its columns: a dull film, number 0, neg."
    )
    assert message.endswith(COLUMNS_HINT.format("text,label"))
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


def test_columns_for_a_file_with_a_header_are_refused():
    path = write("train.csv", table())
    message = refusal(path, read={"columns": ["text", "label"]})
    assert (
        "train.csv, line 1: found the column names (text, label), which data.read.columns gives too. Remove "
        "data.read.columns" in message
    )


# -- delimiters, encodings, compression --------------------------------------------------------------------------------


@pytest.mark.parametrize(("delimiter", "name"), [("\t", "tab"), (";", "semicolon"), ("|", "bar")])
def test_a_delimiter_that_the_header_shows_is_used_and_logged(delimiter, name, caplog):
    caplog.set_level(logging.INFO, "fastloop")
    rows = [*ROWS, ('"', "neg")]
    path = write("train.csv", table(rows[:-1], delimiter) + f'""""{delimiter}neg\n')
    assert named_rows(text_data(path)) == rows
    assert f"train.csv: the delimiter is a {name}, as its header line shows" in caplog.text


def test_a_comma_in_a_tsv_file_is_detected_too():
    assert named_rows(text_data(write("train.tsv", table()))) == ROWS


def test_another_delimiter_is_offered_and_can_be_given():
    path = write("train.csv", table(delimiter=";", header=("review", "class")))
    assert "train.csv: there is no column 'text'" in refusal(path)
    assert refusal(path).endswith("If the delimiter is a semicolon, give data.read.delimiter=';'.")
    assert named_rows(text_data(path, text="review", label="class")) == ROWS
    path = write("train.csv", table([(text.replace(",", ""), label) for text, label in ROWS], "\t", header=()))
    message = refusal(path, read={"columns": ["text", "label"]})
    assert (
        message == "train.csv, line 1: found 1 cell, expected 2 (text, label). If the delimiter is a tab, give "
        "data.read.delimiter=tab."
    )
    for tab in ("tab", "\\t", "\t"):
        assert len(named_rows(text_data(path, read={"columns": ["text", "label"], "delimiter": tab}))) == 12
    path = write("train.csv", table(delimiter="^"))
    assert named_rows(text_data(path, read={"delimiter": "^"})) == ROWS


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-32"])
@pytest.mark.parametrize("suffix", ["csv", "jsonl", "txt"])
def test_a_byte_order_mark_decides_the_encoding(encoding, suffix):
    rows = [("café 🙂", "neg"), ("\u2028 naïve", "pos")]
    content = {
        "csv": table(rows),
        "jsonl": "".join(json.dumps({"text": text, "label": label}, ensure_ascii=False) + "\n" for text, label in rows),
        "txt": "café 🙂\n\u2028 naïve\n",
    }[suffix]
    path = write(f"train.{suffix}", content.encode(encoding))
    if suffix == "txt":
        rows = [(text, None) for text, _ in rows]
    assert named_rows(text_data(path, label=None if suffix == "txt" else "label", read={"encoding": "cp1252"})) == rows


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "txt"])
def test_another_encoding_is_refused_with_line_and_remedy(suffix):
    content = {
        "csv": "text,label\nfine,neg\ncafé,pos\n",
        "jsonl": '\n{"text": "x", "label": "neg"}\n{"text": "café", "label": "pos"}\n',
    }
    path = write(f"train.{suffix}", content.get(suffix, "a\nb\ncafé\n").encode("cp1252"))
    label = None if suffix == "txt" else "label"
    message = refusal(path, label=label)
    assert message.startswith(f"train.{suffix}, line 3: not UTF-8 (invalid continuation byte)")
    assert "data.read.encoding=cp1252" in message
    assert named_rows(text_data(path, label=label, read={"encoding": "cp1252"}))[-1][0] == "café"
    assert f"train.{suffix}, line 3: not ascii" in refusal(path, label=label, read={"encoding": "ascii"})


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
@pytest.mark.parametrize("suffix", ["csv", "txt"])
def test_utf_16_without_a_mark_is_refused_with_its_name(encoding, suffix):
    path = write(f"train.{suffix}", table().encode(encoding))
    label = None if suffix == "txt" else "label"
    message = refusal(path, label=label)
    assert (
        message
        == f"train.{suffix}, line 1: not UTF-8, but looks like UTF-16. If it is, give data.read.encoding={encoding}."
    )
    assert len(named_rows(text_data(path, label=label, read={"encoding": encoding}))) in (12, 13)


def zstd(content: bytes) -> bytes:
    import pyarrow

    compressed: bytes = pyarrow.compress(content, codec="zstd", asbytes=True)
    return compressed


PACK = {".gz": gzip.compress, ".bz2": bz2.compress, ".zst": zstd}


@pytest.mark.parametrize("suffix", PACK)
def test_compressed_files_are_read_and_corrupt_ones_rejected(suffix):
    content = table().encode()
    assert named_rows(text_data(write(f"train.csv{suffix}", PACK[suffix](content)))) == ROWS
    lines = "".join(json.dumps({"text": text, "label": label}) + "\n" for text, label in ROWS)
    assert named_rows(text_data(write(f"train.jsonl{suffix}", PACK[suffix](lines.encode())))) == ROWS
    codec = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd"}[suffix]
    assert named_rows(text_data(write("train.csv", PACK[suffix](content)), read={"compression": codec})) == ROWS
    if suffix != ".bz2":
        assert named_rows(text_data("train.csv")) == ROWS  # by its first bytes
    assert f"cut.csv{suffix}: cannot be read as .csv: Truncated compressed stream." in refusal(
        write(f"cut.csv{suffix}", PACK[suffix](content)[:-9])
    )
    plain = write(f"plain.csv{suffix}", content)
    assert f"It is read as {codec}: if it has another compression, give data.read.compression." in refusal(plain)
    assert named_rows(text_data(plain, read={"compression": "none"})) == ROWS


def test_lines_of_txt_files_end_where_lines_end():
    path = write("train.txt", "one\u2028still one\r\ntwo\x0cstill two\r\nthree\x85still three\n")
    assert [text for text, _ in named_rows(text_data(path, label=None))] == [
        "one\u2028still one",
        "two\x0cstill two",
        "three\x85still three",
    ]


def test_folders_of_csv_files_are_read_like_files():
    write("folder/train.csv", 'text,label\nNA,01\n007,02\n"null",01\n')
    write("folder/test.csv", "text,label\nNA,02\n")
    data = text_data(name="folder")
    assert named_rows(data) == [("NA", "01"), ("007", "02"), ("null", "01")]
    assert named_rows(data, "test") == [("NA", "02")]
    write("folder/train.csv", "text,label\n" + table())
    assert "folder/train.csv, line 2: found the column names (text, label) again" in refusal(name="folder")


def test_cells_stay_as_they_are_written():
    rows = [
        ("007", "true"),
        ("1e5", "false"),
        ("NA", "true"),
        ("true", "false"),
        ("2020-01-01", "true"),
        (" x ", "false"),
        ("", "true"),
    ]
    assert named_rows(text_data(write("train.csv", table(rows)))) == rows
    assert named_rows(text_data(write("train.tsv", table(rows, "\t")))) == rows


def test_text_that_is_half_of_a_character_is_refused():
    path = write("train.jsonl", '{"text": "a", "label": 0}\n{"text": "b \\ud83d", "label": 1}\n')
    assert "train.jsonl, line 2: column 'text' (data.text) holds half of a UTF-16 pair" in refusal(path)


def test_a_missing_text_is_empty_and_warns_with_the_row(caplog):
    path = write("train.jsonl", '{"text": "a", "label": 0}\n{"txt": "b", "label": 1}\n{"text": null, "label": 1}\n')
    assert [text for text, _ in named_rows(text_data(path))] == ["a", "", ""]
    assert (
        "train.jsonl: 2 of 3 texts are empty, the first in train.jsonl, line 2: column 'text' (data.text)"
        in caplog.text
    )


def test_json_beyond_any_bound_is_refused():
    path = write("train.jsonl", '{"text": "a", "label": 0}\n{"text": "b", "label": 1, "n": ' + "9" * 5000 + "}\n")
    assert "train.jsonl, line 2: cannot be read as JSON: Exceeds the limit (4300 digits)" in refusal(path)
    path = write("train.jsonl", '{"text": "a", "label": 0}\n{"text": "b", "label": 1, "n": ' + "[" * 100_000 + "\n")
    assert "train.jsonl, line 2: cannot be read as JSON: maximum recursion depth exceeded" in refusal(path)


# -- what is not a file ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            {"files": "https://example.org/a/train.csv"},
            "wrong-url data.files.train https://example.org/a/train.csv",
        ),
        ({"files": "s3://bucket/train.csv"}, "wrong-url data.files.train s3://bucket/train.csv"),
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
def test_a_url_is_named_as_given(data, message):
    assert_problem(problem_of(**data), message)


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
    ("read", "message"),
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
def test_wrong_options_are_refused_before_a_file_is_read(read, message):
    write("train.csv", "not,even\nright")
    with pytest.raises(RecipeError) as caught:
        text_data("train.csv", read=read)
    assert_problem(caught.value.problem, message)


def test_options_that_no_file_is_read_with_are_refused():
    write("train.parquet", b"")
    write("train.jsonl", b"")
    assert (
        "data.read.encoding: it is for files of type .csv, .json, .jsonl, .tsv, .txt; data.files has .parquet."
        in refusal("train.parquet", read={"encoding": "cp1252"})
    )
    assert "data.read.delimiter: it is for files of type .csv, .tsv; data.files has .jsonl." in refusal(
        "train.jsonl", read={"delimiter": ";"}
    )
    assert "data.read: it is for data.files, which is not there." in refusal(name="imdb", read={"delimiter": ";"})


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
    with pytest.raises(
        RecipeError,
        match=r"^train.tsv, line 11: a quote opens a cell here, and more text follows where it closes in line 12",
    ):
        build(resolve(recipe))
    assert not Path("run").exists()


def test_the_table_of_checks_names_tests_that_exist():
    here = Path(__file__).parent
    page = here.parents[1] / "docs" / "checks" / "data.md"
    files = [*here.glob("test_*.py"), *(here.parent / "plugins" / "tasks").rglob("test_*.py")]
    defined = {name for file in files for name in re.findall(r"(?m)^def (test_\w+)", file.read_text())}
    named = set(re.findall(r"`(test_\w+)`", page.read_text()))
    assert len(named) > 20
    assert named <= defined
