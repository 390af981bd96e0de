"""Memory and traffic of ``fsdp``.

Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", 2023.

Torch splits each parameter along one dimension (``shard_dim``), and pads the shards to equal sizes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
    options = layout.options
    half = (options.get("param_dtype") or layout.precision) == "bf16"
    reduced_itemsize = 2 if options.get("reduce_dtype") == "bf16" else 4
    gathers_again = options.get("reshard_after_forward", True)
    holds_gradients = bool(options.get("hold_gradients")) and layout.micro_steps > 1

    def gathered(weight: Weight) -> float:
        return 2 * weight.elements if half else weight.bytes

    def sent(weight: Weight) -> float:
        return gathered(weight) * group * shard(weight, group) / max(weight.bytes, 1)  # with padding

    def reduction(part: Sequence[Weight]) -> float:
        return sum(weight.elements * reduced_itemsize for weight in part if weight.trained)

    blocks = layout.blocks()
    outside = blocks.pop(None)
    root = sum(map(gathered, outside))
    sizes = [sum(map(gathered, block)) for block in blocks.values()]
    reductions = [reduction(block) for block in blocks.values()]

    # Beside activations: a part is held twice, as weights and as the buffer of its all-gather, which torch frees when
    # it gathers the next part.
    held_twice = 2 * max(sizes) if gathers_again and sizes else sum(sizes) or root
    buckets = root + held_twice + 2 * max(reductions, default=0.0)
    full_gradients = sum(map(gathered, layout.trained)) if holds_gradients else 0.0
    shards = sum(shard(weight, group) for weight in layout.trained)

    # Without activations, there are two moments. In the first, the first block is gathered while the rest is held
    # twice; one micro-step has no gradients then.
    first = 2 * (root + next(iter(sizes), 0.0)) + full_gradients
    if layout.micro_steps == 1:
        first -= shards
    # At the end of backward, the rest has full gradients beside its weights, and then beside the buffer of their
    # reduction.
    outside_gradients = sum(gathered(weight) for weight in outside if weight.trained)
    last = max(root, reduction(outside)) + (full_gradients or outside_gradients)

    share = (group - 1) / group
    groups = layout.processes // group
    in_forward = sum(map(sent, layout.weights))
    in_backward = sum(sum(map(sent, block)) for block in blocks.values()) if gathers_again else 0.0
    gradients = 0.0
    for weight in layout.trained:
        gradients += sent(weight) * reduced_itemsize / (2 if half else weight.itemsize)
    scatter = share * gradients
    if layout.device == "cpu":
        scatter *= 2
    scatters = 1 if holds_gradients else layout.micro_steps
    across = 2 * (groups - 1) / groups * gradients / group
    return MemoryEstimate(
        name="fsdp",
        weights=sum(shard(weight, group) for weight in layout.weights) + layout.buffers,
        gradients=shards,
        optimizer=sum(weight.state * shard(weight, group) / max(weight.bytes, 1) for weight in layout.trained),
        buckets=buckets + full_gradients,
        buckets_alone=max(first, last),
        sent_bytes=layout.micro_steps * share * (in_forward + in_backward) + scatters * scatter + across,
        weights_cast=half and layout.precision == "bf16",
    )
