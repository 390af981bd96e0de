"""Samples of a language model in which only some tokens have a loss, and the collator of ``causal-lm``."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import numpy as np

from fastloop import Batch, RecipeError
from fastloop_plugins.text.batches import Sequences, Width, padded
from fastloop_plugins.text.next_token_loss import IGNORED
from fastloop_plugins.text.ragged import Ragged

if TYPE_CHECKING:
    from numpy.typing import NDArray

logger = logging.getLogger("fastloop")


class MaskedSequences(Sequences):
    """Rows of which some tokens have a loss. A sample has ``input_ids`` and ``targets``, both (tokens,) int32; a target
    is the next token, or -100 where that has no loss.

    Rows are cut at ``max_length`` and after their last token with a loss: no loss depends on later tokens. Rows in
    which no token has a loss are dropped.

    Args:
        ids: Signed ids of all rows, end to end: ``id``, or ``~id`` for a token without a loss.
        lengths: Tokens of every row.
        max_length: Tokens of a sample at most.

    Attributes:
        cut: Rows longer than ``max_length``.
        dropped: Rows without a loss.
    """

    def __init__(self, ids: NDArray[np.int32], lengths: NDArray[np.int64], max_length: int) -> None:
        super().__init__(ids, lengths)
        starts = self.ends - lengths
        trained = np.concatenate([[-1], np.flatnonzero(ids >= 0)])
        last = trained[np.searchsorted(trained, starts + np.minimum(lengths, max_length)) - 1]
        kept = last > starts  # the first token of a row is no target
        self.cut, self.dropped = int((lengths > max_length).sum()), int((~kept).sum())
        self.ends, self.lengths = last[kept] + 1, (last - starts + 1)[kept]

    def __getitem__(self, index: int) -> dict[str, Any]:
        end = self.ends[index]
        row = self.ids[end - self.lengths[index] : end]
        targets = np.full_like(row, IGNORED)
        np.copyto(targets[:-1], row[1:], where=row[1:] >= 0)
        return {"input_ids": np.where(row < 0, ~row, row), "targets": targets}


def masked_sequences(
    where: str, split: str, ids: NDArray[np.int32], lengths: NDArray[np.int64], max_length: int
) -> MaskedSequences:
    """``MaskedSequences``. Logs how many rows are cut and dropped.

    Raises:
        RecipeError: No row is left.
    """
    found = MaskedSequences(ids, lengths, max_length)
    if not len(found):
        raise RecipeError(
            f"{where}: no row of the {split} split has a token with a loss among its first {max_length} "
            "(data.max_length)."
        )
    if found.cut:
        logger.warning(
            "data: %s: %d of %d rows are cut at %d tokens (data.max_length)", split, found.cut, len(lengths), max_length
        )
    if found.dropped:
        logger.warning(
            "data: %s: %d of %d rows have no token with a loss, and are dropped", split, found.dropped, len(lengths)
        )
    return found


class Collator:
    """Pads a list of samples. ``targets`` are the tokens shifted by one: shifting here avoids a copy of the logits.

    Args:
        mask: Add ``attention_mask`` (B, T) int64, 1 for real tokens. Causal attention needs none, but the loss of a
            router does.
    """

    deterministic = True

    def __init__(self, pad_token_id: int, width: Width, mask: bool = False) -> None:
        self.pad_token_id, self.width, self.mask = pad_token_id, width, mask

    def __call__(self, samples: list[dict[str, Any]]) -> Batch:
        batch = self.ragged(samples)
        width = self.width(batch.columns["input_ids"][0])
        inputs = {name: padded(rows, width, fill) for name, (rows, fill) in batch.columns.items()}
        return Batch(inputs, loss_weight=batch.loss_weight, tokens=batch.tokens)

    def ragged(self, samples: list[dict[str, Any]]) -> Ragged:
        """The batch without padding. Its ``loss_weight`` is the number of targets."""
        rows = [sample["input_ids"] for sample in samples]
        targets = [sample["targets"] if "targets" in sample else sample["input_ids"][1:] for sample in samples]
        columns = {"input_ids": (rows, self.pad_token_id), "targets": (targets, IGNORED)}
        if self.mask:
            columns["attention_mask"] = ([np.ones_like(row) for row in rows], 0)
        weight = sum(int((row != IGNORED).sum()) for row in targets)
        return Ragged(columns=columns, loss_weight=weight, tokens=sum(map(len, rows)))


def block_sequences(where: str, split: str, ids: NDArray[np.int32], size: int) -> Sequences:
    """Concatenate texts, each followed by the end token, and cut them into blocks; the last one may be shorter."""
    blocks, rest = divmod(len(ids), size)
    lengths = np.array([size] * blocks + [rest] * (rest > 1), dtype=np.int64)
    if not len(lengths):
        raise RecipeError(f"{where}: the {split} split has no two tokens: there is no next token to learn.")
    return Sequences(ids, lengths)
