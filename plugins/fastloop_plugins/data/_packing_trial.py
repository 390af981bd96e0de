"""A trial of packed rows before training: sequences alone on the unchanged model, and packed on the adapted one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from fastloop import Batch, PluginError
from fastloop.probing import probing
from fastloop.problem import typed_clause
from fastloop_plugins.data.packing import FLASH
from fastloop_plugins.text.forward_passes import compute, split
from fastloop_plugins.text.padding_check import results

if TYPE_CHECKING:
    from fastloop import Run
    from fastloop_plugins.data._packing import PackedCollator

WINDOWS = ("window", "local_att", "chunk", "block_size")
"""Parts of the names of fields that limit attention, such as sliding_window, local_attention and
attention_chunk_size."""


@dataclass(frozen=True)
class TrialResult:
    """Whether a model can be packed.

    Attributes:
        first_position: The model's first position id.
        refusal: Why it cannot be packed, as the end of a sentence; None: it can.
    """

    first_position: int = 0
    refusal: str | None = None


def try_packing(
    run: Run, model: nn.Module, network: Any, collator: PackedCollator, pack: Callable[[], None]
) -> TrialResult:
    """Compute two sequences alone and packed, for each place where models let positions begin. One sequence is longer
    than each window of the model's attention that is shorter than the data. The model stays as it is.

    Args:
        network: The transformers model in ``model``.
        pack: Adapts the model to packed rows.
    """
    dataset = run.datasets[run.loaders.first_split]
    longest = 0
    if network.config._attn_implementation != FLASH:  # FlashAttention has the windows itself
        longest = collator.longest or run.recipe.data.get("max_length") or 0
    limits = windows(network.config.to_dict(), longest)
    longest_window = max(limits.values(), default=0)
    try:
        with probing(model):
            samples = trial_samples(dataset, tokens=max(12, min(longest, 2 * longest_window)))
            first_position = find_first_position(run, model, network, collator, pack, samples)
    except PluginError as error:
        return TrialResult(refusal=str(error))
    except Exception as error:  # whatever a model or a task that knows no rows may raise
        if isinstance(error, IndexError) and "label" in dataset[0]:  # the model gets only the first token of each text
            return TrialResult(refusal="it does not classify by the first token")
        return TrialResult(refusal=typed_clause(error))
    if first_position is not None:
        return TrialResult(first_position)
    refusal = "its results change when sequences are packed in one row"
    if limits:
        fields = ", ".join(f"{name}: {value}" for name, value in limits.items())
        refusal += f". Sequences have up to {longest} tokens, and these fields may limit attention to fewer: {fields}"
    return TrialResult(refusal=refusal)


def trial_samples(dataset: Any, tokens: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """A long and a short sample.

    Args:
        tokens: Tokens of the long one. Longer than every window of the model.
    """
    lengths = list(getattr(dataset, "lengths", [0]))
    longest = lengths.index(max(lengths))
    return resized(dataset[longest], tokens), resized(dataset[len(dataset) - 1], 7)


def find_first_position(
    run: Run,
    model: nn.Module,
    network: Any,
    collator: PackedCollator,
    pack: Callable[[], None],
    samples: tuple[dict[str, Any], dict[str, Any]],
) -> int | None:
    """The first position id with which packed samples give the results that each has alone; None: neither does.

    Adapts the model. The caller undoes it.
    """
    long_sample, short_sample = samples
    if network.config._attn_implementation == FLASH:
        network.set_attn_implementation("sdpa")  # FlashAttention needs CUDA, and the model is on the CPU
    of_long = compute_outputs(run, model, network, collator, [long_sample], collator.collate)
    of_short = compute_outputs(run, model, network, collator, [short_sample], collator.collate)
    expected = join(in_turns(of_long, of_short))
    pack()
    after_pad = (getattr(network.config, "pad_token_id", None) or 0) + 1  # where RoBERTa's positions begin
    for first_position in (0, after_pad):
        collator.first_position = first_position
        packed = compute_outputs(run, model, network, collator, [long_sample, short_sample], collator)
        if same(join(packed), expected):
            return first_position
    return None


def in_turns(first: list[Tensor], second: list[Tensor]) -> list[Tensor]:
    """The results of two samples in the order of a batch of both: a sample may have several texts, such as a question
    and its answer, and a batch has all first texts before all second ones."""
    parts = []
    for first_part, second_part in zip(first, second, strict=True):
        parts += [first_part, second_part]
    return parts


def compute_outputs(
    run: Run, model: nn.Module, network: Any, collator: PackedCollator, samples: list[Any], collate: Any
) -> list[Tensor]:
    """Compute predictions of samples, (samples, ...), or the logits of each token, (tokens, ...), or the sum
    of losses, 0-dim.

    For a task that reads all hidden states, compute the states of each text: its loss may compare texts.

    Args:
        collate: Pads or packs the samples.
    """
    batch = collate(samples)
    if not isinstance(batch, Batch):
        batch = Batch(batch)
    ragged = getattr(collator.collate, "ragged", None)
    if ragged is not None and ragged(samples).reads_all:
        # with targets, the output of a language model is a loss
        inputs = {name: value for name, value in batch.inputs.items() if name != "targets"}
        return split(results(compute(model, inputs)), inputs)
    outputs: list[Any] = []
    handle = network.register_forward_hook(lambda module, args, output: outputs.append(output))
    output = run.hooks.compute_loss(run=run, model=model, batch=batch.inputs)
    handle.remove()
    if output.predictions is not None:
        return [output.predictions]
    logits: Tensor | None = getattr(outputs[-1], "logits", None) if outputs else None
    if logits is None:
        return [output.loss * (batch.loss_weight if batch.loss_weight > 0 else 1)]
    return [logits.flatten(0, -2)[: batch.tokens]]  # padding is at the end


def join(parts: list[Tensor]) -> Tensor:
    """Results of ``compute_outputs`` as one tensor: rows end to end, or the sum of losses."""
    return torch.cat(parts) if parts[0].dim() else torch.stack(parts).sum()


def windows(config: Mapping[str, Any], longest: int, prefix: str = "") -> dict[str, int]:
    """The fields of a transformers configuration that may limit attention to fewer than ``longest`` tokens: name ->
    tokens."""
    limits: dict[str, int] = {}
    for name, value in config.items():
        if isinstance(value, dict):
            limits |= windows(value, longest, f"{prefix}{name}.")
        elif any(part in str(name) for part in WINDOWS) and "layers" not in str(name):
            values = value if isinstance(value, list) else [value]
            sizes = [size for size in values if type(size) is int and 0 < size < longest]
            if sizes:
                limits[f"{prefix}{name}"] = max(sizes)
    return limits


def resized(sample: Mapping[str, Any], size: int) -> dict[str, Any]:
    """The last ``size`` tokens of a sample: the first ones of a language model's sample may have no loss. A shorter
    sample is repeated."""
    tokens = len(sample["input_ids"]) if "input_ids" in sample else None  # else each array is a sequence
    cut = dict(sample)
    for name, value in sample.items():
        if name == "label" or not hasattr(value, "__len__") or not len(value):
            continue
        if tokens is not None and len(value) != tokens:
            continue
        repeated = value if len(value) >= size else np.resize(value, size)
        cut[name] = repeated[-size:]
    return cut


def same(actual: Tensor, expected: Tensor) -> bool:
    """Whether the rows of two results differ only by rounding, which stays below 1e-5. A missed boundary, position or
    window changes them by 1e-3 and more."""
    if actual.shape != expected.shape:
        return False
    count = len(expected) if expected.dim() else 1
    difference = (actual - expected).reshape(count, -1).norm(dim=1)
    size = expected.reshape(count, -1).norm(dim=1)
    return bool(difference.max() < 1e-4 * size.max())
