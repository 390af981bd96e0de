"""The options of ``data.streaming``, and the settings that cannot hold with it."""

from __future__ import annotations

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
        "With streaming: row groups read side by side. Half as many processes with two workers each share no row.",
        default=16,
        ge=1,
    )
    mix: list[float] | None = option(
        "With streaming: the share of each entry of data.files.train in the samples.", default=None
    )


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
    options = data.options
    where = data.where
    plugins = data.recipe.plugins
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
