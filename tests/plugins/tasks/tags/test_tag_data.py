"""The data of token classification: CoNLL files, lists of words and tags, and the messages for those that are wrong."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from data_helpers import write
from tag_helpers import make, write_jsonl

from fastloop.errors import RecipeError
from fastloop.recipe import make_recipe
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


def refusal(*arguments: Any, **data: Any) -> str:
    with pytest.raises(RecipeError) as caught:
        load(*arguments, **data)
    return str(caught.value)


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
    assert f"a.conll: {comments} lines are comments, the first is line 1" in caplog.messages
    assert list(tag_data("a.conll").sentences(Path("a.conll"))) == [words for words, _ in TWO]


def test_a_word_that_begins_with_a_hash_is_no_comment(caplog):
    caplog.set_level(logging.INFO, "fastloop")
    for separator in ("\t", " "):
        lines = [("#", "O"), ("1", "B-PER"), None, ("#eu", "B-ORG"), ("#", "O")]
        content = "\n".join("" if line is None else separator.join(line) for line in lines)
        assert load(write("a.conll", content)) == [(["#", "1"], ["O", "B-PER"]), (["#eu", "#"], ["B-ORG", "O"])]
    assert "comments" not in caplog.text
    assert "a.conll, line 3: found 1 columns, expected 2, as in line 1." in refusal(
        write("a.conll", "EU B-ORG\n\n#eu\n")
    )


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
    assert "a.jsonl: 1 of 3 sentences have no words, and are skipped" in caplog.text


CONLL = "a O\nb B-X\n"


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        ("a O\n\nb B-X extra\n", {}, "a.conll, line 3: found 3 columns, expected 2, as in line 1. Blank lines separate "
                                     "sentences."),
        ("a\nb\n", {}, "a.conll, line 1: found one column, expected a word and its tag, separated by a tab or "
                       "by spaces."),
        ("a O\nb B-X\n", {"tags": 5}, "a.conll, line 1: there is no column 5, which data.tags names. The line has 2, "
                                      "counted from 0."),
        ("a\tO\nb\t\n", {}, "a.conll, line 2: column -1 (data.tags) is empty."),
        ("a O\nb O\n", {}, "a.conll: data.tags: found 'O', expected at least two different tags."),
        ("\n\n", {}, "a.conll: the train split is empty. Expected at least one sentence (data.files, data.splits)."),
        (CONLL, {"tags": "ner"}, "data.tags: found 'ner' (str), and a.conll needs a number: the columns of CoNLL "
                                 "files have no"),
        (CONLL, {"text": "text"}, "data.text: is for texts, and token-classification reads data.words and data.tags. "
                                  "Remove it."),
        (CONLL, {"label_map": {"a": "b"}}, "data.label_map: is for texts"),
        (CONLL, {"read": {"delimiter": ","}}, "data.read.delimiter: is for .csv files, which hold no lists of words. "
                                              "Remove it."),
        (CONLL, {"tag_names": ["O", "O"]}, "data.tag_names: found ['O', 'O'], expected at least two tags, each once."),
        (CONLL, {"tag_names": ["O", "B-Y"]}, "line 2: found the tag 'B-X' (data.tags), which never occurs in "
                                             "data.tag_names."),
    ],
)  # fmt: skip
def test_wrong_conll_files(content, options, message):
    assert message in refusal(write("a.conll", content), **options)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"words": "a b", "tags": ["O"]}, "a.jsonl, row 2: column 'words' (data.words) holds 'a b' (str), expected a "
                                          "list of words."),
        ({"words": ["a", 3], "tags": ["O", "O"]}, "column 'words' (data.words) has as word 2 one that holds 3 (int), "
                                                  "expected text."),
        ({"words": ["a", " "], "tags": ["O", "O"]}, "a.jsonl, row 2: column 'words' (data.words) has as word 2 one "
                                                    "that is empty."),
        ({"words": ["a"], "tags": ["O", "O"]}, "a.jsonl, row 2: found 1 words and 2 tags, expected a tag for "
                                               "each word."),
        ({"words": ["a"], "tags": [None]}, "column 'tags' (data.tags) holds [None] (list), expected a list of tags: "
                                           "names, or"),
    ],
)  # fmt: skip
def test_wrong_lists(row, message):
    write_jsonl("a.jsonl", [{"words": ["a", "b"], "tags": ["O", "B-X"]}, row])
    assert message in refusal("a.jsonl")


def test_other_files_are_refused():
    assert "a.csv: data.words needs a file of type .conll, .jsonl, .json or .parquet." in refusal(
        write("a.csv", "words,tags\n")
    )
    assert (
        "a.txt: data.words needs a file of type .conll, .jsonl, .json or .parquet. For a CoNLL file: data.format=conll."
        in refusal(write("a.txt", CONLL))
    )
    assert "there is no column 'tags', which data.tags names. Its columns: words" in refusal(
        write_jsonl("a.jsonl", [{"words": ["a"]}])
    )
    assert "a.jsonl needs the name of a column" in refusal("a.jsonl", tags=-1)


def test_a_tag_that_training_lacks_is_named_by_its_line():
    files = {"train": write("a.conll", CONLL), "validation": write("b.conll", "-DOCSTART- O\n\na O\n\nb O\nc I-X\n")}
    message = refusal(files)
    assert (
        "b.conll, line 6: found the tag 'I-X' (data.tags), which never occurs in training. There: 'B-X', 'O'."
        in message
    )
    assert (
        "To give the model this tag: data.tag_names=[B-X, O, I-X]. To leave this split out: "
        "data.splits.validation=null." in message
    )
    assert load(files, role="validation", tag_names=["B-X", "O", "I-X"])[1] == (["b", "c"], ["O", "I-X"])


def test_unreadable_sentences_are_skipped_on_request(caplog):
    write("a.conll", "a O\nb B-X\n\nbroken line here\n\nc O\n")
    run = make(
        {"files": {"train": "a.conll"}, "max_length": 16, "validation_fraction": 0.0}, plugins=["skip-unreadable"]
    )
    assert len(run.datasets["train"]) == 2
    assert run.state.unreadable == 1
    assert "a.conll: 1 sentences cannot be read, and are skipped" in caplog.text


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
