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
from typing import Any, NamedTuple

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
COMPILED = "## Call CompiledFxGraph "
"""Begins the name of a compiled graph in torch's profiler, before its hash."""
COMPILED_NAME = "inductor::kernels"
"""Operation under which the own time of all compiled graphs is added up: that of kernels which the compiler wrote."""


class Span(NamedTuple):
    """A named time. Start and end are in microseconds."""

    start: float
    end: float
    name: str

    @property
    def seconds(self) -> float:
        """Its length."""
        return 1e-6 * (self.end - self.start)


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
        shrink = 1.0  # of all regions but ``data``
        if total > waiting:
            shrink = min(1.0, max(0.0, (seconds - waiting) / (total - waiting)))
        scaled = {}
        for (region, event), value in self.seconds.items():
            scaled[region, event] = value if region == "data" else value * shrink
        drift = 1.0  # of all regions, where waiting alone takes longer than the window, or nothing else was shrunk
        if any(scaled.values()):
            drift = seconds / sum(scaled.values())
        return HostTimeline(
            seconds={key: value * drift for key, value in scaled.items()},
            hooks={name: value * shrink * drift for name, value in self.hooks.items()},
        )

    def add_up(self, name: Callable[[str, str], str | None]) -> dict[str, float]:
        """Seconds by ``name`` of region and event; None: left out."""
        sums: dict[str, float] = defaultdict(float)
        for (region, event), value in self.seconds.items():
            part = name(region, event)
            if part is not None:
                sums[part] += value
        return dict(sums)

    @property
    def regions(self) -> dict[str, float]:
        """Region of the loop -> seconds without nested regions."""
        return self.add_up(lambda region, event: region)

    @property
    def work(self) -> dict[str, float]:
        """The same without collectives, which last until the slowest process joins."""

        def name(region: str, event: str) -> str | None:
            return None if COLLECTIVE.match(event) else region

        return self.add_up(name)

    @property
    def operations(self) -> dict[str, float]:
        """Operation -> seconds without nested operations."""

        def name(region: str, event: str) -> str | None:
            return event if OPERATION.match(event) else None

        return self.add_up(name)

    @property
    def between_operations(self) -> dict[str, float]:
        """Region of the loop, or hook outside of all regions -> seconds in which no operation ran; ``other``: nor any
        other event."""

        def name(region: str, event: str) -> str | None:
            if OPERATION.match(event):
                return None
            return event if region == OTHER else region

        return self.add_up(name)


def build_host_timeline(events: Iterable[Any]) -> HostTimeline:
    """Divide the window among the events of ``torch.profiler.profile.events()``.

    The window lasts from the start of the first region or hook to the end of the last one.
    """
    on_host = [event for event in events if event.device_type == DeviceType.CPU]
    named = [event for event in on_host if event.name.startswith(PREFIX)]
    if not named:
        return HostTimeline({}, {})
    thread = mode(event.thread for event in named)  # of the loop
    named = [event for event in named if event.thread == thread]
    own: list[Span] = []  # of the loop's thread
    of_other_threads: list[Span] = []
    for event in on_host:
        # an asynchronous event ends in another thread, so it contains no events of this one
        if event.thread == thread and not event.is_async:
            own.append(_span(event))
        else:
            of_other_threads.append(_span(event))
    regions = flatten(_span(event) for event in named if is_region(event.name))
    elsewhere = [span for span in flatten(of_other_threads) if OPERATION.match(span.name)]
    first = min(event.time_range.start for event in named)
    last = max(event.time_range.end for event in named)
    seconds: dict[tuple[str, str], float] = defaultdict(float)
    for span in _fill(flatten(own), first, last):
        _divide(seconds, span, regions, elsewhere)
    hooks: dict[str, float] = defaultdict(float)
    for event in named:
        if not is_region(event.name):
            span = _span(event)
            hooks[span.name] += span.seconds
    return HostTimeline(dict(seconds), dict(hooks))


def _fill(spans: Iterable[Span], first: float, last: float) -> Iterator[Span]:
    """The parts of the spans between two moments, with ``other`` in their gaps. After the last span is no gap: each
    window ends with an event.

    Args:
        spans: Sorted, without overlaps.
    """
    reached = first
    for span in spans:
        start = max(span.start, reached)
        end = min(span.end, last)
        if start < end:
            yield Span(reached, start, OTHER)
            yield Span(start, end, span.name)
            reached = end


def _divide(
    seconds: dict[tuple[str, str], float], span: Span, regions: Sequence[Span], elsewhere: Sequence[Span]
) -> None:
    """Add the time of a span to its region and event. If it is no operation, it may wait for one of another thread,
    which gets the time of both.

    Args:
        seconds: Region and event -> seconds so far.
        elsewhere: Operations of other threads.
    """
    region = region_at(regions, span.start)
    left = span.end - span.start
    if not OPERATION.match(span.name):
        for operation, overlap in overlaps(elsewhere, span.start, span.end):
            seconds[region, operation] += 1e-6 * overlap
            left -= overlap
    seconds[region, span.name] += 1e-6 * left


def _span(event: Any) -> Span:
    name = COMPILED_NAME if event.name.startswith(COMPILED) else event.name.removeprefix(PREFIX)
    return Span(event.time_range.start, event.time_range.end, name)


def is_region(name: str) -> bool:
    """Whether an event is a region of the loop: the names of hooks have a dot."""
    return name.startswith(PREFIX) and "." not in name


def flatten(nested: Iterable[Span]) -> list[Span]:
    """Spans that do not overlap: an inner span interrupts the outer one. Sorted by time.

    A span a from 0 to 9, with b from 2 to 5 in it, becomes a from 0 to 2, b from 2 to 5, and a from 5 to 9.
    """
    flat: list[Span] = []
    open_spans: list[Span] = []  # the innermost last
    reached = 0.0

    def close(until: float) -> None:
        nonlocal reached
        while open_spans and open_spans[-1].end <= until:
            span = open_spans.pop()
            if span.end > reached:
                flat.append(Span(reached, span.end, span.name))
                reached = span.end

    for span in sorted(nested, key=lambda span: (span.start, -span.end)):  # the outer one first
        close(span.start)
        if open_spans and span.start > reached:
            flat.append(Span(reached, span.start, open_spans[-1].name))
        reached = span.start
        open_spans.append(span)
    close(float("inf"))
    return flat


def region_at(regions: Sequence[Span], time: float) -> str:
    """The region that the host was in; ``other`` outside of all."""
    index = _last_started(regions, time)
    if index >= 0 and time < regions[index].end:
        return regions[index].name
    return OTHER


def _last_started(spans: Sequence[Span], time: float) -> int:
    """The position of the last span that has started by a moment; -1: none has."""
    return bisect_right(spans, time, key=lambda span: span.start) - 1


def overlaps(spans: Sequence[Span], start: float, end: float) -> Iterator[tuple[str, float]]:
    """The spans between two moments, and the microseconds of each in between. ``spans`` do not overlap."""
    index = max(0, _last_started(spans, start))
    while index < len(spans) and spans[index].start < end:
        span = spans[index]
        overlap = min(end, span.end) - max(start, span.start)
        if overlap > 0:
            yield span.name, overlap
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
        busy = sum(self.busy.values())
        idle = sum(self.idle.values())
        busy_scale = min(1.0, seconds / busy) if busy else 1.0
        idle_scale = max(0.0, seconds - busy) / idle if idle else 0.0
        regions: dict[str, float] = defaultdict(float)
        for name, value in self.busy.items():
            regions[name] += value * busy_scale
        for name, value in self.idle.items():
            regions["data" if name == "data" else LAUNCH] += value * idle_scale
        return {name: value for name, value in regions.items() if value}


def read_timeline(path: Path) -> DeviceTimeline:
    """Read a trace that torch's profiler has exported."""
    return build_timeline(json.loads(path.read_text(encoding="utf-8"))["traceEvents"])


def build_timeline(events: Sequence[Mapping[str, Any]]) -> DeviceTimeline:
    """Connect the kernels of a trace with the regions and operations that launched them."""
    annotations: list[Span] = []
    launched: dict[Any, float] = {}  # correlation -> time of the launch
    operations: dict[Any, str] = {}  # external id -> name
    kernels: list[Mapping[str, Any]] = []
    for event in events:
        if event.get("ph") != "X":  # not a complete event
            continue
        category = event.get("cat")
        if category == "user_annotation" and is_region(event["name"]):
            name = event["name"].removeprefix(PREFIX)
            annotations.append(Span(event["ts"], event["ts"] + event["dur"], name))
        elif category in LAUNCHES and "args" in event:
            launched[event["args"]["correlation"]] = event["ts"]
        elif category == "cpu_op":
            operations[event["args"].get("External id")] = event["name"]
        elif category in KERNELS:
            kernels.append(event)
    regions = flatten(annotations)
    kernels.sort(key=lambda event: float(event["ts"]))
    first = 0.0
    if regions:
        first = regions[0].start
    elif kernels:
        first = kernels[0]["ts"]
    busy: dict[str, float] = defaultdict(float)
    idle: dict[str, float] = defaultdict(float)
    seconds: dict[str, float] = defaultdict(float)
    reached = first  # the end of the kernels so far
    for kernel in kernels:
        start = kernel["ts"]
        end = start + kernel["dur"]
        args = kernel.get("args", {})
        operation = operations.get(args.get("External id"), kernel["name"])
        seconds[operation] += 1e-6 * kernel["dur"]
        _add_idle(idle, regions, reached, start)
        region = region_at(regions, launched.get(args.get("correlation"), start))
        busy[region] += 1e-6 * max(0.0, end - max(start, reached))
        reached = max(reached, end)
    last = max([reached, *(region.end for region in regions)])
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
