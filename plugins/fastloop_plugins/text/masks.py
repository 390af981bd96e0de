"""Forward passes of transformers models that do not wait for the device to find out whether a batch is padded.

Before each eager forward, transformers evaluates ``padding_mask.all()``, to drop a mask that masks nothing. A model
without a mask searches its inputs for padding or packed rows. The collator knows the answer on the host: a batch
without padding has no ``attention_mask``. This module therefore gives the model a mask for every batch, and passes the
answer to transformers' mask functions. Attention gets the same masks as before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from fastloop_plugins._models import transformers_model

if TYPE_CHECKING:
    from torch import Tensor, nn


class KnownMask:
    """Wraps one of transformers' mask functions, for a batch whose padding is known.

    Args:
        make: The function; see ``transformers.masking_utils.AttentionMaskInterface``.
        never: Whether no batch needs a mask.

    Attributes:
        padded: Whether the batch has padding. Compiled code ignores it, since it would need a graph for each value.
        width: Tokens of a row of the batch. The mask of a model that pads rows further itself, such as Longformer, is
            longer.
    """

    def __init__(self, make: Callable[..., Any], never: bool) -> None:
        self.make, self.never, self.padded, self.width = make, never, True, 0

    def __call__(self, *args: Any, attention_mask: Tensor | None = None, **kwargs: Any) -> Any:
        """The mask in the form that the attention implementation takes; None if it needs none."""
        import torch

        if attention_mask is not None and attention_mask.shape[-1] > self.width:
            return self.make(*args, attention_mask=attention_mask, **kwargs)
        if self.never or not (torch.compiler.is_compiling() or self.padded):
            attention_mask = None
        elif attention_mask is not None:
            kwargs |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        return self.make(*args, attention_mask=attention_mask, **kwargs)


_known = cache(KnownMask)


def forward(model: nn.Module, inputs: Mapping[str, Any], never: bool = False) -> Any:
    """Compute ``model(**inputs)``, with the same output.

    FlashAttention 2 and flex attention still read the mask of a padded batch, to skip its padding.

    Args:
        model: A transformers model, possibly wrapped.
        inputs: ``input_ids`` (B, T) int64; ``attention_mask`` (B, T) only if there is padding.
        never: No batch needs a mask: attention is causal with padding on the right, or rows are packed.
    """
    import torch
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS as functions

    found = transformers_model(model)
    name = getattr(getattr(found, "config", None), "_attn_implementation", None)
    if name not in functions:
        return model(**inputs)
    known, replaced = _known(functions[name], never), functions._local_mapping
    before = replaced.get(name)
    known.padded, known.width = "attention_mask" in inputs, inputs["input_ids"].shape[1]
    if not known.padded:
        inputs = {**inputs, "attention_mask": torch.ones_like(inputs["input_ids"])}
    replaced[name] = known
    try:
        return model(**inputs)
    finally:
        if before is None:
            del replaced[name]
        else:
            replaced[name] = before
