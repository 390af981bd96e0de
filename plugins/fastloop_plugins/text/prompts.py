"""Batches of prompts for a language model that continues texts."""

from __future__ import annotations

from typing import Any

import torch

from fastloop import Batch
from fastloop_plugins.text.tokenizers import end_of


class PromptCollator:
    """Pads prompts on the left, so that all of them end where generation begins. An empty prompt becomes an end token.

    Args:
        room: Tokens of a prompt at most: of a longer one, its end is kept. None: no limit.

    Attributes:
        generates: True: the model continues the batch. Packed rows cannot be continued.
    """

    generates = True
    deterministic = True

    def __init__(self, tokenizer: Any, room: int | None) -> None:
        self.pad_token_id, self.room = tokenizer.pad_token_id, room
        (self.empty,) = end_of(tokenizer)

    def __call__(self, samples: list[dict[str, Any]]) -> Batch:
        rows = [
            sample["input_ids"][-(self.room or len(sample["input_ids"])) :].tolist() or [self.empty]
            for sample in samples
        ]
        width = max(map(len, rows))
        ids = torch.tensor([[self.pad_token_id] * (width - len(row)) + row for row in rows])
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
        return Batch({"input_ids": ids, "attention_mask": mask}, tokens=sum(map(len, rows)))
