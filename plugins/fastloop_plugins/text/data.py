"""The ``data`` section of the text tasks: its options, and the rows of its splits.

Rows come from files, a Python function, a local folder or the hub: ``source_files`` finds them, and ``parts`` reads
them. A *part* is one file or one split of a dataset, so that an error can name its file. A *role* is ``train``,
``validation`` or ``test``; ``data.splits`` gives the name of its split in the source. The samples selected by
``validation_fraction`` and ``limit`` do not depend on ``train.seed``: runs with different seeds use the same data and
stay comparable.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from fastloop import Problem, RecipeError
from fastloop.errors import DataError
from fastloop.options import parse
from fastloop.problem import agree, counted
from fastloop.splits import SPLITS
from fastloop_plugins._cache import digest
from fastloop_plugins._mapped import flatnonzero, zeros
from fastloop_plugins.rows.column import in_blocks
from fastloop_plugins.rows.content_hashes import ContentHashes
from fastloop_plugins.rows.drop import Condition, Drop, with_drop_line
from fastloop_plugins.rows.formats import FileLayout, KeptColumns
from fastloop_plugins.rows.held_out import DRAW, divide, hold_out_ends
from fastloop_plugins.rows.options import Limit, Read, Splits
from fastloop_plugins.rows.split_rows import Rows, RowsBuilder
from fastloop_plugins.rows.suffixes import FORMATS, format_of, installed_formats
from fastloop_plugins.rows.table import Bad, Table, text_column
from fastloop_plugins.rows.unreadable import UnreadableRows
from fastloop_plugins.text.columns import check_texts, column_names, describe_alike, describe_empty, refuse_empty
from fastloop_plugins.text.dropped_rows import drop_repeats, drop_rows
from fastloop_plugins.text.option_checks import check_label_options
from fastloop_plugins.text.options import DataOptions
from fastloop_plugins.text.parts import read_parts
from fastloop_plugins.text.repeats import find_repeats
from fastloop_plugins.text.source_files import find_source
from fastloop_plugins.text.sources import Source, mix_sources, number_sources
from fastloop_plugins.text.streaming.options import check_streaming
from fastloop_plugins.text.targets import is_readable, read_labels, summarize

if TYPE_CHECKING:
    from fastloop import Run
    from fastloop.recipe import Recipe
    from fastloop_plugins.text.model import TextModel
    from fastloop_plugins.text.streaming.shards import Shards
    from fastloop_plugins.text.streaming.split import StreamedSplit

logger = logging.getLogger("fastloop")

NOTES = 8
"""Lines of the log about how files are read: a pattern may match thousands of them."""
READER = 4
"""Increase it when the same files and options give different rows, so that cached token ids are not used."""


class TextData:
    """The ``data`` section of a recipe. The constructor checks it, ``load`` reads it.

    Args:
        labelled: Whether the task reads labels.

    Attributes:
        where: The section in messages.
        columns: The columns of texts.
        labels: The columns of labels.
        several: Whether ``data.label`` is a list of columns.
        label_type: ``data.label_type``, or the type that follows from the columns of labels.
        classes: The names of the classes. In inference: set before ``load``, from the model.
        files: Split -> the files to read into memory.
        sources: The entries of ``data.sources``.
        stream: The training split, if it is streamed.
        shards: The files of ``data.name``, if it is streamed.
        keeps_places: Whether ``load`` keeps ``tables`` and ``Rows.numbers``, for ``row_places``.
        tables: The rows of each split as read, without dropped ones.
        messages: Lines for the log, and warnings.
        kept: Columns that `predict --keep` keeps of its file, see ``FileLayout``.
        skip_unreadable: Whether to skip rows that cannot be read.
        unreadable: The number of skipped rows.

    Raises:
        RecipeError: An option is invalid, or a file does not exist.
    """

    section: ClassVar[type[DataOptions]] = DataOptions
    text_key = "text"  # the option that names the column of texts
    unit = "rows"  # what a row is called in messages
    subject = "a language model"  # what a task without labels is called in messages
    tagged = False  # whether a row has a list of labels, which are counted one by one
    own_formats: ClassVar[Sequence[str]] = ()  # suffixes that this section reads beside those of all sections

    def __init__(self, recipe: Recipe, labelled: bool) -> None:
        self.recipe = recipe
        self.where = f"{recipe.where}: data"
        self.inference = recipe.inference
        self._refuse_split_keys()
        self.options = parse(self.section, recipe.data, self.where)
        self.splits = parse(Splits, self.options.splits, f"{self.where}.splits")
        self.limit = parse(Limit, self.options.limit, f"{self.where}.limit")
        self.how = parse(Read, self.options.read, f"{self.where}.read")
        self.drop = Drop(self._parse_conditions())
        self.columns = self.find_columns()
        self.labels = self.names_of("label")
        self.several = isinstance(self.options.label, list)
        usual_type = "classes" if self.several else "class"
        self.label_type = self.options.label_type or usual_type
        self.classes: list[str] = []
        self.files: dict[str, list[Path]] = {}
        self.sources: list[Source] = []
        self.stream: StreamedSplit | None = None
        self.shards: Shards | None = None
        self.keeps_places = False
        self.tables: dict[str, list[Table]] = {}
        self.messages: list[str | Problem] = []
        self.kept: KeptColumns | None = None
        self.skip_unreadable = False
        self.unreadable = 0
        check_label_options(self, labelled)
        check_streaming(self, recipe.data)
        reads_source = self.inference is None or self.inference.source is None  # else these are the rows to predict
        if reads_source:
            find_source(self)

    def _refuse_split_keys(self) -> None:
        """Raise a ``RecipeError`` for a key such as ``data.train``: files belong in ``data.files``."""
        for split in SPLITS:
            if split in self.recipe.data:
                raise RecipeError(
                    "no such option.",
                    code="unknown-option",
                    place=f"{self.where}.{split}",
                    remedy=f"For files: data.files.{split}={self.recipe.data[split]}.",
                )

    def _parse_conditions(self) -> list[Condition]:
        """The conditions of ``data.drop``."""
        conditions = []
        for number, condition in enumerate(self.options.drop or ()):
            conditions.append(parse(Condition, condition, f"{self.where}.drop[{number}]"))
        return conditions

    def find_columns(self) -> list[str]:
        """The columns of texts that the options name."""
        return column_names(self.options.text, f"{self.where}.text")

    def names_of(self, key: str) -> list[str]:
        """The columns that the option ``data.<key>`` names."""
        names: str | list[str] | None = getattr(self.options, key)
        if names is None:
            return []
        return column_names(names, f"{self.where}.{key}")

    @property
    def formats(self) -> Sequence[str]:
        """The suffixes of the files that the section reads."""
        return (*FORMATS, *installed_formats(), *self.own_formats)

    # -- reading -------------------------------------------------------------------------------------------------------

    def load(self) -> dict[str, Rows]:
        """Read ``train``, and ``validation`` and ``test`` if they exist.

        Raises:
            RecipeError: Files, columns or labels are invalid.
        """
        self.messages = []
        self.unreadable = 0
        parts = read_parts(self)
        held_out = 0.0 if self.splits.validation in parts else self.options.validation_fraction
        tables = self._select_tables(parts)
        rows = {role: self._rows(role, of_role) for role, of_role in tables.items()}
        if self.keeps_places:
            self.tables = tables
            for of_role in rows.values():
                of_role.numbers = np.arange(len(of_role))
        self._add_notes(tables)
        if self.options.label is not None:
            self._add_labels(rows, tables)
        if self.sources and "train" in rows:
            rows["train"].sources = number_sources(tables["train"])
        rows, note = self._divide(rows, held_out)
        if self.inference is None and self.stream is None:
            self.messages += find_repeats(rows, self, held_out=held_out > 0)
            if self.sources:
                rows["train"] = mix_sources(rows["train"], self)
        if self.stream is None and "train" in rows and rows["train"].labels is not None and self.reports("train"):
            note += f"; {summarize(rows['train'].labels, self)}"
        if self.inference is not None:
            rows = {role: of_role for role, of_role in rows.items() if role == self.inference.split}
        self._add_sizes(rows, note)
        self.log_messages()
        return rows

    def reports(self, role: str) -> bool:
        """Whether ``messages`` describe the rows of a split. A command on a trained model describes the split that it
        reads: the run has logged the others."""
        return self.inference is None or role == self.inference.split

    def _select_tables(self, parts: Mapping[str, list[Table]]) -> dict[str, list[Table]]:
        """Role -> the parts of its split, without the rows that are left out.

        Args:
            parts: Split -> its parts.

        Raises:
            RecipeError: A split is missing, or all of its rows are left out.
        """
        splits = self.needed_splits(parts)
        for role, name in splits.items():
            is_wanted = self.inference is not None or role == "train" or role in (self.options.splits or {})
            if is_wanted and name not in parts:
                raise RecipeError(
                    f"there is no split {name!r}. There are: {', '.join(parts) or 'none'}.",
                    code="unknown-split",
                    place=f"{self.where}.splits.{role}",
                )
        reported: list[Table] = []
        for role, name in splits.items():
            self.messages += describe_empty(parts.get(name, []))
            if self.reports(role):
                reported += parts.get(name, [])
        self.messages += describe_alike(reported, self.text_columns() | self.label_columns())
        tables = drop_rows({role: parts[name] for role, name in splits.items() if name in parts}, self)
        if self.skip_unreadable:  # rows that are left out anyway need not be readable
            for role, of_role in tables.items():
                tables[role] = [self._readable(part) for part in of_role]
        if self.options.deduplicate and "train" in tables:
            tables["train"] = drop_repeats(tables["train"], self)
        return tables

    def _add_notes(self, tables: Mapping[str, Sequence[Table]]) -> None:
        """Add how the files were read to ``messages``."""
        notes: list[str] = []
        for role, parts in tables.items():
            if not self.reports(role):
                continue
            for part in parts:
                notes += part.notes
        self.messages += notes[:NOTES]
        if len(notes) > NOTES:
            self.messages.append(f"data: and {len(notes) - NOTES} more lines such as these, of other files")

    def _add_labels(self, rows: Mapping[str, Rows], tables: Mapping[str, list[Table]]) -> None:
        """Read the labels of all splits, and set ``classes``."""
        labels = read_labels(tables, self)
        self.messages += labels.notes
        if self.reports("train"):
            self.messages += [Problem(line, code="doubtful-labels") for line in labels.warnings]
        self.classes = labels.classes
        for role, of_role in rows.items():
            of_role.labels = labels.by_role[role]

    def _divide(self, rows: dict[str, Rows], held_out: float) -> tuple[dict[str, Rows], str]:
        """Hold rows out for validation, and draw as many rows of each split as its limit allows.

        Args:
            held_out: The share of ``train`` to hold out; 0: none.

        Returns:
            The splits, and a note for the log about held-out rows.
        """
        if held_out and self.how.blank_lines and "train" in rows:
            divided, _ = divide(self._hold_out_ends(rows, held_out), 0.0, None, self.limit, self.where)
            return divided, f" (no validation split: the last {held_out:.0%} of each file held out)"
        classes = None
        if "train" in rows and self.label_type == "class":
            classes = rows["train"].labels
        return divide(rows, held_out, classes, self.limit, self.where)

    def _hold_out_ends(self, rows: Mapping[str, Rows], fraction: float) -> dict[str, Rows]:
        """Move the end of each text of ``train`` to ``validation``: a text is a whole file."""
        name, texts = next(iter(rows["train"].columns.items()))
        starts, ends = hold_out_ends(texts, fraction)
        train = rows_of_texts(name, starts)
        train.sources = rows["train"].sources
        return {**rows, "train": train, "validation": rows_of_texts(name, ends)}

    def _add_sizes(self, rows: Mapping[str, Rows], note: str) -> None:
        """Add the size of each split to ``messages``, with a note."""
        sizes = {role: f"{role} {len(of_role)}" for role, of_role in rows.items()}
        if self.stream is not None:
            sizes |= self.stream.describe_size()
        self.messages.append(f"data: {', '.join(sizes.values())}{note}")

    def name_part(self, split: str) -> str:
        """The rows of a split that are in memory, for messages: of a stream, only the first ones are."""
        is_part = self.stream is not None and split == "train"
        return f"{split}, first rows" if is_part else split

    def text_columns(self) -> dict[str, str]:
        """Column of texts -> the option that names it."""
        return dict.fromkeys(self.columns, self.text_key)

    def optional_text_columns(self) -> list[str]:
        """Columns whose values become a part of a row's texts, such as ``tools`` of a conversation, if a file has them.
        ``parse`` reads them after ``row_columns``, and ``add_optional_texts`` adds them."""
        return []

    def label_columns(self) -> dict[str, str]:
        """Column of labels -> the option that names it."""
        return dict.fromkeys(self.labels, "label")

    def every_file(self) -> list[Path]:
        """The files of all splits."""
        files: list[Path] = []
        for paths in self.files.values():
            files += paths
        if self.stream is not None:
            files += map(Path, self.stream.paths)
        return files

    def layout(self, predicts: bool = False) -> FileLayout:
        """How files are read: those of a split, or a file to predict, which has no labels."""
        if predicts:
            columns = dict.fromkeys(self.columns, self.text_key)
            return FileLayout(self.how, columns, self.optional_text_columns(), predicts=True, kept=self.kept)
        columns = self.text_columns() | self.label_columns() | self.text_columns()
        columns |= {name: key for name, key in self.drop.columns().items() if name not in columns}
        return FileLayout(self.how, columns, self.optional_text_columns(), skip_unreadable=self.skip_unreadable)

    def row_columns(self) -> dict[str, str]:
        """Column that ``parse`` reads -> the option that names it. Those of ``optional_text_columns`` follow."""
        return self.text_columns()

    def parse(self, columns: Sequence[Sequence[Any]], bad: Bad) -> dict[str, list[Any]]:
        """The columns of a split from those of its source. Rows in memory and streamed rows pass through it."""
        texts = {}
        by_name = dict(zip([*self.row_columns(), *self.optional_text_columns()], columns, strict=True))
        for name in self.row_columns():
            values = by_name[name]
            texts[name] = self.read_column(values, name, with_drop_line(bad, name, values))
        self.add_optional_texts(texts, {name: by_name[name] for name in self.optional_text_columns()}, bad)
        return texts

    def read_column(self, values: Iterable[Any], name: str, bad: Bad) -> list[str]:
        """A column of texts, of a split or of a file to predict."""
        return text_column(values, name, self.text_key, bad)

    def add_optional_texts(
        self, texts: Mapping[str, list[str]], optional: Mapping[str, Sequence[Any]], bad: Bad
    ) -> None:
        """Add the values of ``optional_text_columns`` to the texts of their rows, in place. In this class, there are
        none."""

    def parse_rows(self, rows: Sequence[Sequence[Any]], names: Sequence[object]) -> list[Any]:
        """Streamed rows as ``Rows.texts`` has those in memory. They may have more columns.

        Raises:
            DataError: A row, which ``names`` names, cannot be read.
        """

        def bad(index: int, problem: str) -> None:
            raise DataError(problem, code="invalid-row", place=str(names[index]))

        count = len(self.row_columns()) + len(self.optional_text_columns())
        columns = list(self.parse(list(zip(*rows, strict=True))[:count], bad).values())
        return columns[0] if len(columns) == 1 else list(zip(*columns, strict=True))

    def parse_blocks(self, part: Table, bad: Bad | None = None) -> Iterator[dict[str, list[Any]]]:
        """Yield the columns of a split from those of its source, block by block.

        Args:
            bad: Receives each row that cannot be read; None: they end in an error with their count.
        """
        unreadable = UnreadableRows(part)
        columns: list[Iterable[Any]] = [part.column(key, name) for name, key in self.row_columns().items()]
        columns += [part.columns.get(name, repeat(None, len(part))) for name in self.optional_text_columns()]
        report = bad or unreadable.add
        for start, block in in_blocks(columns):

            def at_row(index: int, problem: str, start: int = start) -> None:
                report(start + index, problem)

            yield self.parse(block, at_row)
        if unreadable.problems:
            skips = f"To skip such {self.unit}: --with skip-unreadable"
            if self.inference is not None or self.recipe.leaves_out("skip-unreadable"):
                skips = ""
            raise unreadable.error(self.unit, skips)

    def _rows(self, role: str, parts: list[Table]) -> Rows:
        """The rows of a split, without their labels."""
        rows = RowsBuilder()
        for part in parts:
            for block in self.parse_blocks(part):
                rows.add(block)
        if not rows.count:
            raise refuse_empty(role, parts)
        if self.reports(role):
            self.messages += check_texts(rows.blank, rows.count, parts, self.row_columns())
        return rows.finish()

    def streamed(self, run: Run, datasets: Mapping[str, Any], model: TextModel) -> Mapping[str, Any]:
        """The datasets of a run: those in memory, except a streamed training split."""
        if self.stream is None:
            return datasets
        from fastloop_plugins.text.streaming.rows import LabelledRows

        encode = LabelledRows(self, model, self.stream.label_table(datasets))
        return self.stream.datasets(run, datasets, encode)

    def needed_splits(self, available: Collection[str]) -> dict[str, str]:
        """Role -> split, of those to read. For inference: the evaluated one, or ``train``, if that is held out of it.

        Args:
            available: The splits that the source has.
        """
        splits = {role: name for role, name in vars(self.splits).items() if name is not None}
        if self.inference is None:
            return splits
        role = self.inference.split
        if role == "validation" and self.splits.validation not in available and self.options.validation_fraction:
            role = "train"
        return {key: name for key, name in splits.items() if key == role}

    def log_messages(self) -> None:
        """Log the findings about the data; the last message has its sizes."""
        for message in self.messages:
            if isinstance(message, Problem):
                logger.warning(message)
            else:
                logger.info("%s", message)

    def identity(self, folder: Path | None = None) -> str:
        """A hash of the files that ``load`` reads, and of all options that affect its result.

        Args:
            folder: Where the hashes of files are kept; see ``ContentHashes``.
        """
        options = vars(self.options) | {
            "files": None,
            "label_map": sorted(map(str, (self.options.label_map or {}).items())),
        }
        del options["shuffle_block"]  # the order of training, not the rows
        chosen = {
            "options": options,
            "splits": vars(self.splits),
            "limit": vars(self.limit),
            "draw": DRAW,
            "reader": READER,
        }
        chosen["skip_unreadable"] = self.skip_unreadable
        if self.inference is not None:
            # labels are ids of these classes
            chosen["inference"] = [str(self.inference.model), self.inference.split, self.classes]
        facts = [json.dumps(chosen, sort_keys=True)]
        hashes = ContentHashes(folder)
        for split, paths in self.files.items():
            for path, content in zip(paths, hashes.of(paths), strict=True):
                facts += [split, str(format_of(path)), content]
        return digest(facts)

    def read_files(self, paths: Sequence[str | Path]) -> list[Table]:
        """The parts of a split, one for each file."""
        layout = self.layout()
        return [layout.read(str(path)) for path in paths]

    def _readable(self, part: Table) -> Table:
        """A table without rows that cannot be read, or that have no label."""
        unreadable = UnreadableRows(part)
        for _ in self.parse_blocks(part, unreadable.add):
            pass
        good = zeros(len(part), np.bool_)
        np.logical_not(unreadable.is_unreadable, out=good)
        if not self.tagged:
            for name in self.labels:
                for start, (block,) in in_blocks([part.column("label", name)]):
                    has_label = [is_readable(value, self) for value in block]
                    good[start : start + len(block)] &= np.array(has_label, np.bool_)
        self.add_unreadable(part.unreadable + int((~good).sum()), unreadable)
        return part.keep(flatnonzero(good))

    def add_unreadable(self, count: int, rows: UnreadableRows) -> None:
        """Count rows that are skipped because they cannot be read, and add a warning to ``messages``.

        Args:
            rows: Those whose problem is known.
        """
        if not count:
            return
        text = f"{counted(count, self.unit.removesuffix('s'))} cannot be read, and {agree(count, 'is', 'are')} skipped."
        if rows.problems:
            text += f" {rows.describe_first()}"
        self.messages.append(Problem(text, code="rows-unreadable", place=rows.part.where))
        self.unreadable += count


def rows_of_texts(name: str, texts: list[str]) -> Rows:
    """Rows with one column of texts."""
    builder = RowsBuilder()
    builder.add({name: texts})
    return builder.finish()
