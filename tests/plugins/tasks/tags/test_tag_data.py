"""The data of token classification: CoNLL files, lists of words and tags, and the messages for those that are wrong.

Modules:
    plugins/fastloop_plugins/rows/conll.py
    plugins/fastloop_plugins/tasks/tags/data.py
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from data_helpers import write
from log_lines import find_lines
from tag_helpers import make, write_jsonl

from fastloop.errors import RecipeError
from fastloop.problem import Problem
from fastloop.recipe import make_recipe
from fastloop.testing import assert_problem
from fastloop_plugins.tasks.tags.data import TagTextData

TWO = [(["EU", "rejects"], ["B-ORG", "O"]), (["Peter"], ["B-PER"])]


def tag_data(files: Any = None, **data: Any) -> TagTextData:
    """The section of a recipe; a path alone is the training file."""
    section: dict[str, Any] = {"validation_fraction": 0.0} | data
    if files is not None:
        section["files"] = {"train": files} if isinstance(files, str) else files
    return TagTextData(make_recipe({"data": section}, Path("recipe.yaml")))


def load(*arguments: Any, role: str = "train", **data: Any) -> list[tuple[list[str], list[str]]]:
    """The words of each sentence and the names of their tags."""
    section = tag_data(*arguments, **data)
    rows = section.load()[role].texts
    return [(words, [section.classes[tag] for tag in tags]) for words, tags in rows]


def problem_of(*arguments: Any, **data: Any) -> Problem:
    with pytest.raises(RecipeError) as caught:
        load(*arguments, **data)
    return caught.value.problem


@pytest.mark.parametrize(
    "content",
    [
        "-DOCSTART- -X- -X- O\n\nEU NNP B-NP B-ORG\nrejects VBZ B-VP O\n\nPeter NNP B-NP B-PER\n",
        "EU\tB-ORG\nrejects\tO\n \n\nPeter\tB-PER",
        "\ufeffEU  B-ORG\r\nrejects  O\r\n\r\nPeter  B-PER\r\n\r\n",
        "-DOCSTART-\tO\n\nEU\tB-ORG\nrejects\tO\n-DOCSTART-\tO\nPeter\tB-PER\n",
    ],
    ids=["conll-2003", "tabs", "windows", "documents"],
)
def test_conll_files(content):
    assert load(write("a.conll", content)) == TWO
    assert load(write("a.txt", content), format="conll") == TWO
    assert load(write("a.tsv", content), format="conll") == TWO


@pytest.mark.parametrize(
    ("content", "comments"),
    [
        ("# sent_id = 1\n# text = EU rejects\nEU\tB-ORG\nrejects\tO\n\n# sent_id = 2\nPeter\tB-PER\n", 3),
        ("# sent_id = 1\nEU NNP B-NP B-ORG\nrejects VBZ B-VP O\n\n# newdoc\n#\nPeter NNP B-NP B-PER\n", 3),
        ("#begin document (a); part 000\n\nEU B-ORG\nrejects O\n\nPeter B-PER\n\n#end document\n", 2),
    ],
    ids=["conll-u", "as many columns as a word", "conll-2012"],
)
def test_comments_of_conll_files_are_no_words(content, comments, caplog):
    caplog.set_level(logging.INFO, "fastloop")
    assert load(write("a.conll", content)) == TWO
    assert find_lines(caplog, f"a.conll: {comments} 1")
    ((sentences, _),) = tag_data("a.conll").sentences(Path("a.conll"), 0, 8)
    assert sentences == [words for words, _ in TWO]


def test_a_word_that_begins_with_a_hash_is_no_comment(caplog):
    caplog.set_level(logging.INFO, "fastloop")
    for separator in ("\t", " "):
        lines = [("#", "O"), ("1", "B-PER"), None, ("#eu", "B-ORG"), ("#", "O")]
        content = "\n".join("" if line is None else separator.join(line) for line in lines)
        assert load(write("a.conll", content)) == [(["#", "1"], ["O", "B-PER"]), (["#eu", "#"], ["B-ORG", "O"])]
    assert "comments" not in caplog.text
    assert_problem(problem_of(write("a.conll", "EU B-ORG\n\n#eu\n")), "invalid-row a.conll line 3 1 2")


def test_other_columns_of_a_conll_file():
    assert load(write("a.conll", "1\tEU\tB-ORG\t_\n2\trejects\tO\t_\n\n1\tPeter\tB-PER\t_\n"), words=1, tags=-2) == TWO


def test_lists_of_names_and_ids():
    rows = [{"tokens": words, "ner": tags} for words, tags in TWO]
    assert load(write_jsonl("a.jsonl", rows), words="tokens", tags="ner") == TWO
    names = ["O", "B-PER", "B-ORG"]
    ids = [{"words": words, "tags": [names.index(tag) for tag in tags]} for words, tags in TWO]
    assert load(write_jsonl("b.jsonl", ids), tag_names=names) == TWO
    data = tag_data("b.jsonl")
    data.load()
    assert data.classes == ["0", "1", "2"]


def test_datasets_know_the_names_of_their_tags():
    from datasets import ClassLabel, Dataset, DatasetDict, Features, Sequence, Value

    names = ["O", "B-PER", "B-ORG", "B-LOC"]
    features = Features({"tokens": Sequence(Value("string")), "ner_tags": Sequence(ClassLabel(names=names))})
    rows = {"tokens": [words for words, _ in TWO], "ner_tags": [[names.index(tag) for tag in tags] for _, tags in TWO]}
    DatasetDict({"train": Dataset.from_dict(rows, features)}).save_to_disk("saved")
    data = tag_data(name="saved", words="tokens", tags="ner_tags", splits={"validation": None, "test": None})
    data.load()
    assert data.classes == names
    assert load(name="saved", words="tokens", tags="ner_tags", splits={"validation": None, "test": None}) == TWO


def test_tags_are_sorted_and_ids_by_number():
    data = tag_data(write("a.conll", "a O\nb B-X\nc I-X\nd B-A\n"))
    data.load()
    assert data.classes == ["B-A", "B-X", "I-X", "O"]
    data = tag_data(write_jsonl("a.jsonl", [{"words": list("abc"), "tags": [10, 2, 0]}]))
    data.load()
    assert data.classes == ["0", "2", "10"]


def test_empty_sentences_are_skipped_with_a_warning(caplog):
    rows = [{"words": words, "tags": tags} for words, tags in [*TWO, ([], [])]]
    assert load(write_jsonl("a.jsonl", rows)) == TWO
    assert_problem(caplog, "empty-texts a.jsonl: 1 3")


CONLL = "a O\nb B-X\n"


@pytest.mark.parametrize(
    ("content", "options", "expected"),
    [
        ("a O\n\nb B-X extra\n", {}, "invalid-row a.conll line 3 2 1"),
        ("a\nb\n", {}, "invalid-row a.conll line 1"),
        ("a O\nb B-X\n", {"tags": 5}, "invalid-row a.conll line 1 5 data.tags 2 0"),
        ("1 a O\n2-3 b B-X\n\n1 c O\n", {}, "wrong-column a.conll 0 data.words data.words=1"),
        ("a\tO\nb\t\n", {}, "invalid-row a.conll line 2 -1 data.tags"),
        ("a O\nb O\n", {}, "one-class a.conll data.tags 'O'"),
        ("\n\n", {}, "empty-split a.conll data.files data.splits"),
        (CONLL, {"tags": "ner"}, "wrong-type data.tags 'ner' a.conll CoNLL"),
        (CONLL, {"text": "text"}, "unknown-option data.text data.words data.tags"),
        (CONLL, {"label_map": {"a": "b"}}, "unknown-option data.label_map"),
        (CONLL, {"read": {"delimiter": ","}}, "unknown-option data.read.delimiter"),
        (CONLL, {"tag_names": ["O", "O"]}, "wrong-type data.tag_names 'O'"),
        (CONLL, {"tag_names": ["O", "B-Y"]}, "unknown-label line 2 'B-X' data.tags data.tag_names"),
    ],
)  # fmt: skip
def test_wrong_conll_files(content, options, expected):
    assert_problem(problem_of(write("a.conll", content), **options), expected)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"words": "a b", "tags": ["O"]}, "invalid-row a.jsonl 2 'words' data.words"),
        ({"words": ["a", 3], "tags": ["O", "O"]}, "invalid-row 'words' data.words 2 3"),
        ({"words": ["a", " "], "tags": ["O", "O"]}, "invalid-row a.jsonl 2 'words' data.words"),
        ({"words": ["a"], "tags": ["O", "O"]}, "invalid-row a.jsonl 2 1"),
        ({"words": ["a"], "tags": [None]}, "invalid-row 'tags' data.tags"),
    ],
)  # fmt: skip
def test_wrong_lists(row, expected):
    write_jsonl("a.jsonl", [{"words": ["a", "b"], "tags": ["O", "B-X"]}, row])
    assert_problem(problem_of("a.jsonl"), expected)


def test_other_files_are_refused():
    assert_problem(problem_of(write("a.csv", "words,tags\n")), "unknown-format a.csv data.words")
    assert_problem(problem_of(write("a.txt", CONLL)), "unknown-format a.txt data.words CoNLL data.format=conll")
    assert_problem(problem_of(write_jsonl("a.jsonl", [{"words": ["a"]}])), "unknown-column 'tags' data.tags")
    assert_problem(problem_of("a.jsonl", tags=-1), "wrong-type a.jsonl")


def test_a_tag_that_training_lacks_is_named_by_its_line():
    files = {"train": write("a.conll", CONLL), "validation": write("b.conll", "-DOCSTART- O\n\na O\n\nb O\nc I-X\n")}
    problem = problem_of(files)
    assert_problem(problem, "unknown-label b.conll line 6 'I-X' data.tags 'B-X' 'O'")
    assert_problem(problem, "unknown-label I-X data.splits.validation=null")
    assert load(files, role="validation", tag_names=["B-X", "O", "I-X"])[1] == (["b", "c"], ["O", "I-X"])


def test_tags_that_are_probably_one_warn(caplog):
    train = write("train.jsonl", '{"words": ["Kim", "in", "Rome"], "tags": ["B-PER", "O", "B-Per"]}\n')
    load(train)
    assert_problem(caplog, "doubtful-labels train.jsonl data.tags 'B-PER', 'B-Per'")
    test = write("test.jsonl", '{"words": ["in"], "tags": ["o"]}\n')
    problem = problem_of({"train": train, "test": test})
    assert_problem(problem, "unknown-label test.jsonl 'o' 'O', write data.tag_names")


def test_unreadable_sentences_are_skipped_on_request(caplog):
    write("a.conll", "a O\nb B-X\n\nbroken line here\n\nc O\n")
    run = make(
        {"files": {"train": "a.conll"}, "max_length": 16, "validation_fraction": 0.0}, plugins=["skip-unreadable"]
    )
    assert len(run.datasets["train"]) == 2
    assert run.state.unreadable == 1
    assert_problem(caplog, "rows-unreadable a.conll 1")


def test_cached_token_ids_give_the_same_samples():
    from tag_helpers import write_splits

    data = write_splits()
    plain, *cached = (
        make(data, plugins=plugins, output=name) for name, plugins in (("a", ()), ("b", [CACHE]), ("c", [CACHE]))
    )
    assert list(Path("tokens").iterdir())
    for run in cached:
        assert run.datasets["test"].fingerprint() == plain.datasets["test"].fingerprint()
        assert run.model.config.id2label == plain.model.config.id2label


CACHE = {"token-cache": {"folder": "tokens"}}
