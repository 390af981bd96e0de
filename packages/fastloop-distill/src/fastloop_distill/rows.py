"""The sequences of a batch, one in each row, as a teacher reads them."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

READ = ("input_ids", "token_type_ids")
IGNORED = -100
"""Target of a token without a loss."""


class TeacherRows:
    """The sequences of a batch, which is padded or packed. The padding of a packed row is its last sequence.

    Attributes:
        inputs: Inputs of the teacher, (rows, T) each; ``attention_mask`` only if there is padding.
        real: Which tokens are no padding, (rows, T) bool.
    """

    def __init__(self, batch: Mapping[str, Any]) -> None:
        self.inputs = {name: batch[name] for name in (*READ, "attention_mask") if name in batch}
        self.packed = "position_ids" in batch
        if self.packed:
            sizes = batch["packed"].lengths if "packed" in batch else batch["cu_seq_lens_q"].diff().tolist()
            tokens = self.inputs | {"attention_mask": torch.ones_like(batch["input_ids"])}
            self.inputs = {name: pad_sequence(value[0].split(sizes), True) for name, value in tokens.items()}
        self.real = self.inputs.get("attention_mask", torch.ones_like(self.inputs["input_ids"])).bool()

    def flat(self, values: Tensor) -> Tensor:
        """Values of the teacher, (rows, T, ...), in the order of the student's tokens: (tokens, ...)."""
        return values[self.real] if self.packed else values.flatten(0, 1)

    def keys(self) -> list[int]:
        """A hash of each row. Two of a million rows have the same one with a probability of 3e-8."""
        real = self.real.cpu()
        columns = [self.inputs[name].cpu() for name in READ if name in self.inputs]
        keys = []
        for row, is_real in enumerate(real):
            digest = blake2b(digest_size=8)
            for column in columns:
                digest.update(column[row][is_real].numpy().tobytes())
            keys.append(int.from_bytes(digest.digest(), "little", signed=True))
        return keys

    def weights(self, targets: Tensor, per_text: bool, dtype: torch.dtype) -> Tensor:
        """The weights of tokens in a mean over a padded batch, (tokens,). Each text counts once, or each token with a
        loss."""
        counted = self.real if per_text else (targets != IGNORED).view(1, -1)
        shares = counted.to(dtype) / counted.sum(1, keepdim=True).clamp(min=1)
        return shares.flatten() / len(shares)
