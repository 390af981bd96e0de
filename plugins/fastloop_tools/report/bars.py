"""Bars on one scale: the variants of an ablation, and the regions of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass
class Bar:
    """One bar. ``size``, ``low`` and ``high`` are shares of the longest bar."""

    name: str
    size: float
    label: str
    low: float | None = None
    high: float | None = None
    note: str = ""


def bars(values: Sequence[tuple[str, float, str, tuple[float, float] | None, str]]) -> list[Bar]:
    """Bars on one scale, from name, value, label, interval and note."""
    longest = (
        max([value for _, value, *_ in values] + [interval[1] for *_, interval, _ in values if interval], default=0.0)
        or 1.0
    )
    return [
        Bar(
            name,
            value / longest,
            label,
            interval[0] / longest if interval else None,
            interval[1] / longest if interval else None,
            note,
        )
        for name, value, label, interval, note in values
    ]


def ablation_bars(record: Mapping[str, Any]) -> list[Bar]:
    """The variants of an ablation by speed."""
    rows: list[tuple[str, float, str, tuple[float, float] | None, str]] = []
    for variant in record.get("variants", []):
        results = variant.get("results")
        if variant.get("kind") == "without":
            continue
        if not results:
            rows.append(
                (variant["title"], 0.0, "not measured", None, variant.get("why_not") or variant.get("error") or "")
            )
            continue
        rate = results[f"{results['unit']}_per_second"]
        over = results.get("over_baseline")
        label = f"{rate['median']:,.0f} {results['unit']}/s" + (f", x {over['median']:.2f}" if over else "")
        verdict = (results.get("over_before") or {}).get("verdict", "")
        memory = f"{results['peak_memory_bytes'] / 2**20:,.0f} MiB"
        rows.append(
            (
                variant["title"],
                rate["median"],
                label,
                (rate["low"], rate["high"]),
                "; ".join(filter(None, [verdict, memory])),
            )
        )
    return bars(rows)


def region_bars(record: Mapping[str, Any]) -> list[Bar]:
    """The regions of a step by seconds."""
    profile = record["profile"]
    rows = sorted(profile["regions"].items(), key=lambda item: -item[1])
    return bars(
        [(name, value, f"{1000 * value:,.1f} ms, {value / profile['seconds']:.0%}", None, "") for name, value in rows]
    )
