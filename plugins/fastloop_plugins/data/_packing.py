"""Batches as one row of sequences end to end, and attention that stays inside each of them."""

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
from fastloop_plugins.tasks._text_batches import Ragged

READ = {"input_ids", "token_type_ids"}
"""What the model reads of each token. Anything else with a value for each token is what it is to predict."""
IGNORED = -100
"""What is predicted of the padding at a row's end: nothing."""


class Lengths:
    """The lengths of the sequences in a row.

    Not a tensor, since every layer asks for them and would wait for the device; not a list, since a compiler would make a graph for each.
    """

    def __init__(self, lengths: list[int], longest: int = 0) -> None:
        self.lengths, self.longest = lengths, max(longest, *lengths)


class PackedCollator:
    """Puts the sequences of a batch end to end in a row, without padding them first where the task's collator offers ``ragged``.

    ``input_ids`` and every other column of tokens become rows of shape (1, tokens), without an ``attention_mask``; ``position_ids`` restart
    with each sequence. A row that is padded to a multiple ends in a sequence of padding, which nothing is predicted from.

    Args:
        collate: The task's collator.
        multiple: Tokens of a row are padded to a multiple of this; None: they are not.

    Attributes:
        first_position: Where the model's positions begin.
        varlen: Whether the model's attention takes transformers' arguments for FlashAttention, instead of ``packed``: ``cu_seq_lens_q`` and
            ``cu_seq_lens_k``, int32 of shape (sequences + 2,), and ``max_length_q`` and ``max_length_k``. The padding's sequence is always
            among them, empty or not, and the lengths are the same for all batches, so that shapes and numbers depend on the number of
            sequences alone: a compiler makes one graph, and a CUDA graph fits every row of as many tokens.
        longest: Tokens of the longest sequence of all batches, where that is known.
    """

    def __init__(self, collate: Callable[[list[Any]], Any], multiple: int | None) -> None:
        self.collate, self.multiple = collate, multiple or 1
        self.first_position, self.varlen, self.longest = 0, False, 0

    def __call__(self, samples: list[Any]) -> Batch:
        if hasattr(self.collate, "ragged"):
            ragged: Ragged = self.collate.ragged(samples)
        else:
            ragged = unpadded(self.collate(samples), [len(sample["input_ids"]) for sample in samples])
        return Batch(self.pack(ragged), loss_weight=ragged.loss_weight, tokens=ragged.tokens)

    def width(self, tokens: int) -> int:
        """Tokens of a row with its padding."""
        return -(-tokens // self.multiple) * self.multiple

    def pack(self, batch: Ragged) -> dict[str, Any]:
        """The inputs of a row."""
        lengths = [max(len(row), 1) for row in batch.columns["input_ids"][0]]  # an empty text is a token of padding
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
        if batch.columns.keys() <= READ:  # one prediction a sequence: from its first token
            inputs["first_tokens"] = torch.tensor(starts)
        if not self.varlen:
            return inputs | {"packed": Lengths(lengths + [width - total] * (width > total), self.longest)}
        ends, longest = torch.tensor([*starts, total, width], dtype=torch.int32), max(self.longest, self.multiple, *lengths)
        return inputs | {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}


def unpadded(batch: Any, lengths: list[int]) -> Ragged:
    """The sequences of a batch that a collator padded on the right, given the length of each."""
    if not isinstance(batch, Batch):
        batch = Batch(batch)
    ids = batch.inputs["input_ids"]
    columns: dict[str, Any] = {}
    fixed = {name: value for name, value in batch.inputs.items() if name != "attention_mask"}
    for name, value in list(fixed.items()):
        if isinstance(value, Tensor) and value.shape == ids.shape and value.dtype == ids.dtype:
            columns[name] = (
                [row[:length] for row, length in zip(fixed.pop(name).numpy(), lengths, strict=True)],
                0 if name in READ else IGNORED,
            )
    return Ragged(columns=columns, fixed=fixed, loss_weight=batch.loss_weight, tokens=batch.tokens)


def pack_with(packed: PackedCollator, collate: Callable[[list[Any]], Any], samples: list[Any]) -> Batch:
    """Collate by another collator, and pack as ``packed`` does now: the model may be adapted after collators are built."""
    other = copy.copy(packed)
    other.collate = collate
    return other(samples)


@torch.compiler.disable  # type: ignore[untyped-decorator] # every mix of lengths would be another graph
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
    """In the form of transformers' attention functions: another one of them, asked for each sequence by itself.

    Raises:
        PluginError: The model looks at fewer tokens than a sequence has, which is not done here.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    attend = ALL_ATTENTION_FUNCTIONS[implementation]
    longest = packed.longest if packed is not None else key.shape[2] if attention_mask is None else 0
    if sliding_window is not None and sliding_window < longest:
        raise PluginError(f"attention looks at {sliding_window} tokens only, and sequences have {longest}")
    if packed is None:
        plain: tuple[Tensor, None] = attend(module, query, key, value, attention_mask, **kwargs)
        return plain
    queries: Any = packed.lengths if query.shape[2] == key.shape[2] else 1  # ``cls-last-layer`` asks for no more, and none at a row's end
    split = (torch.split(tensor, sizes, dim=2) for tensor, sizes in ((query, queries), (key, packed.lengths), (value, packed.lengths)))
    return torch.cat([attend(module, *part, None, **kwargs)[0] for part in zip(*split, strict=False)], dim=1), None


def mask(attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor | None:
    """The mask of a padded batch. A row has none: its lengths say what sees what."""
    from transformers.masking_utils import sdpa_mask

    made: Tensor | None = None if attention_mask is None else sdpa_mask(attention_mask=attention_mask, **kwargs)
    return made


def register(implementation: str) -> str:
    """Tell transformers of ``attention`` around one of its own; returns the name it then has."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    name = f"packed_{implementation}"
    AttentionInterface.register(name, partial(attention, implementation))
    AttentionMaskInterface.register(name, mask)
    return name


def first_tokens(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    """A forward hook: of a row that holds one prediction a sequence, the first token of each, as a batch of sequences of one token."""
    firsts = kwargs.get("first_tokens")
    if firsts is not None:
        row = output["last_hidden_state"][0]
        output["last_hidden_state"] = (row if len(row) == len(firsts) else row[firsts])[:, None]  # ``cls-last-layer`` leaves no others
    return output
