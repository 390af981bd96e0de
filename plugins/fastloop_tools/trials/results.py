"""Derives the results of each variant from its measurements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastloop_tools.trials.statistics import break_even, interval, median, verdict

Measurement = dict[str, Any]


def speed(found: Measurement) -> tuple[float, str]:
    """The speed and its unit: real tokens a second if the task counts tokens, else samples a second.

    If a plugin changes the batches, a short window contains other texts. Tokens are then a fairer measure of work.
    """
    unit = "tokens" if found["tokens"] else "samples"
    return found[unit] / found["seconds"], unit


def summary(values: Sequence[float]) -> dict[str, float]:
    """Median and 95% interval."""
    low, high = interval(values)
    return {"median": median(values), "low": low, "high": high}


def ratio(ours: Sequence[Measurement | None], theirs: Sequence[Measurement | None]) -> dict[str, Any] | None:
    """The ratio of two variants' speeds, over the repeats that both have."""
    ratios = [speed(a)[0] / speed(b)[0] for a, b in zip(ours, theirs, strict=False) if a is not None and b is not None]
    return {**summary(ratios), "pairs": len(ratios), "ratios": ratios, "verdict": verdict(ratios)} if ratios else None


def variant_results(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add ``results`` to each variant; None if nothing was measured.

    A step is compared with the nearest measured variant before it. For a variant without one plugin, the factor is the
    full set's speed over its own: the speedup of that plugin when all others are present.
    """
    reached: dict[str, Any] | None = None
    for row in rows:
        done = [found for found in row["measurements"] if found is not None]
        row["results"] = None
        if not done:
            continue
        if row["kind"] == "without":
            full = next(other for other in rows if other["title"] == row["before"])
            over = ratio(full["measurements"], row["measurements"])
        else:
            over = ratio(row["measurements"], reached["measurements"]) if reached else None
            row["before"] = reached["title"] if reached else None
        row["results"] = {
            "unit": speed(done[0])[1],
            "samples_per_second": summary([found["samples"] / found["seconds"] for found in done]),
            "tokens_per_second": summary([found["tokens"] / found["seconds"] for found in done])
            if done[0]["tokens"]
            else None,
            "padding": median([1 - found["tokens"] / found["padded_tokens"] for found in done])
            if done[0]["padded_tokens"]
            else None,
            "seconds_a_step": median([found["seconds_a_step"] for found in done]),
            "over_before": over,
            "over_baseline": ratio(row["measurements"], rows[0]["measurements"]) if row is not rows[0] else None,
            "peak_memory_bytes": done[0]["peak_memory_bytes"],
            "startup_seconds": done[0]["startup_seconds"],
            "first_steps_cold_seconds": done[0]["warmup_extra_seconds"],
            "first_steps_warm_seconds": median([found["warmup_extra_seconds"] for found in done[1:]])
            if done[1:]
            else None,
            "total_steps": done[0]["total_steps"],
            "pays_after_steps": None,
            "warnings": sorted({line for found in done for line in found["warnings"]}),
        }
        if row["kind"] != "without":
            if reached is not None and over is not None and over["verdict"] == "faster":
                row["results"]["pays_after_steps"] = pays_after(row["results"], reached["results"], over["median"])
            reached = row
    return rows


def pays_after(ours: dict[str, Any], before: dict[str, Any], factor: float) -> int | None:
    """Steps until the time saved exceeds the extra start-up and first steps compared to the variant before, with
    nothing compiled yet."""
    extra = sum(ours[name] - before[name] for name in ("startup_seconds", "first_steps_cold_seconds"))
    return break_even(extra, before["seconds_a_step"] * (1 - 1 / factor))
