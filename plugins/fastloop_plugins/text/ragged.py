"""Batches of sequences before padding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor


LENGTHS = "sequence_lengths"
"""Input of a packed batch whose task reads all hidden states: the tokens of each sequence, (sequences,) int64."""


@dataclass(kw_only=True)
class Ragged:
    """A batch before padding: sequences of different lengths. A task's collator pads them, and ``packing`` puts them
    end to end.

    A collator may provide it through a method ``ragged(samples) -> Ragged``.

    Attributes:
        columns: Name -> one array for each sequence, and the value that fills the missing elements of shorter arrays.
            ``input_ids`` is always present and defines the lengths; arrays of other columns are not longer.
        fixed: Name -> a tensor without a token dimension, such as labels of shape (sequences,).
        loss_weight: As in ``Batch``.
        tokens: As in ``Batch``.
        reads_all: Whether the task reads the hidden states of all tokens, and not only of each sequence's first one.
            A batch then has ``sequence_lengths`` if it is packed: see ``text.hidden_states``.
    """

    columns: Mapping[str, tuple[Sequence[NDArray[Any]], int]]
    fixed: dict[str, Tensor] = field(default_factory=dict)
    loss_weight: float
    tokens: int
    reads_all: bool = False
