"""A trial of packed rows before training: sequences alone on the unchanged model, and packed on the adapted one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from fastloop import Batch, PluginError
from fastloop.probing import probing
from fastloop_plugins.text.masks import compute as forward
from fastloop_plugins.text.masks import split
from fastloop_plugins.text.padding_check import results

if TYPE_CHECKING:
    from fastloop import Run
    from fastloop_plugins.data._packing import PackedCollator

WINDOWS = ("window", "local_att", "chunk", "block_size")
"""Parts of the names of fields that limit attention, such as sliding_window, local_attention and
attention_chunk_size."""


def try_packing(
    run: Run, model: nn.Module, found: Any, collator: PackedCollator, pack: Callable[[], None]
) -> int | str:
    """Compute two sequences alone and packed, for each place where models let positions begin. One sequence is longer
    than each window of the model's attention that is shorter than the data. The model stays as it is.

    Args:
        found: The transformers model in ``model``.
        pack: Adapts the model to packed rows.

    Returns:
        The model's first position id, or why it cannot be packed.
    """
    dataset, flash = run.datasets[run.loaders.first], found.config._attn_implementation == "flash_attention_2"
    # FlashAttention has the windows itself
    longest = 0 if flash else collator.longest or run.recipe.data.get("max_length") or 0
    limits = windows(found.config.to_dict(), longest)
    size = max(12, min(longest, 2 * max(limits.values(), default=0)))
    lengths = list(getattr(dataset, "lengths", [0]))
    try:
        with probing(model):
            samples = [resized(dataset[lengths.index(max(lengths))], size), resized(dataset[len(dataset) - 1], 7)]
            if flash:
                found.set_attn_implementation("sdpa")  # FlashAttention needs CUDA, and the model is on the CPU
            alone = [compute(run, model, found, collator, [sample], collator.collate) for sample in samples]
            expected = join([text for texts in zip(*alone, strict=True) for text in texts])
            pack()
            after_pad = (getattr(found.config, "pad_token_id", None) or 0) + 1  # where RoBERTa's positions begin
            for collator.first_position in (0, after_pad):
                if same(join(compute(run, model, found, collator, samples, collator)), expected):
                    return collator.first_position
    except Exception as error:  # whatever a model or a task that knows no rows may raise
        if isinstance(error, IndexError) and "label" in dataset[0]:  # the model gets only the first token of each text
            return "it does not classify by the first token"
        return str(error) if isinstance(error, PluginError) else f"{type(error).__name__}: {error}"
    fields = ", ".join(f"{name}: {value}" for name, value in limits.items())
    reason = (
        f". Sequences have up to {longest} tokens, and these fields may limit attention to fewer: {fields}"
        if limits
        else ""
    )
    return f"its results change when sequences are packed in one row{reason}"


def compute(
    run: Run, model: nn.Module, found: Any, collator: PackedCollator, samples: list[Any], collate: Any
) -> list[Tensor]:
    """Compute predictions of samples, (samples, ...), or the logits of each token, (tokens, ...), or the sum
    of losses, 0-dim.

    For a task that reads all hidden states, compute the states of each text: its loss may compare texts.

    Args:
        collate: Pads or packs the samples.
    """
    batch = collate(samples)
    batch = batch if isinstance(batch, Batch) else Batch(batch)
    ragged = getattr(collator.collate, "ragged", None)
    if ragged is not None and ragged(samples).reads_all:
        # with targets, the output of a language model is a loss
        inputs = {name: value for name, value in batch.inputs.items() if name != "targets"}
        return split(results(forward(model, inputs)), inputs)
    outputs: list[Any] = []
    handle = found.register_forward_hook(lambda module, args, output: outputs.append(output))
    output = run.hooks.compute_loss(run=run, model=model, batch=batch.inputs)
    handle.remove()
    if output.predictions is not None:
        return [output.predictions]
    logits: Tensor | None = getattr(outputs[-1], "logits", None) if outputs else None
    # padding is at the end
    return [output.loss * (batch.loss_weight or 1) if logits is None else logits.flatten(0, -2)[: batch.tokens]]


def join(parts: list[Tensor]) -> Tensor:
    """Results of ``compute`` as one tensor: rows end to end, or the sum of losses."""
    return torch.cat(parts) if parts[0].dim() else torch.stack(parts).sum()


def windows(config: Mapping[str, Any], longest: int, prefix: str = "") -> dict[str, int]:
    """The fields of a transformers configuration that may limit attention to fewer than ``longest`` tokens: name ->
    tokens."""
    found: dict[str, int] = {}
    for name, value in config.items():
        if isinstance(value, dict):
            found |= windows(value, longest, f"{prefix}{name}.")
        elif any(part in str(name) for part in WINDOWS) and "layers" not in str(name):
            sizes = [
                size
                for size in (value if isinstance(value, list) else [value])
                if type(size) is int and 0 < size < longest
            ]
            found |= {f"{prefix}{name}": max(sizes)} if sizes else {}
    return found


def resized(sample: Mapping[str, Any], size: int) -> dict[str, Any]:
    """The last ``size`` tokens of a sample: the first ones of a language model's sample may have no loss. A shorter
    sample is repeated."""
    tokens = len(sample["input_ids"]) if "input_ids" in sample else None  # else each array is a sequence
    cut = {
        name
        for name, value in sample.items()
        if name != "label" and hasattr(value, "__len__") and len(value) and tokens in (None, len(value))
    }
    return {
        name: (value if size <= len(value) else np.resize(value, size))[-size:] if name in cut else value
        for name, value in sample.items()
    }


def same(found: Tensor, expected: Tensor) -> bool:
    """Whether the rows of two results differ only by rounding, which stays below 1e-5. A missed boundary, position or
    window changes them by 1e-3 and more."""
    if found.shape != expected.shape:
        return False
    found, expected = (rows.reshape(len(rows) if rows.dim() else 1, -1) for rows in (found, expected))
    return bool((found - expected).norm(dim=1).max() < 1e-4 * expected.norm(dim=1).max())
