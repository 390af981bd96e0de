"""The collator of a dataset that comes without one: torch's ``default_collate``, and padding by a tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.data import default_collate

from fastloop.errors import DataError

IGNORED = -100
"""Label of a padded token, as in transformers."""


class DefaultCollator:
    """Stacks samples. Lists of token ids become tensors, and a tokenizer pads those of different lengths, and their
    ``labels``.

    Args:
        tokenizer: A tokenizer of transformers; None: samples must have equal shapes.
        remedy: How the user can make samples equal, for messages.
        multiple: The length of padded samples is a multiple of this.
    """

    def __init__(self, tokenizer: Any, remedy: str, multiple: int | None = None) -> None:
        self.tokenizer, self.remedy, self.multiple = tokenizer, remedy, multiple

    def __call__(self, samples: list[Any]) -> Any:
        rows = samples
        if not isinstance(samples[0], tuple) and isinstance(samples[0], Mapping) and "input_ids" in samples[0]:
            rows = list(map(_as_tensors, samples))
            if self.tokenizer is not None and _find_difference(rows):
                rows = self._pad(rows)
        try:
            return default_collate(rows)
        except RuntimeError:
            if (found := _find_difference(rows)) is None:
                raise
            raise DataError(f"the samples of a batch have {found}, expected one shape. {self.remedy}") from None

    def _pad(self, rows: list[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Rows of equal length: the tokenizer pads its own inputs, and labels get -100."""
        from transformers.data.data_collator import pad_without_fast_tokenizer_warning

        if self.tokenizer.pad_token is None:
            raise DataError(
                "processing_class: the tokenizer has no padding token. Set one: tokenizer.pad_token = "
                "tokenizer.eos_token."
            )
        own = [
            name for name in rows[0] if name in {"input_ids", "special_tokens_mask", *self.tokenizer.model_input_names}
        ]
        inputs = [{name: row[name].tolist() for name in own} for row in rows]
        padded: Any = pad_without_fast_tokenizer_warning(  # type: ignore[no-untyped-call]
            self.tokenizer, inputs, pad_to_multiple_of=self.multiple, return_tensors="pt"
        )
        found = [{**row, **{name: values[index] for name, values in padded.items()}} for index, row in enumerate(rows)]
        labels = [row["labels"] for row in rows if isinstance(row.get("labels"), Tensor) and row["labels"].dim() == 1]
        if len(labels) == len(rows):
            each_token = all(len(row["labels"]) == len(row["input_ids"]) for row in rows)
            width = padded["input_ids"].shape[1] if each_token else max(map(len, labels))
            left = each_token and self.tokenizer.padding_side == "left"
            for row, label in zip(found, labels, strict=True):
                missing = width - len(label)
                row["labels"] = pad(label, (missing, 0) if left else (0, missing), value=IGNORED)
        return list(found)


def _as_tensors(sample: Mapping[str, Any]) -> Mapping[str, Any]:
    """A sample whose lists of numbers are tensors, if its token ids are a list. ``default_collate`` would transpose
    lists."""
    if not isinstance(sample.get("input_ids"), list):
        return sample
    return {
        name: torch.tensor(value)
        if isinstance(value, list) and all(isinstance(number, int | float) for number in value)
        else value
        for name, value in sample.items()
    }


def _find_difference(samples: Sequence[Any]) -> str | None:
    """The first field whose shapes differ, and two of the shapes; None if there is none."""
    first = samples[0]
    if isinstance(first, Mapping):
        fields = [(repr(name), [sample.get(name) for sample in samples]) for name in first]
    elif isinstance(first, tuple):
        fields = [(f"element {place}", list(values)) for place, values in enumerate(zip(*samples, strict=False))]
    else:
        fields = [("tensors", list(samples))]
    for name, values in fields:
        shapes = list(dict.fromkeys(map(_shape, values)))
        if len(shapes) > 1:
            return f"{name} of the shapes {shapes[0]} and {shapes[1]}"
    return None


def _shape(value: Any) -> tuple[int, ...]:
    return tuple(value.shape) if hasattr(value, "shape") else (len(value),) if isinstance(value, list | tuple) else ()
