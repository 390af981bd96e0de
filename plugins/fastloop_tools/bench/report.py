"""Shows the record of an ablation as tables in markdown, for ``bench.md`` and the terminal."""

from __future__ import annotations

from statistics import fmean
from typing import Any

from fastloop.cli.numerics import BROKEN, FAILED
from fastloop_tools.shared.tables import markdown_table
from fastloop_tools.trials.measure import LOUD

READING = (
    "Factors are medians of paired repeats, in real tokens/s if the task counts tokens, with 95% bootstrap intervals. "
    "A difference is reported from five pairs on, if the interval excludes 1. First steps: the extra time of the "
    "warm-up steps over usual steps, with nothing compiled yet, and in later repeats. Peak memory is that of the "
    "process."
)

Table = tuple[list[str], list[list[str]]]


def _with_interval(value: dict[str, float] | None, form: str) -> str:
    return f"{value['median']:{form}} ({value['low']:{form}} to {value['high']:{form}})" if value else ""


def _verdict(row: dict[str, Any]) -> str:
    if row["results"] is None:
        return str(row["why_not"] or (f"failed: {row['error']}" if row["error"] else "not measured yet"))
    over, failed = row["results"]["over_before"], f"then failed: {row['error']}" if row["error"] else ""
    return "; ".join(filter(None, [over["verdict"] if over else "", failed]))


def _mib(results: dict[str, Any]) -> str:
    return f"{results['peak_memory_bytes'] / 2**20:,.0f}"


def _pays(results: dict[str, Any]) -> str:
    after, total = results["pays_after_steps"], results["total_steps"]
    if after is None:
        return ""
    if after == 0:
        return "at once"
    if total is None:
        return f"after {after:,} steps"
    return f"after {after:,} steps; this run has {total:,}" + (": not worth it" if after > total else "")


def ablation_table(record: dict[str, Any]) -> Table:
    """The variants in order, with their speed and memory."""
    rows = [row for row in record["variants"] if row["kind"] != "without"]
    unit = next((row["results"]["unit"] for row in rows if row["results"]), "samples")
    lines = []
    for row in rows:
        cells, results = ["", "", "", ""], row["results"]
        if results is not None:
            factors = [_with_interval(results[over], ".2f") for over in ("over_before", "over_baseline")]
            cells = [_with_interval(results[f"{unit}_per_second"], ",.0f"), *factors, _mib(results)]
        lines.append([row["title"], *cells, _verdict(row)])
    rate = "real tokens/s" if unit == "tokens" else "samples/s"
    return ["variant", rate, "x before", "x baseline", "peak MiB", "verdict"], lines


def cost_table(record: dict[str, Any]) -> Table:
    """The one-time costs of each variant, and when its speedup has paid for them."""
    lines = []
    for row in (row for row in record["variants"] if row["kind"] != "without" and row["results"]):
        results = row["results"]
        warm = results["first_steps_warm_seconds"]
        costs = [results["startup_seconds"], results["first_steps_cold_seconds"], *([warm] if warm is not None else [])]
        lines.append([row["title"], *([f"{value:.1f}" for value in costs] + [""])[:3], _pays(results)])
    return ["variant", "start-up s", "first steps s", "again s", "pays"], lines


def without_table(record: dict[str, Any]) -> Table:
    """The speedup of each plugin when all others are present."""
    lines = []
    for row in (row for row in record["variants"] if row["kind"] == "without"):
        results = row["results"] or {}
        factor = _with_interval(results.get("over_before"), ".2f")
        lines.append([row["adds"][0], factor, _mib(results) if results else "", _verdict(row)])
    return ["plugin", "x full set without it", "MiB without it", "verdict"], lines


def numerics_table(record: dict[str, Any]) -> Table:
    """Results of the numerics check."""
    lines = []
    for found in record["numerics"]:
        difference = "" if found["difference"] is None else f"{found['difference']:.1e}"
        noise = f"; two runs of the same recipe differ by {found['noise']:.1e}" if found.get("noise") else ""
        bound = "" if found["bound"] is None else f"{found['bound']:.0e}" if found["bound"] else "0"
        verdict = found["verdict"].upper() if found["verdict"] in (BROKEN, FAILED) else found["verdict"]
        why = f": {found['why']}" if found["why"] else ""
        lines.append([found["plugin"], found["class"], difference, bound, verdict + why + noise])
    return ["plugin", "numerics class", "largest difference", "allowed", "verdict"], lines


def quality_table(record: dict[str, Any]) -> Table:
    """Final metrics of the first and the last variant, over seeds."""
    base, full = (record["quality"] or {"metrics": {"baseline": {}, "full": {}}})["metrics"].values()
    lines = []
    for name in base:
        theirs, ours = ([value for value in arm.get(name, []) if value is not None] for arm in (base, full))
        if not ours or not theirs:
            continue
        difference, spread = fmean(ours) - fmean(theirs), max(max(values) - min(values) for values in (ours, theirs))
        within = "within the seeds' spread" if abs(difference) <= spread else "more than the seeds' spread"
        arms = [f"{fmean(values):.4f} ({min(values):.4f} to {max(values):.4f})" for values in (theirs, ours)]
        lines.append([name, *arms, f"{difference:+.4f}", within])
    return ["metric", "baseline", "full set", "difference", "verdict"], lines


TABLES = {
    "The ablation": ablation_table,
    "One-time costs": cost_table,
    "Each plugin with all others present": without_table,
    "Numerics": numerics_table,
    "Quality": quality_table,
}


def notes(record: dict[str, Any]) -> list[str]:
    """Remarks below the tables."""
    lines, (before, worst) = [], record["foreign_load"].values()
    if max(before, worst) > LOUD:
        lines.append(
            f"Other processes used {before:.0%} of this machine before the start and up to {worst:.0%} during a "
            "measurement. For results to publish, measure on an idle machine."
        )
    for row in record["variants"]:
        lines += [f"{row['title']}: {line}" for line in (row["results"] or {}).get("warnings", [])]
    lines += [f"quality: {error}" for error in (record["quality"] or {}).get("errors", [])]
    if not record["complete"]:
        lines.append("Not complete: the ablation ended before all variants were measured.")
    return list(dict.fromkeys(lines))


def markdown(record: dict[str, Any]) -> str:
    """The contents of ``bench.md``."""
    settings, place = record["settings"], {**record["machine"], **record["versions"]}
    lines = [f"# {record['name']}: speedup of each plugin", "", f"`{record['command']}`", ""]
    lines += [", ".join(f"{name} {value}" for name, value in place.items()) + ".", ""]
    for title, make in TABLES.items():
        header, rows = make(record)
        lines += [f"## {title}", "", *markdown_table(header, rows)] if rows else []
    lines += [f"- {note}" for note in notes(record)]
    window = (
        f"Windows of at least {settings['steps']} steps and {settings['seconds']:g} s, after {settings['warmup']} steps"
    )
    lines += ["", f"{window}; {settings['repeats']} repeats in processes of their own, in alternating order. {READING}"]
    return "\n".join(lines) + "\n"
