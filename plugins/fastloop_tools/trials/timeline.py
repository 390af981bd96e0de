"""Divides a window of steps among its parts, from the events of torch's profiler.

On the host, each moment belongs to the innermost event that the thread of the loop is in, so that the parts add up to
the window. If that event is no operation, and an operation of another thread or a collective runs meanwhile, the moment
belongs to that operation: the loop may wait for it.

Kernels of an accelerator run after the host launched them, so the duration of a host region says nothing about them.
The trace that torch's profiler exports connects both. A kernel (category ``kernel``, ``gpu_memcpy`` or ``gpu_memset``)
names by ``args.correlation`` its launch (``cuda_runtime`` or ``cuda_driver``), which lies in a region (category
``user_annotation``, named ``fastloop/...``), and by ``args["External id"]`` its operation (``cpu_op``). The category
``gpu_user_annotation`` repeats the regions on the device's rows. Source: the Chrome trace of Kineto (torch 2.11).
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mode
from typing import Any

from torch._C._autograd import DeviceType

from fastloop.runtime.regions import PREFIX

KERNELS = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCHES = ("cuda_runtime", "cuda_driver")
LAUNCH = "launch"
"""Region of the time in which the device is idle while the host launches kernels too slowly, and does not wait for
data."""
OTHER = "other"
"""Region and event of the time outside all named regions and events: the loop itself."""
OPERATION = re.compile(r"\w+::?\w")
"""Begins the name of an operation: ``aten::mm``, ``gloo:all_reduce``. Other events contain operations."""
COLLECTIVE = re.compile(r"c10d::|gloo:|nccl:")
"""Begins the name of a collective, in which a process waits for the others."""
COMPILED, COMPILED_NAME = "## Call CompiledFxGraph ", "inductor::kernels"
"""How the name of a compiled graph begins in torch's profiler, before its hash; and the operation under which the own
time of all graphs is added up: that of kernels which the compiler wrote."""

Span = tuple[float, float, str]
"""Start and end in microseconds, and a name."""


@dataclass(frozen=True)
class HostTimeline:
    """The host's time in a window of steps: seconds by region of the loop and innermost event, and of each
    ``PLUGIN.hook`` with everything that it calls."""

    seconds: Mapping[tuple[str, str], float]
    hooks: Mapping[str, float]

    def scale(self, seconds: float) -> HostTimeline:
        """The same for a window of ``seconds`` without a profiler, which stretches all regions but ``data``."""
        total = sum(self.seconds.values())
        waiting = sum(value for (region, _), value in self.seconds.items() if region == "data")
        rest = min(1.0, max(0.0, (seconds - waiting) / (total - waiting))) if total > waiting else 1.0
        scaled = {key: value if key[0] == "data" else value * rest for key, value in self.seconds.items()}
        drift = seconds / sum(scaled.values()) if any(scaled.values()) else 1.0
        return HostTimeline(
            {key: value * drift for key, value in scaled.items()},
            {name: value * rest * drift for name, value in self.hooks.items()},
        )

    def add_up(self, name: Callable[[str, str], str | None]) -> dict[str, float]:
        """Seconds by ``name`` of region and event; None: left out."""
        parts = ((name(region, event), value) for (region, event), value in self.seconds.items())
        return _add_up((part, value) for part, value in parts if part is not None)

    @property
    def regions(self) -> dict[str, float]:
        """Region of the loop -> seconds without nested regions."""
        return self.add_up(lambda region, event: region)

    @property
    def work(self) -> dict[str, float]:
        """The same without collectives, which last until the slowest process joins."""
        return self.add_up(lambda region, event: None if COLLECTIVE.match(event) else region)

    @property
    def operations(self) -> dict[str, float]:
        """Operation -> seconds without nested operations."""
        return self.add_up(lambda region, event: event if OPERATION.match(event) else None)

    @property
    def between_operations(self) -> dict[str, float]:
        """Region of the loop, or hook outside of all regions -> seconds in which no operation ran; ``other``: nor any
        other event."""
        return self.add_up(
            lambda region, event: None if OPERATION.match(event) else event if region == OTHER else region
        )


def _add_up(parts: Iterable[tuple[str, float]]) -> dict[str, float]:
    found: dict[str, float] = defaultdict(float)
    for name, value in parts:
        found[name] += value
    return dict(found)


def build_host_timeline(events: Iterable[Any]) -> HostTimeline:
    """Divide the window among the events of ``torch.profiler.profile.events()``.

    The window lasts from the start of the first region or hook to the end of the last one.
    """
    seen = [event for event in events if event.device_type == DeviceType.CPU]
    named = [event for event in seen if event.name.startswith(PREFIX)]
    if not named:
        return HostTimeline({}, {})
    thread = mode(event.thread for event in named)
    named = [event for event in named if event.thread == thread]
    inner: list[Any] = []
    outer: list[Any] = []
    for event in seen:
        # an asynchronous event ends in another thread, so it contains no events of this one
        (inner if event.thread == thread and not event.is_async else outer).append(event)
    regions = flatten(_span(event) for event in named if is_region(event.name))
    elsewhere = [span for span in flatten(map(_span, outer)) if OPERATION.match(span[2])]
    reached, last = min(event.time_range.start for event in named), max(event.time_range.end for event in named)
    seconds: dict[tuple[str, str], float] = defaultdict(float)

    def add(start: float, end: float, name: str) -> None:
        region, left = region_at(regions, start), end - start
        for operation, overlap in () if OPERATION.match(name) else overlaps(elsewhere, start, end):
            seconds[region, operation] += 1e-6 * overlap
            left -= overlap
        seconds[region, name] += 1e-6 * left

    for start, end, name in flatten(map(_span, inner)):
        start, end = max(start, reached), min(end, last)
        if start < end:
            add(reached, start, OTHER)
            add(start, end, name)
            reached = end
    hooks = [event for event in named if not is_region(event.name)]
    return HostTimeline(dict(seconds), _add_up((name, 1e-6 * (end - start)) for start, end, name in map(_span, hooks)))


def _span(event: Any) -> Span:
    name = COMPILED_NAME if event.name.startswith(COMPILED) else event.name.removeprefix(PREFIX)
    return event.time_range.start, event.time_range.end, name


def is_region(name: str) -> bool:
    """Whether an event is a region of the loop: the names of hooks have a dot."""
    return name.startswith(PREFIX) and "." not in name


def flatten(nested: Iterable[Span]) -> list[Span]:
    """Spans that do not overlap: an inner span interrupts the outer one. Sorted by time."""
    flat: list[Span] = []
    stack: list[tuple[float, str]] = []  # end and name of the open spans
    reached = 0.0

    def close(until: float) -> None:
        nonlocal reached
        while stack and stack[-1][0] <= until:
            end, name = stack.pop()
            if end > reached:
                flat.append((reached, end, name))
                reached = end

    for start, end, name in sorted(nested, key=lambda span: (span[0], -span[1])):
        close(start)
        if stack and start > reached:
            flat.append((reached, start, stack[-1][1]))
        reached = start
        stack.append((end, name))
    close(float("inf"))
    return flat


def region_at(regions: Sequence[Span], time: float) -> str:
    """The region that the host was in; ``other`` outside of all."""
    index = bisect_right(regions, time, key=lambda span: span[0]) - 1
    return regions[index][2] if index >= 0 and time < regions[index][1] else OTHER


def overlaps(spans: Sequence[Span], start: float, end: float) -> Iterator[tuple[str, float]]:
    """The spans between two moments, and the microseconds of each in between. ``spans`` do not overlap."""
    index = max(0, bisect_right(spans, start, key=lambda span: span[0]) - 1)
    while index < len(spans) and spans[index][0] < end:
        overlap = min(end, spans[index][1]) - max(start, spans[index][0])
        if overlap > 0:
            yield spans[index][2], overlap
        index += 1


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
    """

    seconds: float
    busy: Mapping[str, float]
    idle: Mapping[str, float]
    operations: Mapping[str, float]

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
    """Read a trace that torch's profiler has exported."""
    return build_timeline(json.loads(path.read_text(encoding="utf-8"))["traceEvents"])


def build_timeline(events: Sequence[Mapping[str, Any]]) -> DeviceTimeline:
    """Connect the kernels of a trace with the regions and operations that launched them."""
    complete = [event for event in events if event.get("ph") == "X"]
    regions = flatten(
        (event["ts"], event["ts"] + event["dur"], event["name"].removeprefix(PREFIX))
        for event in complete
        if event.get("cat") == "user_annotation" and is_region(event["name"])
    )
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
    first = reached = regions[0][0] if regions else (kernels[0]["ts"] if kernels else 0.0)
    for kernel in kernels:
        start, end, args = kernel["ts"], kernel["ts"] + kernel["dur"], kernel.get("args", {})
        operation = operations.get(args.get("External id"), kernel["name"])
        seconds[operation] += 1e-6 * kernel["dur"]
        _add_idle(idle, regions, reached, start)
        region = region_at(regions, launched.get(args.get("correlation"), start))
        busy[region] += 1e-6 * max(0.0, end - max(start, reached))
        reached = max(reached, end)
    last = max([reached, *(end for _, end, _ in regions)])
    _add_idle(idle, regions, reached, last)
    return DeviceTimeline(1e-6 * (last - first), dict(busy), dict(idle), dict(seconds))


def _add_idle(idle: dict[str, float], regions: Sequence[Span], start: float, end: float) -> None:
    """Add the idle time between two moments to the regions that the host was in."""
    left = max(0.0, end - start)
    for region, overlap in overlaps(regions, start, end):
        idle[region] += 1e-6 * overlap
        left -= overlap
    if left > 0:
        idle[OTHER] += 1e-6 * left
