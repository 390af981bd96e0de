"""Forward passes of transformers models without the question whether a batch is padded, for which the host would wait for the device.

Before each eager forward transformers evaluates ``padding_mask.all()``, to leave out a mask that masks nothing; a model that gets no mask
looks for padding or packed rows among its inputs. The collator has the answer on the host: a batch without padding has no
``attention_mask``. So here the model gets a mask for every batch, and transformers' function that makes masks gets the answer. The masks
that attention sees are those that it would see otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from fastloop_plugins._models import transformers_model

if TYPE_CHECKING:
    from torch import Tensor, nn


class KnownMask:
    """One of transformers' functions that make masks, for a batch whose padding is known.

    Args:
        make: The function; see ``transformers.masking_utils.AttentionMaskInterface``.
        never: No batch needs a mask.

    Attributes:
        padded: Whether the batch has padding. A compiler does not see it: it would make a graph for each answer.
    """

    def __init__(self, make: Callable[..., Any], never: bool) -> None:
        self.make, self.never, self.padded = make, never, True

    def __call__(self, *args: Any, attention_mask: Tensor | None = None, **kwargs: Any) -> Any:
        """The mask in the form that the attention implementation takes; None where it needs none."""
        import torch

        if self.never or not (torch.compiler.is_compiling() or self.padded):
            attention_mask = None
        elif attention_mask is not None:
            kwargs |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        return self.make(*args, attention_mask=attention_mask, **kwargs)


_known = cache(KnownMask)


def forward(model: nn.Module, inputs: Mapping[str, Any], never: bool = False) -> Any:
    """``model(**inputs)``, with the same output.

    FlashAttention 2 and flex attention still read the mask of a padded batch, to leave its padding out.

    Args:
        model: A transformers model, whatever is wrapped around it.
        inputs: ``input_ids`` (B, T) int64; ``attention_mask`` (B, T) where there is padding, and only there.
        never: No mask is needed for any batch: attention is causal and padding on the right, or rows are packed.
    """
    import torch
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS as functions

    found = transformers_model(model)
    name = getattr(getattr(found, "config", None), "_attn_implementation", None)
    if name not in functions:
        return model(**inputs)
    known, replaced = _known(functions[name], never), functions._local_mapping
    before = replaced.get(name)
    known.padded = "attention_mask" in inputs
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
