"""Forward passes of transformers models, and the hidden states of texts in padded batches and in packed rows.

The forward pass does not wait for the device to find out whether a batch is padded.

Before each eager forward, transformers evaluates ``padding_mask.all()``, to drop a mask that masks nothing. A model
without a mask searches its inputs for padding or packed rows. The collator knows the answer on the host: a batch
without padding has no ``attention_mask``. This module therefore gives the model a mask for every batch, and passes the
answer to transformers' mask functions. Attention gets the same masks as before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

from fastloop_plugins.models.wrapped import transformers_model
from fastloop_plugins.text.batches import LENGTHS

if TYPE_CHECKING:
    from torch import Tensor, nn

    from fastloop import Batch, Run

Pooling = Literal["mean", "first", "last"]
"""How the hidden states of a text become one vector: their mean, or that of the first or of the last token."""


class KnownMask:
    """Wraps one of transformers' mask functions, for a batch whose padding is known.

    Args:
        make: The function; see ``transformers.masking_utils.AttentionMaskInterface``.
        never: Whether no batch needs a mask.

    Attributes:
        padded: Whether the batch has padding. Compiled code ignores it, since it would need a graph for each value.
        width: Tokens of a row of the batch. The mask of a model that pads rows further itself, such as Longformer, is
            longer. Compiled code ignores it, too: it makes each batch's mask anyway.
    """

    def __init__(self, make: Callable[..., Any], never: bool) -> None:
        self.make = make
        self.never = never
        self.padded = True
        self.width = 0

    def __call__(self, *args: Any, attention_mask: Tensor | None = None, **kwargs: Any) -> Any:
        """The mask in the form that the attention implementation takes; None if it needs none."""
        import torch

        is_compiling = torch.compiler.is_compiling()
        # checked in eager mode alone: a compiler would guard on the width, and build a graph for each
        if not is_compiling and attention_mask is not None and attention_mask.shape[-1] > self.width:
            return self.make(*args, attention_mask=attention_mask, **kwargs)
        needs_mask = (is_compiling or self.padded) and not self.never
        if not needs_mask:
            return self.make(*args, attention_mask=None, **kwargs)
        if attention_mask is not None:
            kwargs |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        return self.make(*args, attention_mask=attention_mask, **kwargs)


_known = cache(KnownMask)


def call_with_mask(model: nn.Module, inputs: Mapping[str, Any], never: bool = False) -> Any:
    """Compute ``model(**inputs)``, with the same output.

    FlashAttention 2 and flex attention still read the mask of a padded batch, to skip its padding.

    Args:
        model: A transformers model, possibly wrapped.
        inputs: ``input_ids`` (B, T) int64; ``attention_mask`` (B, T) only if there is padding.
        never: No batch needs a mask: attention is causal with padding on the right, or rows are packed.
    """
    import torch
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS as functions

    config = getattr(transformers_model(model), "config", None)
    name = getattr(config, "_attn_implementation", None)
    if name not in functions:
        return model(**inputs)
    known = _known(functions[name], never)
    known.padded = "attention_mask" in inputs
    known.width = inputs["input_ids"].shape[1]
    replaced = functions._local_mapping
    before = replaced.get(name)
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


def compute(model: nn.Module, batch: Mapping[str, Any], **inputs: Any) -> Any:
    """Compute the output of the model for a batch of a ``TextTask``. Its ``labels`` are no input of the model.

    Args:
        batch: As ``compute_loss`` receives it.
        inputs: More inputs of the model.
    """
    own = {name: value for name, value in batch.items() if name not in ("labels", LENGTHS)}
    # inputs with positions are packed rows, which need no mask
    return call_with_mask(model, own | inputs, never="position_ids" in batch)


def compute_all(
    run: Run, model: nn.Module, dataset: Any, collate: Callable[[list[Any]], Batch], compute: Callable[..., Tensor]
) -> Tensor:
    """Compute values of all samples of a dataset, in eval mode and without gradients: (samples, ...), on the
    device.

    Every process calls it, and gets all values. Processes share the batches, which have similar lengths.

    Args:
        dataset: Samples with ``lengths``, such as ``Sequences``.
        collate: Builds a batch of them, as ``build_collator`` returns it.
        compute: ``compute(model, inputs)`` -> the values of a batch, (its samples, ...).
    """
    import numpy as np
    import torch
    from accelerate.utils import send_to_device

    from fastloop.evaluation_results import evaluating

    processes = run.loaders.processes
    result = torch.zeros(0)
    size = run.recipe.train.eval_batch_size or run.loaders.micro_batch_size
    longest_first = np.argsort(-dataset.lengths, kind="stable")
    batches = np.array_split(longest_first, math.ceil(len(dataset) / size))
    with evaluating(model), torch.no_grad():
        # with 5 batches, process 0 of 2 computes the batches 0, 2 and 4, and process 1 computes 1, 3 and, once more, 0:
        # every process makes the same number of forward passes
        for first in range(0, len(batches), processes.world_size):
            place = first + processes.rank
            ids = batches[place % len(batches)].tolist()
            inputs = send_to_device(collate([dataset[index] for index in ids]).inputs, run.device)
            values = compute(model, inputs)
            if first == 0:
                result = values.new_zeros(len(dataset), *values.shape[1:])
            if place < len(batches):
                result[ids] = values
    for module in model.modules():
        reshard = getattr(module, "reshard", None)
        if reshard is not None:  # fsdp leaves some weights gathered
            reshard()
    return processes.all_reduce_sum(result.cpu()).to(run.device)


def find_documents(position_ids: Tensor) -> Tensor:
    """The index of each token's document, (B, T), from positions that restart with each document. A document is one of
    the texts of a row; of a packed row, one of its sequences.

    For positions [0, 1, 2, 0, 1, 0], it is [0, 0, 0, 1, 1, 2].
    """
    import torch

    starts = position_ids[:, 1:] <= position_ids[:, :-1]
    return torch.nn.functional.pad(starts.cumsum(1), (1, 0))


def pool(states: Tensor, batch: Mapping[str, Any], how: Pooling = "mean") -> Tensor:
    """One vector for each text, (texts, D), in float32.

    Args:
        states: The hidden states of the batch's tokens: (texts, T, D) if it is padded, (1, T, D) if it is packed.
        batch: As ``compute_loss`` receives it.
        how: See ``Pooling``.
    """
    lengths = batch.get(LENGTHS)
    if lengths is None:
        return _pool_padded(states, batch.get("attention_mask"), how)
    return _pool_packed(states[0], lengths, how)


def _pool_padded(states: Tensor, mask: Tensor | None, how: Pooling) -> Tensor:
    """``pool`` of a padded batch: (texts, T, D). Without a mask, there is no padding. Padding may be on either side."""
    import torch

    if mask is None:
        mask = states.new_ones(states.shape[:2], dtype=torch.int64)
    if how == "mean":
        weights = mask[..., None].float()
        average: Tensor = (states.float() * weights).sum(1) / weights.sum(1).clamp(min=1)
        return average
    # argmax finds the first 1: for the mask [0, 1, 1, 0], the first token is at 1, and the last one at 4 - 1 - 1 = 2
    if how == "first":
        place = mask.argmax(1)
    else:
        place = mask.shape[1] - 1 - mask.flip(1).argmax(1)
    return states[torch.arange(len(states), device=states.device), place].float()


def _pool_packed(row: Tensor, lengths: Tensor, how: Pooling) -> Tensor:
    """``pool`` of texts end to end in a row, (T, D), which may have padding at its end."""
    import torch

    # texts of the lengths [3, 2] begin at [0, 3], and their last tokens are at [2, 4]
    ends = lengths.cumsum(0)
    if how != "mean":
        place = ends - lengths if how == "first" else ends - 1
        return row.index_select(0, place).float()
    tokens = row[: int(lengths.sum())].float()
    text_of_token = torch.repeat_interleave(lengths, output_size=len(tokens))  # [0, 0, 0, 1, 1]
    sums = tokens.new_zeros(len(lengths), tokens.shape[1]).index_add(0, text_of_token, tokens)
    mean: Tensor = sums / lengths[:, None]
    return mean


def split(states: Tensor, batch: Mapping[str, Any]) -> list[Tensor]:
    """The hidden states, or other values, of the tokens of each text: (tokens, ...) each, without padding.

    Args:
        states: As for ``pool``, of any shape after the tokens.
        batch: As ``compute_loss`` receives it.
    """
    import torch

    lengths = batch.get(LENGTHS)
    if lengths is not None:
        sizes = lengths.tolist()
        return list(torch.split(states[0, : sum(sizes)], sizes))
    mask = batch.get("attention_mask")
    if mask is None:
        return list(states)
    return [row[is_real] for row, is_real in zip(states, mask.bool(), strict=True)]
