"""Labels in the data of others: each row gets the class that its label means, or an error names row and key.

Modules:
    plugins/fastloop_plugins/text/label_column.py
    plugins/fastloop_plugins/text/label_lists.py
    plugins/fastloop_plugins/text/label_names.py
    plugins/fastloop_plugins/text/label_warnings.py
    plugins/fastloop_plugins/text/labels.py
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from data_helpers import named_rows, problem_of, refusal, text_data, write
from log_lines import find_lines
from streaming_helpers import write_lines

from fastloop.errors import RecipeError
from fastloop.recipe import Inference, make_recipe
from fastloop.testing import assert_problem
from fastloop_plugins.rows.index import LABELS
from fastloop_plugins.text.data import TextData
from fastloop_plugins.text.streaming.split import HEAD
from fastloop_tools.inference.target import load


def csv_file(labels: Sequence[str], path: str = "train.csv") -> str:
    return write(path, "text,label\n" + "".join(f"film {i},{label}\n" for i, label in enumerate(labels)))


def jsonl_file(labels: Sequence[Any], path: str = "train.jsonl") -> str:
    return write(
        path, "".join(json.dumps({"text": f"film {i}", "label": label}) + "\n" for i, label in enumerate(labels))
    )


def names(path: str, **data: Any) -> list[str | None]:
    return [name for _, name in named_rows(text_data(path, **data))]


def proposed_maps(message: str) -> list[str]:
    """The values of ``data.label_map`` in a message. A shell reads ``'"'"'`` inside single quotes as ``'``."""
    return re.findall(r"data.label_map=({.*?})", message.replace("""'"'"'""", "'"))


# -- text and numbers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("labels", "classes", "ids"),
    [
        (["0", "1", "1"], ["0", "1"], [0, 1, 1]),
        (["0.0", "1.0", "1."], ["0", "1"], [0, 1, 1]),
        (["0", "1.0", "2.000"], ["0", "1", "2"], [0, 1, 2]),
        (["01", "02", "01"], ["01", "02"], [0, 1, 0]),
        (["01", "10", "02"], ["01", "02", "10"], [0, 2, 1]),
        (["true", "false"], ["false", "true"], [1, 0]),
        (["2020-01-02", "2020-01-01"], ["2020-01-01", "2020-01-02"], [1, 0]),
        (["0x1F", "0x2F"], ["0x1F", "0x2F"], [0, 1]),
        (["NaN", "x"], ["NaN", "x"], [0, 1]),
        ([str(i) for i in range(11)] * 2, [str(i) for i in range(11)], [*range(11), *range(11)]),
        (["9" * 25, "8" * 25], ["8" * 25, "9" * 25], [1, 0]),
    ],
)
def test_labels_of_csv_files_are_numbers_only_if_all_are(labels, classes, ids):
    data = text_data(csv_file(labels))
    assert data.load()["train"].labels.tolist() == ids
    assert data.classes == classes


def test_integral_floats_are_read_as_whole_numbers_and_that_is_logged(caplog):
    caplog.set_level(logging.INFO, "fastloop")
    assert names(csv_file(["0.0", "1.0"])) == ["0", "1"]
    assert "train.csv: column 'label' (data.label): '0.0', '1.0' " in caplog.text
    assert names(jsonl_file([0.0, 1.0, 1])) == ["0", "1", "1"]
    assert "train.jsonl: column 'label' (data.label): 0.0, 1.0 " in caplog.text


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        (
            ["0", "1", "01"],
            "mixed-labels line 4: 'label' data.label '01' '0' 2",
        ),
        (
            ["neg", "pos", "3"],
            "mixed-labels line 2: 'label' data.label 'neg' '3' 4",
        ),
    ],
)
def test_labels_of_several_kinds_are_refused_with_the_row(labels, expected):
    assert_problem(problem_of(csv_file(labels)), f"{expected} train.csv,")


def test_labels_of_other_types_are_read_as_what_they_are():
    assert names(jsonl_file([True, False])) == ["true", "false"]
    assert names(jsonl_file(["1", "2"])) == ["1", "2"]
    Path("mine.py").write_text(
        "import numpy as np\ndef rows(): return {'train': [{'text': 'a', 'label': np.int64(1)}, {'text': 'b', 'label': "
        "np.float32(0)}]}\n"
    )
    assert names(None, module="mine.py:rows") == ["1", "0"]


def test_every_split_is_read_by_the_rule_of_train():
    files = {"train": csv_file(["0", "1"]), "test": csv_file(["1.0", "0.0"], "test.csv")}
    assert [name for _, name in named_rows(text_data(files), "test")] == ["1", "0"]
    files["test"] = csv_file(["01", "1"], "test.csv")
    assert_problem(problem_of(files), "unknown-label test.csv, line 2: 'label' data.label '01' 0, 1")
    files = {"train": csv_file(["neg", "pos"]), "test": csv_file(["Pos ", "neg"], "test.csv")}
    problem = problem_of(files)
    assert_problem(problem, "unknown-label test.csv, line 2: 'label' data.label")
    assert "data.label_map={'Pos ': 'pos'}" in problem.proposals
    assert [name for _, name in named_rows(text_data(files, label_map={"Pos ": "pos"}), "test")] == ["pos", "neg"]


# -- numbers that do not count from 0 ----------------------------------------------------------------------------------


@pytest.mark.parametrize("write_file", [csv_file, jsonl_file])
def test_labels_that_count_from_1_are_refused_with_the_option_that_reads_them(write_file, caplog):
    caplog.set_level(logging.INFO, "fastloop")
    path = write_file([1, 2, 3, 2])
    assert_problem(problem_of(path), "gaps-in-labels 1, 2, 3, data.label_offset=1.")
    data = text_data(path, label_offset=1)
    assert data.load()["train"].labels.tolist() == [0, 1, 2, 1]
    assert data.classes == ["1", "2", "3"]
    assert find_lines(caplog, "1 3 0 2 data.label_offset")


def test_an_offset_that_does_not_fit_is_refused():
    assert_problem(problem_of(csv_file(["0", "1"]), label_offset=1), "gaps-in-labels 0, 1, 2")
    assert_problem(problem_of(csv_file(["neg", "pos"]), label_offset=1), "unknown-option 'neg' 'pos' data.label_offset")
    for option in ({"label_offset": 1}, {"label_map": {0: "neg"}}):
        problem = problem_of(csv_file(["0"]), label=None, **option)
        assert_problem(problem, f"unknown-option data.{next(iter(option))}")
    assert_problem(problem_of(csv_file(["0", "1"]), label_offset=-1), "invalid-value data.label_offset -1")


@pytest.mark.parametrize("write_file", [csv_file, jsonl_file])
def test_a_map_names_or_numbers_classes(write_file):
    path = write_file([-1, 1, -1])
    assert_problem(problem_of(path), "gaps-in-labels 0 1 data.label_map={NUMBER NAME")
    assert names(path, label_map={-1: "neg", 1: "pos"}) == ["neg", "pos", "neg"]
    assert names(path, label_map={-1: 0}) == ["0", "1", "0"]
    assert_problem(problem_of(path, label_map={-1: 0, 2: 1}), "unknown-label recipe.yaml: data.label_map '2' remove")


def test_a_map_names_labels_of_several_kinds():
    assert names(csv_file(["0", "1", "3+"]), label_map={"3+": 2}) == ["0", "1", "2"]
    assert names(jsonl_file([True, False]), label_map={"true": "yes", "false": "no"}) == ["yes", "no"]


LISTS = {
    "commas": ["a", "b", "a,b", "c", "a,b", "b,c"],
    "spaces": ["a", "b", "a, b", "c", "a, b", "b, c"],
    "semicolons": ["a", "b", "a;b", "a;b"],
    "bars": ["drama|war", "drama", "war", "drama|war|crime", "crime"],
    "lists alone": ["a,b", "b,c", "a,c"],
    "both orders": ["a,b", "b,a", "a,b"],
    "written lists": ["['a']", "['b']", "['a', 'b']", "['a', 'b']"],
}
"""Labels of rows that are lists of classes."""
NAMES = {
    "plain": ["a", "b", "a"],
    "names with commas": ["Boston, MA", "Salem, MA", "Albany, NY", "Boston, MA"],
    "recurring at one place": ["Paris, France", "Paris, Texas", "Austin, Texas", "Lyon, France"],
    "one part recurs": ["Arts", "Arts, Culture", "Arts, Culture", "Sports"],
    "one row": ["a", "b", "a", "b", "a,b"],
    "the same part twice": ["a", "a,a", "a", "a,a"],
    "an empty part": ["a", "a,", "a", "a,"],
    "codes": ["A|1", "A|2", "B|1", "B|2"],
}
"""Labels that are names of classes."""


@pytest.mark.parametrize("case", LISTS)
def test_labels_that_are_lists_of_classes_warn_with_the_forms_of_several_classes(case, caplog):
    text_data(jsonl_file(LISTS[case])).load()
    assert_problem(caplog, "doubtful-labels train.jsonl data.label_type=classes data.label=[")


@pytest.mark.parametrize("case", NAMES)
def test_names_with_separators_are_no_lists_of_classes(case, caplog):
    text_data(jsonl_file(NAMES[case])).load()
    assert "data.label_type=classes" not in caplog.text


def test_errors_about_labels_that_are_lists_propose_several_classes():
    mixed = problem_of(csv_file(["0", "1", '"0,1"', '"0,1"']))
    assert_problem(mixed, "mixed-labels train.csv data.label_type=classes data.label=[0,1]")
    pairs = [f"{first},{second}" for first in "abcdef" for second in "abcdef" if first < second]
    assert_problem(problem_of(jsonl_file(pairs)), "too-many-labels train.jsonl data.label_type=classes")


def test_the_proposed_lists_are_read_as_several_classes():
    data = text_data(jsonl_file([["a"], ["b"], ["a", "b"]]), label_type="classes")
    assert data.load()["train"].labels.tolist() == [[1, 0], [0, 1], [1, 1]]


# -- rows without a label ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("write_file", [csv_file, jsonl_file])
@pytest.mark.parametrize(("mark", "labels"), [("-", ["yes", "no"]), (-1, [0, 1])])
def test_labels_mapped_to_null_leave_out_their_rows_with_a_count(write_file, mark, labels, caplog):
    caplog.set_level(logging.INFO, "fastloop")
    files = {
        "train": write_file([*labels, mark, *labels, mark]),
        "test": write_file([mark, labels[1]], f"t{Path(write_file([0])).suffix}"),
    }
    files["train"] = write_file([*labels, mark, *labels, mark])
    data = text_data(files, label_map={mark: None})
    assert named_rows(data) == [(f"film {i}", str(labels[i % 3])) for i in (0, 1, 3, 4)]
    assert [text for text, _ in named_rows(data, "test")] == ["film 1"]
    assert re.search(rf"data: train: 2 of 6 .* \(data\.label_map\): '{re.escape(str(mark))}' 2", caplog.text)
    assert re.search(rf"data: test: 1 of 2 .* \(data\.label_map\): '{re.escape(str(mark))}' 1", caplog.text)
    assert_problem(
        problem_of(files | {"test": write_file([mark, mark], files["test"])}, label_map={mark: None}),
        "empty-split recipe.yaml data.label_map 2 data.splits.test=null",
    )
    assert_problem(problem_of(files["train"], label_map={7: None}), "unknown-label data.label_map '7' remove")


def test_rows_after_those_left_out_keep_their_numbers():
    path = write(
        "train.jsonl",
        "".join(json.dumps({"text": text, "label": "-ab"[i % 3]}) + "\n" for i, text in enumerate(["x", "y", 3])),
    )
    assert_problem(problem_of(path, label_map={"-": None}), "invalid-row train.jsonl, line 3: 'text' data.text")


def test_names_of_a_dataset_stay_when_rows_are_left_out():
    from datasets import ClassLabel, Dataset, DatasetDict, Features, Value

    features = Features({"text": Value("string"), "label": ClassLabel(names=["no", "yes"])})
    rows = {"text": ["a", "b", "c", "d"], "label": [0, -1, 1, -1]}
    DatasetDict({"train": Dataset.from_dict(rows, features)}).save_to_disk("saved")
    data = text_data(None, name="saved", label_map={-1: None}, splits={"validation": None, "test": None})
    assert named_rows(data) == [("a", "no"), ("c", "yes")]


def save_splits(feature: Callable[[list[str]], Any], **splits: tuple[list[str], list[Any]]) -> None:
    """Save a dataset whose splits have names of classes, and labels, each."""
    from datasets import Dataset, DatasetDict, Features, Value

    made = {}
    for split, (classes, labels) in splits.items():
        features = Features({"text": Value("string"), "label": feature(classes)})
        made[split] = Dataset.from_dict({"text": list("abc"[: len(labels)]), "label": labels}, features)
        made[split] = made[split].add_column("topic", labels, feature=feature(classes))
    DatasetDict(made).save_to_disk("saved")


def evaluated(options: dict[str, Any], classes: list[str], is_own_data: bool = True) -> TextData:
    """The section as `fastloop evaluate` reads its validation split for a model with these classes."""
    recipe = make_recipe({"data": {"validation_fraction": 0.0, "label": "label"} | options}, Path("recipe.yaml"))
    recipe.inference = Inference(Path("model"), "validation", is_own_data=is_own_data)
    data = TextData(recipe, labelled=True)
    data.classes = classes
    return data


def assert_rows(data: TextData, expected: list[tuple[str, str]] | str) -> None:
    """Check the rows of the validation split and their classes, or the problem of the data."""
    if isinstance(expected, str):
        with pytest.raises(RecipeError) as caught:
            data.load()
        assert_problem(caught.value.problem, expected)
    else:
        assert named_rows(data, "validation") == expected


NUMBERED: dict[str, tuple[list[str], dict[str, Any], list[tuple[str, str]] | str]] = {
    "alike": (["no", "yes", "other"], {}, [("a", "no"), ("b", "yes"), ("c", "other")]),
    "in another order": (["other", "no", "yes"], {}, [("a", "other"), ("b", "no"), ("c", "yes")]),
    "and renamed": (
        ["other", "no", "yes"],
        {"label_map": {0: "not", 1: "yes", 2: "neither"}},
        [("a", "neither"), ("b", "not"), ("c", "yes")],
    ),
    "and numbered": (["other", "no", "yes"], {"label_map": {2: 1}}, [("a", "1"), ("b", "0"), ("c", "1")]),
    "and left out": (["other", "no", "yes"], {"label_map": {0: None}}, [("a", "other"), ("c", "yes")]),
    "and dropped": (
        ["other", "no", "yes"],
        {"drop": [{"column": "label", "equals": 0}]},
        [("a", "other"), ("c", "yes")],
    ),
    "and dropped by another column": (
        ["other", "no", "yes"],
        {"drop": [{"column": "topic", "equals": 0}]},
        [("a", "other"), ("c", "yes")],
    ),
    "with another class": (["yes", "maybe", "no"], {}, "unknown-label saved validation row 2: 'maybe'"),
    "that is left out": (["yes", "maybe", "no"], {"label_map": {"maybe": None}}, [("a", "yes"), ("c", "no")]),
}
"""How the validation split numbers its classes: their names, options, and its rows or the problem."""


@pytest.mark.parametrize("streaming", [False, True], ids=["in memory", "streamed"])
@pytest.mark.parametrize("case", NUMBERED)
def test_a_split_of_a_dataset_may_number_the_classes_of_train(case, streaming):
    """A stream refuses null in ``label_map``, so those cases are in memory."""
    from datasets import ClassLabel

    classes, options, expected = NUMBERED[case]
    leaves_out = None in options.get("label_map", {}).values()
    options = {"name": "saved", "streaming": streaming and not leaves_out, "splits": {"test": None}} | options
    train = (["no", "yes", "other"], [0, 1, 2])
    save_splits(lambda names: ClassLabel(names=names), train=train, validation=(classes, [0, 1, 2]))
    trained = text_data(**options)
    assert_rows(trained, expected)
    assert_rows(evaluated(options, trained.classes or train[0]), expected)


WITHOUT_TRAIN: dict[str, tuple[dict[str, Any], list[tuple[str, str]] | str]] = {
    "as named": ({}, [("a", "other"), ("b", "no"), ("c", "yes")]),
    "renamed by name": ({"label_map": {"other": "no"}}, [("a", "no"), ("b", "no"), ("c", "yes")]),
    "left out by name": ({"label_map": {"other": None}}, [("b", "no"), ("c", "yes")]),
    "dropped by name": ({"drop": [{"column": "label", "equals": "no"}]}, [("a", "other"), ("c", "yes")]),
    "renamed by number": ({"label_map": {0: "no"}}, "unknown-split data.label_map 0 'gone' 'other' saved"),
    "left out by number": ({"label_map": {"0": None}}, "unknown-split data.label_map 0 'gone' 'other' saved"),
    "dropped by number": (
        {"drop": [{"column": "label", "equals": [1, 5]}]},
        "unknown-split data.drop 1 'gone' 'no' saved",
    ),
    "dropped by number of another column": (
        {"drop": [{"column": "topic", "equals": 1}]},
        "unknown-split data.drop 1 'gone' 'no' saved",
    ),
    "dropped by name of another column": (
        {"drop": [{"column": "topic", "equals": "no"}]},
        [("a", "other"), ("c", "yes")],
    ),
    "renamed by number and name": (
        {"label_map": {0: "yes", "other": "no"}},
        [("a", "no"), ("b", "no"), ("c", "yes")],
    ),
    "without a class": ({"label_map": {-1: None}}, [("a", "other"), ("b", "no"), ("c", "yes")]),
}
"""Options, and the rows of an evaluated split that numbers other, no, yes, or the problem."""


@pytest.mark.parametrize("is_own_data", [True, False], ids=["without train", "of others"])
@pytest.mark.parametrize("case", WITHOUT_TRAIN)
def test_names_decide_if_the_evaluated_dataset_lacks_the_training_split_of_the_model(case, is_own_data):
    from datasets import ClassLabel

    options, expected = WITHOUT_TRAIN[case]
    splits = {"validation": (["other", "no", "yes"], [0, 1, 2])}
    if is_own_data:
        options = {"splits": {"train": "gone"}} | options
    else:
        splits["train"] = (["other", "no", "yes"], [0, 1, 2])
        if isinstance(expected, str):
            expected = expected.replace(" 'gone'", "").replace("saved", "not that of the run saved")
    save_splits(lambda names: ClassLabel(names=names), **splits)
    assert_rows(evaluated({"name": "saved"} | options, ["no", "yes", "other"], is_own_data), expected)


OTHER_DATA = {
    "data.name=other": False,
    "data.files.test=other.csv": False,
    "data.name=own": True,
    "data.max_length=8": True,
    "train.seed=2": True,
    "recipes/other.yaml": False,
    "recipes/other.yaml data.name=own": True,
    "recipes/own.yaml": True,
    "recipes/own.yaml data.name=other": False,
    "recipes/own.yaml train.seed=2": True,
}
"""Recipe and overrides -> whether the data is that of the run."""


@pytest.mark.parametrize("arguments", OTHER_DATA)
def test_another_source_makes_it_other_data(arguments):
    (Path("run") / "model").mkdir(parents=True)
    (Path("run") / "model" / "model.safetensors").touch()
    write("run/recipe.yaml", json.dumps({"data": {"name": "own"}, "output": "run"}))
    Path("recipes").mkdir()
    for name in ("own", "other"):
        write(f"recipes/{name}.yaml", json.dumps({"data": {"name": name}}))
    recipe = load("run", arguments.split(), Inference(Path(), "test"))
    assert recipe.inference is not None
    assert recipe.inference.is_own_data == OTHER_DATA[arguments]


def test_an_evaluated_split_may_be_renamed_by_names():
    """As the message about an unknown label proposes."""
    from datasets import ClassLabel

    splits = {"train": (["no", "yes"], [0, 1]), "validation": (["yes", "no"], [0, 1])}
    save_splits(lambda names: ClassLabel(names=names), **splits)
    assert_rows(evaluated({"name": "saved"}, ["not", "yes"]), "unknown-label validation row 2: 'no' data.label_map")
    options = {"name": "saved", "label_map": {"no": "not"}}
    assert_rows(evaluated(options, ["not", "yes"]), [("a", "yes"), ("b", "not")])


def test_a_number_that_the_features_do_not_name_is_no_class_of_a_set():
    """The features of ``datasets`` accept -1."""
    from datasets import ClassLabel
    from datasets import Sequence as ListOf

    save_splits(lambda names: ListOf(ClassLabel(names=names)), train=(["x", "y", "z"], [[0, 1], [-1]]))
    problem = problem_of(name="saved", label_type="classes", splits={"validation": None, "test": None})
    assert_problem(problem, "unknown-label saved, train, row 2: -1, 0 2: 'x', 'y', 'z'.")


def test_marks_of_missing_labels_come_with_the_map_that_leaves_them_out(caplog):
    problem = problem_of(csv_file(["0", "1", "-1"]))
    assert_problem(problem, "gaps-in-labels -1, 0, 1,")
    assert "data.label_map={-1: null}" in str(problem)
    text_data(csv_file(["yes", "no", "-"] * 6)).load()
    assert_problem(caplog, "doubtful-labels '-' data.label_map={'-'")
    problem = problem_of({"train": csv_file(["yes", "no"]), "test": csv_file(["-", "no"], "test.csv")})
    assert_problem(problem, "unknown-label data.label_map={'-' data.splits.test=null")


# -- classes that look wrong -------------------------------------------------------------------------------------------


def test_the_log_counts_the_rows_of_each_class(caplog):
    caplog.set_level(logging.INFO, "fastloop")
    text_data(csv_file(["pos", "neg"] * 36 + ["label"]), validation_fraction=0.0).load()
    (line,) = [line for line in caplog.messages if line.startswith("data: train 73; ")]
    assert line.endswith(": neg 36, pos 36, label 1")
    text_data(csv_file(["pos", "neg"] * 36), validation_fraction=0.5, limit={"train": 20}).load()
    (line,) = [line for line in caplog.messages if line.startswith("data: train 20, validation 36")]
    counts = line.partition("in train: ")[2].replace("neg ", "").replace("pos ", "").split(", ")
    assert sum(map(int, counts)) == 20


def test_many_classes_are_counted_in_short():
    from fastloop_plugins.text.label_names import count_classes

    ids = [index for index in range(20) for _ in range(index + 1)]
    assert (
        count_classes(ids, [f"c{i}" for i in range(20)])
        == "c19 20, c18 19, c17 18, c16 17, c15 16, c14 15, c13 14, 12 more, and c0 1"
    )
    assert count_classes([0, 1, 1], ["0", "very good"]) == "'very good' 2, '0' 1"


def test_classes_with_few_rows_warn(caplog):
    text_data(csv_file(["neg", "pos"] * 36 + ["label"])).load()
    assert "train.csv: column 'label'" not in caplog.text
    assert_problem(caplog, "doubtful-labels train.csv: 5 'label' 1")
    caplog.clear()
    text_data(csv_file(["neg", "pos"] * 36)).load()
    assert caplog.text == ""


@pytest.mark.parametrize(
    "other", ["Neg ", "NEG", "neg\u200b", "neg\u00a0", "\ufeffneg", "n\u00adeg", "\uff4eeg", "neg\U000e0001"]
)
def test_classes_that_differ_by_case_or_spaces_warn_with_the_map_that_joins_them(other, caplog):
    path = csv_file(["neg", "pos"] * 36 + [other] * 6)
    text_data(path).load()
    assert_problem(caplog, "doubtful-labels train.csv")
    (override,) = proposed_maps(caplog.text)
    assert yaml.safe_load(override) == {other: "neg"}
    caplog.clear()
    assert set(names(path, label_map=yaml.safe_load(override))) == {"neg", "pos"}
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("written", "remedy"),
    [
        (["neg", "neg "], "{'neg ': 'neg'}"),
        (["Neg", "neg "], "{'neg ': 'Neg'}"),
        (["Neg", "neg", "neg "], "{'Neg': 'neg', 'neg ': 'neg'}"),
        ([" neg", "neg "], "{' neg': 'neg', 'neg ': 'neg'}"),
    ],
)
def test_the_proposed_name_of_a_class_has_no_needless_spaces(written, remedy, caplog):
    path = csv_file([*written, "pos"] * 12)
    text_data(path).load()
    assert proposed_maps(caplog.text) == [remedy]
    caplog.clear()
    assert set(names(path, label_map=yaml.safe_load(remedy))) == {yaml.safe_load(remedy)["neg "], "pos"}
    assert caplog.text == ""


def test_accents_that_look_the_same_are_named_by_their_characters(caplog):
    path = csv_file(["caf\u00e9", "cafe\u0301", "pos"] * 12)
    text_data(path).load()
    (override,) = proposed_maps(caplog.text)
    assert override.isascii() is False
    assert "e\\u0301" in override
    assert set(names(path, label_map=yaml.safe_load(override))) == {"caf\u00e9", "pos"}


def test_classes_with_other_inner_spaces_are_different_ones(caplog):
    text_data(csv_file(["neg", "pos"] * 36 + ["very  neg"] * 6)).load()
    assert caplog.text == ""


@pytest.mark.parametrize("other", ["x\u200b", "X", "x "])
def test_a_label_of_another_split_is_joined_by_the_proposed_map(other):
    files = {"train": csv_file(["x", "y"]), "test": csv_file([other, "y"], "test.csv")}
    problem = problem_of(files)
    (override,) = re.findall(r"If they are one class: data.label_map=({.*?})", problem.remedy)
    assert named_rows(text_data(files, label_map=yaml.safe_load(override)), "test")[0][1] == "x"


def test_one_override_joins_all_classes_that_differ_by_case_or_spaces(caplog):
    path = csv_file(["neg", "Neg", "pos", "POS "] * 12)
    text_data(path).load()
    (override,) = proposed_maps(caplog.text)
    assert set(names(path, label_map=yaml.safe_load(override))) == {"neg", "pos"}


@pytest.mark.parametrize(("often", "seldom"), [("Good", "good"), ("good", "Good"), ("GOOD", "Good ")])
def test_the_spelling_with_the_most_rows_names_the_class(often, seldom, caplog):
    path = csv_file([often, "bad"] * 20 + [seldom] * 6)
    text_data(path).load()
    (override,) = proposed_maps(caplog.text)
    assert yaml.safe_load(override) == {seldom: often}


def test_all_names_of_missing_values_are_left_out_by_one_override_which_also_joins_classes(caplog):
    path = csv_file(["neg", "pos", "Pos", "?", "n/a", "neg", "pos"] * 6)
    text_data(path).load()
    overrides = [yaml.safe_load(text) for text in proposed_maps(caplog.text)]
    assert overrides == [{"Pos": "pos"}, {"?": None, "n/a": None}, {"Pos": "pos", "?": None, "n/a": None}]
    caplog.clear()
    assert set(names(path, label_map=overrides[2])) == {"neg", "pos"}
    assert caplog.text == ""


@pytest.mark.parametrize("name", ["nan", "?", "#DIV/0!", "\\N", " ", "NaT"])
def test_a_class_with_the_name_of_a_missing_value_warns(name, caplog):
    path = csv_file(["neg", "pos", name] * 6)
    text_data(path).load()
    assert_problem(caplog, "doubtful-labels train.csv")
    (override,) = proposed_maps(caplog.text)
    assert set(names(path, label_map=yaml.safe_load(override))) == {"neg", "pos"}


@pytest.mark.parametrize(
    "labels", [[f"a label of its own, number {i}".replace(",", "") for i in range(40)], [str(i) for i in range(40)]]
)
def test_a_class_for_nearly_every_row_is_refused(labels):
    problem = problem_of(csv_file([*labels, labels[0]]))
    assert_problem(problem, "too-many-labels train.csv 'label' data.label 40 41")
    assert ("data.label_type=number" in str(problem)) == labels[0].isdigit()
    assert len(names(csv_file(labels[:10]))) == 10  # a first trial with a row a class


# -- rows without a label ----------------------------------------------------------------------------------------------

UNLABELLED: dict[str, list[Any]] = {
    "empty text": ["neg", "", "pos", "", "neg"],
    "null": ["neg", None, "pos", None, "neg"],
    "null among numbers": [0, None, 1, None, 0],
    "NaN": [0.0, float("nan"), 1.0, float("nan"), 0.0],
}


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("kind", UNLABELLED)
def test_rows_without_a_label_are_counted_and_the_proposed_line_leaves_them_out(kind, streaming):
    path = jsonl_file(UNLABELLED[kind])
    problem = problem_of(path, streaming=streaming)
    unit = "row" if streaming else "line"
    assert_problem(problem, f"missing-label train.jsonl, {unit} 2: 2 of 5")
    line = re.search(r"data\.drop=(\[.*\])", str(problem))
    assert line is not None
    data = text_data(path, streaming=streaming, drop=yaml.safe_load(line[1]))
    assert set(data.load()["train"].texts) == {"film 0", "film 2", "film 4"}


@pytest.mark.parametrize("kind", UNLABELLED)
def test_the_empty_key_of_label_map_leaves_out_rows_without_a_label(kind, caplog):
    caplog.set_level(logging.INFO, "fastloop")
    found = named_rows(text_data(jsonl_file(UNLABELLED[kind]), label_map={"": None}))
    assert [text for text, _ in found] == ["film 0", "film 2", "film 4"]
    assert re.search(r"2 of 5 .* \(data\.label_map\)", caplog.text)
    assert_problem(problem_of(jsonl_file(["neg", "pos"]), label_map={"": None}), "unknown-label data.label_map ''")


def test_a_label_of_spaces_is_counted_with_those_that_the_proposed_line_leaves_out(caplog):
    caplog.set_level(logging.INFO, "fastloop")
    path = jsonl_file(["neg", "pos", "", " ", "neg", "pos"])
    assert_problem(problem_of(path), "missing-label train.jsonl, line 3: 2 of 6")
    text_data(path, drop=[{"column": "label", "empty": True}]).load()
    assert "2 of 6 rows are left out" in caplog.text


def test_rows_without_a_number_or_a_switch_propose_the_same_line():
    line = "2 of 5 rows have none. To leave out such rows: 'data.drop=[{column: label, empty: true}]'"
    assert line in refusal(jsonl_file(UNLABELLED["NaN"]), label_type="number")
    table = [{"text": "a", "one": 1, "two": None}, {"text": "b", "one": 0, "two": 1}]
    problem = problem_of(write_lines("t.jsonl", table), label=["one", "two"])
    assert_problem(problem, "wrong-label 1 2")


def test_a_class_named_none_is_no_missing_label(caplog):
    path = jsonl_file(["None", None, "yes"] * 3)
    assert_problem(problem_of(path), "missing-label 3 9")
    assert {name for _, name in named_rows(text_data(path, label_map={"": None}))} == {"None", "yes"}
    assert_problem(caplog, "doubtful-labels 'None'")
    assert names(path, label_map={"": None, "None": "no"}).count("no") == 3
    problem = problem_of(jsonl_file([None, "no", "yes"] * 3), label_map={"None": None})
    assert_problem(problem, "unknown-label 'None' ''")


def test_a_number_beside_spaces_is_proposed_as_the_name_of_its_label():
    assert "data.label_map={'1 ': 1}" in refusal(csv_file(["0", "1 ", "1"]))
    assert names(csv_file(["0", "1 ", "1"]), label_map={"1 ": 1}) == ["0", "1", "1"]


# -- streams -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("first", "later"), [(True, 1), (1, True), (False, 0.0), (0, False)])
def test_a_stream_does_not_take_booleans_for_numbers(first, later):
    """Far behind the rows that are in memory, a label 1 would get the class of true."""
    values = [first] * (2 * HEAD) + [later, 2]
    problem = problem_of(jsonl_file(values), streaming=True)
    assert_problem(problem, "mixed-labels train.jsonl, line")
    assert_problem(problem_of(jsonl_file(values)), "mixed-labels train.jsonl, line")


def test_a_stream_of_rows_without_a_number_has_one_label_for_them():
    values = [0.0, 1.0] * 10 + [float("nan")] * (LABELS + 1)
    assert_problem(problem_of(jsonl_file(values), streaming=True), f"missing-label train.jsonl, line {LABELS + 1}")


# -- names that no file can hold ---------------------------------------------------------------------------------------


def test_a_class_among_several_that_is_no_text_is_refused():
    path = write_lines("t.jsonl", [{"text": "a", "label": ["\ud83d", "x"]}, {"text": "b", "label": ["y"]}])
    assert_problem(problem_of(path, label_type="classes"), "wrong-label t.jsonl '\\ud83d'")


def test_classes_among_several_that_are_probably_one_warn(caplog):
    rows = [{"text": "a", "label": ["Spam", "new"]}, {"text": "b", "label": ["spam"]}]
    path = write_lines("t.jsonl", rows)
    text_data(path, label_type="classes").load()
    assert_problem(caplog, "doubtful-labels t.jsonl 'Spam', 'spam'")
    files = {"train": path, "test": write_lines("test.jsonl", [{"text": "c", "label": ["NEW"]}])}
    assert_problem(problem_of(files, label_type="classes"), "unknown-label test.jsonl, line 1 'NEW' 'new', write")
