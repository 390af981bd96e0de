"""Samples as text for a terminal or a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FEW_NUMBERS = 16
"""Inputs of at most this many numbers are shown in full, others by their shape."""


def describe_sample(sample: Any, tokenizer: PreTrainedTokenizerBase | None) -> str | None:
    """A sample's input as text: decoded token ids, a text, or few numbers. The shape of a larger tensor; None for
    anything else."""
    if isinstance(sample, Mapping):
        if tokenizer is not None and "input_ids" in sample:
            return str(tokenizer.decode(sample["input_ids"], skip_special_tokens=True))
        texts = [f"{key}: {value}" for key, value in sample.items() if isinstance(value, str)]
        return "\n".join(texts) or None
    inputs = sample[0] if isinstance(sample, Sequence) and not isinstance(sample, str) and len(sample) == 2 else sample
    if isinstance(inputs, str):
        return inputs
    if isinstance(inputs, Tensor):
        if inputs.numel() <= FEW_NUMBERS:
            return ", ".join(f"{value:.4g}" for value in inputs.flatten().tolist())
        return f"{tuple(inputs.shape)} {str(inputs.dtype).removeprefix('torch.')}"
    return None
