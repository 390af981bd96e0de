"""Batches as one row of sequences end to end, and attention that stays inside each of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from fastloop import Batch, PluginError

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
    """Makes a row of what a task's collator has padded.

    ``input_ids`` and whatever else has a value for each token become rows of shape (1, tokens), without the padding and without the
    ``attention_mask``; ``position_ids`` restart with each sequence. A row that is padded to a multiple ends in a sequence of its own, which
    nothing is predicted from.

    Attributes:
        first_position: Where the model's positions begin.
        varlen: Whether the model's attention takes transformers' arguments for FlashAttention, instead of ``packed``.
        longest: The length of the longest sequence of all batches, where it is known.
    """

    def __init__(self, collate: Callable[[list[Any]], Any], multiple: int | None) -> None:
        self.collate, self.multiple = collate, multiple or 1
        self.first_position, self.varlen, self.longest = 0, False, 0

    def __call__(self, samples: list[Any]) -> Batch:
        batch = self.collate(samples)
        if not isinstance(batch, Batch):
            batch = Batch(batch)
        width = batch.inputs["input_ids"].shape[1]
        batch.inputs = self.pack(batch.inputs, [min(max(len(sample["input_ids"]), 1), width) for sample in samples])
        return batch

    def pack(self, inputs: Mapping[str, Any], lengths: list[int]) -> dict[str, Any]:
        """The inputs of a padded batch as those of a row."""
        ids, total = inputs["input_ids"], sum(lengths)
        places = torch.cat([torch.arange(length) + row * ids.shape[1] for row, length in enumerate(lengths)])
        positions = torch.cat([torch.arange(length) for length in lengths]) + self.first_position
        ends = list(accumulate(lengths, initial=0))
        result = {name: value for name, value in inputs.items() if name != "attention_mask"}
        tokens = [
            name for name, value in result.items() if isinstance(value, Tensor) and value.shape == ids.shape and value.dtype == ids.dtype
        ]
        if set(tokens) <= READ:  # one prediction a sequence: from its first token
            result["first_tokens"] = torch.tensor(ends[:-1])
        if tail := -total % self.multiple:
            places, positions = nn.functional.pad(places, (0, tail)), nn.functional.pad(positions, (0, tail), value=self.first_position)
            lengths, ends = [*lengths, tail], [*ends, total + tail]
        for name in tokens:
            result[name] = result[name].flatten()[places][None]
            result[name][:, total:] = 0 if name in READ else IGNORED
        result["position_ids"] = positions[None]
        if not self.varlen:
            return result | {"packed": Lengths(lengths, self.longest)}
        ends_tensor, longest = torch.tensor(ends, dtype=torch.int32), max(lengths)
        return result | {
            "cu_seq_lens_q": ends_tensor,
            "cu_seq_lens_k": ends_tensor,
            "max_length_q": longest,
            "max_length_k": longest,
        }


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
    queries: Any = packed.lengths if query.shape[2] == key.shape[2] else 1  # ``first-token`` asks for no more, and none at a row's end
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
        output["last_hidden_state"] = (row if len(row) == len(firsts) else row[firsts])[:, None]  # ``first-token`` leaves no others
    return output
