"""Bars on one scale: the variants of an ablation, and the regions of a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass
class Bar:
    """One bar, with the ends of its interval."""

    name: str
    size: float
    label: str
    low: float | None = None
    high: float | None = None
    note: str = ""


def scale(bars: list[Bar]) -> list[Bar]:
    """Set sizes and intervals to shares of the longest one; returns the bars."""
    longest = max((max(bar.size, bar.high or 0.0) for bar in bars), default=0.0) or 1.0
    for bar in bars:
        bar.size /= longest
        if bar.low is not None and bar.high is not None:
            bar.low, bar.high = bar.low / longest, bar.high / longest
    return bars


def ablation_bars(record: Mapping[str, Any]) -> list[Bar]:
    """The variants of an ablation by speed."""
    bars = []
    for variant in record.get("variants", []):
        results = variant.get("results")
        if variant.get("kind") == "without":
            continue
        if not results:
            why = variant.get("why_not") or variant.get("error") or ""
            bars.append(Bar(variant["title"], 0.0, "not measured", note=why))
            continue
        rate, over = results[f"{results['unit']}_per_second"], results.get("over_baseline")
        label = f"{rate['median']:,.0f} {results['unit']}/s" + (f", x {over['median']:.2f}" if over else "")
        verdict = (results.get("over_before") or {}).get("verdict", "")
        memory = f"{results['peak_memory_bytes'] / 2**20:,.0f} MiB"
        note = "; ".join(filter(None, [verdict, memory]))
        bars.append(Bar(variant["title"], rate["median"], label, rate["low"], rate["high"], note))
    return scale(bars)


def region_bars(record: Mapping[str, Any]) -> list[Bar]:
    """The regions of a step by seconds."""
    regions, seconds = record["profile"]["regions"], record["profile"]["seconds"]
    rows = sorted(regions.items(), key=lambda item: -item[1])
    return scale([Bar(name, value, f"{1000 * value:,.1f} ms, {value / seconds:.0%}") for name, value in rows])
