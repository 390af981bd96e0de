"""The sizes that a strategy estimates its memory from, for `fastloop plan --device-memory`.

A strategy overrides the class method ``estimate_memory(layout)``. It yields a mapping for each of its variants:

* ``name``: the variant in the table, such as ``zero-2``; ``options``: the plugin's options for it;
* ``listed``: whether ``layout.options`` already select it; default True;
* ``weights``, ``gradients``, ``optimizer``: bytes that a process holds when the optimizer is about to step;
* ``buckets``: bytes that it holds beside them during forward and backward, such as gathered weights;
* ``alone``: bytes that it holds beside them when there are no activations, if those may be more; default 0;
* ``kept``: the part of ``buckets`` that it also holds when the optimizer is about to step; default 0;
* ``wire``: bytes that it sends in an optimizer step;
* ``host``: of the above, bytes in the host's memory, which ``weights``, ``gradients`` and ``optimizer`` leave out;
  default 0;
* ``weights_cast``: whether it stores the forward pass's copy of the weights, so that autocast makes none; default
  False.

A strategy that divides the layers themselves, over processes that train on the same samples, also declares two class
methods. ``divisions(processes, per_node)`` returns the numbers of processes that it can divide a layer over; 1: none.
``divide_model(model, processes, precision, where)`` makes a model of fake tensors the share of a process, and
``layout`` then describes the share. It returns an object whose attribute ``sent`` counts the bytes that forward and
backward send. A plugin that divides the tokens of sequences declares ``divide_sequences(model, size)``, which does the
same for ``size`` processes of its option ``size``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Weight:
    """One parameter; tied ones count once.

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
    def share(self) -> float:
        """(n - 1) / n, for n processes: the bytes that a process sends in a ring all-gather or reduce-scatter of one
        byte."""
        return (self.processes - 1) / self.processes

    def blocks(self) -> dict[int | None, list[Weight]]:
        """Index of a block -> its weights. None: the weights outside of blocks."""
        found: dict[int | None, list[Weight]] = {None: []}
        for weight in self.weights:
            found.setdefault(weight.block, []).append(weight)
        return found


def shard_dim(shape: Sequence[int], processes: int) -> int:
    """The dimension that ``fsdp`` shards: the first one, unless it is smaller than the number of processes and another
    one divides evenly, as of stacked experts."""
    if not shape or shape[0] >= processes:
        return 0
    return next((dim for dim, size in enumerate(shape) if size % processes == 0), 0)


def total(weights: Iterable[Weight], size: Callable[[Weight], float] | None = None) -> float:
    """The sum of a size over parameters; by default, of their bytes."""
    return sum(weight.bytes if size is None else size(weight) for weight in weights)
