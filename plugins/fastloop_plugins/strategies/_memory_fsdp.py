"""Memory and traffic of ``fsdp``.

Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", 2023.

Torch splits each parameter along one dimension (``shard_dim``), and pads the shards to equal sizes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fastloop_plugins.strategies._memory_layout import Layout, Weight, shard_dim, total


def shard(weight: Weight, processes: int) -> float:
    """Bytes of one process's shard of a parameter, with padding."""
    rows = weight.shape[shard_dim(weight.shape, processes)] if weight.shape else 1
    return -(-rows // processes) * weight.bytes / max(rows, 1)


def estimate(layout: Layout) -> Iterator[dict[str, Any]]:
    """The plain form, the one with shards within each machine (``hsdp``), and the one with shards in the host's
    memory."""
    plain, tensor = sharded(layout, layout.processes), layout.tensor
    offloads, within = bool(layout.options.get("cpu_offload")), layout.options.get("shard_within")
    is_mesh = min(layout.options.get("tensor") or 1, layout.processes * tensor) == tensor
    mesh, suffix = ({"tensor": tensor}, f" x tensor {tensor}") if tensor > 1 else ({}, "")
    yield {"name": f"fsdp{suffix}", "options": mesh, "listed": is_mesh and not offloads and not within} | plain
    size = within // tensor if within else layout.per_node
    if size < layout.processes and layout.processes % max(size, 1) == 0 and size * tensor > 1:
        options = {"shard_within": size * tensor} | mesh
        listed = is_mesh and bool(within) and not offloads
        yield {"name": f"hsdp{suffix}", "options": options, "listed": listed} | sharded(layout, size)
    if tensor > 1:
        return
    if layout.device == "cpu" or layout.processes == 1:
        return
    host = plain["weights"] + plain["gradients"] + plain["optimizer"] - layout.buffers
    held = {"weights": layout.buffers, "gradients": 0.0, "optimizer": 0.0, "host": host}
    yield {"name": "fsdp offload", "options": {"cpu_offload": True}, "listed": offloads} | plain | held


def sharded(layout: Layout, group: int) -> dict[str, Any]:
    """The bytes with shards over ``group`` processes, and copies of the shards in each of the ``processes / group``
    groups.

    In each micro-step, the blocks are gathered in forward and in backward, and the rest of the model once. Gradients
    are reduce-scattered once, which gloo does by an all-reduce of twice the bytes. Between groups, their shards are
    all-reduced once a step.
    """
    if layout.processes == 1:
        return {"weights": total(layout.weights) + layout.buffers} | {
            "gradients": total(layout.trained),
            "optimizer": total(layout.trained, lambda weight: weight.state),
            "buckets": 0.0,
            "wire": 0.0,
        }
    options, blocks = layout.options, layout.blocks()
    half = (options.get("param_dtype") or layout.precision) == "bf16"
    reduced = 2 if options.get("reduce_dtype") == "bf16" else 4

    def gathered(weight: Weight) -> float:
        return 2 * weight.elements if half else weight.bytes

    def sent(weight: Weight) -> float:
        return gathered(weight) * group * shard(weight, group) / max(weight.bytes, 1)  # with padding

    def reduction(part: list[Weight]) -> float:
        return total((weight for weight in part if weight.trained), lambda weight: weight.elements * reduced)

    outside = blocks.pop(None)
    root, sizes = total(outside, gathered), [total(block, gathered) for block in blocks.values()]
    reductions = [reduction(block) for block in blocks.values()]
    again = options.get("reshard_after_forward", True)
    # A part is held twice, as weights and as the buffer of its all-gather, which torch frees when it gathers the next
    # part.
    kept = root + (2 * max(sizes) if again and sizes else sum(sizes) or root) + 2 * max(reductions, default=0.0)
    held = bool(options.get("hold_gradients")) and layout.micro_steps > 1
    full = total(layout.trained, gathered) if held else 0.0
    shards = total(layout.trained, lambda weight: shard(weight, group))
    # Two moments without activations. The first block is gathered while the rest is held twice; one micro-step has no
    # gradients then.
    first = 2 * (root + next(iter(sizes), 0.0)) + full - (shards if layout.micro_steps == 1 else 0.0)
    # At the end of backward, the rest has full gradients beside its weights, and then beside the buffer of their
    # reduction.
    last = max(root, reduction(outside)) + (full or total((weight for weight in outside if weight.trained), gathered))
    gathers, in_blocks = total(layout.weights, sent), sum(total(block, sent) for block in blocks.values())
    share, groups = (group - 1) / group, layout.processes // group
    gradients = total(layout.trained, lambda weight: sent(weight) * reduced / (2 if half else weight.itemsize))
    scatter = 2 * share * gradients if layout.device == "cpu" else share * gradients
    across = 2 * (groups - 1) / groups * gradients / group
    reductions_per_step = 1 if held else layout.micro_steps
    return {
        "weights": total(layout.weights, lambda weight: shard(weight, group)) + layout.buffers,
        "gradients": shards,
        "optimizer": total(layout.trained, lambda weight: weight.state * shard(weight, group) / max(weight.bytes, 1)),
        "buckets": kept + full,
        "alone": max(first, last),
        "wire": layout.micro_steps * share * (gathers + again * in_blocks) + reductions_per_step * scatter + across,
        "weights_cast": half and layout.precision == "bf16",
    }
