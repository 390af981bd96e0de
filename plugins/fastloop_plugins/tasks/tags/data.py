"""The ``data`` section of ``token-classification``: sentences as lists of words, and a tag for each word."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from fastloop import Problem, RecipeError, option
from fastloop.problem import agree, counted, counted_of
from fastloop_plugins.rows.column import in_blocks
from fastloop_plugins.rows.conll import Columns
from fastloop_plugins.rows.drop import drop_line
from fastloop_plugins.rows.formats import FileLayout
from fastloop_plugins.rows.paths import find_files
from fastloop_plugins.rows.split_rows import Rows, RowsBuilder
from fastloop_plugins.rows.suffixes import CONLL, format_of
from fastloop_plugins.rows.table import Bad, Table, problem_of_text, show
from fastloop_plugins.text.data import TextData
from fastloop_plugins.text.label_names import (
    describe_counts,
    has_unnamed_classes,
    list_labels,
    refuse_broken_names,
    written_label,
)
from fastloop_plugins.text.label_warnings import find_alike, warn_about_alike_names
from fastloop_plugins.text.options import DataOptions

if TYPE_CHECKING:
    from fastloop import Run
    from fastloop.recipe import Recipe

LISTS = "a file of type .conll, .jsonl, .json or .parquet"
"""Files that hold lists of words, for messages."""
WORD_NUMBER = re.compile(r"[0-9]+([-.][0-9]+)?")
"""The number of a word in its sentence, in a column of CoNLL-U or GermEval: 3, or 3-4 for two words in one."""


@dataclass(kw_only=True)
class TagData(DataOptions):
    """The ``data`` section of ``token-classification``."""

    words: str | int | None = option(
        "The column of words, a list in each row; in CoNLL files a number. null: words, or in CoNLL files 0.",
        default=None,
    )
    tags: str | int | None = option(
        "The column of tags, a list of names or ids in each row. null: tags, or in CoNLL files -1, the last.",
        default=None,
    )
    format: Literal["conll"] | None = option(
        "conll: .txt and .tsv files are CoNLL files, as .conll files are.", default=None
    )
    tag_names: list[str] | None = option(
        "The tags in the order of their ids; null: those of train, sorted.", default=None
    )


def has_tags(recipe: Recipe) -> bool:
    """Whether the ``data`` section is certainly that of ``token-classification``."""
    data = recipe.data
    if data.get("label") is not None or data.get("target") is not None or recipe.model.get("module"):
        return False
    if data.get("format") == "conll" or data.get("words") is not None or data.get("tags") is not None:
        return True
    files: Any = data.get("files")
    if not isinstance(files, dict):
        return False
    for entries in files.values():
        for path in entries if isinstance(entries, list) else [entries]:
            if isinstance(path, str) and format_of(Path(path))[0] == CONLL:
                return True
    return False


class TagTextData(TextData):
    """The ``data`` section of a recipe. ``load`` returns the words of each sentence, and the ids of their tags.

    Attributes:
        classes: The tags in the order of their ids. In inference: set before ``load``, from the model.

    Raises:
        RecipeError: An option is invalid, or a file does not exist or cannot hold tags.
    """

    section = TagData
    tagged = True
    options: TagData
    text_key = "words"
    unit = "sentences"
    own_formats = (CONLL,)

    def __init__(self, recipe: Recipe) -> None:
        where = f"{recipe.where}: data"
        for key in ("text", "label", "label_type", "label_offset", "label_map"):
            if recipe.data.get(key) is not None:
                raise RecipeError(
                    "is for texts, and token-classification reads data.words and data.tags.",
                    code="unknown-option",
                    place=f"{where}.{key}",
                    remedy="Remove it.",
                )
        how = recipe.data.get("read")
        for key in ("delimiter", "columns", "quoting"):
            if isinstance(how, dict) and how.get(key) is not None:
                raise RecipeError(
                    "is for .csv files, which hold no lists of words.",
                    code="unknown-option",
                    place=f"{where}.read.{key}",
                    remedy="Remove it.",
                )
        super().__init__(recipe, labelled=False)
        words = self.options.words
        tags = self.options.tags
        self.columns = [words if isinstance(words, str) else "words"]
        self.labels = [tags if isinstance(tags, str) else "tags"]
        self.numbers = Columns(words if isinstance(words, int) else 0, tags if isinstance(tags, int) else -1)
        names = self.options.tag_names
        if names is not None and (len(set(names)) < len(names) or len(names) < 2):
            raise RecipeError(
                code="wrong-type", place=f"{where}.tag_names", found=str(names), expected="at least two tags, each once"
            )
        for path in self.every_file():
            self._check_file(path)

    def label_columns(self) -> dict[str, str]:
        return dict.fromkeys(self.labels, "tags")

    def streamed(self, run: Run, datasets: Mapping[str, Any], model: Any) -> Mapping[str, Any]:
        if self.stream is None:
            return datasets
        from fastloop_plugins.tasks.tags.batches import TagRows

        ids = {name: index for index, name in enumerate(self.classes)}
        part = self.stream.head
        table = {}
        for tag in self._stream_tags():
            name = self._name(part, tag)
            if name not in ids:
                first = self.stream.index.labels[tag].first
                raise self._unknown_tag(str(self.stream.index.name(first)), tag, "train")
            table[tag] = ids[name]
        return self.stream.datasets(run, datasets, TagRows(self, model, table, datasets["train"][0]))

    def _stream_tags(self) -> list[Any]:
        """The tags of a streamed training split; empty without one."""
        if self.stream is None:
            return []
        return [tag for tag in self.stream.index.labels if isinstance(tag, str | Integral) and tag != ""]

    def is_conll(self, path: Path) -> bool:
        """Whether a file is read as a CoNLL file."""
        suffix = format_of(path)[0]
        if self.options.format == "conll" and suffix in (".txt", ".tsv"):
            return True
        return suffix == CONLL

    def _check_file(self, path: Path) -> None:
        suffix = format_of(path)[0]
        is_conll = self.is_conll(path)
        if not is_conll and suffix in (".csv", ".tsv", ".txt"):
            remedy = "" if suffix == ".csv" else " For a CoNLL file: data.format=conll."
            raise RecipeError(f"data.words needs {LISTS}.", code="unknown-format", place=str(path), remedy=remedy)
        for key, value in (("words", self.options.words), ("tags", self.options.tags)):
            if isinstance(value, str if is_conll else int):
                expected = "a number: the columns of CoNLL files have no names" if is_conll else "the name of a column"
                raise RecipeError(
                    f"found {show(value)}, and {path} needs {expected}.", code="wrong-type", place=f"{self.where}.{key}"
                )

    # -- reading -------------------------------------------------------------------------------------------------------

    def layout(self, predicts: bool = False) -> FileLayout:
        suffixes = (CONLL, ".txt", ".tsv") if self.options.format == "conll" else (CONLL,)
        return replace(super().layout(predicts), conll=self.numbers, conll_suffixes=suffixes)

    def read_files(self, paths: Sequence[str | Path]) -> list[Table]:
        for path in paths:
            self._check_file(Path(path))
        return super().read_files(paths)

    def row_columns(self) -> dict[str, str]:
        return self.text_columns() | self.label_columns()

    def parse(self, columns: Sequence[Sequence[Any]], bad: Bad) -> dict[str, list[Any]]:
        sentences: dict[str, list[Any]] = {"words": [], "tags": []}
        for index, (words, tags) in enumerate(zip(*columns, strict=True)):
            problem = self.problem(words, tags)
            if problem is not None:
                bad(index, problem)
            sentences["words"].append([] if problem else words)
            sentences["tags"].append([] if problem else tags)
        return sentences

    def problem(self, words: Any, tags: Any) -> str | None:
        """Why two cells are not words and their tags; None if they are."""
        problem = problem_of_words(words)
        if problem:
            return f"column {self.columns[0]!r} (data.words) {problem}"
        if not isinstance(tags, list | tuple) or not all(isinstance(tag, str | Integral) and tag != "" for tag in tags):
            return (
                f"column {self.labels[0]!r} (data.tags) holds {show(tags)}, expected a list of tags: names, or "
                "whole numbers."
            )
        if len(tags) != len(words):
            return f"found {counted(len(words), 'word')} and {counted(len(tags), 'tag')}, expected a tag for each word."
        return None

    def _rows(self, role: str, parts: list[Table]) -> Rows:
        where = ", ".join(part.where for part in parts)
        has_words = False
        names = set[str]()
        for part in parts:
            tags = set[Any]()
            are_numbers = self.is_conll(Path(part.where))
            for block in self.parse_blocks(part):
                are_numbers = are_numbers and all(map(WORD_NUMBER.fullmatch, chain.from_iterable(block["words"])))
                has_words = has_words or any(block["words"])
                tags.update(*block["tags"])
            if are_numbers and tags:
                self._refuse_numbers(part)
            names.update(self._name(part, tag) for tag in tags)
        if not has_words:
            raise RecipeError(
                f"the {role} split is empty.",
                code="empty-split",
                place=where,
                expected="at least one sentence (data.files, data.splits)",
            )
        if role == "train" and self.inference is None:
            self.classes = self._tag_names(names, next(part for part in parts if len(part)), where)
        rows = RowsBuilder()
        counts = np.zeros(len(self.classes), np.int64)
        for part in parts:
            columns = [part.column(key, name) for name, key in self.row_columns().items()]
            for start, raw in in_blocks(columns):
                sentences = self._number_tags(part, start, raw, role)
                rows.add(sentences)
                ids = list(chain.from_iterable(sentences["tags"]))
                counts += np.bincount(np.array(ids, np.int64), minlength=len(counts))
        total = sum(map(len, parts))
        empty = total - rows.count
        if empty:
            text = (
                f"{counted_of(empty, total, 'sentences')} {agree(empty, 'has', 'have')} no words, and "
                f"{agree(empty, 'is', 'are')} skipped."
            )
            remedy = drop_line(next(iter(self.row_columns())), "empty: true")
            self.messages.append(Problem(text, code="empty-texts", place=where, remedy=remedy))
        if role == "train" and self.inference is None and self.stream is None:
            self.messages.append(f"data: words of each tag in train: {describe_counts(counts, self.classes)}")
        return rows.finish()

    def _refuse_numbers(self, part: Table) -> None:
        """Raise an error for a CoNLL file whose column of words has the numbers of the words.

        Raises:
            RecipeError: Always.
        """
        column = self.numbers.words
        raise RecipeError(
            f"column {column} (data.words) has numbers alone, as CoNLL-U and GermEval count the words of a sentence.",
            code="wrong-column",
            place=part.where,
            remedy=f"Name the column of the words: data.words={column + 1}, counted from 0.",
        )

    def _number_tags(self, part: Table, start: int, block: Sequence[list[Any]], role: str) -> dict[str, list[Any]]:
        """The words and the ids of the tags of some sentences, without those that have no words.

        Args:
            start: The first row of the block, from 0.
            block: The words, and the tags, of each sentence.

        Raises:
            RecipeError: A tag is none of ``classes``.
        """
        ids = {name: index for index, name in enumerate(self.classes)}
        columns: dict[str, list[Any]] = {"words": [], "tags": []}
        for number, (words, tags) in enumerate(zip(*block, strict=True), start + 1):
            tag_ids = [ids.get(self._name(part, tag), -1) for tag in tags]
            if -1 in tag_ids:
                place = tag_ids.index(-1)
                raise self._unknown(part, number, place, tags[place], role)
            if words:
                columns["words"].append(list(words))
                columns["tags"].append(tag_ids)
        return columns

    # -- tags ----------------------------------------------------------------------------------------------------------

    def _name(self, part: Table, tag: Any) -> str:
        """The name of a tag. An id is a name of the dataset, of ``data.tag_names`` or of the model, or a name
        itself."""
        if isinstance(tag, str):
            return tag
        names = part.class_names.get(self.labels[0]) or self.options.tag_names
        if names is not None and self.inference is not None and has_unnamed_classes(self.classes, names):
            names = None
        if names is None and self.inference is not None and str(int(tag)) not in self.classes:
            names = self.classes
        if names is not None and 0 <= tag < len(names):
            return names[int(tag)]
        return str(int(tag))

    def _tag_names(self, names: set[str], first: Table, where: str) -> list[str]:
        """The classes: those that are given, or the names of the tags in the data, sorted.

        Args:
            first: The first part with rows.
        """
        classes = self.options.tag_names or first.class_names.get(self.labels[0])
        if classes:
            return list(classes)
        names = names | {self._name(first, tag) for tag in self._stream_tags()}
        refuse_broken_names(names, f"{where}: data.tags")
        if len(names) < 2:
            raise RecipeError(
                code="one-class",
                place=f"{where}: data.tags",
                found=str(list_labels(names) or "no tag"),
                expected="at least two different tags",
                remedy="Add sentences with other tags, or name another column in data.tags.",
            )
        for warning in warn_about_alike_names(sorted(names)):
            self.messages.append(Problem(warning, code="doubtful-labels", place=f"{where}: data.tags"))
        return sorted(names, key=lambda name: (int(name), "") if name.isdecimal() else (-1, name))

    def _unknown(self, part: Table, number: int, index: int, tag: Any, role: str) -> RecipeError:
        place = f"{part.row(number)}, word {index + 1}"
        if part.numbers is not None and self.is_conll(Path(part.where)):
            place = f"{part.where}, line {part.numbers[number - 1] + index}"
        if self.inference is not None:
            return RecipeError(
                f"found the tag {tag!r} (data.tags), which is none of the model {self.inference.model}. Its tags: "
                f"{list_labels(self.classes)}.",
                code="unknown-label",
                place=place,
            )
        return self._unknown_tag(place, tag, role)

    def _unknown_tag(self, place: str, tag: Any, role: str) -> RecipeError:
        where = "in data.tag_names" if self.options.tag_names else "in training"
        remedy = ""
        alike = find_alike(str(tag), self.classes)
        if alike is not None:
            remedy = f"If it is the tag {written_label(alike)}, write it so, and not {written_label(str(tag))}. "
        remedy += f"To give the model this tag: data.tag_names=[{', '.join([*self.classes, str(tag)])}]."
        if role != "train":
            remedy += f" To leave this split out: data.splits.{role}=null."
        return RecipeError(
            f"found the tag {tag!r} (data.tags), which never occurs {where}. There: {list_labels(self.classes)}. ",
            code="unknown-label",
            place=place,
            remedy=remedy,
        )

    # -- prediction ----------------------------------------------------------------------------------------------------

    def sentences(
        self, source: Path | Iterable[str] | None, start: int, size: int
    ) -> Iterator[tuple[list[list[str]], Bad]]:
        """The words of sentences to predict, ``size`` at a time, from number ``start``, and a function that refuses one
        of them.

        Args:
            source: A file, whose tags are ignored; texts, which are split at spaces; None: the split to predict.

        Raises:
            RecipeError: The file cannot be read, or a row is no list of words.
        """
        from fastloop_plugins.text.chunks import chunks_of, read_chunks

        if source is None:
            (rows,) = self.load().values()
            named = ((f"predict: sentence {number}", words) for number, words in enumerate(rows.columns["words"], 1))
            yield from chunks_of(named, start, size)
            return
        is_plain = not isinstance(source, Path) or self._is_plain(source)
        for chunk, bad in read_chunks(self, source, start, size):
            sentences = []
            for index, (words,) in enumerate(chunk):
                sentence = words.split() if is_plain else words
                problem = problem_of_words(sentence)
                if problem:
                    bad(index, f"column {self.columns[0]!r} (data.words) {problem}")
                sentences.append(list(sentence))
            yield sentences, bad

    def _is_plain(self, source: Path) -> bool:
        """Whether each line of a file to predict is the text of a sentence.

        Raises:
            RecipeError: The file does not exist, or cannot hold lists of words.
        """
        path = find_files(self.recipe, str(source), "predict", "FILE", self.formats)[0]
        if self.is_conll(path):
            return False
        suffix = format_of(path)[0]
        if suffix in (".csv", ".tsv"):
            raise RecipeError(
                f"data.words needs {LISTS}, or a .txt file with a sentence a line.",
                code="unknown-format",
                place=str(path),
            )
        return suffix == ".txt"


def problem_of_words(value: Any) -> str | None:
    """Why a value is not a list of words; None if it is."""
    if not isinstance(value, list | tuple):
        return f"holds {show(value)}, expected a list of words."
    for number, word in enumerate(value, 1):
        problem = problem_of_text(word) or ("is empty." if not word.strip() else None)
        if problem:
            return f"has as word {number} one that {problem}"
    return None
