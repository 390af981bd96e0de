"""Packed batches: sequences end to end in one row, with attention inside each sequence."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fastloop import Batch, PluginError
from fastloop_plugins._targets import IGNORED
from fastloop_plugins.text.batches import LENGTHS, Ragged

READ = {"input_ids", "token_type_ids"}
"""Columns that the model reads. Any other column with one value for each token holds targets."""


class Lengths:
    """The lengths of the sequences in a row.

    Not a tensor: every layer reads the lengths, and each read would wait for the device. Not a list: a compiler would
    build a graph for each.
    """

    def __init__(self, lengths: list[int], longest: int = 0) -> None:
        self.lengths = lengths
        self.longest = max(longest, *lengths)


class PackedCollator:
    """Packs the sequences of a batch into one row, without padding them first if the task's collator has a method
    ``ragged``.

    ``input_ids`` and every other column of tokens become rows of shape (1, tokens), without an ``attention_mask``.
    ``position_ids`` restart with each sequence. If a row is padded to a multiple, the padding is a sequence of its own,
    without targets.

    Args:
        collate: The task's collator.
        multiple: Pad the tokens of a row to a multiple of this; None: no padding.

    Attributes:
        first_position: The model's first position id.
        varlen: Whether the model's attention takes transformers' arguments for FlashAttention instead of ``packed``:
            ``cu_seq_lens_q`` and ``cu_seq_lens_k``, int32 of shape (sequences + 2,): 0, the end of each sequence, and
            the end of the padding, which is a sequence of its own, empty or not. ``max_length_q`` and ``max_length_k``
            are the same for all batches. Shapes then depend only on the number of sequences: a compiler builds one
            graph, and a CUDA graph fits every row with the same number of tokens.
        longest: Tokens of the longest sequence of all batches; 0 if unknown.
    """

    def __init__(self, collate: Callable[[list[Any]], Any], multiple: int | None) -> None:
        self.collate = collate
        self.multiple = multiple or 1
        self.first_position = 0
        self.varlen = False
        self.longest = 0

    @property
    def deterministic(self) -> bool:
        """As in ``DatasetProtocol``."""
        return getattr(self.collate, "deterministic", False)

    def __call__(self, samples: list[Any]) -> Batch:
        if hasattr(self.collate, "ragged"):
            ragged: Ragged = self.collate.ragged(samples)
        else:
            ragged = unpadded(self.collate(samples), [len(sample["input_ids"]) for sample in samples])
        return Batch(self.pack(ragged), loss_weight=ragged.loss_weight, tokens=ragged.tokens)

    def width(self, tokens: int) -> int:
        """Tokens of a row, padding included."""
        return -(-tokens // self.multiple) * self.multiple

    def pack(self, batch: Ragged) -> dict[str, Any]:
        """Build the model's inputs from a batch.

        Sequences of 3 and 2 tokens in a row of 8 have the lengths [3, 2], the starts [0, 3] and the positions
        [0, 1, 2, 0, 1, 0, 0, 0]. The last three tokens are padding.
        """
        # an empty text becomes one token of padding
        lengths = [max(len(row), 1) for row in batch.columns["input_ids"][0]]
        *starts, total = accumulate(lengths, initial=0)
        width = self.width(total)
        inputs: dict[str, Any] = dict(batch.fixed)
        for name, (rows, fill) in batch.columns.items():
            tokens = np.full(width, fill, dtype=np.int64)
            for start, row in zip(starts, rows, strict=True):
                tokens[start : start + len(row)] = row
            inputs[name] = torch.from_numpy(tokens)[None]
        positions = np.full(width, self.first_position)
        positions[:total] += np.arange(total) - np.repeat(starts, lengths)
        inputs["position_ids"] = torch.from_numpy(positions)[None]
        if batch.reads_all:
            inputs[LENGTHS] = torch.tensor(lengths)
        elif batch.columns.keys() <= READ:  # each sequence has one target, predicted from its first token
            inputs["first_tokens"] = torch.tensor(starts)
        if self.varlen:
            ends = torch.tensor([*starts, total, width], dtype=torch.int32)
            longest = max(self.longest, self.multiple, *lengths)
            for side in ("q", "k"):
                inputs[f"cu_seq_lens_{side}"] = ends
                inputs[f"max_length_{side}"] = longest
            return inputs
        if width > total:
            lengths.append(width - total)  # the padding
        inputs["packed"] = Lengths(lengths, self.longest)
        return inputs


def unpadded(batch: Any, lengths: list[int]) -> Ragged:
    """Remove the padding from a batch that a collator padded on the right, given the length of each sequence."""
    if not isinstance(batch, Batch):
        batch = Batch(batch)
    ids = batch.inputs["input_ids"]
    columns: dict[str, Any] = {}
    fixed: dict[str, Any] = {}
    for name, value in batch.inputs.items():
        if name == "attention_mask":
            continue
        is_token_column = isinstance(value, Tensor) and value.shape == ids.shape and value.dtype == ids.dtype
        if is_token_column:
            rows = [row[:length] for row, length in zip(value.numpy(), lengths, strict=True)]
            columns[name] = (rows, 0 if name in READ else IGNORED)
        else:
            fixed[name] = value
    return Ragged(columns=columns, fixed=fixed, loss_weight=batch.loss_weight, tokens=batch.tokens)


class LaterPackedCollator:
    """Packs the batches of a split after the first one, which has a collator of its own.

    Each batch uses the settings that ``packed``, the collator of the first split, has then: the model may be adapted
    after this is built.
    """

    def __init__(self, packed: PackedCollator, collate: Callable[[list[Any]], Any]) -> None:
        self.packed = packed
        self.collate = collate
        self.deterministic: bool = getattr(collate, "deterministic", False)

    def __call__(self, samples: list[Any]) -> Batch:
        packed = copy.copy(self.packed)
        packed.collate = self.collate
        return packed(samples)


@torch.compiler.disable  # type: ignore[untyped-decorator] # each combination of lengths would need its own graph
def attention(
    implementation: str,
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    packed: Lengths | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Call a transformers attention function for each sequence separately. Has the form of one itself.

    Raises:
        PluginError: The model's sliding window is smaller than a sequence, which is not supported here.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    attend = ALL_ATTENTION_FUNCTIONS[implementation]
    longest = 0  # unknown
    if packed is not None:
        longest = packed.longest
    elif attention_mask is None:
        longest = key.shape[2]
    if sliding_window is not None and sliding_window < longest:
        raise PluginError(
            f"attention is limited to {sliding_window} tokens, and sequences have {longest}", code="sequence-too-long"
        )
    if packed is None:
        plain: tuple[Tensor, None] = attend(module, query, key, value, attention_mask, **kwargs)
        return plain
    # ``cls-last-layer`` needs one query of each sequence, and none of the padding, whose keys and values zip leaves out
    query_sizes: Any = packed.lengths if query.shape[2] == key.shape[2] else 1
    queries = torch.split(query, query_sizes, dim=2)
    keys = torch.split(key, packed.lengths, dim=2)
    values = torch.split(value, packed.lengths, dim=2)
    outputs = []
    for own_query, own_key, own_value in zip(queries, keys, values, strict=False):
        outputs.append(attend(module, own_query, own_key, own_value, None, **kwargs)[0])
    return torch.cat(outputs, dim=1), None


def mask(attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor | None:
    """The mask of a padded batch. A packed row needs none: its lengths define it."""
    from transformers.masking_utils import sdpa_mask

    made: Tensor | None = None if attention_mask is None else sdpa_mask(attention_mask=attention_mask, **kwargs)
    return made


def register(implementation: str) -> str:
    """Register ``attention`` around one of transformers' own implementations; returns the new name."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    name = f"packed_{implementation}"
    AttentionInterface.register(name, partial(attention, implementation))
    AttentionMaskInterface.register(name, mask)
    return name


def select_first_tokens(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    """Forward hook: select the first token of each sequence in a packed row, as a batch of sequences of one token."""
    firsts = kwargs.get("first_tokens")
    if firsts is not None:
        selected = output["last_hidden_state"][0]
        if len(selected) != len(firsts):  # `cls-last-layer` has selected them already
            selected = selected.index_select(0, firsts)
        output["last_hidden_state"] = selected[:, None]
    return output
