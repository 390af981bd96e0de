"""Shows the record of an ablation as tables: in markdown for ``bench.md``, and in the terminal."""

from __future__ import annotations

from statistics import fmean
from typing import Any

from fastloop.cli.numerics import BROKEN, FAILED
from fastloop_tools.trials.measure import LOUD
from fastloop_tools.trials.tables import markdown_table, show_table

READING = (
    "Factors are medians of paired repeats, in real tokens/s if the task counts tokens, with 95% bootstrap intervals. "
    "A difference is reported from five pairs on, if the interval excludes 1. First steps: the extra time of the "
    "warm-up steps over usual steps, with nothing compiled yet, and in later repeats. Peak memory is that of the "
    "process."
)

Table = tuple[list[str], list[list[str]]]


def _with_interval(value: dict[str, float] | None, form: str) -> str:
    if value is None:
        return ""
    return f"{value['median']:{form}} ({value['low']:{form}} to {value['high']:{form}})"


def _verdict(row: dict[str, Any], over: dict[str, Any] | None) -> str:
    if row["results"] is None:
        return str(row["why_not"] or (f"failed: {row['error']}" if row["error"] else "not measured yet"))
    failed = f"then failed: {row['error']}" if row["error"] else ""
    return "; ".join(filter(None, [over["verdict"] if over else "", failed]))


def _mib(results: dict[str, Any]) -> str:
    return f"{results['peak_memory_bytes'] / 2**20:,.0f}"


def _pays(results: dict[str, Any]) -> str:
    over, after, total = results["over_before"], results["pays_after_steps"], results["total_steps"]
    if over is None or over["verdict"] != "faster" or after is None:
        return ""
    if after == 0:
        return "at once"
    if total is None:
        return f"after {after:,} steps"
    return f"after {after:,} steps; this run has {total:,}" + (": not worth it" if after > total else "")


def ablation_table(record: dict[str, Any], short: bool = False) -> Table:
    """The variants in order.

    Args:
        short: Only the columns that fit into a terminal.
    """
    rows = [row for row in record["variants"] if row["kind"] != "without"]
    unit = next((row["results"]["unit"] for row in rows if row["results"]), "samples")
    lines = []
    for row in rows:
        results = row["results"]
        line = {"variant": row["title"], "verdict": _verdict(row, results and results["over_before"])}
        if results is not None:
            warm, base, pays = results["first_steps_warm_seconds"], results["over_baseline"], _pays(results)
            again = "" if warm is None else f", again {warm:.1f}"
            line |= {
                "samples/s": _with_interval(results["samples_per_second"], ",.1f"),
                "real tokens/s": _with_interval(results["tokens_per_second"], ",.0f"),
                "x before": _with_interval(results["over_before"], ".2f"),
                "x baseline": _with_interval(base, ".2f"),
                "peak MiB": _mib(results),
                "start-up s": f"{results['startup_seconds']:.1f}",
                "first steps s": f"{results['first_steps_cold_seconds']:.1f}{again}",
                "pays": pays,
            }
            if short:
                line |= {
                    f"{unit}/s": f"{results[f'{unit}_per_second']['median']:,.0f}",
                    "x before": line["x before"].replace(" to ", "-"),
                    "x base": f"{base['median']:.2f}" if base else "",
                    "MiB": line["peak MiB"],
                    "verdict": "; ".join(filter(None, [line["verdict"], pays and f"pays {pays}"])),
                }
        lines.append(line)
    header = ["variant", "samples/s", *(["real tokens/s"] if unit == "tokens" else []), "x before", "x baseline"]
    header += ["verdict", "peak MiB", "start-up s", "first steps s", "pays"]
    if short:
        header = ["variant", f"{unit}/s", "x before", "x base", "MiB", "verdict"]
    return header, [[line.get(name, "") for name in header] for line in lines]


def without_table(record: dict[str, Any]) -> Table:
    """The speedup of each plugin when all others are present."""
    lines = []
    for row in (row for row in record["variants"] if row["kind"] == "without"):
        results = row["results"]
        over = results and results["over_before"]
        lines.append(
            [row["adds"][0], _with_interval(over, ".2f"), _mib(results) if results else "", _verdict(row, over)]
        )
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


def tables(record: dict[str, Any], short: bool = False) -> list[tuple[str, Table]]:
    """Title and table of each part of the record."""
    found = [
        ("The ablation", ablation_table(record, short)),
        ("Each plugin with all others present", without_table(record)),
        ("Numerics", numerics_table(record)),
        ("Quality", quality_table(record)),
    ]
    return [(title, (header, rows)) for title, (header, rows) in found if rows]


def notes(record: dict[str, Any]) -> list[str]:
    """Remarks below the tables."""
    lines = []
    before, worst = record["foreign_load"]["before"] or 0.0, record["foreign_load"]["worst"] or 0.0
    if max(before, worst) > LOUD:
        lines.append(
            f"Other processes used {before:.0%} of this machine before the start and up to {worst:.0%} during a "
            "measurement."
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
    for title, (header, rows) in tables(record):
        lines += [f"## {title}", "", *markdown_table(header, rows)]
    lines += [f"- {note}" for note in notes(record)]
    window = (
        f"Windows of at least {settings['steps']} steps and {settings['seconds']:g} s, after {settings['warmup']} steps"
    )
    lines += ["", f"{window}; {settings['repeats']} repeats in processes of their own, in alternating order. {READING}"]
    return "\n".join(lines) + "\n"


def show(record: dict[str, Any]) -> None:
    """Print the tables to the terminal."""
    import rich
    from rich.markup import escape

    for title, (header, rows) in tables(record, short=True):
        show_table(header, rows, title, wraps=-1)
        rich.print()
    for note in notes(record):
        rich.print(escape(note))
