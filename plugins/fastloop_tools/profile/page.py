"""Shows a profile and its suggestions on one page of markdown, for ``profile.md`` and the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from fastloop.problem import counted
from fastloop.speedup_estimates import StepProfile
from fastloop_tools.profile.suggestions import Suggestion, show_speedup, speedup
from fastloop_tools.shared.tables import markdown_table
from fastloop_tools.trials.statistics import break_even
from fastloop_tools.trials.timeline import LAUNCH, OTHER

OPERATIONS = 10
"""Rows of the table of operations."""
HOOKS = 5
"""Rows of the table of hooks."""
FLAT = 1.05
"""Reserved memory is flat if its maximum is at most this many times its minimum."""
LAUNCH_SHARE = 0.1
"""Share of a step. Below it, waiting for kernel launches is not mentioned."""
LAG = 1.1
"""A process lags if its own work takes this many times that of the fastest process."""


def milliseconds(seconds: float) -> str:
    """A duration as text."""
    return f"{1000 * seconds:,.1f} ms" if seconds < 1 else f"{seconds:,.2f} s"


def markdown(profile: StepProfile, suggestions: list[Suggestion], refused: Mapping[str, str], name: str) -> str:
    """The page.

    Args:
        refused: Plugins that would be faster, but cannot run here -> why.
        name: The name of the recipe, for the title.
    """
    lines = [f"# {name}: where a step spends its time", ""]
    rate = f"{profile.samples / profile.seconds:,.1f} samples/s"
    if profile.tokens:
        rate += f", {profile.tokens / profile.seconds:,.0f} real tokens/s"
    where = f"{profile.device}, {profile.precision}"
    if profile.world_size > 1:
        where += f", {counted(profile.world_size, 'process')}"
    lines += [
        f"A step takes {milliseconds(profile.seconds)}: {rate} ({where}; mean of {counted(profile.steps, 'step')}).",
        "",
    ]
    regions = [[key, milliseconds(value), f"{value / profile.seconds:.0%}"] for key, value in ranked(profile.regions)]
    if regions:
        lines += markdown_table(["region", "a step", "share"], regions)
    hooks = [[key, milliseconds(value), f"{value / profile.seconds:.1%}"] for key, value in ranked(profile.hooks)]
    if hooks:
        lines += markdown_table(["hook", "a step", "share"], hooks[:HOOKS])
    lines += [f"- {line}" for line in facts(profile)]
    lines.append("")
    lines += ["## Operations", "", *operations(profile)]
    lines += ["## Suggestions", ""]
    if not suggestions:
        lines += ["No plugin estimates a speedup of more than a few percent.", ""]
    for number, suggestion in enumerate(suggestions, start=1):
        lines.append(f"{number}. {describe(profile, suggestion)}")
    lines.append("")
    for plugin, why in refused.items():
        lines.append(f"- `{plugin}` would be faster, but cannot run here: {why}")
    return "\n".join(lines).rstrip() + "\n"


def describe(profile: StepProfile, suggestion: Suggestion) -> str:
    """A suggestion in a line: ``--with compile: about 12.1 ms of a step (x 1.30). ...``."""
    estimate = suggestion.estimate
    about = f"about {milliseconds(estimate.seconds)} of a step (x {show_speedup(speedup(profile, estimate))})"
    text = f"`{suggestion.edit}`: {about}. {estimate.why}"
    pays = break_even(estimate.once, estimate.seconds)
    if pays:
        text += f" It costs about {estimate.once:.0f} s once, and pays off after {counted(pays, 'step')}."
    return f"{text} ({suggestion.numerics})"


class OperationRow(NamedTuple):
    """A row of the table of operations: seconds of a step, and the number of calls as text."""

    name: str
    seconds: float
    calls: str = ""


def operations(profile: StepProfile) -> list[str]:
    """The table of operations, which adds up to the step."""
    parts = []
    for name, seconds in profile.operations.items():
        parts.append(OperationRow(f"`{name}`", seconds, f"{profile.counts.get(name, 0):,.0f}"))
    for name, seconds in profile.between_operations.items():
        if name != OTHER:
            parts.append(OperationRow(f"{name}, between operations", seconds))
    parts.sort(key=lambda part: -part.seconds)
    missing = max(0.0, profile.seconds - sum(part.seconds for part in parts))
    rest = parts[OPERATIONS:]
    if rest:
        parts = [*parts[:OPERATIONS], OperationRow(f"{len(rest)} more", sum(part.seconds for part in rest))]
    parts.append(OperationRow("not attributed", missing))
    rows = []
    for part in parts:
        rows.append([part.name, milliseconds(part.seconds), f"{part.seconds / profile.seconds:.1%}", part.calls])
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
        share = profile.region(LAUNCH) / profile.seconds
        if share > LAUNCH_SHARE:
            lines.append(
                f"the device waits {share:.0%} of a step for the host to launch kernels: compile or larger "
                "micro-batches help"
            )
    if profile.page_faults:
        cost = profile.page_faults * profile.fault_seconds
        lines.append(f"allocator: {profile.page_faults:,.0f} page faults in a step, about {milliseconds(cost)}")
    if len(profile.reserved) > 1:
        least = min(profile.reserved)
        most = max(profile.reserved)
        shape = "flat" if most <= FLAT * least else "a sawtooth"
        lines.append(
            f"allocator: {shape}, {least / 2**20:,.0f} to {most / 2**20:,.0f} MiB reserved; "
            f"{counted(profile.retries, 'retry', 'retries')}"
        )
    for cut in profile.graph_breaks:
        lines.append(f"{counted(cut['count'], 'graph break')} at {cut['where']}: {cut['reason']}")
    for again in profile.recompiles:
        lines.append(f"recompiled {counted(again['count'], 'time')}: {again['where']}, since {again['reason']}")
    lag = describe_lag(profile)
    if lag:
        lines.append(lag)
    return lines


def describe_lag(profile: StepProfile) -> str:
    """The process for which the others wait, and the part of a step that takes it longer; empty: there is none."""
    own_work = [rank.get("data", 0.0) + rank.get("loss", 0.0) for rank in profile.ranks]
    if len(own_work) < 2 or max(own_work) <= LAG * min(own_work):
        return ""
    slowest = own_work.index(max(own_work))

    def excess(part: str) -> float:
        """Seconds that the slowest process spends in a part beyond the fastest one."""
        seconds = [rank.get(part, 0.0) for rank in profile.ranks]
        return seconds[slowest] - min(seconds)

    part = max(("data", "loss"), key=excess)
    return (
        f"process {slowest} lags: {milliseconds(own_work[slowest])} of its own work a step, the fastest "
        f"{milliseconds(min(own_work))}: its {part}"
    )


def record(profile: StepProfile, suggestions: list[Suggestion], refused: Mapping[str, str]) -> dict[str, Any]:
    """The contents of ``profile.json``."""
    rows = []
    for suggestion in suggestions:
        estimate = suggestion.estimate
        rows.append(
            {
                "plugin": suggestion.plugin,
                "edit": suggestion.edit,
                "numerics": suggestion.numerics,
                "seconds": estimate.seconds,
                "once": estimate.once,
                "why": estimate.why,
            }
        )
    return {"profile": profile.to_dict(), "suggestions": rows, "refused": dict(refused)}
