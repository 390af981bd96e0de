"""Hidden states of texts, in padded batches and in packed rows: a task that reads them needs no code for either."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from fastloop_plugins.text.masks import forward
from fastloop_plugins.text.ragged import LENGTHS

if TYPE_CHECKING:
    from torch import Tensor, nn

Pooling = Literal["mean", "first", "last"]
"""How the hidden states of a text become one vector: their mean, or that of the first or of the last token."""


def compute(model: nn.Module, batch: Mapping[str, Any], **inputs: Any) -> Any:
    """Compute the output of the model for a batch of a ``TextTask``. Its ``labels`` are no input of the model.

    Args:
        batch: As ``compute_loss`` receives it.
        inputs: More inputs of the model.
    """
    own = {name: value for name, value in batch.items() if name not in ("labels", LENGTHS)}
    # inputs with positions are packed rows, which need no mask
    return forward(model, own | inputs, never="position_ids" in batch)


def pool(states: Tensor, batch: Mapping[str, Any], how: Pooling = "mean") -> Tensor:
    """One vector for each text, (texts, D), in float32.

    Args:
        states: The hidden states of the batch's tokens: (texts, T, D) if it is padded, (1, T, D) if it is packed.
        batch: As ``compute_loss`` receives it.
        how: See ``Pooling``.
    """
    import torch

    if (lengths := batch.get(LENGTHS)) is None:
        mask = batch.get("attention_mask")
        if mask is None:
            mask = states.new_ones(states.shape[:2], dtype=torch.int64)
        if how == "mean":
            weights = mask[..., None].float()
            average: Tensor = (states.float() * weights).sum(1) / weights.sum(1).clamp(min=1)
            return average
        # padding may be on either side
        place = mask.argmax(1) if how == "first" else mask.shape[1] - 1 - mask.flip(1).argmax(1)
        return states[torch.arange(len(states), device=states.device), place].float()
    ends = lengths.cumsum(0)
    if how != "mean":
        return states[0].index_select(0, ends - lengths if how == "first" else ends - 1).float()
    row = states[0, : int(lengths.sum())].float()
    text = torch.repeat_interleave(lengths, output_size=len(row))
    mean: Tensor = row.new_zeros(len(lengths), row.shape[1]).index_add(0, text, row) / lengths[:, None]
    return mean


def split(states: Tensor, batch: Mapping[str, Any]) -> list[Tensor]:
    """The hidden states, or other values, of the tokens of each text: (tokens, ...) each, without padding.

    Args:
        states: As for ``pool``, of any shape after the tokens.
        batch: As ``compute_loss`` receives it.
    """
    import torch

    if (lengths := batch.get(LENGTHS)) is not None:
        sizes = lengths.tolist()
        return list(torch.split(states[0, : sum(sizes)], sizes))
    mask = batch.get("attention_mask")
    return list(states) if mask is None else [row[real] for row, real in zip(states, mask.bool(), strict=True)]
