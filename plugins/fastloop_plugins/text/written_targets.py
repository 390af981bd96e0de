"""Target texts as the tokenizer writes them.

A generated text is decoded from token ids, so it cannot equal a target with unknown tokens, or one that is cut. The
encoded row of such a target keeps its text: generated texts are compared with the texts of the data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import numpy as np

from fastloop.problem import counted_of

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from transformers import PreTrainedTokenizerBase

SHOWN = 60
"""Characters of a text in a message."""
DIFFERENCES = 8
"""Numbers for a difference in the first number of a packed text."""


class TextDifference(IntEnum):
    """Why the tokens of a target decode to another text."""

    CUT = 1
    UNKNOWN = 2
    """It has characters or words that are unknown tokens."""
    CHANGED = 3
    NORMALIZED = 4
    """Only the tokenizer's normalization changes it, such as to lower case."""


REASONS = {
    TextDifference.UNKNOWN: "have unknown tokens",
    TextDifference.CHANGED: "are changed by the tokenizer",
    TextDifference.NORMALIZED: "are changed by the tokenizer's normalization",
}


def pack_text(text: str, difference: TextDifference) -> list[int]:
    """The text of a target as int32 for its row: ``DIFFERENCES * bytes + difference``, and then four bytes in each."""
    data = text.encode("utf-8", "surrogatepass")
    words = np.frombuffer(data + bytes(-len(data) % 4), "<i4")
    return [DIFFERENCES * len(data) + difference, *words.tolist()]


def unpack_text(packed: NDArray[Any]) -> str | None:
    """The text of ``pack_text``; None for an empty array, or one of zeros."""
    if not len(packed) or not packed[0]:
        return None
    size = int(packed[0]) // DIFFERENCES
    return packed[1:].astype("<i4").tobytes()[:size].decode("utf-8", "surrogatepass")


class TargetWriter:
    """Compares targets with the texts that their tokens decode to."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self._unknown = tokenizer.unk_token_id
        if self._unknown in (tokenizer.eos_token_id, tokenizer.sep_token_id):  # as GPT-2's, which ends each target
            self._unknown = None
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._normalizer = None if backend is None else backend.normalizer

    def pack(self, texts: Sequence[str], rows: list[list[int]], cuts: Sequence[bool]) -> list[list[int]]:
        """``pack_text`` of each target that its tokens do not decode to; an empty list for the others.

        Args:
            rows: The token ids of each target.
            cuts: Whether ``rows`` has only the beginning of a target.
        """
        written = self.tokenizer.batch_decode(rows, skip_special_tokens=True)
        packed = list[list[int]]()
        for text, written_text, ids, is_cut in zip(texts, written, rows, cuts, strict=True):
            if text == written_text:
                packed.append([])
            else:
                packed.append(pack_text(text, self._difference(text, written_text, ids, is_cut)))
        return packed

    def _difference(self, text: str, written: str, ids: Sequence[int], is_cut: bool) -> TextDifference:
        if is_cut:
            return TextDifference.CUT
        if self._unknown is not None and self._unknown in ids:
            return TextDifference.UNKNOWN
        if self._normalize(text) == self._normalize(written):
            return TextDifference.NORMALIZED
        return TextDifference.CHANGED

    def _normalize(self, text: str) -> str:
        return text if self._normalizer is None else str(self._normalizer.normalize_str(text))


@dataclass(frozen=True)
class Finding:
    """Targets of a split whose tokens decode to another text, for the same reason.

    Attributes:
        text: The first one.
        written: The text that its tokens decode to.
    """

    difference: TextDifference
    count: int
    text: str
    written: str

    def describe(self, split: str, total: int, max_length: int) -> str:
        """These targets for a message: ``train: 2 of 22 targets are cut at 12 tokens (...): ...``."""
        reason = REASONS.get(self.difference, f"are cut at {max_length} tokens (data.max_target_length)")
        return (
            f"{split}: {counted_of(self.count, total, 'targets')} {reason}: {self.count / total:.1%}, such as "
            f"{_short(self.text)}, which becomes {_short(self.written)}"
        )


def _short(text: str) -> str:
    return repr(text if len(text) <= SHOWN else f"{text[:SHOWN]}...")
