"""The options of the ``data`` section of text tasks, and the traits that tasks declare by them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from fastloop import Plugin, option
from fastloop_plugins.rows.suffixes import FORMATS
from fastloop_plugins.text.streaming.options import StreamingOptions

if TYPE_CHECKING:
    from fastloop import Trait
    from fastloop.recipe import Recipe


@dataclass(kw_only=True)
class DataOptions(StreamingOptions):
    """The ``data`` section."""

    name: str | None = option("Dataset: hub id or local folder.", default=None)
    subset: str | None = option("Configuration of the dataset, if it has several.", default=None)
    revision: str | None = option("Branch, tag or commit of the dataset on the hub.", default=None)
    files: dict[str, Any] | None = option(
        f"Split -> path, list of paths or pattern ({' '.join(FORMATS)}).", default=None
    )
    sources: list[dict[str, Any]] | None = option(
        "Instead of files.train: sources with columns of other names, {files, text, label, weight} each.", default=None
    )
    module: str | None = option(
        "Function that returns {split: rows}: package.module:name or file.py:name.", default=None
    )
    arguments: dict[str, Any] | None = option("Arguments of that function.", default=None)
    splits: dict[str, Any] | None = option(
        "What the source calls the splits train, evaluate and test; null: leave out.", default=None
    )
    text: str | list[str] = option(
        "The column of texts; two: pairs of texts, more: joined with the separator token.", default="text"
    )
    label: str | list[str] | None = option(
        "The column of labels: text, or whole numbers from 0; or 0/1 columns, one a class.", default=None
    )
    label_type: Literal["class", "classes", "number"] | None = option(
        "One class a row, any number of classes (lists of names, or 0/1 columns), or a number (regression); null: "
        "as label shows.",
        default=None,
    )
    label_offset: int = option(
        "The number that the first class has, where labels are numbers: 1 if they count from 1.", default=0, ge=0
    )
    label_map: dict[Any, int | str | None] | None = option(
        "Label as in the data -> name or number of its class, or null: leave out its rows; others stay.", default=None
    )
    drop: list[dict[str, Any]] | None = option(
        "Rows to leave out of all splits: {column: NAME}, with equals, shorter_than, longer_than, empty or first_role.",
        default=None,
    )
    deduplicate: bool = option(
        "Leave out rows of train whose texts an earlier row has; the first stays, with its label.", default=False
    )
    read: dict[str, Any] | None = option(
        "How files are read: delimiter, columns, encoding, quoting, compression, blank_lines.", default=None
    )
    max_length: int = option("Tokens of a sample at most.", default=512, ge=2)
    padding: Literal["longest", "max_length"] = option(
        "Pad to the longest of the batch, or always to max_length.", default="longest"
    )
    pad_to_multiple_of: int | None = option(
        "Pad lengths to a multiple of this; null: as plugins choose, 1: do not.", default=None, ge=1
    )
    shuffle_block: int | None = option(
        "Shuffle training samples in blocks of this many, for a slow disk; null: an epoch as a whole.",
        default=None,
        ge=16,
    )
    limit: dict[str, Any] | None = option(
        "Split -> how many samples to keep, drawn at random, always the same.", default=None
    )
    validation_fraction: float = option(
        "Share of train to evaluate on where there is no validation split.", default=0.1, ge=0, lt=1
    )


@dataclass(kw_only=True)
class Files:
    """``data.files``."""

    train: str | list[str] | None = option("a path, a list of paths or a pattern", default=None)
    validation: str | list[str] | None = option("a path, a list of paths or a pattern", default=None)
    test: str | list[str] | None = option("a path, a list of paths or a pattern", default=None)


def text_traits(recipe: Recipe) -> set[Trait]:
    """The traits that all text tasks have: ``token-ids``, and without ``data.streaming`` also ``deterministic`` and
    ``cached-token-ids``. With ``data.padding: max_length`` also ``fixed-length``."""
    traits: set[Trait] = {"token-ids"}
    if not recipe.data.get("streaming"):
        traits |= {"deterministic", "cached-token-ids"}
    return traits | {"fixed-length"} if is_padded_to_maximum(recipe) else traits


def padded_traits(recipe: Recipe) -> set[Trait]:
    """``text_traits``, and ``padded`` where a batch is padded to its longest text."""
    traits = text_traits(recipe)
    return traits if is_padded_to_maximum(recipe) else traits | {"padded"}


def is_padded_to_maximum(recipe: Recipe) -> bool:
    """Whether all samples are padded to ``data.max_length``."""
    return recipe.data.get("padding") == "max_length"


def language_traits(recipe: Recipe) -> set[Trait]:
    """The traits of a causal language model. Blocks of ``data.max_length`` tokens have a fixed length, and
    conversations are padded."""
    rows = any(recipe.data.get(key) is not None for key in ("messages", "prompt", "completion"))
    if not rows and (not recipe.data.get("streaming") or recipe.data.get("blocks")):
        return text_traits(recipe) | {"next-token-loss", "fixed-length"}
    return padded_traits(recipe) | {"next-token-loss"}


class SamplingOptions(Plugin):
    """Options of `fastloop predict` for tasks that generate texts."""

    temperature: float = option(
        "Divides the logits before drawing a token; 0: take the most probable token.", default=0.0, ge=0
    )
    top_k: int | None = option("Draw only from this many tokens, the most probable ones.", default=None, ge=1)
    top_p: float | None = option(
        "Draw only from the fewest tokens with this total probability.", default=None, gt=0, le=1
    )

    def sampling(self) -> dict[str, Any]:
        """Arguments of ``generate`` that draw tokens; none at temperature 0."""
        if not self.temperature:
            return {}
        drawn = {"temperature": self.temperature, "top_k": self.top_k or 0, "top_p": self.top_p or 1.0}
        return {"do_sample": True, **drawn}
