"""The part of the ``data`` section of text tasks that opens a streamed training split."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from fastloop import RecipeError
from fastloop_plugins.text.streaming.options import HOLD_OUT, refuse

if TYPE_CHECKING:
    from fastloop import Run
    from fastloop_plugins.rows.table import Table
    from fastloop_plugins.text.model import TextModel
    from fastloop_plugins.text.streaming.dataset import Streaming
    from fastloop_plugins.text.streaming.shards import Shards


class StreamedData:
    """The part of ``TextData`` that streams.

    Attributes:
        stream: The training split, if it is streamed.
        shards: The files of ``data.name``, if it is streamed.
        tagged: Whether a row has a list of labels, which are counted one by one.
    """

    stream: Streaming | None = None
    shards: Shards | None = None
    tagged = False

    def open_stream(self: Any, files: Mapping[str, Any], needed: Collection[str]) -> set[str]:
        """Find the files of a streamed training split. Returns the splits of ``needed`` to read into memory."""
        train = self.splits.train
        if not self.options.streaming or train not in needed:
            return set(needed)
        from fastloop_plugins.rows.index import find_shards
        from fastloop_plugins.text.streaming.dataset import Streaming

        if self.inference is not None:
            raise RecipeError(
                "the training split is only streamed, and not evaluated.",
                code="unknown-split",
                place=f"{self.where}.streaming",
                remedy="Choose another split.",
            )
        entries: list[list[str]]
        if self.shards is not None:
            entries = [files[train]]
        elif self.sources:
            entries = [source.find_shards(self) for source in self.sources]
        else:
            entries = find_shards(self.recipe, files[train], f"{self.where}.files.train", self.formats)
        self.stream = Streaming(self, entries)
        return set(needed) - {train}

    def open_shards(self: Any) -> None:
        """Find the files of ``data.name``, and open its training split."""
        from fastloop_plugins.text.streaming.shards import list_shards

        self.shards = list_shards(self)
        there = self.shards.splits
        if self.inference is None and self.options.validation_fraction and self.splits.validation not in there:
            raise refuse(
                self, "validation_fraction", f"{HOLD_OUT} Name a split of {', '.join(there)}: data.splits.validation"
            )
        self.open_stream(there, [name for name in self.needed_splits(there).values() if name in there])

    def read_shards(self: Any) -> dict[str, list[Table]]:
        """The splits of ``data.name`` that are needed."""
        needed = self.needed_splits(self.shards.splits).values()
        tables_of: dict[str, list[Table]] = {}
        for split, paths in self.shards.splits.items():
            if self.stream is not None and split == self.splits.train:
                tables_of[split] = [self.stream.read_head()]
            elif split in needed:
                tables_of[split] = self.read_files(paths)
            else:
                tables_of[split] = []
        names = self.shards.class_names(self)
        for tables in tables_of.values():
            for table in tables:
                table.classes = names
        return tables_of

    def every_file(self: Any) -> list[Path]:
        """The files of all splits."""
        files: list[Path] = []
        for paths in self.files.values():
            files += paths
        if self.stream is not None:
            files += map(Path, self.stream.paths)
        return files

    def optional_columns(self) -> list[str]:
        """Columns that are read if a file has them, after those of ``text_columns``."""
        return []

    def label_columns(self: Any) -> dict[str, str]:
        """Column of labels -> the option that names it."""
        return dict.fromkeys(self.labels, "label")

    def streamed(self: Any, run: Run, datasets: Mapping[str, Any], model: TextModel) -> Mapping[str, Any]:
        """The datasets of a run: those in memory, except a streamed training split."""
        if self.stream is None:
            return datasets
        from fastloop_plugins.text.streaming.dataset import LabelledRows

        encode = LabelledRows(self, model, self.stream.label_table(datasets))
        return cast("Mapping[str, Any]", self.stream.datasets(run, datasets, encode))
