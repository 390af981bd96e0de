"""Reads the kernels of an accelerator from a trace that torch's profiler exported.

Kernels run after the host launched them, so the duration of a host region says nothing about them. The trace connects
both:

    kernel        category ``kernel``, ``gpu_memcpy`` or ``gpu_memset``; ``args.correlation`` names the launch,
                  ``args["External id"]`` the operation
    launch        category ``cuda_runtime`` or ``cuda_driver``, with the same ``args.correlation``; lies in a region
    operation     category ``cpu_op``, with the same ``args["External id"]``
    region        category ``user_annotation``, named ``fastloop/...``

The category ``gpu_user_annotation`` repeats the regions on the device's rows. Those rows are not kernels.

Source of the format: the Chrome trace that Kineto writes (torch 2.11, ``profiler.export_chrome_trace``).
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastloop.runtime.regions import PREFIX
from fastloop_tools.profile.host_timeline import OTHER, Span, flatten, is_region, overlaps, region_at

KERNELS = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCHES = ("cuda_runtime", "cuda_driver")
LAUNCH = "launch"
"""Region of the time in which the device is idle while the host launches kernels too slowly, and does not wait for
data."""


@dataclass(frozen=True)
class DeviceTimeline:
    """The kernels of a window of steps. All seconds are totals of the window.

    Attributes:
        seconds: From the first region's start to the end of the last region or kernel.
        busy: Region of the loop -> seconds in which the device ran kernels that the region launched. Where kernels
            overlap, the one that started first counts.
        idle: Region of the loop in which the host was -> seconds in which the device ran nothing; ``other`` outside of
            all regions.
        operations: Operation -> seconds of its kernels. A kernel without an operation counts under its own name.
        counts: Operation -> kernels.
    """

    seconds: float
    busy: Mapping[str, float]
    idle: Mapping[str, float]
    operations: Mapping[str, float]
    counts: Mapping[str, int]

    @property
    def idle_share(self) -> float:
        """Share of the window in which the device ran nothing."""
        return sum(self.idle.values()) / self.seconds if self.seconds else 0.0

    def regions(self, seconds: float) -> dict[str, float]:
        """Split ``seconds``, measured without a profiler, into regions.

        A profiler slows the host but not the kernels. Busy time therefore stays the same, and idle time gets the rest.
        Idle time counts as ``data`` while the host waits for a batch, and as ``launch`` otherwise.
        """
        busy, idle = sum(self.busy.values()), sum(self.idle.values())
        scale = min(1.0, seconds / busy) if busy else 1.0
        rest = max(0.0, seconds - busy) / idle if idle else 0.0
        found = defaultdict(float, {name: value * scale for name, value in self.busy.items()})
        for name, value in self.idle.items():
            found["data" if name == "data" else LAUNCH] += value * rest
        return {name: value for name, value in found.items() if value}


def read_timeline(path: Path) -> DeviceTimeline:
    """Read an exported trace.

    Raises:
        ValueError: The file is not a JSON object with ``traceEvents``.
    """
    trace = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(trace, dict) or "traceEvents" not in trace:
        raise ValueError(f"{path}: no traceEvents: not a trace that torch's profiler exported")
    return build_timeline(trace["traceEvents"])


def build_timeline(events: Sequence[Mapping[str, Any]]) -> DeviceTimeline:
    """Connect the kernels of a trace with the regions and operations that launched them."""
    complete = [event for event in events if event.get("ph") == "X"]
    regions = host_regions(complete)
    launched = {
        event["args"]["correlation"]: event["ts"]
        for event in complete
        if event.get("cat") in LAUNCHES and "args" in event
    }
    operations = {event["args"].get("External id"): event["name"] for event in complete if event.get("cat") == "cpu_op"}
    kernels = sorted((event for event in complete if event.get("cat") in KERNELS), key=lambda event: event["ts"])
    busy: dict[str, float] = defaultdict(float)
    idle: dict[str, float] = defaultdict(float)
    seconds: dict[str, float] = defaultdict(float)
    counts: Counter[str] = Counter()
    first = reached = regions[0][0] if regions else (kernels[0]["ts"] if kernels else 0.0)
    for kernel in kernels:
        start, end, args = kernel["ts"], kernel["ts"] + kernel["dur"], kernel.get("args", {})
        operation = operations.get(args.get("External id"), kernel["name"])
        seconds[operation] += 1e-6 * kernel["dur"]
        counts[operation] += 1
        _add_idle(idle, regions, reached, start)
        region = region_at(regions, launched.get(args.get("correlation"), start))
        busy[region] += 1e-6 * max(0.0, end - max(start, reached))
        reached = max(reached, end)
    last = max([reached, *(end for _, end, _ in regions)])
    _add_idle(idle, regions, reached, last)
    return DeviceTimeline(1e-6 * (last - first), dict(busy), dict(idle), dict(seconds), dict(counts))


def host_regions(events: Sequence[Mapping[str, Any]]) -> list[Span]:
    """The loop's regions on the host as spans that do not overlap: an inner region interrupts the outer one. Sorted by
    time."""
    return flatten(
        (event["ts"], event["ts"] + event["dur"], event["name"].removeprefix(PREFIX))
        for event in events
        if event.get("cat") == "user_annotation" and is_region(event["name"])
    )


def _add_idle(idle: dict[str, float], regions: Sequence[Span], start: float, end: float) -> None:
    """Add the idle time between two moments to the regions that the host was in."""
    left = max(0.0, end - start)
    for region, overlap in overlaps(regions, start, end):
        idle[region] += 1e-6 * overlap
        left -= overlap
    if left > 0:
        idle[OTHER] += 1e-6 * left
