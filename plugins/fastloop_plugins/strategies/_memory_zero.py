"""Memory and traffic of ``deepspeed``.

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020.

DeepSpeed 0.19 keeps three parts that the paper does not count. The first is a flat fp32 copy of a process's share of
the weights, also for fp32 weights; here it is part of ``optimizer``. The others are a bucket of gradients, and the full
gradient of each weight of which a process steps a part.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fastloop_plugins.strategies._memory_layout import Layout, Weight, total

BUCKET = 500_000_000
"""Elements of a bucket, at most: the plugin's and DeepSpeed's default."""
PERSISTENT = 100_000
"""Elements of a weight that stage 3 does not shard, at most: DeepSpeed's default."""
LIVE = 1_000_000_000
"""Elements of gathered weights that stage 3 keeps, if they are used again: DeepSpeed's default."""


def estimate(layout: Layout) -> Iterator[dict[str, Any]]:
    """Stages 0 to 3, and those with the optimizer, or optimizer and weights, in the host's memory."""
    half = layout.precision == "fp16"
    for number in range(4):
        if half and number == 0:
            continue  # the plugin refuses it
        listed = number == (2 if layout.options.get("stage") is None else layout.options["stage"])
        offloads = bool(layout.options.get("offload_optimizer"))
        plain = {"name": f"zero-{number}", "options": {"stage": number}} | stage(layout, number, half)
        yield plain | {"listed": listed and not offloads}
        if number in (2, 3):
            options = plain["options"] | {"offload_optimizer": True}
            held = {"gradients": 0.0, "optimizer": 0.0, "host": plain["gradients"] + plain["optimizer"]}
            if number == 3:
                options["offload_parameters"] = True
                held |= {"weights": float(layout.buffers), "host": held["host"] + plain["weights"] - layout.buffers}
            yield plain | {"name": f"zero-{number} offload", "options": options, "listed": listed and offloads} | held


def stage(layout: Layout, number: int, half: bool) -> dict[str, Any]:
    """The bytes of a stage of ZeRO.

    Args:
        half: Whether the weights themselves have two bytes an element, with a sharded copy in fp32.
    """
    n, trained = layout.processes, layout.trained

    def size(weight: Weight) -> int:
        return 2 * weight.elements if half else weight.bytes

    def part(weight: Weight) -> int:
        return -(-weight.elements // n)

    full, grads = total(layout.weights, size), total(trained, size)
    state, master = total(trained, lambda weight: weight.state), total(trained, lambda weight: 4 * weight.elements)
    bucket = min(total(trained, lambda weight: weight.elements), layout.options.get("bucket_size") or BUCKET) * (
        2 if half else 4
    )
    steps = layout.micro_steps
    if number == 0:
        wire = 2 * layout.share * grads
        return {
            "weights": full + layout.buffers,
            "gradients": grads,
            "optimizer": state,
            "buckets": bucket * (n > 1),
            "wire": wire,
        }
    if number < 3:
        whole = number == 1 and steps > 1  # stage 1 reduces after the last micro-step
        reduced = (1 if number == 1 else steps) * layout.share * grads * (2 if layout.device == "cpu" else 1)
        return {
            "weights": full + layout.buffers,
            "gradients": grads if whole else straddling(layout, size),
            "optimizer": (master + state) / n,
            "buckets": bucket,
            "wire": reduced + layout.share * grads,
            "weights_cast": half,
        }
    small = [weight for weight in layout.weights if weight.elements <= PERSISTENT]
    sharded = [weight for weight in layout.weights if weight.elements > PERSISTENT]
    item = 2 if half else 4
    gathered = min(total(sharded, size), LIVE * item)
    return {
        "weights": total(layout.weights, lambda weight: part(weight) * item) + total(small, size) + layout.buffers,
        "gradients": total(trained, lambda weight: part(weight) * item),
        "optimizer": total(trained, lambda weight: part(weight) * (4 + weight.state / max(weight.elements, 1))),
        "buckets": bucket + gathered,
        "kept": bucket,
        "wire": layout.share * (steps * (2 * total(sharded, size) + grads) + total(small, size)),
        "weights_cast": half,
    }


def straddling(layout: Layout, size: Any) -> float:
    """Bytes of the gradients that stages 1 and 2 hold on the process that holds most: of each weight of which it steps
    any part.

    DeepSpeed flattens the weights of an optimizer's group, and cuts them into equal parts.
    """
    held = [0.0] * layout.processes
    groups: dict[int, list[Weight]] = {}
    for weight in layout.trained:
        groups.setdefault(weight.group, []).append(weight)
    for weights in groups.values():
        part = -(-sum(weight.elements for weight in weights) // layout.processes)
        start = 0
        for weight in weights:
            for rank in range(start // part, (start + max(weight.elements, 1) - 1) // part + 1):
                held[rank] += size(weight)
            start += weight.elements
    return max(held)
