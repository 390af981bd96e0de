"""The options of ``data.streaming``, and the settings that cannot hold with it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from fastloop import RecipeError, option

if TYPE_CHECKING:
    from fastloop import Run
    from fastloop_plugins.rows.table import Table
    from fastloop_plugins.text.data import TextData
    from fastloop_plugins.text.model import TextModel
    from fastloop_plugins.text.streaming.dataset import Streaming
    from fastloop_plugins.text.streaming.shards import Shards

HOLD_OUT = "no rows are held out of a stream."
PLUGINS = {
    "folds": "it divides rows in memory. Remove it",
    "length-bucketing": "it sorts by the lengths of all rows. Remove it; packing computes no padding either",
    "skip-unreadable": "rows of a stream cannot be left out. Remove it, and correct the rows",
}
"""Plugins that need the whole training split, and why."""


@dataclass(kw_only=True)
class StreamingOptions:
    """Options of the ``data`` section for training data larger than memory."""

    streaming: bool = option("Read the training files while training; other splits stay in memory.", default=False)
    shuffle_buffer: int = option(
        "With streaming: rows in memory to shuffle in, for each process that reads; 0: do not shuffle.",
        default=10_000,
        ge=0,
    )
    lanes: int = option(
        "With streaming: row groups read side by side. Half as many processes with two workers each share no row.",
        default=16,
        ge=1,
    )
    mix: list[float] | None = option(
        "With streaming: the share of each entry of data.files.train in the samples.", default=None
    )


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
        self.open_stream(there, [name for name in self._needed(there).values() if name in there])

    def read_shards(self: Any) -> dict[str, list[Table]]:
        """The splits of ``data.name`` that are needed."""
        found, needed = {}, self._needed(self.shards.splits).values()
        for split, paths in self.shards.splits.items():
            if self.stream is not None and split == self.splits.train:
                found[split] = [self.stream.read_head()]
            else:
                found[split] = self._read_files(paths) if split in needed else []
        names = self.shards.class_names(self)
        for table in (table for tables in found.values() for table in tables):
            table.classes = names
        return found

    def every_file(self: Any) -> list[Path]:
        """The files of all splits."""
        streamed = [] if self.stream is None else self.stream.paths
        return [path for paths in self.files.values() for path in paths] + [Path(path) for path in streamed]

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


def refuse(data: TextData, key: str, reason: str) -> RecipeError:
    """The error for an option that a stream does not support."""
    return RecipeError(f"cannot hold with data.streaming: {reason}.", code="no-streaming", place=f"{data.where}.{key}")


def check_streaming(data: TextData, given: dict[str, Any]) -> None:
    """Check the options that a stream does not support.

    Args:
        given: The recipe's ``data`` section.

    Raises:
        RecipeError: Names the key, and what to do.
    """
    options, where, plugins = data.options, data.where, data.recipe.plugins
    if not options.streaming:
        for key in ("shuffle_buffer", "lanes", "mix"):
            if given.get(key) is not None:
                raise RecipeError(
                    "it is for data.streaming, which is not on.",
                    code="unknown-option",
                    place=f"{where}.{key}",
                    remedy="Remove it, or set data.streaming=true.",
                )
        return

    if options.files is None and options.sources is None and options.name is None:
        raise RecipeError(
            "it reads files, and there are none.",
            code="missing-value",
            place=f"{where}.streaming",
            remedy="Give data.files.train, data.sources or data.name.",
        )
    if options.sources is not None and options.mix is not None:
        raise RecipeError(
            "is for data.files.train.",
            code="unknown-option",
            place=f"{where}.mix",
            remedy="Give each entry of data.sources a weight.",
        )
    if options.shuffle_block is not None:
        raise refuse(data, "shuffle_block", "a stream has data.lanes and data.shuffle_buffer. Remove it")
    if data.limit.train is not None:
        raise refuse(data, "limit.train", "rows are not drawn from a stream. Set train.max_steps, or name fewer files")
    named = options.files is None and options.sources is None
    if options.validation_fraction and not named and (options.files or {}).get("validation") is None:
        raise refuse(
            data, "validation_fraction", f"{HOLD_OUT} Give data.files.validation, or set validation_fraction: 0"
        )
    if data.splits.train != "train" and not named:
        raise refuse(data, "splits.train", "data.files.train is streamed. Remove it")
    if None in (options.label_map or {}).values():
        raise refuse(
            data,
            "label_map",
            "null leaves out rows of memory. Leave them out by data.drop, with column and equals, or with column and "
            "empty: true for rows without a label",
        )
    if options.deduplicate:
        raise refuse(data, "deduplicate", "it compares all rows in memory. Remove repeated rows from the files")
    if data.label_type == "classes" and options.label is not None:
        raise refuse(
            data,
            "label_type=classes",
            "expected one class or one number a row. Remove data.streaming, or train on one label",
        )
    if options.mix is not None:
        train = (options.files or {}).get("train")
        entries = train if isinstance(train, list) else [""]
        if len(options.mix) != len(entries) or len(entries) < 2 or min(options.mix) <= 0:
            raise RecipeError(
                code="wrong-weights",
                place=f"{where}.mix",
                found=f"{options.mix} for {len(entries)} entries of data.files.train",
                expected=(
                    "two entries or more, and a positive number for each, such as files.train: [a/*.parquet, "
                    "b/*.parquet] with mix: [0.7, 0.3]"
                ),
            )
    for name, reason in PLUGINS.items():
        if isinstance(plugins.get(name), dict):
            raise RecipeError(
                f"cannot hold with data.streaming: {reason}.",
                code="no-streaming",
                place=f"{data.recipe.where}: plugins.{name}",
            )
    for name, chosen in plugins.items():
        loss = chosen.get("loss") if isinstance(chosen, dict) else None
        if isinstance(loss, dict) and loss.get("class_weights") == "balanced":
            raise RecipeError(
                "balanced cannot hold with data.streaming: it counts rows in memory.",
                code="no-streaming",
                place=f"{data.recipe.where}: plugins.{name}.loss.class_weights",
                remedy="Give a list of weights, or a mapping of the classes' names.",
            )
