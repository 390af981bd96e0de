"""Renders the HTML page. All values are escaped: names and errors may contain anything."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fastloop.metric_modes import recorded_mode
from fastloop_tools.report import sweeps
from fastloop_tools.report.charts import Chart, Panel, line_chart, panel
from fastloop_tools.report.metrics import Series
from fastloop_tools.report.read import Evaluation, Found, TrainedRun
from fastloop_tools.report.tables import differences, environment
from fastloop_tools.shared.matrix_picture import Matrix, draw_matrix
from fastloop_tools.shared.svg import number
from fastloop_tools.shared.tables import Cell, ReportTable
from fastloop_tools.trials.record import results_table

if TYPE_CHECKING:
    import jinja2

MANY = 6
"""Most runs whose lines share a chart. More runs have a small chart each, and their tables have a row for each run."""
MOST_NAMES = 3
"""Most names in the title of a page."""
TITLES = {
    "loss": ("Training loss", "loss", 1.0),
    "lr": ("Learning rate", "learning rate", 1.0),
    "samples_per_second": ("Throughput: samples", "samples/s", 1.0),
    "tokens_per_second": ("Throughput: real tokens", "tokens/s", 1.0),
    "grad_norm": ("Gradient norm", "2-norm", 1.0),
    "memory_bytes": ("Memory", "MiB", 2.0**-20),
}
"""Titles, units and factors of values of the core, in the order of their charts. Metrics follow the loss. Other values
come last."""
ASIDE = ("epoch",)
MOST_CLASSES, PAIRS = 60, 20
"""Most classes of a matrix on the page. For more classes, a table has the most frequent confusions."""


def page_title(found: Found) -> str:
    """The tasks of the runs, and the names of what the page shows, such as ``text-classification: quickstart``; their
    number, if they are more than ``MOST_NAMES``."""
    tasks = dict.fromkeys(str(run.summary["task"]) for run in found.runs if run.summary and run.summary.get("task"))
    names = [name for part in (found.sweeps, found.ablations, found.profiles) for name, _ in part]
    if not found.sweeps:  # whose runs have numbers
        names = [*(run.name for run in found.runs), *names]
    shown = ", ".join(names) if len(names) <= MOST_NAMES else f"{len(names)} results"
    return f"{', '.join(tasks)}: {shown}" if tasks else shown


def render(found: Found, title: str) -> str:
    """Render the HTML page."""
    drawn = charts(found.runs)
    template = _templates().get_template("page.html")
    return template.render(
        title=title,
        runs=found.runs,
        charts=[chart for chart in drawn if isinstance(chart, Chart)],
        panels=[chart for chart in drawn if isinstance(chart, Panel)],
        tables=_tables(found.runs),
        rows=[(run.name, name, rows_table(rows)) for run in found.runs for name, rows in run.rows.items() if rows],
        evaluations=[shown for run in found.runs for shown in shown_evaluations(run)],
        sweeps=[(name, results_table(record), sweeps.plots(record)) for name, record in found.sweeps],
        ablations=[(name, record, ablation_bars(record)) for name, record in found.ablations],
        profiles=[(name, record, region_bars(record)) for name, record in found.profiles],
    )


def drawing(chart: Chart) -> str:
    """A chart as SVG."""
    macros: Any = _templates().get_template("macros.html").module
    return str(macros.drawing(chart, ""))


@functools.cache
def _templates() -> jinja2.Environment:
    import jinja2

    templates = jinja2.Environment(
        loader=jinja2.PackageLoader("fastloop_tools.report", "."),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    templates.filters["number"] = number
    return templates


def _tables(runs: list[TrainedRun]) -> list[tuple[str, str, ReportTable]]:
    """Headings, ids and tables: the final metrics, and in which keys and facts the runs differ."""
    names, many = [run.name for run in runs], len(runs) > MANY
    tables = [("Final metrics", "metrics", ReportTable("metric", names, final_metrics(runs), numbers=True))]
    if len(runs) > 1:
        for heading, id, rows in (
            ("Where the recipes differ", "differences", differences([run.recipe for run in runs])),
            ("Where the environments differ", "environments", environment([run.summary or {} for run in runs])),
        ):
            tables.append(
                (
                    heading,
                    id,
                    ReportTable("key", names, [(key, [Cell(value) for value in values]) for key, values in rows]),
                )
            )
    return [(heading, id, table.transposed("run") if many else table) for heading, id, table in tables if table.rows]


def final_metrics(runs: list[TrainedRun]) -> list[tuple[str, list[Cell]]]:
    """Final metrics: name -> the value of each run, and whether it is the best one. No value is the best if the runs do
    not know, or do not agree, whether a lower or a higher value is better."""
    names = dict.fromkeys(
        (split, name)
        for run in runs
        for split in ("validation", "test")
        for name in ((run.summary or {}).get(split) or {})
    )
    rows = []
    for split, name in names:
        values = [((run.summary or {}).get(split) or {}).get(name) for run in runs]
        there = [value for value in values if isinstance(value, int | float) and math.isfinite(value)]
        modes = {
            recorded_mode(run.summary or {}, name) for run in runs if name in ((run.summary or {}).get(split) or {})
        }
        best = None
        if len(set(there)) > 1:
            best = min(there) if modes == {"min"} else max(there) if modes == {"max"} else None
        shown = [Cell("" if value is None else number(value), value is not None and value == best) for value in values]
        rows.append((f"{split} {name}", shown))
    return rows


def rows_table(rows: list[dict[str, Any]]) -> ReportTable:
    """Rows of ``run.log_rows``, with their step first."""
    names = [name for name in dict.fromkeys(name for row in rows for name in row) if name != "step"]
    lines = []
    for row in rows:
        values = [row.get(name) for name in names]
        texts = [value if isinstance(value, str) else json.dumps(value, ensure_ascii=False) for value in values]
        lines.append((str(row["step"]), [Cell(text) for text in texts]))
    return ReportTable("step", names, lines)


def charts(runs: list[TrainedRun]) -> list[Chart | Panel]:
    """The curves of each value that any run has: loss, metrics, learning rate, throughput, then all others."""
    keys = dict.fromkeys(
        key
        for run in runs
        for key, series in run.lines.items()
        if key.rpartition(" ")[2] not in ASIDE and (series.least or series.most)
    )
    core = [key for key in TITLES if key in keys]
    metrics = [key for key in keys if key.startswith("validation ")]
    others = [key for key in keys if key not in core and not key.startswith(("validation ", "test "))]
    drawn = [_curves(key, runs) for key in [*core[:1], *metrics, *core[1:], *others]]
    return [chart for chart in drawn if chart is not None]


def _curves(key: str, runs: list[TrainedRun]) -> Chart | Panel | None:
    name = f"Validation {key.removeprefix('validation ')}" if key.startswith("validation ") else key
    title, unit, factor = TITLES.get(key, (name, key.removeprefix("validation "), 1.0))
    series = {run.name: run.lines.get(key, Series()).scaled(factor) for run in runs}
    if len(runs) > MANY:
        there = {name: line for name, line in series.items() if line}
        return panel(title, there, unit, first=key == "loss" or key.startswith("validation "))
    return line_chart(title, {name: (index, line) for index, (name, line) in enumerate(series.items())}, unit)


# -- evaluations -------------------------------------------------------------------------------------------------------


def shown_evaluations(run: TrainedRun) -> list[dict[str, Any]]:
    """The evaluations of a run, as the template shows them."""
    return [
        {
            "name": run.name,
            "found": found,
            "outdated": _outdated(run, found),
            "matrix": _matrix(found),
            "tables": _evaluation_tables(found),
        }
        for found in run.evaluations
    ]


def _outdated(run: TrainedRun, found: Evaluation) -> str:
    """A remark if the run has trained on since its evaluation."""
    steps = (run.summary or {}).get("steps")
    if steps is None or found.steps is None or steps == found.steps:
        return ""
    return f"This is the model after {found.steps:,} steps. The run now has {steps:,}: evaluate it again."


def _matrix(found: Evaluation) -> Matrix | None:
    if not 0 < len(found.classes) <= MOST_CLASSES:
        return None
    return draw_matrix([row.name for row in found.classes], found.confusion)


def _evaluation_tables(found: Evaluation) -> list[tuple[str, str, ReportTable]]:
    """Headings, keys and tables: the metrics of each class and, without a matrix, the most frequent confusions."""
    tables = []
    if found.classes:
        columns, rows = ["precision", "recall", "f1", "samples"], []
        for row in found.classes:
            texts = [f"{value:.4f}" for value in (row.precision, row.recall, row.f1)] + [f"{row.samples:,}"]
            rows.append((row.name, [Cell(text) for text in texts]))
        tables.append(("Classes", "classes", ReportTable("class", columns, rows, numbers=True)))
    if len(found.classes) > MOST_CLASSES:
        counts = [
            (count, target, prediction)
            for target, row in enumerate(found.confusion)
            for prediction, count in enumerate(row)
            if count and target != prediction
        ]
        counts.sort(key=lambda item: -item[0])
        pairs = [
            (found.classes[target].name, [Cell(found.classes[prediction].name), Cell(f"{count:,}")])
            for count, target, prediction in counts[:PAIRS]
        ]
        tables.append(
            ("Most frequent confusions", "confusions", ReportTable("target", ["prediction", "samples"], pairs))
        )
    return tables


# -- bars: the variants of an ablation, and the regions of a step ------------------------------------------------------


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
