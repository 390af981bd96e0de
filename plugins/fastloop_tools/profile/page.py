"""What was seen, on one page: markdown, which the terminal shows as well."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastloop.estimates import StepProfile
from fastloop_tools.measure.statistics import break_even
from fastloop_tools.profile.suggestions import Suggestion
from fastloop_tools.profile.timeline import LAUNCH

OPERATIONS, HOOKS = 8, 5
"""Rows that are shown."""
FLAT = 1.05
"""The allocator's line is flat when its most is no more than so many times its least."""
LAUNCH_SHARE = 0.1
"""Share of a step. Below it, launches of kernels are not worth a line."""
LAG = 1.1
"""A process lags when its own work takes so many times the fastest's."""


def milliseconds(seconds: float) -> str:
    """As tables have it."""
    return f"{1000 * seconds:,.1f} ms" if seconds < 1 else f"{seconds:,.2f} s"


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    """A markdown table: the first column is text."""
    return [f"| {' | '.join(head)} |", "|---|" + "---:|" * (len(head) - 1), *(f"| {' | '.join(row)} |" for row in rows), ""]


def markdown(seen: StepProfile, found: list[Suggestion], refused: Mapping[str, str], name: str) -> str:
    """The whole page."""
    lines = [f"# {name}: what a step spends", ""]
    rate = f"{seen.samples / seen.seconds:,.1f} samples/s" + (f", {seen.tokens / seen.seconds:,.0f} real tokens/s" if seen.tokens else "")
    where = f"{seen.device}, {seen.precision}" + (f", {seen.world_size} processes" if seen.world_size > 1 else "")
    lines += [f"A step takes {milliseconds(seen.seconds)}: {rate} ({where}; mean of {seen.steps} steps).", ""]
    lines += table(
        ["region", "a step", "share"], [[key, milliseconds(value), f"{value / seen.seconds:.0%}"] for key, value in ranked(seen.regions)]
    )
    if seen.hooks:
        lines += table(
            ["hook", "a step", "share"],
            [[key, milliseconds(value), f"{value / seen.seconds:.1%}"] for key, value in ranked(seen.hooks)[:HOOKS]],
        )
    lines += [f"- {line}" for line in facts(seen)] + [""]
    lines += ["## Operations", ""]
    lines += table(
        ["operation", "a step", "share", "calls"],
        [
            [key, milliseconds(value), f"{value / seen.seconds:.0%}", f"{seen.counts.get(key, 0):,.0f}"]
            for key, value in ranked(seen.operations)[:OPERATIONS]
        ],
    )
    lines += ["## What would give it back", ""]
    if not found:
        lines += ["Nothing that is known here would win more than a few percent.", ""]
    for number, verdict in enumerate(found, start=1):
        about = f"about {milliseconds(verdict.win.seconds)} of a step ({verdict.win.seconds / seen.seconds:.0%})"
        pays = break_even(verdict.win.once, verdict.win.seconds)
        once = f" It costs about {verdict.win.once:.0f} s once, which {pays} steps win back." if pays else ""
        lines.append(f"{number}. `{verdict.edit}`: {about}. {verdict.win.why}{once} ({verdict.numerics})")
    lines += ["", *(f"- `{plugin}` would win, and cannot be here: {why}" for plugin, why in refused.items())]
    return "\n".join(lines).rstrip() + "\n"


def ranked(values: Mapping[str, float]) -> list[tuple[str, float]]:
    """Largest first."""
    return sorted(values.items(), key=lambda item: -item[1])


def facts(seen: StepProfile) -> list[str]:
    """What is to be known beside the shares."""
    lines = []
    if seen.padded:
        lines.append(f"padding: {seen.padding:.0%} of the {seen.padded:,.0f} tokens that a step computes")
    if seen.flops and seen.peaks:
        reached = seen.flops / seen.seconds
        share = reached / (seen.peaks.get(seen.precision) or max(seen.peaks.values()))
        peaks = ", ".join(f"{value / 1e9:,.0f} in {dtype}" for dtype, value in seen.peaks.items())
        lines.append(f"matrix products: {reached / 1e9:,.0f} GFLOP/s over the step, {share:.0%} of what this device reaches ({peaks})")
    if seen.idle is not None:
        lines.append(f"the device computed nothing for {seen.idle:.0%} of the time")
        if (share := seen.region(LAUNCH) / seen.seconds) > LAUNCH_SHARE:
            lines.append(f"the device waits {share:.0%} of a step for the host to launch kernels: compile or larger micro-batches help")
    if seen.page_faults:
        cost = seen.page_faults * seen.fault_seconds
        lines.append(f"allocator: {seen.page_faults:,.0f} pages of memory handed out a step, about {milliseconds(cost)}")
    if len(seen.reserved) > 1:
        least, most = min(seen.reserved), max(seen.reserved)
        shape = "flat" if most <= FLAT * least else "a sawtooth"
        lines.append(f"allocator: {shape}, {least / 2**20:,.0f} to {most / 2**20:,.0f} MiB reserved; {seen.retries} retries")
    for cut in seen.graph_breaks:
        lines.append(f"compilation is cut {cut['count']} times at {cut['where']}: {cut['reason']}")
    for again in seen.recompiles:
        lines.append(f"compiled {again['count']} times more: {again['where']}, since {again['reason']}")
    if len(seen.ranks) > 1:
        own = [rank.get("data", 0.0) + rank.get("loss", 0.0) for rank in seen.ranks]
        slow = max(range(len(own)), key=own.__getitem__)
        if own[slow] > LAG * min(own):
            others = {key: min(rank.get(key, 0.0) for rank in seen.ranks) for key in ("data", "loss")}
            part = max(others, key=lambda key: seen.ranks[slow].get(key, 0.0) - others[key])
            lines.append(
                f"process {slow} lags: {milliseconds(own[slow])} of its own work a step, the fastest {milliseconds(min(own))}: its {part}"
            )
    return lines


def record(seen: StepProfile, found: list[Suggestion], refused: Mapping[str, str]) -> dict[str, Any]:
    """For ``profile.json``."""
    return {
        "seen": seen.to_dict(),
        "verdicts": [
            {
                "plugin": verdict.plugin,
                "edit": verdict.edit,
                "seconds": verdict.win.seconds,
                "once": verdict.win.once,
                "why": verdict.win.why,
                "numerics": verdict.numerics,
            }
            for verdict in found
        ],
        "refused": dict(refused),
    }
