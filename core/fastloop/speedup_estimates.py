"""The profile of a run's steps, the speedups that plugins estimate from it, and recommendations by rule.

Imports no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

MULTIPLYING = (
    "aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::addbmm", "aten::linear", "aten::mkldnn_linear",
    "mkldnn::_linear_pointwise", "aten::convolution", "aten::mkldnn_convolution", "aten::_convolution",
    "aten::convolution_backward",
)  # fmt: skip
"""Names of matrix products in torch's profiler."""


@dataclass(kw_only=True)
class StepProfile:
    """Averages over a window of steps: times, counts and operations are per step, on the main process.

    Attributes:
        device: ``cpu``, ``cuda``, ...
        precision: ``fp32``, or the dtype of autocast: ``bf16``, ``fp16``.
        cores: Processors that this process may use.
        threads: Threads of torch.
        foreign_cores: Processors that other programs kept busy.
        world_size: Number of processes.
        steps: Steps in the timed window.
        seconds: Wall time of a step without a profiler.
        samples: Samples trained on, over all processes.
        tokens: Tokens without padding, over all processes; 0 if the task does not count tokens.
        padded: Tokens computed on this process, including padding; 0 if inputs have no ``input_ids``.
        longest: ``padded``, if batches were padded to their longest sample.
        real: Tokens of ``padded`` that are not padding.
        attention_calls: Calls of attention in forward if each sequence of ``padded`` had one in each layer.
        reading: CPU seconds that this process spent on reading batches; small if it only waits for workers.
        regions: Region of the loop -> seconds without nested regions. They add up to ``seconds``. On an accelerator:
            seconds in which the device ran kernels of the region; ``data`` is time spent waiting for batches,
            ``launch`` waiting for the host.
        hooks: ``PLUGIN.hook`` -> seconds.
        operations: Operation -> seconds on the device, without nested operations.
        between_operations: Region of the loop, or hook outside of all regions -> seconds in which no operation runs:
            Python, or native code that torch's profiler does not record. ``other`` is attributed to nothing. With
            ``operations``, they add up to ``seconds``. On an accelerator: ``data`` and ``launch`` of ``regions``.
        counts: Operation -> calls.
        flops: Floating-point operations of matrix products.
        peaks: Dtype -> measured peak of matrix products on this device, in floating-point operations per second.
        idle: Fraction of the profiled time in which an accelerator ran no kernel; None on a CPU.
        page_faults: Minor page faults.
        fault_seconds: Seconds per page fault.
        reserved: Bytes that CUDA's allocator reserved after each step; should be constant.
        retries: Times that CUDA's allocator freed its cache and retried.
        layers: Length of the longest list of equal modules in the model: a transformer's depth.
        graph_breaks: ``{"where": "file:line", "reason": ..., "count": n}`` for each graph break of ``torch.compile``.
        recompiles: The same for recompiled functions.
        total_steps: Steps of the recipe; None: unknown.
        ranks: The regions of each process; on a CPU without collectives, in which it waits for the others.
    """

    device: str
    precision: str = "fp32"
    cores: int = 1
    threads: int = 1
    foreign_cores: float = 0.0
    world_size: int = 1
    steps: int = 1
    seconds: float
    samples: float = 0.0
    tokens: float = 0.0
    padded: float = 0.0
    longest: float = 0.0
    real: float = 0.0
    attention_calls: float = 0.0
    reading: float = 0.0
    regions: dict[str, float] = field(default_factory=dict)
    hooks: dict[str, float] = field(default_factory=dict)
    operations: dict[str, float] = field(default_factory=dict)
    between_operations: dict[str, float] = field(default_factory=dict)
    counts: dict[str, float] = field(default_factory=dict)
    flops: float = 0.0
    peaks: dict[str, float] = field(default_factory=dict)
    idle: float | None = None
    page_faults: float = 0.0
    fault_seconds: float = 0.0
    reserved: list[int] = field(default_factory=list)
    retries: int = 0
    layers: int = 0
    graph_breaks: list[dict[str, Any]] = field(default_factory=list)
    recompiles: list[dict[str, Any]] = field(default_factory=list)
    total_steps: int | None = None
    ranks: list[dict[str, float]] = field(default_factory=list)

    def region(self, *names: str) -> float:
        """Total seconds of the given regions."""
        return sum(self.regions.get(name, 0.0) for name in names)

    @property
    def computing(self) -> float:
        """Seconds of forward, loss and backward."""
        return self.region("loss", "backward")

    @property
    def in_operations(self) -> float:
        """Seconds of operations in forward, loss and backward. Fewer tokens do not shorten the time between them, such
        as that of Python."""
        between = sum(self.between_operations.get(region, 0.0) for region in ("loss", "backward"))
        return self.computing - between

    @property
    def padding(self) -> float:
        """Fraction of the computed tokens that are padding."""
        return 1 - self.real / self.padded if self.padded else 0.0

    def spent(self, names: Iterable[str]) -> float:
        """Total seconds of the given operations."""
        return sum(self.operations.get(name, 0.0) for name in names)

    def multiplying(self) -> float:
        """Seconds of matrix products."""
        return self.spent(MULTIPLYING)

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return dataclasses.asdict(self)


@dataclass(frozen=True, kw_only=True)
class SpeedupEstimate:
    """A plugin's estimate of its speedup.

    Attributes:
        seconds: Seconds saved per step.
        why: The reason in a few words, with figures from the profile.
        options: Options to set for the plugin.
        overrides: Recipe keys to set instead of adding the plugin, such as ``{"data.padding": "longest"}``.
        once: One-time cost in seconds, such as compilation.
    """

    seconds: float
    why: str
    options: Mapping[str, Any] = field(default_factory=dict)
    overrides: Mapping[str, Any] = field(default_factory=dict)
    once: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Recommendation:
    """A plugin that makes training faster on a machine, by rule.

    Attributes:
        why: The reason in a few words.
        options: Options to set for the plugin.
    """

    why: str
    options: Mapping[str, Any] = field(default_factory=dict)
