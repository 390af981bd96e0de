"""Renders the HTML page. All values are escaped: names and errors may contain anything."""

from __future__ import annotations

import math
from typing import Any

from fastloop_tools.report.charts import Chart, ablation_bars, line_chart, number, region_bars
from fastloop_tools.report.read import Found, Trained, differences

TITLES = {
    "loss": "Training loss",
    "grad_norm": "Gradient norm",
    "lr": "Learning rate",
    "samples_per_second": "Samples a second",
    "tokens_per_second": "Real tokens a second",
    "memory_bytes": "Memory (bytes)",
}
"""Lines with a chart of their own, in this order. Evaluation metrics follow, then all other lines."""
ASIDE = ("epoch",)
LOWER = ("loss", "perplexity", "error", "mse", "mae")
"""Parts of names of metrics that improve when they fall."""


def render(found: Found, title: str) -> str:
    """Render the HTML page."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("fastloop_tools.report", "."),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    return environment.get_template("page.html").render(
        title=title,
        runs=[_facts(run, index) for index, run in enumerate(found.runs)],
        metrics=_metrics(found.runs),
        charts=charts(found.runs),
        differences=differences(found.runs) if len(found.runs) > 1 else [],
        names=[run.name for run in found.runs],
        sweeps=[(name, record["monitor"], _points(record)) for name, record in found.sweeps],
        ablations=[(name, record, ablation_bars(record)) for name, record in found.ablations],
        profiles=[(name, record, region_bars(record)) for name, record in found.profiles],
    )


def _facts(run: Trained, index: int) -> dict[str, Any]:
    summary = run.summary or {}
    seconds = {key: summary.get(f"{key}_seconds") for key in ("train", "evaluate", "save", "startup", "compile")}
    return {
        "name": run.name,
        "colour": index,
        "folder": str(run.folder),
        "status": (summary.get("status") or "not finished") + (f": {summary['reason']}" if summary.get("reason") else ""),
        "device": " x ".join(str(part) for part in (summary.get("world_size"), summary.get("device")) if part),
        "steps": number(summary["steps"]) if summary.get("steps") is not None else "",
        "speed": number(summary["samples_per_second"]) if summary.get("samples_per_second") else "",
        "tokens": number(summary["tokens_per_second"]) if summary.get("tokens_per_second") else "",
        "memory": f"{summary['peak_memory_bytes'] / 2**20:,.0f}" if summary.get("peak_memory_bytes") else "",
        "seconds": ", ".join(f"{key} {value:,.1f}" for key, value in seconds.items() if value),
        "plugins": ", ".join(summary.get("plugins") or ()),
    }


def _points(record: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of a sweep's table."""
    rows = []
    for point in record["points"]:
        over = point["difference"] or {}
        shown = {key: "" if over.get(key) is None else number(over[key]) for key in ("mean", "low", "high")}
        rows.append(
            {
                "name": point["point"],
                "runs": f"{point['finished']} of {len(point['runs'])}",
                "mean": "" if point["mean"] is None else number(point["mean"]),
                "deviation": "" if point["deviation"] is None else number(point["deviation"]),
                "difference": shown["mean"],
                "interval": f"{shown['low']} to {shown['high']}" if shown["low"] else "",
                "best": point["point"] == record["best"],
            }
        )
    return rows


def _metrics(runs: list[Trained]) -> list[tuple[str, list[tuple[str, bool]]]]:
    """Final metrics: name -> the value of each run, and whether it is the best one."""
    names = dict.fromkeys(
        (split, name) for run in runs for split in ("validation", "test") for name in ((run.summary or {}).get(split) or {})
    )
    rows = []
    for split, name in names:
        values = [((run.summary or {}).get(split) or {}).get(name) for run in runs]
        there = [value for value in values if isinstance(value, int | float) and math.isfinite(value)]
        better = min if any(word in name.lower() for word in LOWER) else max
        best = better(there) if len(set(there)) > 1 else None
        shown = [("" if value is None else number(value), value is not None and value == best) for value in values]
        rows.append((f"{split} {name}", shown))
    return rows


def charts(runs: list[Trained]) -> list[Chart]:
    """One chart for each value that any run has."""
    keys = dict.fromkeys(
        key
        for run in runs
        for key, points in run.lines.items()
        if key.rpartition(" ")[2] not in ASIDE and any(value for _, value in points)
    )
    ordered = [key for key in TITLES if key in keys]
    ordered += [key for key in keys if key.startswith("validation ")]
    ordered += [key for key in keys if key not in ordered and not key.startswith("test ")]
    drawn = []
    for key in ordered:
        series = {run.name: (index, run.lines[key]) for index, run in enumerate(runs) if key in run.lines}
        chart = line_chart(TITLES.get(key, key), series)
        if chart is not None:
            drawn.append(chart)
    return drawn
