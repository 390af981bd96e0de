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
KEY = 16
"""Bytes of a row's key: two of a million rows have the same one with a probability of 1e-27."""


class Rows:
    """The sequences of a batch, which is padded or packed.

    Attributes:
        inputs: Inputs of the teacher, (rows, T) each; ``attention_mask`` only if there is padding.
        real: Which tokens are no padding, (rows, T) bool.
    """

    def __init__(self, batch: Mapping[str, Any]) -> None:
        self.inputs = {name: batch[name] for name in (*READ, "attention_mask") if name in batch}
        self.packed = "position_ids" in batch
        if self.packed:
            self._unpack(batch["position_ids"][0], batch.get("first_tokens"))
        self.real = self.inputs.get("attention_mask", torch.ones_like(self.inputs["input_ids"])).bool()

    def _unpack(self, positions: Tensor, starts: Tensor | None) -> None:
        """Pad the sequences of a packed row, whose positions restart. The row's own padding is the last sequence."""
        later = (positions != positions[0]).nonzero()
        total = int(later.max()) + 1 if len(later) else len(positions)
        if starts is None:
            starts = (positions[:total] == positions[0]).nonzero().flatten()
        bounds = [*starts.tolist(), max(total, int(starts[-1]) + 1)]
        bounds += [len(positions)] * (bounds[-1] < len(positions))
        sizes = [end - start for start, end in zip(bounds, bounds[1:], strict=False)]
        tokens = {name: value[0] for name, value in self.inputs.items()} | {
            "attention_mask": torch.ones_like(positions)
        }
        self.inputs = {name: pad_sequence(value.split(sizes), batch_first=True) for name, value in tokens.items()}

    def flat(self, values: Tensor) -> Tensor:
        """Values of the teacher, (rows, T, ...), in the order of the student's tokens: (tokens, ...)."""
        return values[self.real] if self.packed else values.flatten(0, 1)

    def keys(self) -> list[bytes]:
        """A key for the content of each row."""
        real, columns = self.real.cpu(), [self.inputs[name].cpu() for name in READ if name in self.inputs]
        contents = ([column[row][real[row]].numpy().tobytes() for column in columns] for row in range(len(real)))
        return [blake2b(b"".join(content), digest_size=KEY).digest() for content in contents]

    def weights(self, targets: Tensor, per_text: bool, dtype: torch.dtype) -> Tensor:
        """The weights of tokens in a mean over the batch, (tokens,). Each text counts once, or each token with a
        loss."""
        if not per_text:
            kept = (targets.flatten() != IGNORED).to(dtype)
            return kept / kept.sum()
        share = self.real.to(dtype) / self.real.sum(1, keepdim=True).clamp(min=1) / len(targets)
        share[len(targets) :] = 0  # the padding of a packed row
        return self.flat(share)
