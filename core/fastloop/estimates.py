"""What was seen of a run, and what a plugin makes of it. Plain values: they are written as JSON, and no torch is imported."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

MULTIPLYING = (
    "aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::addbmm", "aten::linear", "aten::mkldnn_linear",
    "mkldnn::_linear_pointwise", "aten::convolution", "aten::mkldnn_convolution", "aten::_convolution", "aten::convolution_backward",
)  # fmt: skip
"""Operations that multiply matrices, as torch's profiler calls them."""


@dataclass(kw_only=True)
class StepProfile:
    """A window of steps. All seconds, counts and operations are those of one step on the main process.

    Attributes:
        device: ``cpu``, ``cuda``, ...
        precision: ``fp32``, or what autocast computes in: ``bf16``, ``fp16``.
        cores: Processors that this process may use.
        threads: That torch computes with.
        world_size: Processes.
        steps: In the window that was timed.
        seconds: Of a step, while nothing looked on.
        samples: Trained on, over all processes.
        tokens: Real ones, over all processes; 0 where the task counts none.
        padded: Tokens that were computed on this process, padding included; 0 where inputs have no ``input_ids``.
        longest: What they would be if batches were padded to their longest sample.
        real: Real ones among them.
        reading: Seconds of a processor that this process took for its batches; little where it only waits for them.
        regions: Region of the loop -> its own seconds, without those of inner regions. Their sum is ``seconds``. On an accelerator: seconds
            in which the device ran kernels of the region, ``data`` while it waited for batches, ``launch`` while it waited for the host.
        hooks: ``PLUGIN.hook`` -> seconds.
        operations: Operation -> seconds of its own, on the device that computes.
        counts: Operation -> calls.
        flops: Floating-point operations of matrix products.
        peaks: Dtype -> floating-point operations a second that matrix products of this device reach.
        idle: Share of the profiled time in which an accelerator ran no kernel; None on a CPU.
        page_faults: Pages that the system handed out.
        fault_seconds: What one of them costs.
        reserved: Bytes that CUDA's allocator held after each step; flat is good.
        retries: How often it freed everything to go on.
        layers: Length of the longest list of like modules in the model: a transformer's depth.
        graph_breaks: ``{"where": "file:line", "reason": ..., "count": n}`` for every place where compilation was cut.
        recompiles: The same for functions that were compiled again, for other shapes or values.
        total_steps: Of the recipe as it stands; None: nobody knows.
        ranks: For each process, its regions.
    """

    device: str
    precision: str = "fp32"
    cores: int = 1
    threads: int = 1
    world_size: int = 1
    steps: int = 1
    seconds: float
    samples: float = 0.0
    tokens: float = 0.0
    padded: float = 0.0
    longest: float = 0.0
    real: float = 0.0
    reading: float = 0.0
    regions: dict[str, float] = field(default_factory=dict)
    hooks: dict[str, float] = field(default_factory=dict)
    operations: dict[str, float] = field(default_factory=dict)
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
        """Seconds of some regions."""
        return sum(self.regions.get(name, 0.0) for name in names)

    @property
    def computing(self) -> float:
        """Seconds of forward, loss and backward."""
        return self.region("loss", "backward")

    @property
    def padding(self) -> float:
        """Share of the computed tokens that are padding."""
        return 1 - self.real / self.padded if self.padded else 0.0

    def spent(self, names: Iterable[str]) -> float:
        """Seconds of some operations, as shares of their sum that the timed steps took."""
        return sum(self.operations.get(name, 0.0) for name in names)

    def multiplying(self) -> float:
        """Seconds of matrix products."""
        return self.spent(MULTIPLYING)

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return dataclasses.asdict(self)


@dataclass(frozen=True, kw_only=True)
class SpeedupEstimate:
    """A plugin's estimate.

    Attributes:
        seconds: Of each step that it would win back. A estimate: `fastloop tune` measures.
        why: What was seen that says so, in a few words with figures.
        options: What to set in the plugin's options.
        overrides: What to set in the recipe instead of adding the plugin, such as ``{"data.padding": "longest"}``.
        once: Seconds that it costs once in a run, such as those of compilation.
    """

    seconds: float
    why: str
    options: Mapping[str, Any] = field(default_factory=dict)
    overrides: Mapping[str, Any] = field(default_factory=dict)
    once: float = 0.0
