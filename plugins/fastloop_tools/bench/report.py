"""Shows the record of an ablation as tables in markdown, for ``bench.md`` and the terminal."""

from __future__ import annotations

import math
from statistics import fmean
from typing import Any, TypeGuard

from fastloop.cli.numerics import BROKEN, FAILED
from fastloop.problem import agree, counted
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
    """A median with its interval: ``1.52 (1.48 to 1.57)``; empty without a value.

    Args:
        form: Format of the numbers, such as ``.2f``.
    """
    if value is None:
        return ""
    return f"{value['median']:{form}} ({value['low']:{form}} to {value['high']:{form}})"


def _verdict(row: dict[str, Any]) -> str:
    """Whether a variant is faster than the one before, or why that is not known."""
    if row["results"] is None:
        if row["why_not"]:
            return str(row["why_not"])
        return f"failed: {row['error']}" if row["error"] else "not measured yet"
    parts = []
    over_before = row["results"]["over_before"]
    if over_before is not None:
        parts.append(over_before["verdict"])
    if row["error"]:
        parts.append(f"then failed: {row['error']}")
    return "; ".join(parts)


def _mib(results: dict[str, Any]) -> str:
    return f"{results['peak_memory_bytes'] / 2**20:,.0f}"


def _pays(results: dict[str, Any]) -> str:
    """After how many steps a variant has saved more time than it costs."""
    after = results["pays_after_steps"]
    total = results["total_steps"]
    if after is None:
        return ""
    if after == 0:
        return "at once"
    text = f"after {counted(after, 'step')}"
    if total is not None:
        text += f"; this run has {total:,}"
        if after > total:
            text += ": not worth it"
    return text


def _steps(record: dict[str, Any]) -> list[dict[str, Any]]:
    """The variants that are compared with the one before."""
    return [row for row in record["variants"] if row["kind"] != "without"]


def ablation_table(record: dict[str, Any]) -> Table:
    """The variants in order, with their speed and memory."""
    rows = _steps(record)
    units = [row["results"]["unit"] for row in rows if row["results"] is not None]
    unit = units[0] if units else "samples"
    lines = []
    for row in rows:
        results = row["results"]
        if results is None:
            cells = ["", "", "", ""]
        else:
            cells = [
                _with_interval(results[f"{unit}_per_second"], ",.0f"),
                _with_interval(results["over_before"], ".2f"),
                _with_interval(results["over_baseline"], ".2f"),
                _mib(results),
            ]
        lines.append([row["title"], *cells, _verdict(row)])
    rate = "real tokens/s" if unit == "tokens" else "samples/s"
    return ["variant", rate, "x before", "x baseline", "peak MiB", "verdict"], lines


def cost_table(record: dict[str, Any]) -> Table:
    """The one-time costs of each variant, and when its speedup has paid for them."""
    lines = []
    for row in _steps(record):
        results = row["results"]
        if results is None:
            continue
        startup = f"{results['startup_seconds']:.1f}"
        cold = f"{results['first_steps_cold_seconds']:.1f}"
        warm = ""
        if results["first_steps_warm_seconds"] is not None:  # there was a second repeat
            warm = f"{results['first_steps_warm_seconds']:.1f}"
        lines.append([row["title"], startup, cold, warm, _pays(results)])
    return ["variant", "start-up s", "first steps s", "again s", "pays"], lines


def without_table(record: dict[str, Any]) -> Table:
    """The speedup of each plugin when all others are present."""
    lines = []
    for row in record["variants"]:
        if row["kind"] != "without":
            continue
        results = row["results"]
        factor = ""
        memory = ""
        if results is not None:
            factor = _with_interval(results["over_before"], ".2f")
            memory = _mib(results)
        lines.append([row["adds"][0], factor, memory, _verdict(row)])
    return ["plugin", "x full set without it", "MiB without it", "verdict"], lines


def numerics_table(record: dict[str, Any]) -> Table:
    """Results of the numerics check."""
    lines = []
    for finding in record["numerics"]:
        difference = "" if finding["difference"] is None else f"{finding['difference']:.1e}"
        if finding["bound"] is None:
            bound = ""
        else:
            bound = f"{finding['bound']:.0e}" if finding["bound"] > 0 else "0"
        verdict = finding["verdict"]
        if verdict in (BROKEN, FAILED):
            verdict = verdict.upper()
        if finding["why"]:
            verdict += f": {finding['why']}"
        if finding.get("noise"):
            verdict += f"; two runs of the same recipe differ by {finding['noise']:.1e}"
        lines.append([finding["plugin"], finding["class"], difference, bound, verdict])
    return ["plugin", "numerics class", "largest difference", "allowed", "verdict"], lines


def quality_table(record: dict[str, Any]) -> Table:
    """Final metrics of the first and the last variant, over seeds. They are compared if all trainings have a finite
    value: the mean of the others would hide a training that has diverged or failed."""
    lines = []
    metrics = record["quality"]["metrics"] if record["quality"] is not None else {}
    for name, baseline in metrics.get("baseline", {}).items():
        full = metrics["full"][name]
        if not full:
            continue  # not trained yet
        failures = list(filter(None, [_without_value("baseline", baseline), _without_value("full set", full)]))
        difference = ""
        if failures:
            verdict = "; ".join(failures)
        else:
            change = fmean(full) - fmean(baseline)
            spread = max(max(full) - min(full), max(baseline) - min(baseline))
            difference = f"{change:+.4f}"
            verdict = "within the seeds' spread" if abs(change) <= spread else "more than the seeds' spread"
        lines.append([name, _with_range(baseline), _with_range(full), difference, verdict])
    return ["metric", "baseline", "full set", "difference", "verdict"], lines


def _without_value(variant: str, values: list[float | None]) -> str:
    """The trainings of a variant that have diverged or failed: ``full set: no finite value in 1 of 3 trainings (seed
    2)``; empty: there are none."""
    seeds = []
    for number, value in enumerate(values, start=1):
        if not _is_finite(value):
            seeds.append(str(number))
    if not seeds:
        return ""
    trainings = counted(len(values), "training")
    noun = agree(len(seeds), "seed", "seeds")
    return f"{variant}: no finite value in {len(seeds)} of {trainings} ({noun} {', '.join(seeds)})"


def _is_finite(value: float | None) -> TypeGuard[float]:
    """Whether a training has a finite value of a metric. The written record has None in place of NaN and infinity."""
    return value is not None and math.isfinite(value)


def _with_range(values: list[float | None]) -> str:
    """The mean of a metric over the seeds with a finite value, and its range: ``0.9120 (0.9080 to 0.9160)``; empty: no
    seed has one."""
    finite = [value for value in values if _is_finite(value)]
    if not finite:
        return ""
    return f"{fmean(finite):.4f} ({min(finite):.4f} to {max(finite):.4f})"


TABLES = {
    "The ablation": ablation_table,
    "One-time costs": cost_table,
    "Each plugin with all others present": without_table,
    "Numerics": numerics_table,
    "Quality": quality_table,
}


def notes(record: dict[str, Any]) -> list[str]:
    """Remarks below the tables."""
    lines = []
    before = record["foreign_load"]["before"]
    worst = record["foreign_load"]["worst"]
    if max(before, worst) > LOUD:
        lines.append(
            f"Other processes used {before:.0%} of this machine before the start and up to {worst:.0%} during a "
            "measurement. For results to publish, measure on an idle machine."
        )
    for row in record["variants"]:
        if row["results"] is not None:
            lines += [f"{row['title']}: {line}" for line in row["results"]["warnings"]]
    if record["quality"] is not None:
        lines += [f"quality: {error}" for error in record["quality"]["errors"]]
    if not record["complete"]:
        lines.append("Not complete: the ablation ended before all variants were measured.")
    return list(dict.fromkeys(lines))


def markdown(record: dict[str, Any]) -> str:
    """The contents of ``bench.md``."""
    settings = record["settings"]
    place = {**record["machine"], **record["versions"]}
    lines = [f"# {record['name']}: speedup of each plugin", "", f"`{record['command']}`", ""]
    lines += [", ".join(f"{name} {value}" for name, value in place.items()) + ".", ""]
    for title, make in TABLES.items():
        header, rows = make(record)
        if rows:
            lines += [f"## {title}", "", *markdown_table(header, rows)]
    lines += [f"- {note}" for note in notes(record)]
    lines += [
        "",
        f"Windows of at least {settings['steps']} steps and {settings['seconds']:g} s, after {settings['warmup']} "
        f"steps; {settings['repeats']} repeats in processes of their own, in alternating order. {READING}",
    ]
    return "\n".join(lines) + "\n"
