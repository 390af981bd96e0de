"""Memory and traffic of ``fsdp``.

Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", 2023.

Torch splits each parameter along one dimension (``shard_dim``), and pads the shards to equal sizes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from fastloop import Layout, MemoryEstimate
from fastloop.memory_estimates import Weight


def shard_dim(shape: Sequence[int], processes: int) -> int:
    """The dimension that ``fsdp`` shards: the first one, unless it is smaller than the number of processes and another
    one divides evenly, as of stacked experts."""
    if not shape or shape[0] >= processes:
        return 0
    return next((dim for dim, size in enumerate(shape) if size % processes == 0), 0)


def shard(weight: Weight, processes: int) -> float:
    """Bytes of one process's shard of a parameter, with padding."""
    rows = weight.shape[shard_dim(weight.shape, processes)] if weight.shape else 1
    return -(-rows // processes) * weight.bytes / max(rows, 1)


def estimate(layout: Layout) -> Iterator[MemoryEstimate]:
    """The plain form, the one with shards within each machine (``hsdp``), and the one with shards in the host's
    memory."""
    tensor = layout.tensor
    offloads = bool(layout.options.get("cpu_offload"))
    within = layout.options.get("shard_within")  # counts all processes of a group, also those that divide a layer
    is_mesh = min(layout.options.get("tensor") or 1, layout.processes * tensor) == tensor
    mesh = {"tensor": tensor} if tensor > 1 else {}
    suffix = f" x tensor {tensor}" if tensor > 1 else ""
    is_plain = is_mesh and not offloads and not within
    plain = sharded(layout, layout.processes)
    yield replace(plain, name=f"fsdp{suffix}", options=mesh, listed=is_plain)
    size = within // tensor if within else layout.per_node
    if size < layout.processes and layout.processes % max(size, 1) == 0 and size * tensor > 1:
        yield replace(
            sharded(layout, size),
            name=f"hsdp{suffix}",
            options={"shard_within": size * tensor} | mesh,
            listed=is_mesh and bool(within) and not offloads,
        )
    if tensor > 1 or layout.device == "cpu" or layout.processes == 1:
        return
    yield replace(
        plain,
        name="fsdp offload",
        options={"cpu_offload": True},
        listed=offloads,
        weights=layout.buffers,
        gradients=0.0,
        optimizer=0.0,
        host=plain.weights + plain.gradients + plain.optimizer - layout.buffers,
    )


def sharded(layout: Layout, group: int) -> MemoryEstimate:
    """The bytes with shards over ``group`` processes, and copies of the shards in each of the ``processes / group``
    groups.

    In each micro-step, the blocks are gathered in forward and in backward, and the rest of the model once. Gradients
    are reduce-scattered once, which gloo does by an all-reduce of twice the bytes. Between groups, their shards are
    all-reduced once a step.
    """
    if layout.processes == 1:
        return MemoryEstimate(
            name="fsdp",
            weights=layout.weight_bytes + layout.buffers,
            gradients=layout.gradient_bytes,
            optimizer=layout.state_bytes,
        )
    parts = GatheredParts(layout, group)
    gradients = parts.full_gradients
    shards = sum(shard(weight, group) for weight in layout.trained)
    return MemoryEstimate(
        name="fsdp",
        weights=sum(shard(weight, group) for weight in layout.weights) + layout.buffers,
        gradients=shards,
        optimizer=sum(weight.state * shard(weight, group) / max(weight.bytes, 1) for weight in layout.trained),
        buckets=parts.held_in_blocks() + gradients,
        buckets_alone=max(parts.held_at_first(shards), parts.held_at_last()),
        sent_bytes=parts.sent_in_step(),
        weights_cast=parts.half and layout.precision == "bf16",
    )


class GatheredParts:
    """The parts of a model that are gathered at once: its blocks, and the rest, which is the root.

    Args:
        group: Number of processes that share the weights.

    Attributes:
        blocks: The weights of each block.
        outside: The weights of the root.
        half: Whether gathered weights have two bytes.
        gathers_again: Whether backward gathers the blocks again.
        holds_gradients: Whether full gradients are kept until the last micro-step, and reduced only then.
    """

    def __init__(self, layout: Layout, group: int) -> None:
        self.layout = layout
        self.group = group
        options = layout.options
        self.half = (options.get("param_dtype") or layout.precision) == "bf16"
        self.reduced_itemsize = 2 if options.get("reduce_dtype") == "bf16" else 4
        self.gathers_again = options.get("reshard_after_forward", True)
        self.holds_gradients = bool(options.get("hold_gradients")) and layout.micro_steps > 1
        blocks = layout.blocks()
        self.outside = blocks.pop(None)
        self.blocks = list(blocks.values())

    @property
    def full_gradients(self) -> float:
        """The bytes of the gradients that are kept until the last micro-step."""
        return self.gathered(self.layout.trained) if self.holds_gradients else 0.0

    def gathered(self, weights: Iterable[Weight]) -> float:
        """The bytes of whole weights."""
        if self.half:
            return sum(2 * weight.elements for weight in weights)
        return sum(weight.bytes for weight in weights)

    def sent(self, weights: Iterable[Weight]) -> float:
        """The bytes that an all-gather of weights sends, with padding."""
        group = self.group
        return sum(self.gathered([weight]) * group * shard(weight, group) / max(weight.bytes, 1) for weight in weights)

    def reduction(self, weights: Iterable[Weight]) -> float:
        """The bytes of the buffer in which the gradients of weights are reduced."""
        return sum(weight.elements * self.reduced_itemsize for weight in weights if weight.trained)

    def held_in_blocks(self) -> float:
        """The bytes beside activations."""
        root = self.gathered(self.outside)
        sizes = [self.gathered(block) for block in self.blocks]
        if self.gathers_again and sizes:
            # one block at a time, as weights and as the buffer of its all-gather, which torch frees when it gathers the
            # next block
            held_beside_root = 2 * max(sizes)
        elif any(sizes):
            held_beside_root = sum(sizes)  # forward leaves the weights of all blocks
        else:
            held_beside_root = root  # the buffer of the root's own all-gather
        return root + held_beside_root + 2 * max(map(self.reduction, self.blocks), default=0.0)

    def held_at_first(self, shards: float) -> float:
        """The bytes without activations in forward: the first block is gathered while the root is held twice.

        Args:
            shards: The bytes of the gradients' shards, which a single micro-step does not have yet.
        """
        first_block = self.gathered(self.blocks[0]) if self.blocks else 0.0
        held = 2 * (self.gathered(self.outside) + first_block) + self.full_gradients
        return held - shards if self.layout.micro_steps == 1 else held

    def held_at_last(self) -> float:
        """The bytes without activations at the end of backward: the root has full gradients beside its weights, and
        then beside the buffer of their reduction."""
        gradients = self.full_gradients or self.gathered(weight for weight in self.outside if weight.trained)
        return max(self.gathered(self.outside), self.reduction(self.outside)) + gradients

    def sent_in_step(self) -> float:
        """The bytes that a process sends in a step: weights, and gradients within its group and to the other groups."""
        layout = self.layout
        gathers = self.sent(layout.weights)
        if self.gathers_again:
            gathers += sum(map(self.sent, self.blocks))
        gradients = 0.0
        for weight in layout.trained:
            gradients += self.sent([weight]) * self.reduced_itemsize / (2 if self.half else weight.itemsize)
        share = (self.group - 1) / self.group
        scatter = share * gradients
        if layout.device == "cpu":
            scatter *= 2
        scatters = 1 if self.holds_gradients else layout.micro_steps
        groups = layout.processes // self.group
        across = 2 * (groups - 1) / groups * gradients / self.group
        return layout.micro_steps * share * gathers + scatters * scatter + across
