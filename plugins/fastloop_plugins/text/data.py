"""The ``data`` section of the text tasks: rows from files, a Python function, a local folder or the hub.

Sources return *parts* (one file, one split), so that an error can name its file. A *role* is ``train``,
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
from fastloop_plugins._cache import digest
from fastloop_plugins._mapped import flatnonzero, zeros
from fastloop_plugins.models.hub import check_hub_name, explain, offline, quiet
from fastloop_plugins.rows.column import in_blocks
from fastloop_plugins.rows.content_hashes import ContentHashes
from fastloop_plugins.rows.drop import Condition, Drop, with_drop_line
from fastloop_plugins.rows.formats import FileLayout, KeptColumns
from fastloop_plugins.rows.options import Read
from fastloop_plugins.rows.paths import find_files, refuse_options_without_files, refuse_repeated, refuse_url
from fastloop_plugins.rows.source import call_source, check_source
from fastloop_plugins.rows.split_rows import Rows, RowsBuilder
from fastloop_plugins.rows.splits import DRAW, Limit, Splits, divide, hold_out_ends
from fastloop_plugins.rows.suffixes import FORMATS, format_of, installed_formats
from fastloop_plugins.rows.table import Bad, Table, table_of, text_column
from fastloop_plugins.rows.unreadable import UnreadableRows
from fastloop_plugins.text.columns import check_texts, column_names, describe_empty, refuse_empty
from fastloop_plugins.text.dropped_rows import drop_repeats, drop_rows
from fastloop_plugins.text.option_checks import check_label_options
from fastloop_plugins.text.options import DataOptions, Files
from fastloop_plugins.text.repeats import find_repeats
from fastloop_plugins.text.sources import Source, find_sources, mix_sources, number_sources
from fastloop_plugins.text.streaming.options import check_streaming
from fastloop_plugins.text.streaming.streamed_data import StreamedData
from fastloop_plugins.text.targets import is_readable, read_labels, summarize

if TYPE_CHECKING:
    from fastloop.recipe import Recipe

logger = logging.getLogger("fastloop")

SOURCES = {"name": "name (a dataset)", "files": "files", "module": "module (a function)"}
"""Option of ``data`` that names the source of the rows -> the option in messages."""
NOTES = 8
"""Lines of the log about how files are read: a pattern may match thousands of them."""
READER = 3
"""Increase it when the same files and options give different rows, so that cached token ids are not used."""


class TextData(StreamedData):
    """The ``data`` section of a recipe. The constructor checks it, ``load`` reads it.

    Raises:
        RecipeError: An option is invalid, or a file does not exist.
    """

    section: ClassVar[type[DataOptions]] = DataOptions
    text_key = "text"  # the option that names the column of texts
    unit = "rows"  # what a row is called in messages
    subject = "a language model"  # what a task without labels is called in messages
    own_formats: ClassVar[Sequence[str]] = ()  # suffixes that this section reads beside those of all sections

    def __init__(self, recipe: Recipe, labelled: bool) -> None:
        self.recipe, self.where = recipe, f"{recipe.where}: data"
        for split in ("train", "validation", "test"):
            if split in recipe.data:
                raise RecipeError(
                    "no such option.",
                    code="unknown-option",
                    place=f"{self.where}.{split}",
                    remedy=f"For files: data.files.{split}={recipe.data[split]}.",
                )
        self.options = parse(self.section, recipe.data, self.where)
        self.splits = parse(Splits, self.options.splits, f"{self.where}.splits")
        self.limit = parse(Limit, self.options.limit, f"{self.where}.limit")
        self.how = parse(Read, self.options.read, f"{self.where}.read")
        conditions = enumerate(self.options.drop or ())
        self.drop = Drop([parse(Condition, each, f"{self.where}.drop[{number}]") for number, each in conditions])
        self.inference = recipe.inference
        self.columns = self.find_columns()
        self.labels = [] if self.options.label is None else column_names(self.options.label, f"{self.where}.label")
        self.several = isinstance(self.options.label, list)
        self.label_type = self.options.label_type or ("classes" if self.several else "class")
        self.classes: list[str] = []  # in inference: set before ``load``, from the model
        self.keeps_places = False  # whether ``load`` keeps ``tables`` and ``Rows.numbers``, for ``row_places``
        self.tables: dict[str, list[Table]] = {}  # the rows of each split as read, without dropped ones
        self.messages: list[str | Problem] = []  # lines for the log, and warnings
        self.kept: KeptColumns | None = None  # of a file to predict, see ``FileLayout``
        self.skip_unreadable, self.unreadable = False, 0  # whether to skip unreadable rows; number of skipped rows
        check_label_options(self, labelled)
        self.files: dict[str, list[Path]] = {}
        self.sources: list[Source] = []
        check_streaming(self, recipe.data)
        if self.inference is not None and self.inference.source is not None:
            return  # the rows come from there
        if self.options.sources is not None:
            if (self.options.files or {}).get("train") is not None:
                raise RecipeError(
                    code="exclusive-options", place=self.where, found="files.train and sources", expected="one of them"
                )
            self.options.files = {**(self.options.files or {}), "train": []}
        # as when a user adds files to a shipped recipe
        if self.options.name is not None and self.options.files is not None:
            logger.info("data: files are given, so data.name (%s) is not used", self.options.name)
            self.options.name = None
        check_source(self.options, SOURCES, recipe)
        if self.options.files is not None:
            files = vars(parse(Files, self.options.files, f"{self.where}.files"))
            given = {split: paths for split, paths in files.items() if paths is not None}
            roles = given if self.inference is None else self._needed(given).values()
            if self.options.sources is not None:
                self.sources = find_sources(self, roles)
            needed = self.open_stream(given, roles)
            self.files = {
                split: find_files(recipe, paths, split, f"{self.where}.files.{split}", self.formats)
                if split in needed and not (self.sources and split == "train")
                else []
                for split, paths in given.items()
            }
            for split, paths in self.files.items():
                refuse_repeated(paths, f"{self.where}.files.{split}")
            if self.sources:
                self.files["train"] = [path for source in self.sources for path in source.paths]
            if "train" not in self.files and self.inference is None:
                raise RecipeError(
                    "missing.", code="missing-value", place=f"{self.where}.files.train", expected="a file to train on"
                )
        if len(self.columns) > 1 and (
            texts := [path for paths in self.files.values() for path in paths if format_of(path)[0] == ".txt"]
        ):
            raise RecipeError(
                f"found {self.columns}, and {texts[0]} has one column.",
                code="unknown-format",
                place=f"{self.where}.text",
                remedy="Use another format.",
            )
        if self.options.name is not None:
            self._check_name(self.options.name)
            if self.options.streaming:
                self.open_shards()
        if self.options.read is not None:
            self._check_read()

    def find_columns(self) -> list[str]:
        """The columns of texts that the options name."""
        return column_names(self.options.text, f"{self.where}.text")

    def names_of(self, key: str) -> list[str]:
        """The columns that the option ``data.<key>`` names."""
        given: str | list[str] | None = getattr(self.options, key)
        return [] if given is None else column_names(given, f"{self.where}.{key}")

    @property
    def formats(self) -> Sequence[str]:
        """The suffixes of the files that the section reads."""
        return (*FORMATS, *installed_formats(), *self.own_formats)

    def _check_read(self) -> None:
        if self.options.files is None:
            raise RecipeError(
                "it is for data.files, which is not there.",
                code="unknown-option",
                place=f"{self.where}.read",
                remedy="Remove it, or give the files there.",
            )
        refuse_options_without_files(self.how, self.every_file(), f"{self.where}.read", self.formats)
        if self.sources or self.how.columns is None:
            return
        wanted = [("text", name) for name in self.columns] + [("label", name) for name in self.labels]
        wanted += [(key, name) for name, key in self.drop.columns().items()]
        for key, name in wanted:
            if name not in self.how.columns:
                raise RecipeError(
                    code="unknown-column",
                    place=f"{self.where}.read.columns",
                    found=str(self.how.columns),
                    expected=f"{name!r} (data.{key}) among them",
                )

    def _check_name(self, name: str) -> None:
        refuse_url(name, f"{self.where}.name", "its files")
        path = self.recipe.find(name)
        if path.is_file():
            raise RecipeError(
                f"{name} is a file.",
                code="not-a-name",
                place=f"{self.where}.name",
                remedy=f"Give it as data.files.train={name}.",
            )
        check_hub_name(name, path, f"{self.where}.name: {name}")

    # -- reading -------------------------------------------------------------------------------------------------------

    def load(self) -> dict[str, Rows]:
        """Read ``train``, and ``validation`` and ``test`` if they exist.

        Raises:
            RecipeError: Files, columns or labels are invalid.
        """
        self.messages, self.unreadable, parts = [], 0, self._read()
        splits, held_out = self._needed(parts), self.options.validation_fraction and self.splits.validation not in parts
        for role, name in splits.items():
            if name not in parts and (self.inference or role == "train" or role in (self.options.splits or {})):
                raise RecipeError(
                    f"there is no split {name!r}. There are: {', '.join(parts) or 'none'}.",
                    code="unknown-split",
                    place=f"{self.where}.splits.{role}",
                )
        for name in splits.values():
            self.messages += describe_empty(parts.get(name, []))
        used = drop_rows({role: parts[name] for role, name in splits.items() if name in parts}, self)
        if self.skip_unreadable:  # rows that are left out anyway need not be readable
            used = {role: [self._readable(part) for part in found] for role, found in used.items()}
        if self.options.deduplicate and "train" in used:
            used["train"] = drop_repeats(used["train"], self)
        rows = {role: self._rows(role, found) for role, found in used.items()}
        if self.keeps_places:
            self.tables = used
            for of_role in rows.values():
                of_role.numbers = np.arange(len(of_role))
        notes = [note for found in used.values() for part in found for note in part.notes]
        self.messages += notes[:NOTES]
        if len(notes) > NOTES:
            self.messages.append(f"data: and {len(notes) - NOTES} more lines such as these, of other files")
        if self.options.label is not None:
            labels = read_labels(used, self)
            self.messages += labels.notes
            self.messages += [Problem(line, code="doubtful-labels") for line in labels.warnings]
            self.classes = labels.classes
            for role in rows:
                rows[role].labels = labels.ids[role]
        if self.sources and "train" in rows:
            rows["train"].sources = number_sources(used["train"])
        classes = rows["train"].labels if "train" in rows and self.label_type == "class" else None
        fraction = self.options.validation_fraction if held_out else 0.0
        if fraction and self.how.blank_lines and "train" in rows:
            name, texts = next(iter(rows["train"].columns.items()))
            sources = rows["train"].sources
            for role, parts_of_texts in zip(("train", "validation"), hold_out_ends(texts, fraction), strict=True):
                builder = RowsBuilder()
                builder.add({name: parts_of_texts})
                rows[role] = builder.finish()
            rows["train"].sources = sources
            rows, _ = divide(rows, 0.0, None, self.limit, self.where)
            suffix = f" (no validation split: the last {fraction:.0%} of each file held out)"
        else:
            rows, suffix = divide(rows, fraction, classes, self.limit, self.where)
        if self.inference is None and self.stream is None:
            self.messages += find_repeats(rows, self, held_out=fraction > 0)
            if self.sources:
                rows["train"] = mix_sources(rows["train"], self)
        if "train" in rows and rows["train"].labels is not None and self.stream is None:
            suffix += f"; {summarize(rows['train'].labels, self)}"
        rows = {role: split for role, split in rows.items() if self.inference is None or role == self.inference.split}
        sizes = {role: f"{role} {len(split)}" for role, split in rows.items()} | (
            self.stream.size() if self.stream else {}
        )
        self.messages.append(f"data: {', '.join(sizes.values())}{suffix}")
        self.log_messages()
        return rows

    def name_part(self, split: str) -> str:
        """The rows of a split that are in memory, for messages: of a stream, only the first ones are."""
        is_part = self.stream is not None and split == "train"
        return f"{split}, first rows" if is_part else split

    def text_columns(self) -> dict[str, str]:
        """Column of texts -> the option that names it."""
        return dict.fromkeys(self.columns, self.text_key)

    def layout(self, predicts: bool = False) -> FileLayout:
        """How files are read: those of a split, or a file to predict, which has no labels."""
        if predicts:
            columns = dict.fromkeys(self.columns, self.text_key)
            return FileLayout(self.how, columns, self.optional_columns(), predicts=True, kept=self.kept)
        columns = self.text_columns() | self.label_columns() | self.text_columns()
        columns |= {name: key for name, key in self.drop.columns().items() if name not in columns}
        return FileLayout(self.how, columns, self.optional_columns(), skip_unreadable=self.skip_unreadable)

    def row_columns(self) -> dict[str, str]:
        """Column that ``parse`` reads -> the option that names it. Those of ``optional_columns`` follow."""
        return self.text_columns()

    def parse(self, columns: Sequence[Sequence[Any]], bad: Bad) -> dict[str, list[Any]]:
        """The columns of a split from those of its source. Rows in memory and streamed rows pass through it."""
        parsed = {}
        for name, values in zip(self.row_columns(), columns, strict=True):
            parsed[name] = self.read_column(values, name, with_drop_line(bad, name, values))
        return parsed

    def read_column(self, values: Iterable[Any], name: str, bad: Bad) -> list[str]:
        """A column of texts, of a split or of a file to predict."""
        return text_column(values, name, self.text_key, bad)

    def parse_rows(self, rows: Sequence[Sequence[Any]], names: Sequence[object]) -> list[Any]:
        """Streamed rows as ``Rows.texts`` has those in memory. They may have more columns.

        Raises:
            DataError: A row, which ``names`` names, cannot be read.
        """

        def bad(index: int, problem: str) -> None:
            raise DataError(problem, code="invalid-row", place=str(names[index]))

        count = len(self.row_columns()) + len(self.optional_columns())
        columns = list(self.parse(list(zip(*rows, strict=True))[:count], bad).values())
        return columns[0] if len(columns) == 1 else list(zip(*columns, strict=True))

    def parse_blocks(self, part: Table, bad: Bad | None = None) -> Iterator[dict[str, list[Any]]]:
        """Yield the columns of a split from those of its source, block by block.

        Args:
            bad: Receives each row that cannot be read; None: they end in an error with their count.
        """
        unreadable = UnreadableRows(part)
        columns: list[Iterable[Any]] = [part.column(key, name) for name, key in self.row_columns().items()]
        columns += [part.columns.get(name, repeat(None, len(part))) for name in self.optional_columns()]
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
        self.messages += check_texts(rows.blank, rows.count, parts, self.row_columns())
        return rows.finish()

    def _needed(self, there: Collection[str]) -> dict[str, str]:
        """Role -> split, of those to read. For inference: the evaluated one, or ``train``, if that is held out of
        it."""
        splits = {role: name for role, name in vars(self.splits).items() if name is not None}
        if self.inference is None:
            return splits
        role = self.inference.split
        if role == "validation" and self.splits.validation not in there and self.options.validation_fraction:
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

    def _read(self) -> dict[str, list[Table]]:
        """Split -> parts, from the configured source."""
        if self.options.module is not None:
            return self._call()
        if self.shards is not None:
            return self.read_shards()
        if self.options.name is not None:
            return self._dataset(self.options.name)
        found = {
            split: self._read_files(paths)
            if split in vars(self.splits).values() and not (self.sources and split == "train")
            else []
            for split, paths in self.files.items()
        }
        if self.sources and self.stream is None:
            parts = [part for number, source in enumerate(self.sources) for part in source.read(number, self)]
            return found | {"train": parts}
        return found if self.stream is None else found | {"train": [self.stream.read_head()]}

    def _read_files(self, paths: Sequence[str | Path]) -> list[Table]:
        layout = self.layout()
        return [layout.read(str(path)) for path in paths]

    def _call(self) -> dict[str, list[Table]]:
        reference, result = self.options.module, call_source(self.options, self.recipe)
        if not isinstance(result, Mapping):
            raise RecipeError(
                f"{reference} returned {type(result).__name__}, expected {{split: rows}}.",
                code="wrong-result",
                place=f"{self.where}.module",
            )
        return {
            str(split): [table_of(f"{reference}, split {split}", rows, *self._dataset_columns())]
            for split, rows in result.items()
        }

    def _dataset_columns(self) -> tuple[dict[str, str], str | None]:
        """The columns that are read from a dataset -> the option that names each; and that of its labels."""
        layout = self.layout()
        columns = dict.fromkeys(layout.optional, self.text_key) | dict(layout.columns)
        return columns, next(iter(self.labels), None)

    def _dataset(self, name: str) -> dict[str, list[Table]]:
        import datasets

        folder = self.recipe.find(name)
        try:
            with quiet():
                if (folder / "dataset_dict.json").is_file():
                    found = datasets.load_from_disk(str(folder))
                elif (folder / "state.json").is_file():  # `save_to_disk` of a single dataset, which has no split
                    found = {self.splits.train: datasets.load_from_disk(str(folder))}
                elif folder.is_dir():
                    builder = datasets.load_dataset_builder(str(folder.resolve()), self.options.subset)
                    if builder.name == "csv":  # datasets would guess types and missing values
                        return {
                            str(split): self._read_files(paths) for split, paths in builder.config.data_files.items()
                        }
                    found = datasets.load_dataset(str(folder.resolve()), self.options.subset)
                else:
                    offline()
                    found = datasets.load_dataset(name, self.options.subset, revision=self.options.revision)
        except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
            raise RecipeError(
                explain(f"{self.where}.name", name, folder, error, "data.files.train=FILE or data.name=FOLDER"),
                code="file-unreadable",
            ) from None
        return {
            split: [table_of(f"dataset {name}, split {split}", rows, *self._dataset_columns())]
            for split, rows in found.items()
        }

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
        text = f"{count} {self.unit} cannot be read, and are skipped."
        if rows.problems:
            text += f" {rows.describe_first()}"
        self.messages.append(Problem(text, code="rows-unreadable", place=rows.part.where))
        self.unreadable += count
