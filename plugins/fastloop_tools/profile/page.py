"""Shows a profile and its suggestions on one page of markdown, for ``profile.md`` and the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastloop.estimates import StepProfile
from fastloop_tools.profile.suggestions import Suggestion, show_speedup, speedup
from fastloop_tools.shared.tables import markdown_table
from fastloop_tools.trials.statistics import break_even
from fastloop_tools.trials.timeline import LAUNCH, OTHER

OPERATIONS, HOOKS = 10, 5
"""Rows of the tables of operations and hooks."""
FLAT = 1.05
"""Reserved memory is flat if its maximum is at most this many times its minimum."""
LAUNCH_SHARE = 0.1
"""Share of a step. Below it, waiting for kernel launches is not mentioned."""
LAG = 1.1
"""A process lags if its own work takes this many times that of the fastest process."""


def milliseconds(seconds: float) -> str:
    """A duration as text."""
    return f"{1000 * seconds:,.1f} ms" if seconds < 1 else f"{seconds:,.2f} s"


def markdown(profile: StepProfile, found: list[Suggestion], refused: Mapping[str, str], name: str) -> str:
    """The page."""
    lines = [f"# {name}: where a step spends its time", ""]
    rate = f"{profile.samples / profile.seconds:,.1f} samples/s"
    if profile.tokens:
        rate += f", {profile.tokens / profile.seconds:,.0f} real tokens/s"
    where = f"{profile.device}, {profile.precision}"
    if profile.world_size > 1:
        where += f", {profile.world_size} processes"
    lines += [f"A step takes {milliseconds(profile.seconds)}: {rate} ({where}; mean of {profile.steps} steps).", ""]
    for head, values, digits in (("region", ranked(profile.regions), 0), ("hook", ranked(profile.hooks)[:HOOKS], 1)):
        rows = [[key, milliseconds(value), f"{value / profile.seconds:.{digits}%}"] for key, value in values]
        lines += markdown_table([head, "a step", "share"], rows) if rows else []
    lines += [f"- {line}" for line in facts(profile)] + [""]
    lines += ["## Operations", "", *operations(profile)]
    lines += ["## Suggestions", ""]
    if not found:
        lines += ["No plugin estimates a speedup of more than a few percent.", ""]
    for number, suggestion in enumerate(found, start=1):
        estimate = suggestion.estimate
        about = f"about {milliseconds(estimate.seconds)} of a step (x {show_speedup(speedup(profile, estimate))})"
        pays = break_even(estimate.once, estimate.seconds)
        once = f" It costs about {estimate.once:.0f} s once, and pays off after {pays} steps." if pays else ""
        lines.append(f"{number}. `{suggestion.edit}`: {about}. {estimate.why}{once} ({suggestion.numerics})")
    lines += ["", *(f"- `{plugin}` would be faster, but cannot run here: {why}" for plugin, why in refused.items())]
    return "\n".join(lines).rstrip() + "\n"


def operations(profile: StepProfile) -> list[str]:
    """The table of operations, which adds up to the step."""
    found = [(f"`{name}`", value, f"{profile.counts.get(name, 0):,.0f}") for name, value in profile.operations.items()]
    between = {name: value for name, value in profile.between_operations.items() if name != OTHER}
    found += [(f"{name}, between operations", value, "") for name, value in between.items()]
    found.sort(key=lambda row: -row[1])
    lost = max(0.0, profile.seconds - sum(value for _, value, _ in found))
    if rest := found[OPERATIONS:]:
        found[OPERATIONS:] = [(f"{len(rest)} more", sum(value for _, value, _ in rest), "")]
    rows = [
        [name, milliseconds(value), f"{value / profile.seconds:.1%}", calls]
        for name, value, calls in (*found, ("not attributed", lost, ""))
    ]
    lines = markdown_table(["operation", "a step", "share", "calls"], rows)
    return [*lines, "Between operations, Python runs, or native code that torch's profiler does not record.", ""]


def ranked(values: Mapping[str, float]) -> list[tuple[str, float]]:
    """Items by value, largest first."""
    return sorted(values.items(), key=lambda item: -item[1])


def facts(profile: StepProfile) -> list[str]:
    """Remarks below the regions."""
    lines = []
    if profile.padded:
        lines.append(f"padding: {profile.padding:.0%} of the {profile.padded:,.0f} tokens that a step computes")
    if profile.flops and profile.peaks:
        reached = profile.flops / profile.seconds
        share = reached / (profile.peaks.get(profile.precision) or max(profile.peaks.values()))
        peaks = ", ".join(f"{value / 1e9:,.0f} in {dtype}" for dtype, value in profile.peaks.items())
        lines.append(
            f"matrix products: {reached / 1e9:,.0f} GFLOP/s over the step, {share:.0%} of what this device reaches "
            f"({peaks})"
        )
    if profile.idle is not None:
        lines.append(f"the device was idle for {profile.idle:.0%} of the time")
        if (share := profile.region(LAUNCH) / profile.seconds) > LAUNCH_SHARE:
            lines.append(
                f"the device waits {share:.0%} of a step for the host to launch kernels: compile or larger "
                "micro-batches help"
            )
    if profile.page_faults:
        cost = profile.page_faults * profile.fault_seconds
        lines.append(f"allocator: {profile.page_faults:,.0f} page faults in a step, about {milliseconds(cost)}")
    if len(profile.reserved) > 1:
        least, most = min(profile.reserved), max(profile.reserved)
        shape = "flat" if most <= FLAT * least else "a sawtooth"
        lines.append(
            f"allocator: {shape}, {least / 2**20:,.0f} to {most / 2**20:,.0f} MiB reserved; {profile.retries} retries"
        )
    for cut in profile.graph_breaks:
        lines.append(f"{cut['count']} graph breaks at {cut['where']}: {cut['reason']}")
    for again in profile.recompiles:
        lines.append(f"recompiled {again['count']} times: {again['where']}, since {again['reason']}")
    if len(profile.ranks) > 1:
        own = [rank.get("data", 0.0) + rank.get("loss", 0.0) for rank in profile.ranks]
        slow = max(range(len(own)), key=own.__getitem__)
        if own[slow] > LAG * min(own):
            others = {key: min(rank.get(key, 0.0) for rank in profile.ranks) for key in ("data", "loss")}
            part = max(others, key=lambda key: profile.ranks[slow].get(key, 0.0) - others[key])
            lines.append(
                f"process {slow} lags: {milliseconds(own[slow])} of its own work a step, the fastest "
                f"{milliseconds(min(own))}: its {part}"
            )
    return lines


def record(profile: StepProfile, found: list[Suggestion], refused: Mapping[str, str]) -> dict[str, Any]:
    """The contents of ``profile.json``."""
    suggestions = [
        {key: getattr(one, key) for key in ("plugin", "edit", "numerics")}
        | {key: getattr(one.estimate, key) for key in ("seconds", "once", "why")}
        for one in found
    ]
    return {"profile": profile.to_dict(), "suggestions": suggestions, "refused": dict(refused)}
