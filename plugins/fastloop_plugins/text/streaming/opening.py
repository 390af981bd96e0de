"""Opens the stream of a ``data`` section: finds the files of a training split that is streamed."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from fastloop import RecipeError
from fastloop_plugins.text.streaming.options import HOLD_OUT, refuse

if TYPE_CHECKING:
    from fastloop_plugins.text.data import TextData


def open_stream(data: TextData, files: Mapping[str, str | list[str]], needed: Collection[str]) -> set[str]:
    """Open the stream of ``data.files.train`` or ``data.sources``, if ``data.streaming`` is on. Sets ``data.stream``.

    Args:
        files: Split -> its paths and patterns, as in the recipe.
        needed: The splits that the run reads.

    Returns:
        The splits of ``needed`` to read into memory.

    Raises:
        RecipeError: The run evaluates the training split, or a file of it cannot be streamed.
    """
    if not _is_streamed(data, needed):
        return set(needed)
    from fastloop_plugins.rows.index import find_shards
    from fastloop_plugins.text.streaming.split import StreamedSplit

    train = data.splits.train
    if data.sources:
        entries = [source.find_shards(data) for source in data.sources]
    else:
        entries = find_shards(data.recipe, files[train], f"{data.where}.files.train", data.formats)
    data.stream = StreamedSplit(data, entries)
    return set(needed) - {train}


def open_shards(data: TextData) -> None:
    """Find the files of ``data.name``, and open the stream of its training split. Sets ``data.shards`` and
    ``data.stream``.

    Raises:
        RecipeError: The files cannot be listed, rows would be held out of the stream, or the run evaluates the training
            split.
    """
    from fastloop_plugins.text.streaming.shards import list_shards
    from fastloop_plugins.text.streaming.split import StreamedSplit

    data.shards = list_shards(data)
    splits = data.shards.splits
    if data.inference is None and data.options.validation_fraction and data.splits.validation not in splits:
        raise refuse(
            data, "validation_fraction", f"{HOLD_OUT} Name a split of {', '.join(splits)}: data.splits.validation"
        )
    needed = [name for name in data.needed_splits(splits).values() if name in splits]
    if _is_streamed(data, needed):
        data.stream = StreamedSplit(data, [splits[data.splits.train]])


def _is_streamed(data: TextData, needed: Collection[str]) -> bool:
    """Whether the run reads the training split from a stream.

    Raises:
        RecipeError: The run evaluates it.
    """
    if not data.options.streaming or data.splits.train not in needed:
        return False
    if data.inference is not None:
        raise RecipeError(
            "the training split is only streamed, and not evaluated.",
            code="unknown-split",
            place=f"{data.where}.streaming",
            remedy="Choose another split.",
        )
    return True
