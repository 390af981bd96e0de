"""The options of ``data.streaming``, and the settings that cannot hold with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fastloop import RecipeError, option

if TYPE_CHECKING:
    from fastloop_plugins.text.data import TextData

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
        "With streaming: parts of an epoch that are read side by side. Up to lanes / 2 processes with two data "
        "workers each read no row twice.",
        default=16,
        ge=1,
    )
    mix: list[float] | None = option(
        "With streaming: the share of each entry of data.files.train in the samples.", default=None
    )


def refuse(data: TextData, key: str, reason: str) -> RecipeError:
    """The error for an option that a stream does not support."""
    return RecipeError(f"cannot hold with data.streaming: {reason}.", code="no-streaming", place=f"{data.where}.{key}")


def check_streaming(data: TextData, section: Mapping[str, Any]) -> None:
    """Check the options that a stream does not support.

    Args:
        section: The recipe's ``data`` section.

    Raises:
        RecipeError: Names the key, and what to do.
    """
    if not data.options.streaming:
        _check_absent(data, section)
        return
    _check_files(data)
    _check_rows(data)
    if data.options.mix is not None:
        _check_mix(data, data.options.mix)
    _check_plugins(data)


def _check_absent(data: TextData, section: Mapping[str, Any]) -> None:
    """Without a stream: check that no option is for one."""
    for key in ("shuffle_buffer", "lanes", "mix"):
        if section.get(key) is not None:
            raise RecipeError(
                "it is for data.streaming, which is not on.",
                code="unknown-option",
                place=f"{data.where}.{key}",
                remedy="Remove it, or set data.streaming=true.",
            )


def _check_files(data: TextData) -> None:
    """Check that there are files to read, and that each split has its own."""
    options = data.options
    if options.files is None and options.sources is None and options.name is None:
        raise RecipeError(
            "it reads files, and there are none.",
            code="missing-value",
            place=f"{data.where}.streaming",
            remedy="Give data.files.train, data.sources or data.name.",
        )
    if options.sources is not None and options.mix is not None:
        raise RecipeError(
            "it is for data.files.train.",
            code="unknown-option",
            place=f"{data.where}.mix",
            remedy="Give each entry of data.sources a weight.",
        )
    if options.shuffle_block is not None:
        raise refuse(data, "shuffle_block", "a stream has data.lanes and data.shuffle_buffer. Remove it")
    if data.limit.train is not None:
        raise refuse(data, "limit.train", "rows are not drawn from a stream. Set train.max_steps, or name fewer files")
    is_named = options.files is None and options.sources is None
    if is_named:
        return
    if options.validation_fraction and (options.files or {}).get("validation") is None:
        raise refuse(
            data, "validation_fraction", f"{HOLD_OUT} Give data.files.validation, or set validation_fraction: 0"
        )
    if data.splits.train != "train":
        raise refuse(data, "splits.train", "data.files.train is streamed. Remove it")


def _check_rows(data: TextData) -> None:
    """Check the options that leave out rows, or that give a row several classes."""
    options = data.options
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


def _check_mix(data: TextData, mix: list[float]) -> None:
    """Check that there is a positive share for each entry of the training files."""
    train = (data.options.files or {}).get("train")
    entries = len(train) if isinstance(train, list) else 1
    if len(mix) != entries or entries < 2 or min(mix) <= 0:
        raise RecipeError(
            code="wrong-weights",
            place=f"{data.where}.mix",
            found=f"{mix} for {entries} entries of data.files.train",
            expected=(
                "two entries or more, and a positive number for each, such as files.train: [a/*.parquet, "
                "b/*.parquet] with mix: [0.7, 0.3]"
            ),
        )


def _check_plugins(data: TextData) -> None:
    """Check that no plugin needs the whole training split."""
    plugins = data.recipe.plugins
    for name, reason in PLUGINS.items():
        if isinstance(plugins.get(name), dict):
            raise RecipeError(
                f"cannot hold with data.streaming: {reason}.",
                code="no-streaming",
                place=f"{data.recipe.where}: plugins.{name}",
            )
    for name, options in plugins.items():
        loss = options.get("loss") if isinstance(options, dict) else None
        if isinstance(loss, dict) and loss.get("class_weights") == "balanced":
            raise RecipeError(
                "balanced cannot hold with data.streaming: it counts rows in memory.",
                code="no-streaming",
                place=f"{data.recipe.where}: plugins.{name}.loss.class_weights",
                remedy="Give a list of weights, or a mapping of the classes' names.",
            )
