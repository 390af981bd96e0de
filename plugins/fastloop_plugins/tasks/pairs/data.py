"""Rows of ``seq2seq``: an input text and a target text, as token ids and as padded batches."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np

from fastloop import Batch, RecipeError, option
from fastloop_plugins._cache import flat
from fastloop_plugins.rows.paths import format_of
from fastloop_plugins.rows.table import Bad
from fastloop_plugins.text.batches import Sequences, Width, describe_cut, mask, padded
from fastloop_plugins.text.chunks import text_chunks
from fastloop_plugins.text.data import Data, TextData
from fastloop_plugins.text.next_token_loss import IGNORED
from fastloop_plugins.text.samples import show_tokens
from fastloop_plugins.text.streaming.samples import end_of
from fastloop_plugins.text.tokens import encode, encode_marked, portions

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fastloop import Run
    from fastloop.recipe import Recipe
    from fastloop_plugins.rows.index import Row
    from fastloop_plugins.text.model import TextModel
    from fastloop_plugins.text.samples import Sample
    from fastloop_plugins.text.tokens import Split

logger = logging.getLogger("fastloop")


@dataclass(kw_only=True)
class PairData(Data):
    """The ``data`` section of ``seq2seq``."""

    target: Annotated[str | None, option("The column of targets: the texts to generate.")] = None
    prefix: Annotated[str, option('Text to put before each input, such as "summarize: ".')] = ""
    max_target_length: Annotated[int, option("Tokens of a target at most, with its end token.", ge=2)] = 128


class PairTextData(TextData):
    """The ``data`` section of ``seq2seq``. ``load`` returns inputs, with ``data.prefix``, and targets.

    Raises:
        RecipeError: An option is invalid, or a file does not exist.
    """

    section = PairData
    options: PairData

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe, labelled=False)
        if self.options.target is None:
            raise RecipeError(f"{self.where}.target: missing. Name the column of targets, such as data.target=summary.")
        if self.options.target in self.columns:
            raise RecipeError(
                f"{self.where}.target: found {self.options.target!r}, the column of data.text too. Name another column."
            )
        self.target = self.options.target
        for path in self.every_file():
            if format_of(path)[0] == ".txt":
                raise RecipeError(
                    f"{path}: a .txt file has one column, and data.target needs another. Use another format."
                )

    def text_columns(self) -> dict[str, str]:
        return super().text_columns() | {self.target: "target"}

    def streamed(self, run: Run, datasets: Mapping[str, Any], model: TextModel) -> Mapping[str, Any]:
        if self.stream is None:
            return datasets
        return self.stream.datasets(run, datasets, PairRows(self, model))

    def parse(self, columns: Sequence[Sequence[Any]], bad: Bad) -> dict[str, list[Any]]:
        found = super().parse(columns, bad)
        found[self.columns[0]] = [f"{self.options.prefix}{text}" for text in found[self.columns[0]]]
        return found


def encode_rows(
    tokenizer: Any, rows: Sequence[tuple[str, str]], end: list[int], arguments: Mapping[str, Any]
) -> Iterator[list[int]]:
    """Yield for each row: the number of input tokens, what is truncated, the ids of the input and of the target.

    The second number is the sum of 1 for the target and 2 for the input, if they are truncated.

    Args:
        rows: Inputs and targets.
        end: The end token, which every target gets if the tokenizer does not add it.
        arguments: ``max_length`` and ``max_target_length``, as in the ``data`` section.
    """
    most = arguments["max_target_length"]

    def encode_targets(targets: Sequence[str], length: int) -> list[list[int]]:
        found = tokenizer(text_target=list(targets), truncation=True, max_length=length, return_attention_mask=False)
        ids: list[list[int]] = found["input_ids"]
        return ids

    for portion in portions(rows):
        texts, targets = zip(*portion, strict=True)
        inputs = encode_marked(tokenizer, texts, {"truncation": True, "max_length": arguments["max_length"]})
        for (ids, long), target, labels in zip(inputs, targets, encode_targets(targets, most + 1), strict=True):
            missing = [token for token in end if token not in labels]
            if cut := len(labels) + len(missing) > most:
                (labels,) = encode_targets([target], most - len(missing))
            yield [len(ids), cut + 2 * long, *ids, *labels, *missing]


class PairSequences(Sequences):
    """Rows of an input and a target. A sample has ``input_ids`` and ``labels``, both (tokens,) int32.

    Args:
        ids: The rows of ``encode_rows``, end to end.
        lengths: Length of every row.

    Attributes:
        lengths: Tokens of input and target together.
        truncated: Inputs that are cut at ``data.max_length``, and targets that are cut at ``data.max_target_length``.
    """

    def __init__(self, ids: NDArray[np.int32], lengths: NDArray[np.int64]) -> None:
        super().__init__(ids, lengths)
        self.starts = self.ends - lengths + 2
        self.borders = self.starts + ids[self.starts - 2]
        marks = ids[self.starts - 1]
        self.lengths, self.truncated = (
            lengths - 2,
            {"inputs": int((marks // 2).sum()), "targets": int((marks % 2).sum())},
        )

    def __getitem__(self, index: int) -> dict[str, Any]:
        border = self.borders[index]
        return {"input_ids": self.ids[self.starts[index] : border], "labels": self.ids[border : self.ends[index]]}


def pair_sequences(
    split: str, ids: NDArray[np.int32], lengths: NDArray[np.int64], sizes: Mapping[str, int]
) -> PairSequences:
    """``PairSequences``. Logs how many inputs and targets are cut.

    Args:
        sizes: ``max_length`` and ``max_target_length``, as in the ``data`` section.
    """
    found = PairSequences(ids, lengths)
    for what, key in (("inputs", "max_length"), ("targets", "max_target_length")):
        if count := found.truncated[what]:
            logger.warning("%s", describe_cut(split, count, len(found), what, sizes[key], key))
    return found


class Collator:
    """Pads inputs and targets, each to the longest of the batch. The mask is 1 for real tokens; a batch without padding
    has no mask.

    ``tokens`` counts the tokens of inputs, as the padding of ``input_ids`` is measured.

    Args:
        empty: The ids of an input without tokens: attention needs one.
    """

    deterministic = True

    def __init__(self, pad_token_id: int, empty: list[int], width: Width, target_width: Width) -> None:
        self.pad_token_id, self.empty, self.width, self.target_width = (
            pad_token_id,
            np.array(empty),
            width,
            target_width,
        )

    def __call__(self, samples: list[dict[str, Any]]) -> Batch:
        rows = [sample["input_ids"] if len(sample["input_ids"]) else self.empty for sample in samples]
        width = self.width(rows)
        inputs = {"input_ids": padded(rows, width, self.pad_token_id)}
        if min(map(len, rows)) < width:
            inputs["attention_mask"] = mask(rows, width)
        targets = [sample["labels"] for sample in samples if "labels" in sample]  # texts to predict have none
        if targets:
            inputs["labels"] = padded(targets, self.target_width(targets), IGNORED)
        return Batch(inputs, loss_weight=sum(map(len, targets)), tokens=sum(map(len, rows)))


def input_chunks(
    data: PairTextData, model: TextModel, source: Path | Iterable[str], start: int, size: int
) -> Iterator[Sequences]:
    """The inputs of a file, ``size`` at a time, from row ``start``; or the given texts. Each gets ``data.prefix``.

    Args:
        model: With its tokenizer loaded.

    Raises:
        RecipeError: The file cannot be read.
    """
    for texts in text_chunks(data, source, start, size):
        rows = [f"{data.options.prefix}{text}" for text in texts]
        yield Sequences(
            *flat(encode(model.tokenizer, rows, [], {"truncation": True, "max_length": data.options.max_length}))
        )


class PairRows:
    """Samples of ``seq2seq``."""

    def __init__(self, data: PairTextData, model: TextModel) -> None:
        self.data, self.tokenizer, self.end = data, model.tokenizer, end_of(model)
        self.arguments = {"max_length": data.options.max_length, "max_target_length": data.options.max_target_length}

    def __call__(self, rows: list[Row], names: list[str]) -> list[dict[str, Any]]:
        pairs = self.data.parse_rows(rows, names)
        found = PairSequences(*flat(encode_rows(self.tokenizer, pairs, self.end, self.arguments)))
        return [found[index] for index in range(len(found))]


def pair_samples(model: TextModel, split: Split) -> Iterator[Sample]:
    """Rows of an input and a target."""
    found = PairSequences(split.ids, split.lengths)
    for index, row in enumerate(split.texts):
        text, target = row
        ids = found[index]
        yield [
            ("input", text),
            ("target", target),
            ("tokens of the input", show_tokens(model.tokenizer, ids["input_ids"])),
            ("tokens of the target", show_tokens(model.tokenizer, ids["labels"], [""] * len(ids["labels"]))),
        ]
