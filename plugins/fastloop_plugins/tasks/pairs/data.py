"""Rows of ``seq2seq``: an input text and a target text, as token ids and as padded batches."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np

from fastloop import Batch, option
from fastloop_plugins.rows.table import Bad
from fastloop_plugins.text.batches import ColumnSequences, Width, join_ids, mask, padded
from fastloop_plugins.text.next_token_loss import IGNORED
from fastloop_plugins.text.options import Data
from fastloop_plugins.text.samples import show_tokens
from fastloop_plugins.text.task import ColumnData
from fastloop_plugins.text.tokenizers import end_of
from fastloop_plugins.text.tokens import encode_marked, portions

if TYPE_CHECKING:
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


class PairTextData(ColumnData):
    """The ``data`` section of ``seq2seq``. ``load`` returns inputs, with ``data.prefix``, and targets."""

    options: PairData

    def parse(self, columns: Sequence[Sequence[Any]], bad: Bad) -> dict[str, list[Any]]:
        found = super().parse(columns, bad)
        found[self.columns[0]] = self.add_prefix(found[self.columns[0]])
        return found

    def add_prefix(self, texts: Iterable[Any]) -> list[str]:
        """Inputs with ``data.prefix``."""
        return [f"{self.options.prefix}{text}" for text in texts]


def encode_rows(tokenizer: Any, rows: Sequence[tuple[str, str]], arguments: Mapping[str, Any]) -> Iterator[list[int]]:
    """Yield the ids of input and target of each row, see ``join_ids``. Every target ends with the tokenizer's end
    token.

    Args:
        rows: Inputs and targets.
        arguments: ``max_length`` and ``max_target_length``, as in the ``data`` section.
    """
    most, end = arguments["max_target_length"], end_of(tokenizer)

    def encode_targets(targets: Sequence[str], length: int) -> list[list[int]]:
        found = tokenizer(text_target=list(targets), truncation=True, max_length=length, return_attention_mask=False)
        ids: list[list[int]] = found["input_ids"]
        return ids

    for portion in portions(rows):
        texts, targets = zip(*portion, strict=True)
        inputs = encode_marked(tokenizer, texts, {"truncation": True, "max_length": arguments["max_length"]})
        for found, target, labels in zip(inputs, targets, encode_targets(targets, most + 1), strict=True):
            missing = [token for token in end if token not in labels]
            if cut := len(labels) + len(missing) > most:
                (labels,) = encode_targets([target], most - len(missing))
            yield join_ids([found, ([*labels, *missing], cut)])


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


def pair_samples(model: TextModel, split: Split, dataset: ColumnSequences) -> Iterator[Sample]:
    """Rows of an input and a target, for `fastloop plan --samples`. All tokens of a target have a loss."""
    for index, (text, target) in enumerate(split.texts):
        ids = dataset[index]
        yield [
            ("input", text),
            ("target", target),
            ("tokens of the input", show_tokens(model.tokenizer, ids["input_ids"])),
            ("tokens of the target", show_tokens(model.tokenizer, ids["labels"], [""] * len(ids["labels"]))),
        ]
