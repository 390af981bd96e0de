"""The model that `fastloop plan --device-memory` describes to a strategy, and the memory that the strategy estimates.

Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Weight:
    """The size of one parameter. Tied parameters count once.

    Attributes:
        shape: Its shape.
        itemsize: Bytes of an element.
        state: Bytes of its optimizer state, without sharding.
        trained: Whether it has a gradient.
        block: Index of the repeated block that holds it; None: it is outside of them.
        group: Index of its group in the optimizer.
    """

    shape: tuple[int, ...]
    itemsize: int = 4
    state: int = 0
    trained: bool = True
    block: int | None = None
    group: int = 0

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Bytes, without sharding."""
        return self.elements * self.itemsize


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A model on a number of processes.

    Attributes:
        weights: All parameters, in the order of the model.
        buffers: Bytes of the model's buffers.
        processes: Number of processes that train on different samples.
        per_node: Those of one machine.
        tensor: Number of processes that divide each layer, and train on the same samples.
        micro_steps: Micro-batches of an optimizer step on one process.
        precision: ``no``, ``bf16`` or ``fp16``.
        samples: Samples of a micro-batch on one process.
        device: ``cpu``, which communicates by gloo, or another type, which communicates by NCCL or its like.
        options: The strategy's options in the recipe; empty if the recipe does not list it.
    """

    weights: tuple[Weight, ...]
    buffers: int = 0
    processes: int = 1
    per_node: int = 1
    tensor: int = 1
    micro_steps: int = 1
    precision: str = "no"
    samples: int = 1
    device: str = "cuda"
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def trained(self) -> tuple[Weight, ...]:
        """The parameters that have gradients."""
        return tuple(weight for weight in self.weights if weight.trained)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all parameters, without sharding."""
        return sum(weight.bytes for weight in self.weights)

    @property
    def gradient_bytes(self) -> int:
        """Bytes of all gradients, without sharding."""
        return sum(weight.bytes for weight in self.trained)

    @property
    def state_bytes(self) -> int:
        """Bytes of the optimizer's state, without sharding."""
        return sum(weight.state for weight in self.trained)

    @property
    def share(self) -> float:
        """(n - 1) / n, for n processes: the bytes that a process sends in a ring all-gather or reduce-scatter of one
        byte."""
        return (self.processes - 1) / self.processes

    def blocks(self) -> dict[int | None, list[Weight]]:
        """Index of a block -> its weights. None: the weights outside of blocks."""
        blocks: dict[int | None, list[Weight]] = {None: []}
        for weight in self.weights:
            blocks.setdefault(weight.block, []).append(weight)
        return blocks


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """The bytes that one process holds and sends with one variant of a strategy.

    Attributes:
        name: The variant in the table, such as ``zero-2``.
        options: The strategy's options that select it.
        listed: Whether ``Layout.options`` already select it.
        weights: Weights and buffers.
        gradients: Gradients when the optimizer is about to step.
        optimizer: Optimizer state, with the strategy's own copy of weights.
        activations: The most that forward and backward hold beside all others. A strategy leaves it 0: `fastloop plan`
            measures it.
        buckets: Gathered weights and buffers of communication, beside the activations.
        buckets_alone: The same at a time without activations, if it may be more.
        buckets_kept: The part of ``buckets`` that is also held when the optimizer is about to step.
        sent_bytes: Bytes that the process sends in an optimizer step.
        host: Bytes in the host's memory, which ``weights``, ``gradients`` and ``optimizer`` leave out.
        weights_cast: Whether the strategy stores the weights in the dtype of autocast, so that autocast makes no copy.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    listed: bool = True
    weights: float
    gradients: float
    optimizer: float
    activations: float = 0.0
    buckets: float = 0.0
    buckets_alone: float = 0.0
    buckets_kept: float = 0.0
    sent_bytes: float = 0.0
    host: float = 0.0
    weights_cast: bool = False

    @property
    def largest_buckets(self) -> float:
        """``buckets`` at the time when they and the activations are most: with the activations, or alone, when only
        the part above the activations counts."""
        return max(self.buckets, self.buckets_alone - self.activations)

    @property
    def total(self) -> float:
        """The most bytes that the process holds on the device."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.largest_buckets
