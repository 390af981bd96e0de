"""The validation split drawn from train has each class, and rows in two splits or with two labels are named.

Modules:
    plugins/fastloop_plugins/rows/held_out.py
    plugins/fastloop_plugins/text/repeats.py
"""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

from data_helpers import named_rows, problem_of, text_data, write
from image_helpers import write_image

from fastloop import Problem
from fastloop.recipe import make_recipe
from fastloop.testing import assert_problem, find_problems
from fastloop_plugins.rows.held_out import hold_out
from fastloop_plugins.tasks.image.data import ImageData
from fastloop_plugins.tasks.tags.data import TagTextData

COUNTS = {"common": 900, "seldom": 97, "rare": 2, "single": 1}


def labelled(counts: dict[str, int], path: str = "train.csv") -> str:
    names = [name for name, count in counts.items() for _ in range(count)]
    return write(path, "text,label\n" + "".join(f"film {i},{name}\n" for i, name in enumerate(names)))


# -- held out of train -------------------------------------------------------------------------------------------------


def test_each_class_with_two_rows_is_in_the_validation_split():
    data = text_data(labelled(COUNTS), validation_fraction=0.1)
    found = {role: Counter(name for _, name in named_rows(data, role)) for role in ("train", "validation")}
    assert found["validation"] == {"common": 90, "seldom": 9, "rare": 1}
    assert found["train"] == {"common": 810, "seldom": 88, "rare": 1, "single": 1}


def test_the_same_rows_are_held_out_each_time_and_whatever_the_numbers_of_the_classes():
    classes = [0] * 20 + [1] * 15 + [2] * 15 + [3] * 5
    renumbered = [{0: 3, 1: 2, 2: 1, 3: 0}[index] for index in classes]
    first, again, other = ([*map(list, hold_out(55, 0.13, c, "data"))] for c in (classes, classes, renumbered))
    assert first == again == other
    assert sorted(first[0] + first[1]) == list(range(55))
    assert len(first[1]) == 7


def test_rows_without_classes_are_drawn_as_a_whole():
    train, held = hold_out(50, 0.1, None, "data")
    assert len(held) == 5
    assert sorted([*train, *held]) == list(range(50))
    data = text_data(
        write("n.csv", "text,label\n" + "".join(f"film {i},{i / 7}\n" for i in range(20))), label_type="number"
    )
    data.options.validation_fraction = 0.25
    assert len(data.load()["validation"].texts) == 5


def test_classes_of_one_row_each_cannot_be_held_out():
    problem = problem_of(labelled({"a": 1, "b": 1, "c": 1}), validation_fraction=0.4)
    assert_problem(problem, "too-few-rows recipe.yaml data.validation_fraction 3 data.validation_fraction=0")


def test_images_are_held_out_of_each_class():
    for name, count in {"cat": 30, "dog": 9, "owl": 2, "yak": 1}.items():
        for index in range(count):
            write_image(Path("pets", name, f"{index}.png"), (90, 90, 90), (4, 4))
    data = ImageData(make_recipe({"data": {"images": "pets"}}, Path("recipe.yaml")))
    found = {split: Counter(name.partition("/")[0] for name in files.names) for split, files in data.load().items()}
    assert found["validation"] == {"cat": 3, "dog": 1, "owl": 1}
    assert found["train"] == {"cat": 27, "dog": 8, "owl": 1, "yak": 1}


# -- rows that repeat each other ---------------------------------------------------------------------------------------


def rows_file(path: str, rows: list[tuple[str, str]]) -> str:
    return write(path, "text,label\n" + "".join(f"{text},{label}\n" for text, label in rows))


def repeats(caplog, train: list[tuple[str, str]], **splits: list[tuple[str, str]]) -> list[Problem]:
    caplog.clear()
    files = {"train": rows_file("train.csv", train)} | {
        split: rows_file(f"{split}.csv", rows) for split, rows in splits.items()
    }
    text_data(files).load()
    return find_problems(caplog, "repeated-rows") + find_problems(caplog, "several-labels")


DIFFERENT = [(f"film {i}", ("neg", "pos")[i % 2]) for i in range(12)]


def test_rows_that_repeat_or_stand_in_two_splits_give_one_warning(caplog):
    assert repeats(caplog, DIFFERENT, test=[("another film", "pos")]) == []
    train = [*DIFFERENT, DIFFERENT[0], DIFFERENT[0], DIFFERENT[7]]
    (problem,) = repeats(caplog, train)
    assert_problem(problem, "repeated-rows data: 3 15 train")
    assert "'film 0'" in problem.text
    assert problem.proposals == ["data.deduplicate=true"]
    splits = {"validation": [DIFFERENT[3], ("new", "neg")], "test": [*DIFFERENT[4:7], ("new", "neg")]}
    (problem,) = repeats(caplog, train, **splits)
    numbers = re.findall(r"(\d+) of (\d+) rows of (\w+)", problem.text)
    assert numbers == [("3", "15", "train"), ("1", "2", "validation"), ("3", "4", "test")]
    assert "'film 3'" in problem.text
    assert problem.proposals == []


def test_repeats_in_rows_held_out_of_train_name_the_key_that_removes_them(caplog):
    """Repeats are removed before rows are held out, so none of them is in both splits then."""
    path = rows_file("train.csv", DIFFERENT * 4)
    text_data(path, validation_fraction=0.25).load()
    (problem,) = find_problems(caplog, "repeated-rows data: train validation")
    assert problem.proposals == ["data.deduplicate=true"]
    caplog.clear()
    splits = text_data(path, validation_fraction=0.25, deduplicate=True).load()
    assert find_problems(caplog, "repeated-rows") == []
    assert {role: len(split) for role, split in splits.items()} == {"train": 9, "validation": 3}


def test_equal_texts_with_different_labels_give_a_warning(caplog):
    (problem,) = repeats(caplog, [*DIFFERENT, ("film 2", "pos"), ("film 5", "neg")])
    assert_problem(problem, "several-labels data: 2 'neg' 'pos'")
    assert "'film 2'" in problem.text
    first, second = repeats(caplog, DIFFERENT, test=[("film 2", "pos")])
    assert_problem(first, "repeated-rows data: 1 test train")
    assert_problem(second, "several-labels data: 1 'neg' 'pos'")
    assert "'film 2'" in first.text
    assert "'film 2'" in second.text


def test_pairs_and_sets_of_classes_are_compared_as_a_whole(caplog):
    rows = [{"a": "x", "b": str(i), "tags": ["p", "q"][: 1 + i % 2]} for i in range(6)]
    write("train.jsonl", "".join(json.dumps(row) + "\n" for row in [*rows, rows[1], {**rows[0], "tags": ["q"]}]))
    text_data("train.jsonl", label="tags", label_type="classes", text=["a", "b"]).load()
    (repeated,) = find_problems(caplog, "repeated-rows data: 1 8 train")
    assert "'x | 1'" in repeated.text
    assert repeated.proposals == ["data.deduplicate=true"]
    (labels,) = find_problems(caplog, "several-labels data: 1 'p' 'q'")
    assert "'x | 0'" in labels.text


def test_sentences_with_tags_are_compared_with_their_tags(caplog):
    rows = [{"words": ["EU", "film"], "tags": ["B-ORG", "O"]}, {"words": ["EU", "film"], "tags": ["O", "O"]}]
    write("t.jsonl", "".join(json.dumps(row) + "\n" for row in [*rows, rows[0]]))
    TagTextData(
        make_recipe({"data": {"files": {"train": "t.jsonl"}, "validation_fraction": 0}}, Path("recipe.yaml"))
    ).load()
    (repeated,) = find_problems(caplog, "repeated-rows data: 1 3 train")
    assert "'EU film'" in repeated.text
    assert repeated.proposals == ["data.deduplicate=true"]


def test_lines_of_a_language_model_and_numbers_may_repeat(caplog):
    text_data(write("a.txt", "one line\n" * 5), label=None).load()
    text_data(write("n.csv", "text,label\nfilm,1.5\nfilm,2.5\n"), label_type="number").load()
    assert caplog.messages == []
