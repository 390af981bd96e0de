"""Names of classes in the schema of Parquet and Arrow files: each row gets the class that its own file names.

``datasets`` writes the names of a ``ClassLabel`` to the schema, and two files may list them in another order.

Modules:
    plugins/fastloop_plugins/rows/features.py
    plugins/fastloop_plugins/text/class_numbers.py
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pytest
from _pytest.mark.structures import ParameterSet
from data_helpers import named_rows, text_data
from pyarrow import parquet

from fastloop.errors import RecipeError
from fastloop.recipe import Inference, make_recipe
from fastloop.testing import assert_problem
from fastloop_plugins.tasks.tags.data import TagTextData
from fastloop_plugins.text.data import TextData

NAMES = ["no", "yes", "other"]
REVERSED = ["other", "yes", "no"]


@dataclass(frozen=True)
class NamedFile:
    """A file to write.

    Attributes:
        names: The names in its schema; None: it has none, and numbers in the order of ``NAMES``.
        classes: The class of each row.
    """

    names: Sequence[str] | None
    classes: Sequence[str] = ("other", "no", "yes", "no")

    def numbers(self) -> list[int]:
        names = NAMES if self.names is None else self.names
        return [names.index(name) for name in self.classes]


@dataclass(frozen=True)
class NamedSplits:
    """The files of a training and a validation split, and the words of the error about them if there is one.

    Attributes:
        problem: The error of data in memory.
        streamed: The error of a streamed training split.
    """

    train: Sequence[NamedFile]
    validation: NamedFile
    problem: str = ""
    streamed: str = ""


MAYBE = NamedFile([*REVERSED, "maybe"], ("maybe", "no"))
TWO_ORDERS = "mixed-labels 'label' other, yes, no no, yes, other data.streaming"
CASES = {
    "one order": NamedSplits([NamedFile(NAMES)], NamedFile(NAMES)),
    "another order": NamedSplits([NamedFile(NAMES)], NamedFile(REVERSED)),
    "unsorted train": NamedSplits([NamedFile(REVERSED)], NamedFile(NAMES)),
    "numbers": NamedSplits([NamedFile(NAMES)], NamedFile(None)),
    "more names": NamedSplits([NamedFile(NAMES)], NamedFile([*REVERSED, "maybe"])),
    "more classes": NamedSplits([NamedFile(NAMES)], MAYBE, "unknown-label 'maybe'", "unknown-label 'maybe'"),
    "two orders": NamedSplits([NamedFile(NAMES), NamedFile(REVERSED)], NamedFile(REVERSED), "", TWO_ORDERS),
    "two sets": NamedSplits([NamedFile(NAMES), MAYBE], MAYBE, "", TWO_ORDERS.replace("no no", "no, maybe no")),
    "numbers first": NamedSplits([NamedFile(None), NamedFile(NAMES)], NamedFile(REVERSED)),
    "numbers and two orders": NamedSplits(
        [NamedFile(NAMES), NamedFile(REVERSED)], NamedFile(None), "mixed-labels 0 'no' 'other'", TWO_ORDERS
    ),
}
KINDS = ("class", "classes", "tags")
SOURCES = ("parquet", "arrow", "folder", "saved")


def make_dataset(file: NamedFile, kind: str, prefix: str) -> datasets.Dataset:
    feature = datasets.Value("int64") if file.names is None else datasets.ClassLabel(names=list(file.names))
    texts: list[Any] = [f"{prefix}{row}" for row in range(len(file.classes))]
    labels: list[Any] = file.numbers()
    text_feature = datasets.Value("string")
    if kind != "class":
        feature = datasets.List(feature)
        labels = [[number] for number in labels]
    if kind == "tags":
        text_feature = datasets.List(text_feature)
        texts = [[text] for text in texts]
    features = datasets.Features({"text": text_feature, "label": feature})
    return datasets.Dataset.from_dict({"text": texts, "label": labels}, features)


def write_file(data: datasets.Dataset, path: str) -> str:
    if path.endswith(".parquet"):
        data.to_parquet(path)
    else:
        table = data.data.table
        with pa.OSFile(path, "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table)
    return path


def write_source(splits: NamedSplits, kind: str, source: str) -> dict[str, Any]:
    """Write the files; returns the options of ``data`` that name them."""
    train = [make_dataset(file, kind, f"train{number}-") for number, file in enumerate(splits.train)]
    validation = make_dataset(splits.validation, kind, "validation-")
    if source == "saved":
        datasets.DatasetDict({"train": train[0], "validation": validation}).save_to_disk("saved")
        return {"name": "saved"}
    folder = Path("folder")
    folder.mkdir()
    suffix = "arrow" if source == "arrow" else "parquet"
    paths = [write_file(part, f"folder/train-{number}.{suffix}") for number, part in enumerate(train)]
    path = write_file(validation, f"folder/validation-0.{suffix}")
    if source == "folder":
        return {"name": "folder"}
    return {"files": {"train": paths, "validation": path}}


def make_data(kind: str, options: dict[str, Any], inference: Inference | None = None) -> TextData:
    section = {"validation_fraction": 0.0, "splits": {"test": None}} | options
    if kind == "tags":
        section |= {"words": "text", "tags": "label"}
    else:
        section |= {"label": "label", "label_type": kind}
    recipe = make_recipe({"data": section}, Path("recipe.yaml"))
    recipe.inference = inference
    return TagTextData(recipe) if kind == "tags" else TextData(recipe, labelled=True)


def read_pairs(data: TextData, kind: str, role: str) -> set[tuple[str, str]]:
    """The text and the name of the class of each row."""
    rows = data.load()[role]
    if kind == "tags":
        return {(words[0], data.classes[tags[0]]) for words, tags in rows.texts}
    ids = rows.labels if kind == "class" else rows.labels.argmax(1)
    return {(text, data.classes[index]) for text, index in zip(rows.texts, ids, strict=True)}


def expected_pairs(prefix: str, file: NamedFile) -> set[tuple[str, str]]:
    return {(f"{prefix}{row}", name) for row, name in enumerate(file.classes)}


def applies(case: str, kind: str, source: str) -> bool:
    """A saved split has one schema, and a set of classes without names has numbers as names."""
    splits = CASES[case]
    unnamed = any(file.names is None for file in [*splits.train, splits.validation])
    return not (source == "saved" and len(splits.train) > 1) and not (kind == "classes" and unnamed)


def combinations() -> Iterator[ParameterSet]:
    """Each that applies. The quick tests read Parquet files alone: other sources read the same features."""
    for case, kind, source, streaming in itertools.product(CASES, KINDS, SOURCES, (False, True)):
        if applies(case, kind, source):
            marks = [] if source == "parquet" else [pytest.mark.slow]
            yield pytest.param(case, kind, source, streaming, marks=marks)


@pytest.mark.parametrize(("case", "kind", "source", "streaming"), list(combinations()))
def test_each_row_has_the_class_that_its_file_names(case, kind, source, streaming, tmp_path, monkeypatch):
    if streaming and kind == "classes":
        pytest.skip("a stream reads one class a row")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    splits = CASES[case]
    options = {**write_source(splits, kind, source), "streaming": streaming}
    problem = splits.streamed if streaming else splits.problem
    if problem:
        with pytest.raises(RecipeError) as caught:
            make_data(kind, options).load()
        assert_problem(caught.value.problem, problem)
        return
    train = set[tuple[str, str]]()
    for number, file in enumerate(splits.train):
        train |= expected_pairs(f"train{number}-", file)
    data = make_data(kind, options)
    assert read_pairs(data, kind, "train") >= train
    if not (streaming and kind == "class"):  # which has stand-ins for rare classes
        assert read_pairs(data, kind, "train") == train
    expected = expected_pairs("validation-", splits.validation)
    assert read_pairs(make_data(kind, options), kind, "validation") == expected
    for is_own_data in (True, False):
        evaluated = make_data(kind, options, Inference(Path("model"), "validation", is_own_data=is_own_data))
        evaluated.classes = data.classes
        if splits.validation.names is None and not is_own_data:
            continue  # numbers of other data are ids of the model
        assert read_pairs(evaluated, kind, "validation") == expected


@pytest.mark.parametrize("kind", ["class", "tags"])
def test_a_model_that_was_trained_on_numbers_is_evaluated_by_numbers(kind):
    """An older release read the names of files as numbers."""
    splits = NamedSplits([NamedFile(NAMES)], NamedFile(REVERSED))
    options = write_source(splits, kind, "parquet")
    data = make_data(kind, options, Inference(Path("model"), "validation"))
    data.classes = ["0", "1", "2"]
    expected = {(text, str(NAMES.index(name))) for text, name in expected_pairs("validation-", splits.validation)}
    assert read_pairs(data, kind, "validation") == expected


def test_options_have_the_numbers_of_the_training_file():
    splits = NamedSplits([NamedFile(NAMES)], NamedFile(REVERSED))
    options = write_source(splits, "class", "parquet")
    renamed = options | {"label_map": {0: "bad", 1: "good", 2: "bad"}}
    expected = [("validation-0", "bad"), ("validation-1", "bad"), ("validation-2", "good"), ("validation-3", "bad")]
    dropped = options | {"drop": [{"column": "label", "equals": 0}]}
    kept = [("validation-0", "other"), ("validation-2", "yes")]
    for inference in (None, Inference(Path("model"), "validation")):
        for changed, pairs in ((renamed, expected), (dropped, kept)):
            data = make_data("class", changed, inference)
            data.classes = ["bad", "good"] if changed is renamed else NAMES
            assert named_rows(data, "validation") == pairs


def test_sources_have_the_names_of_their_files():
    train = [NamedFile(NAMES), NamedFile(REVERSED)]
    paths = write_source(NamedSplits(train, NamedFile(REVERSED)), "class", "parquet")["files"]
    table = parquet.read_table(paths["train"][1])
    features = json.loads(table.schema.metadata[b"huggingface"])
    features["info"]["features"]["class"] = features["info"]["features"].pop("label")
    table = table.rename_columns(["text", "class"]).replace_schema_metadata({"huggingface": json.dumps(features)})
    parquet.write_table(table, paths["train"][1])
    sources = [{"files": paths["train"][0]}, {"files": paths["train"][1], "label": "class"}]
    data = text_data({"validation": paths["validation"]}, sources=sources, splits={"test": None})
    assert set(named_rows(data)) == expected_pairs("train0-", train[0]) | expected_pairs("train1-", train[1])
    assert set(named_rows(data, "validation")) == expected_pairs("validation-", NamedFile(REVERSED))
    with pytest.raises(RecipeError) as caught:
        text_data({}, sources=sources, streaming=True).load()
    assert_problem(caught.value.problem, TWO_ORDERS)


METADATA = {
    "{": "file-unreadable train-0.parquet 'huggingface' JSON",
    '{"info": {"features": {"label": {"_type": "ClassLabel", "names": 3}}}}': "file-unreadable 'label' 3 texts",
    '{"info": {"features": {"label": {"_type": "ClassLabel", "names": ["a", "a", "b"]}}}}': "file-unreadable 'a' twice",
    '{"info": {}}': "",
    "[]": "",
}
"""Metadata of a schema, and the error about it; empty: the numbers have no names."""


@pytest.mark.parametrize("streaming", [False, True], ids=["in memory", "streamed"])
@pytest.mark.parametrize("metadata", METADATA)
def test_metadata_is_valid_or_ends_in_an_error(metadata, streaming):
    (path,) = write_source(NamedSplits([NamedFile(NAMES)], NamedFile(NAMES)), "class", "parquet")["files"]["train"]
    table = parquet.read_table(path)
    parquet.write_table(table.replace_schema_metadata({"huggingface": metadata}), path)
    data = text_data(path, streaming=streaming)
    if METADATA[metadata]:
        with pytest.raises(RecipeError) as caught:
            data.load()
        assert_problem(caught.value.problem, METADATA[metadata])
    else:
        data.load()
        assert data.classes == ["0", "1", "2"]


def test_a_column_that_is_text_by_now_has_no_numbers():
    (path,) = write_source(NamedSplits([NamedFile(NAMES)], NamedFile(NAMES)), "class", "parquet")["files"]["train"]
    table = parquet.read_table(path)
    texts = pa.array(["b", "a", "c", "a"])
    parquet.write_table(table.set_column(1, "label", texts).replace_schema_metadata(table.schema.metadata), path)
    data = text_data(path)
    assert [name for _, name in named_rows(data)] == ["b", "a", "c", "a"]
    assert data.classes == ["a", "b", "c"]
