"""Shows the record of an ablation as tables: in markdown for ``bench.md``, and in the terminal."""

from __future__ import annotations

from typing import Any

from fastloop.cli.numerics import BROKEN, FAILED
from fastloop_tools.trials.measure import LOUD

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


def _reason(row: dict[str, Any]) -> str:
    if row["why_not"]:
        return str(row["why_not"])
    return f"failed: {row['error']}" if row["error"] else "not measured yet"


def _pays(results: dict[str, Any]) -> str:
    over, after, total = results["over_before"], results["pays_after_steps"], results["total_steps"]
    if over is None or over["verdict"] != "faster" or after is None:
        return ""
    if after == 0:
        return "at once"
    if total is None:
        return f"after {after:,} steps"
    return f"after {after:,} steps; this run has {total:,}" + (": not worth it" if after > total else "")


def ablation_table(record: dict[str, Any]) -> Table:
    """The variants in order, with all results."""
    rows = [row for row in record["variants"] if row["kind"] != "without"]
    tokens = any(row["results"] and row["results"]["tokens_per_second"] for row in rows)
    header = ["variant", "samples/s", *(["real tokens/s"] if tokens else []), "x before", "x baseline", "verdict"]
    header += ["peak MiB", "start-up s", "first steps s", "pays"]
    lines = []
    for row in rows:
        results = row["results"]
        if results is None:
            lines.append([row["title"], *[""] * (header.index("verdict") - 1), _reason(row), "", "", "", ""])
            continue
        over, warm = results["over_before"], results["first_steps_warm_seconds"]
        line = [row["title"], _with_interval(results["samples_per_second"], ",.1f")]
        if tokens:
            line.append(_with_interval(results["tokens_per_second"], ",.0f"))
        line += [_with_interval(over, ".2f"), _with_interval(results["over_baseline"], ".2f")]
        line += [
            over["verdict"] if over else "",
            f"{results['peak_memory_bytes'] / 2**20:,.0f}",
            f"{results['startup_seconds']:.1f}",
        ]
        line += [
            f"{results['first_steps_cold_seconds']:.1f}" + ("" if warm is None else f", again {warm:.1f}"),
            _pays(results),
        ]
        if row["error"]:
            line[header.index("verdict")] += f"; then failed: {row['error']}"
        lines.append(line)
    return header, lines


def short_table(record: dict[str, Any]) -> Table:
    """The variants with fewer columns, for a terminal."""
    rows = [row for row in record["variants"] if row["kind"] != "without"]
    unit = next((row["results"]["unit"] for row in rows if row["results"]), "samples")
    lines = []
    for row in rows:
        results = row["results"]
        if results is None:
            lines.append([row["title"], "", "", "", "", _reason(row)])
            continue
        over, base = results["over_before"], results["over_baseline"]
        remarks = [
            over["verdict"] if over else "",
            _pays(results) and f"pays {_pays(results)}",
            row["error"] and f"then failed: {row['error']}",
        ]
        lines.append(
            [
                row["title"],
                f"{results[f'{unit}_per_second']['median']:,.0f}",
                _with_interval(over, ".2f").replace(" to ", "-"),
                f"{base['median']:.2f}" if base else "",
                f"{results['peak_memory_bytes'] / 2**20:,.0f}",
                "; ".join(filter(None, remarks)),
            ]
        )
    return ["variant", f"{unit}/s", "x before", "x base", "MiB", "verdict"], lines


def without_table(record: dict[str, Any]) -> Table | None:
    """The speedup of each plugin when all others are present."""
    rows = [row for row in record["variants"] if row["kind"] == "without"]
    if not rows:
        return None
    lines = []
    for row in rows:
        over = row["results"] and row["results"]["over_before"]
        more = row["results"] and over and f"{row['results']['peak_memory_bytes'] / 2**20:,.0f}"
        lines.append(
            [row["adds"][0], _with_interval(over, ".2f"), more or "", over["verdict"] if over else _reason(row)]
        )
    return ["plugin", "x full set without it", "MiB without it", "verdict"], lines


def numerics_table(record: dict[str, Any]) -> Table | None:
    """Results of the numerics check."""
    if not record["numerics"]:
        return None
    lines = []
    for found in record["numerics"]:
        difference = "" if found["difference"] is None else f"{found['difference']:.1e}"
        noise = f"; two runs of the same recipe differ by {found['noise']:.1e}" if found.get("noise") else ""
        bound = "" if found["bound"] is None else f"{found['bound']:.0e}" if found["bound"] else "0"
        verdict = found["verdict"].upper() if found["verdict"] in (BROKEN, FAILED) else found["verdict"]
        lines.append(
            [
                found["plugin"],
                found["class"],
                difference,
                bound,
                verdict + (f": {found['why']}" if found["why"] else "") + noise,
            ]
        )
    return ["plugin", "numerics class", "largest difference", "allowed", "verdict"], lines


def quality_table(record: dict[str, Any]) -> Table | None:
    """Final metrics of the first and the last variant, over seeds."""
    if not record["quality"]:
        return None
    base, full = record["quality"]["metrics"]["baseline"], record["quality"]["metrics"]["full"]
    lines = []
    for name in base:
        ours, theirs = (
            [value for value in full.get(name, []) if value is not None],
            [value for value in base[name] if value is not None],
        )
        if not ours or not theirs:
            continue
        difference = sum(ours) / len(ours) - sum(theirs) / len(theirs)
        spread = max(max(values) - min(values) for values in (ours, theirs))
        within = "within the seeds' spread" if abs(difference) <= spread else "more than the seeds' spread"
        lines.append(
            [
                name,
                *(f"{sum(v) / len(v):.4f} ({min(v):.4f} to {max(v):.4f})" for v in (theirs, ours)),
                f"{difference:+.4f}",
                within,
            ]
        )
    return ["metric", "baseline", "full set", "difference", "verdict"], lines


def tables(record: dict[str, Any]) -> list[tuple[str, Table]]:
    """Title and table of each part of the record."""
    found: list[tuple[str, Table | None]] = [
        ("The ablation", ablation_table(record)),
        ("Each plugin with all others present", without_table(record)),
        ("Numerics", numerics_table(record)),
        ("Quality", quality_table(record)),
    ]
    return [(title, table) for title, table in found if table is not None]


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
    for error in (record["quality"] or {}).get("errors", []):
        lines.append(f"quality: {error}")
    if not record["complete"]:
        lines.append("Not complete: the ablation ended before all variants were measured.")
    return list(dict.fromkeys(lines))


def markdown(record: dict[str, Any]) -> str:
    """The contents of ``bench.md``."""
    settings = record["settings"]
    lines = [f"# {record['name']}: speedup of each plugin", "", f"`{record['command']}`", ""]
    lines += [
        ", ".join(f"{name} {value}" for name, value in {**record["machine"], **record["versions"]}.items()) + ".",
        "",
    ]
    for title, (header, rows) in tables(record):
        lines += [f"## {title}", "", f"| {' | '.join(header)} |", f"|{'---|' * len(header)}"]
        lines += [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows]
        lines.append("")
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
    from rich.table import Table as RichTable

    for title, (header, rows) in [("The ablation", short_table(record)), *tables(record)[1:]]:
        table = RichTable(box=None, pad_edge=False, title=title, title_justify="left", title_style="bold")
        for number, name in enumerate(header, start=1):
            table.add_column(name, no_wrap=number < len(header))  # the last column may wrap
        for row in rows:
            table.add_row(*map(escape, row))
        rich.print(table)
        rich.print()
    for note in notes(record):
        rich.print(escape(note))
