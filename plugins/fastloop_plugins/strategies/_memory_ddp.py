"""Memory and traffic of ``ddp``.

Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", 2020."""

from __future__ import annotations

from collections.abc import Iterator

from fastloop import Layout, MemoryEstimate


def estimate(layout: Layout) -> Iterator[MemoryEstimate]:
    """Every process holds everything. Gradients are averaged once a step: 2 (n - 1) / n of their bytes in a ring."""
    gradients = layout.gradient_bytes
    exchanged = gradients / 2 if layout.options.get("compress") else gradients
    several = layout.processes > 1
    kept = gradients if several and not layout.options.get("gradient_as_bucket_view", True) else 0.0
    buckets = kept
    if several and exchanged < gradients:  # the smaller copy of a bucket; one is reduced while the next is filled
        buckets += min(exchanged, 2 * layout.options.get("bucket_cap_mb", 25) * 2**20 / 2)
    yield MemoryEstimate(
        name="ddp",
        weights=layout.weight_bytes + layout.buffers,
        gradients=gradients,
        optimizer=layout.state_bytes,
        buckets=buckets,
        buckets_kept=kept,
        sent_bytes=2 * layout.share * exchanged + layout.share * layout.buffers * layout.micro_steps,
    )
