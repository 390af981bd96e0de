"""``data.sources``: training rows from several sources with columns of other names, mixed by weight."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fastloop import RecipeError, option
from fastloop.options import parse
from fastloop_plugins._mapped import concatenate, flatnonzero, take, zeros
from fastloop_plugins.rows.file import ColumnName
from fastloop_plugins.rows.held_out import draw
from fastloop_plugins.rows.paths import find_files
from fastloop_plugins.rows.split_rows import Rows
from fastloop_plugins.rows.table import Table
from fastloop_plugins.text.columns import column_names

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fastloop_plugins.text.data import TextData


@dataclass(kw_only=True)
class Source:
    """An entry of ``data.sources``."""

    files: str | list[str] = option("A path, a list of paths or a pattern.")
    text: str | list[str] | None = option("Its column of texts; null: that of data.text.", default=None)
    label: str | None = option("Its column of labels; null: that of data.label.", default=None)
    weight: float | None = option(
        "Its share of the samples, relative to the other weights; null: each row once.", default=None, gt=0
    )

    def __post_init__(self) -> None:
        self.where = ""  # its key in the recipe
        self.paths: list[Path] = []
        self.shards: list[str] = []  # for a stream, instead of ``paths``

    def find_shards(self, data: TextData) -> list[str]:
        """Its files, for a stream."""
        from fastloop_plugins.rows.index import find_shards

        self.shards = []
        for paths in find_shards(data.recipe, self.files, f"{self.where}.files", data.formats):
            self.shards += paths
        return self.shards

    def names(self, data: TextData) -> dict[str, ColumnName]:
        """Column of the section -> its name in the files of this source."""
        key = self.where.rpartition("data.")[2]
        own = column_names(data.columns if self.text is None else self.text, f"{self.where}.text")
        if len(own) != len(data.columns):
            raise RecipeError(
                code="wrong-type",
                place=f"{self.where}.text",
                found=str(own),
                expected=f"as many columns as data.text: {data.columns}",
            )
        names = dict[str, ColumnName]()
        for column, name in zip(data.columns, own, strict=True):
            names[column] = ColumnName(name, f"{key}.text")
        for column in data.labels:
            names[column] = ColumnName(self.label or column, f"{key}.label")
        for column, drop_option in data.drop.columns().items():
            if column not in names:
                names[column] = ColumnName(column, drop_option)
        return names

    def read(self, number: int, data: TextData) -> list[Table]:
        """Its files, with the columns named as ``data.text`` and ``data.label`` name them."""
        key = self.where.rpartition("data.")[2]
        names = self.names(data)
        layout = replace(data.layout(), columns={name.in_file: name.option for name in names.values()})
        parts = []
        for path in self.paths:
            part = layout.read(str(path))
            columns = {}
            class_names = {}
            for column, name in names.items():
                columns[column] = part.column(name.option, name.in_file)
                if name.in_file in part.class_names:
                    class_names[column] = part.class_names[name.in_file]
            where = f"{path} (data.{key})"
            parts.append(
                replace(part, where=where, columns=columns, names=None, source=number, class_names=class_names)
            )
        return parts


def find_sources(data: TextData, needed: Collection[str]) -> list[Source]:
    """The entries of ``data.sources``, with their files if train is needed.

    Raises:
        RecipeError: An entry is invalid, or only some have a weight.
    """
    where = f"{data.where}.sources"
    sources: list[Source] = []
    others = ("target", "messages", "prompt", "words", "tags")
    if data.text_key != "text" or data.several or any(data.recipe.data.get(key) is not None for key in others):
        raise RecipeError(
            "reads texts and one column of labels.",
            code="unknown-option",
            place=where,
            remedy="Rename the columns, and use data.files.",
        )
    for number, entry in enumerate(data.options.sources or ()):
        source = parse(Source, entry, f"{where}[{number}]")
        source.where = f"{where}[{number}]"
        if source.label is not None and not data.labels:
            raise RecipeError(
                "data.label is not there.",
                code="unknown-option",
                place=f"{source.where}.label",
                remedy="Remove it, or name data.label too.",
            )
        if "train" in needed and not data.options.streaming:
            source.paths = find_files(data.recipe, source.files, "train", f"{source.where}.files", data.formats)
        sources.append(source)
    if not sources:
        raise RecipeError(
            code="missing-value",
            place=where,
            found="an empty list",
            expected="sources such as {files: a.csv, text: review}",
        )
    weightless = [source.where for source in sources if source.weight is None]
    if weightless and len(weightless) < len(sources):
        raise RecipeError(
            "missing.",
            code="missing-value",
            place=f"{weightless[0]}.weight",
            remedy="Give each source a weight, or none.",
        )
    return sources


def number_sources(parts: Sequence[Table]) -> NDArray[np.int64]:
    """The number of each row's source."""
    numbers = zeros(sum(map(len, parts)), np.int64)
    start = 0
    for part in parts:
        numbers[start : start + len(part)] = part.source
        start += len(part)
    return numbers


def empty_share(share: float, whole: str, place: str) -> RecipeError:
    """The error for a source whose weight is so small that none of its rows would be read.

    Args:
        share: The weight, divided by the sum of all weights.
        whole: The samples that the weights divide, such as ``8 rows of an epoch``.
        place: The key of the weight.
    """
    return RecipeError(
        f"its share is {share:.2%}, which is none of the {whole}.",
        code="wrong-weights",
        place=place,
        remedy="Give it a larger weight. Without weights, each row comes once.",
    )


def mix_sources(rows: Rows, data: TextData) -> Rows:
    """The rows of an epoch. Their number is that of all rows, and each source has the share of its weight. A fixed seed
    draws the rows that are repeated or left out: they are the same in all epochs and runs. Adds the numbers to
    ``data.messages``.

    With 4 rows of weight 3 and 6 rows of weight 1, 7.5 of the 10 rows of an epoch are of the first source: it ends at
    row 8, so each of its rows comes twice. The second source has the other 2, which are drawn of its 6 rows.
    """
    assert rows.sources is not None
    ids_by_source = [flatnonzero(rows.sources == number) for number in range(len(data.sources))]
    pairs = list(zip(data.sources, ids_by_source, strict=True))
    weights = [len(ids) if source.weight is None else source.weight for source, ids in pairs]
    chosen: list[NDArray[np.int64]] = []
    lines: list[str] = []
    before = 0  # rows of an epoch of the sources before
    end = 0.0  # with those of this source, not rounded
    for number, ((source, ids), weight) in enumerate(zip(pairs, weights, strict=True)):
        if not len(ids):
            raise RecipeError(
                "has no rows left.",
                code="empty-split",
                place=source.where,
                remedy="Remove it, or what leaves out its rows.",
            )
        end += weight / sum(weights) * len(rows)
        # a source of 4 rows with a share of 11 rows: 2 whole passes, and 3 extra rows that are drawn
        share = round(end) - before
        if not share:
            share_of_weights = weight / sum(weights)
            raise empty_share(share_of_weights, f"{len(rows)} rows of an epoch", f"{source.where}.weight")
        whole_passes, extra = divmod(share, len(ids))
        before = round(end)
        chosen += [ids] * whole_passes
        chosen.append(take(ids, draw(len(ids), extra)))
        lines.append(f"data.sources[{number}] {len(ids)}, {share} an epoch")
    data.messages.append(f"data: train: rows of each source: {'; '.join(lines)}")
    every = concatenate(chosen)
    every.sort()
    return rows.keep(every)
