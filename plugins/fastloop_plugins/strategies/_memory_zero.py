"""Memory and traffic of ``deepspeed``.

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020.

DeepSpeed 0.19 keeps three parts that the paper does not count. The first is a flat fp32 copy of a process's share of
the weights, also for fp32 weights; here it is part of ``optimizer``. The others are a bucket of gradients, and the full
gradient of each weight of which a process steps a part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from fastloop import Layout, MemoryEstimate
from fastloop.memory_estimates import Weight

BUCKET = 500_000_000
"""Elements of a bucket, at most: the plugin's and DeepSpeed's default."""
PERSISTENT = 100_000
"""Elements of a weight that stage 3 does not shard, at most: DeepSpeed's default."""
LIVE = 1_000_000_000
"""Elements of gathered weights that stage 3 keeps, if they are used again: DeepSpeed's default."""


def estimate(layout: Layout) -> Iterator[MemoryEstimate]:
    """Stages 0 to 3, and those with the optimizer, or optimizer and weights, in the host's memory."""
    half = layout.precision == "fp16"
    listed_stage = layout.options.get("stage")
    if listed_stage is None:
        listed_stage = 2
    offloads = bool(layout.options.get("offload_optimizer"))
    for number in range(4):
        if half and number == 0:
            continue  # the plugin refuses it
        is_listed = number == listed_stage
        plain = replace(stage(layout, number, half), listed=is_listed and not offloads)
        yield plain
        if number < 2:
            continue
        options = {**plain.options, "offload_optimizer": True}
        offloaded = replace(
            plain,
            name=f"{plain.name} offload",
            options=options,
            listed=is_listed and offloads,
            gradients=0.0,
            optimizer=0.0,
            host=plain.gradients + plain.optimizer,
        )
        if number == 3:
            offloaded = replace(
                offloaded,
                options={**options, "offload_parameters": True},
                weights=layout.buffers,
                host=offloaded.host + plain.weights - layout.buffers,
            )
        yield offloaded


def stage(layout: Layout, number: int, half: bool) -> MemoryEstimate:
    """The bytes of a stage of ZeRO.

    Args:
        half: Whether the weights themselves have two bytes an element, with a sharded copy in fp32.
    """

    size = partial(held_bytes, half=half)
    trained = layout.trained
    steps = layout.micro_steps
    weights = sum(map(size, layout.weights))
    gradients = sum(map(size, trained))
    elements = sum(weight.elements for weight in trained)
    bucket = min(elements, layout.options.get("bucket_size") or BUCKET) * (2 if half else 4)
    variant = MemoryEstimate(
        name=f"zero-{number}",
        options={"stage": number},
        weights=weights + layout.buffers,
        gradients=gradients,
        optimizer=layout.state_bytes,
        buckets=bucket,
        weights_cast=half and number > 0,
    )
    if number == 0:
        buckets = bucket if layout.processes > 1 else 0.0
        return replace(variant, buckets=buckets, sent_bytes=2 * layout.share * gradients)
    if number < 3:
        reduces_once = number == 1  # stage 1 reduces after the last micro-step, and stage 2 in each
        holds_all = reduces_once and steps > 1
        reduced = (1 if reduces_once else steps) * layout.share * gradients
        if layout.device == "cpu":
            reduced *= 2
        return replace(
            variant,
            gradients=gradients if holds_all else straddling(layout, size),
            optimizer=(4 * elements + layout.state_bytes) / layout.processes,
            sent_bytes=reduced + layout.share * gradients,
        )
    return shard_weights(layout, variant, half)


def held_bytes(weight: Weight, half: bool) -> int:
    """The bytes of a weight."""
    return 2 * weight.elements if half else weight.bytes


def shard_weights(layout: Layout, whole: MemoryEstimate, half: bool) -> MemoryEstimate:
    """The bytes of stage 3, which shards weights, too.

    Args:
        whole: The bytes with whole weights, gradients and state.
    """
    size = partial(held_bytes, half=half)
    processes = layout.processes
    small = [weight for weight in layout.weights if weight.elements <= PERSISTENT]
    sharded = [weight for weight in layout.weights if weight.elements > PERSISTENT]
    small_bytes = sum(map(size, small))
    sharded_bytes = sum(map(size, sharded))
    itemsize = 2 if half else 4
    shards = 0
    for weight in layout.weights:
        shards += shard(weight, processes) * itemsize
    optimizer = 0.0
    for weight in layout.trained:
        optimizer += shard(weight, processes) * (4 + weight.state / max(weight.elements, 1))
    sent = layout.micro_steps * (2 * sharded_bytes + whole.gradients) + small_bytes
    return replace(
        whole,
        weights=shards + small_bytes + layout.buffers,
        gradients=sum(shard(weight, processes) for weight in layout.trained) * itemsize,
        optimizer=optimizer,
        buckets=whole.buckets + min(sharded_bytes, LIVE * itemsize),
        buckets_kept=whole.buckets,
        sent_bytes=layout.share * sent,
    )


def shard(weight: Weight, processes: int) -> int:
    """Elements of one process's shard of a parameter, with padding."""
    return -(-weight.elements // processes)


def straddling(layout: Layout, size: Callable[[Weight], int]) -> float:
    """Bytes of the gradients that stages 1 and 2 hold on the process that holds most: of each weight of which it steps
    any part.

    DeepSpeed flattens the weights of an optimizer's group, and cuts them into equal parts. Weights of 3, 4 and 1
    elements on 2 processes have the parts [0 0 0 1] and [1 1 1 2]: the first process holds the gradients of weights 0
    and 1, the second those of 1 and 2.

    Args:
        size: Bytes of a weight's gradient.
    """
    held = [0.0] * layout.processes
    groups: dict[int, list[Weight]] = {}
    for weight in layout.trained:
        groups.setdefault(weight.group, []).append(weight)
    for weights in groups.values():
        part = -(-sum(weight.elements for weight in weights) // layout.processes)
        start = 0
        for weight in weights:
            first = start // part
            last = (start + max(weight.elements, 1) - 1) // part
            for rank in range(first, last + 1):
                held[rank] += size(weight)
            start += weight.elements
    return max(held)
