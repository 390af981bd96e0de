"""Batches of texts and their labels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from fastloop_plugins.text.batches import PaddedCollator, Ragged

if TYPE_CHECKING:
    from fastloop_plugins.tasks.heads.losses import ClassLoss
    from fastloop_plugins.text.batches import Width


class Collator(PaddedCollator):
    """Pads texts with labels. See ``PaddedCollator``."""

    def __init__(self, pad_token_id: int, width: Width, loss: ClassLoss) -> None:
        super().__init__(self.build_ragged, width)
        self.pad_token_id, self.loss = pad_token_id, loss

    def build_ragged(self, samples: list[dict[str, Any]]) -> Ragged:
        """The batch without padding and without a mask."""
        import torch

        rows = [sample["input_ids"] for sample in samples]
        found = [sample["label"] for sample in samples]
        labels = torch.tensor(found if isinstance(found[0], int) else np.array(found))
        weight = len(rows) if self.loss.weights is None else self.loss.weight_of(labels)
        columns = {"input_ids": (rows, self.pad_token_id)}
        if "token_type_ids" in samples[0]:
            columns["token_type_ids"] = ([sample["token_type_ids"] for sample in samples], 0)
        return Ragged(columns=columns, fixed={"labels": labels}, loss_weight=weight, tokens=sum(map(len, rows)))
