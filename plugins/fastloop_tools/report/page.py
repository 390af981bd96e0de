"""Renders the HTML page. All values are escaped: names and errors may contain anything."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fastloop.metric_modes import MetricMode, recorded_mode
from fastloop.problem import counted
from fastloop.runtime.json_text import with_nan
from fastloop.splits import EVALUATED
from fastloop_tools.report import sweeps
from fastloop_tools.report.charts import Chart, Panel, line_chart, panel
from fastloop_tools.report.metrics_log import Series
from fastloop_tools.report.read import Evaluation, PageContents, TrainedRun
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
"""Values without a chart."""
MOST_CLASSES = 60
"""Most classes of a matrix on the page. For more classes, a table has the most frequent confusions."""
PAIRS = 20
"""Rows of that table."""


def page_title(contents: PageContents) -> str:
    """The tasks of the runs, and the names of what the page shows, such as ``text-classification: quickstart``; their
    number, if they are more than ``MOST_NAMES``."""
    tasks: list[str] = []
    for run in contents.runs:
        task = str((run.summary or {}).get("task") or "")
        if task and task not in tasks:
            tasks.append(task)
    names = []
    if not contents.sweeps:  # whose runs have numbers
        names += [run.name for run in contents.runs]
    for name, _ in (*contents.sweeps, *contents.ablations, *contents.profiles):
        names.append(name)
    shown = ", ".join(names) if len(names) <= MOST_NAMES else f"{len(names)} results"
    return f"{', '.join(tasks)}: {shown}" if tasks else shown


def render(contents: PageContents, title: str) -> str:
    """Render the HTML page."""
    drawn = charts(contents.runs)
    logged_rows = []
    evaluations = []
    for run in contents.runs:
        for name, rows in run.rows.items():
            if rows:
                logged_rows.append((run.name, name, rows_table(rows)))
        evaluations += shown_evaluations(run)
    template = _templates().get_template("page.html")
    return template.render(
        title=title,
        runs=contents.runs,
        charts=[chart for chart in drawn if isinstance(chart, Chart)],
        panels=[chart for chart in drawn if isinstance(chart, Panel)],
        tables=_tables(contents.runs),
        rows=logged_rows,
        evaluations=evaluations,
        sweeps=[(name, results_table(record), sweeps.plots(record)) for name, record in contents.sweeps],
        ablations=[(name, record, ablation_bars(record)) for name, record in contents.ablations],
        profiles=[(name, record, region_bars(record)) for name, record in contents.profiles],
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
    names = [run.name for run in runs]
    metrics = ReportTable("metric", names, final_metrics(runs), numbers=True)
    tables = [("Final metrics", "metrics", metrics)]
    if len(runs) > 1:
        recipes = _differing_keys(names, differences([run.recipe for run in runs]))
        environments = _differing_keys(names, environment([run.summary or {} for run in runs]))
        tables.append(("Where the recipes differ", "differences", recipes))
        tables.append(("Where the environments differ", "environments", environments))
    shown = []
    for heading, id, table in tables:
        if not table.rows:
            continue
        if len(runs) > MANY:
            table = table.transposed("run")
        shown.append((heading, id, table))
    return shown


def _differing_keys(names: list[str], rows: list[tuple[str, list[str]]]) -> ReportTable:
    """The table of keys that differ between runs, with the value of each run."""
    return ReportTable("key", names, [(key, [Cell(value) for value in values]) for key, values in rows])


def final_metrics(runs: list[TrainedRun]) -> list[tuple[str, list[Cell]]]:
    """Final metrics: name -> the value of each run, and whether it is the best one. No value is the best if the runs do
    not know, or do not agree, whether a lower or a higher value is better."""
    names: dict[tuple[str, str], None] = {}  # in order
    for run in runs:
        for split in EVALUATED:
            for name in _metrics_of(run, split):
                names[split, name] = None
    rows = []
    for split, name in names:
        values = [_metrics_of(run, split).get(name) for run in runs]
        modes = {recorded_mode(run.summary or {}, name) for run in runs if name in _metrics_of(run, split)}
        best = _best_value(values, modes)
        cells = []
        for value in values:
            text = "" if value is None else number(value)
            cells.append(Cell(text, best=value is not None and value == best))
        rows.append((f"{split} {name}", cells))
    return rows


def _metrics_of(run: TrainedRun, split: str) -> Mapping[str, float]:
    """The final metrics of a run on a split; empty if it has none."""
    return with_nan((run.summary or {}).get(split) or {})


def _best_value(values: list[Any], modes: set[MetricMode | None]) -> float | None:
    """The best of different values; None if they are equal, or the runs do not agree about the better ones.

    Args:
        modes: Which values the runs take as better.
    """
    finite = [value for value in values if isinstance(value, int | float) and math.isfinite(value)]
    if len(set(finite)) < 2:
        return None
    if modes == {"min"}:
        return min(finite)
    return max(finite) if modes == {"max"} else None


def rows_table(rows: list[dict[str, Any]]) -> ReportTable:
    """Rows of ``run.log_rows``, with their step first."""
    names: list[str] = []
    for row in rows:
        for name in row:
            if name != "step" and name not in names:
                names.append(name)
    lines = []
    for row in rows:
        values = [row.get(name) for name in names]
        texts = [value if isinstance(value, str) else json.dumps(value, ensure_ascii=False) for value in values]
        lines.append((str(row["step"]), [Cell(text) for text in texts]))
    return ReportTable("step", names, lines)


def charts(runs: list[TrainedRun]) -> list[Chart | Panel]:
    """The curves of each value that any run has: loss, metrics, learning rate, throughput, then all others."""
    keys: list[str] = []
    for run in runs:
        for key, series in run.lines.items():
            is_zero = not series.least and not series.most
            if key not in keys and key.rpartition(" ")[2] not in ASIDE and not is_zero:
                keys.append(key)
    core = [key for key in TITLES if key in keys]
    metrics = [key for key in keys if key.startswith("validation ")]
    others = [key for key in keys if key not in core and not key.startswith(("validation ", "test "))]
    drawn = []
    for key in [*core[:1], *metrics, *core[1:], *others]:
        chart = _curves(key, runs)
        if chart is not None:
            drawn.append(chart)
    return drawn


def _curves(key: str, runs: list[TrainedRun]) -> Chart | Panel | None:
    """The curves of a value: one chart, or a panel with a small chart for each of many runs. None without values."""
    metric = key.removeprefix("validation ")
    is_metric = key.startswith("validation ")
    title, unit, factor = TITLES.get(key, (f"Validation {metric}" if is_metric else key, metric, 1.0))
    series = {run.name: run.lines.get(key, Series()).scaled(factor) for run in runs}
    if len(runs) > MANY:
        present = {name: line for name, line in series.items() if line}
        return panel(title, present, unit, first=key == "loss" or is_metric)
    coloured = {}
    for index, (name, line) in enumerate(series.items()):
        coloured[name] = (index, line)
    return line_chart(title, coloured, unit)


# -- evaluations -------------------------------------------------------------------------------------------------------


def shown_evaluations(run: TrainedRun) -> list[dict[str, Any]]:
    """The evaluations of a run, as the template shows them."""
    return [
        {
            "name": run.name,
            "evaluation": evaluation,
            "outdated": _outdated(run, evaluation),
            "matrix": _matrix(evaluation),
            "tables": _evaluation_tables(evaluation),
        }
        for evaluation in run.evaluations
    ]


def _outdated(run: TrainedRun, evaluation: Evaluation) -> str:
    """A remark if the run has trained on since its evaluation."""
    steps = (run.summary or {}).get("steps")
    if steps is None or evaluation.steps is None or steps == evaluation.steps:
        return ""
    return f"This is the model after {counted(evaluation.steps, 'step')}. The run now has {steps:,}: evaluate it again."


def _matrix(evaluation: Evaluation) -> Matrix | None:
    if not 0 < len(evaluation.classes) <= MOST_CLASSES:
        return None
    return draw_matrix([row.name for row in evaluation.classes], evaluation.confusion)


def _evaluation_tables(evaluation: Evaluation) -> list[tuple[str, str, ReportTable]]:
    """Headings, keys and tables: the metrics of each class and, without a matrix, the most frequent confusions."""
    tables = []
    if evaluation.classes:
        columns = ["precision", "recall", "f1", "samples"]
        rows = []
        for row in evaluation.classes:
            texts = [f"{row.precision:.4f}", f"{row.recall:.4f}", f"{row.f1:.4f}", f"{row.samples:,}"]
            rows.append((row.name, [Cell(text) for text in texts]))
        tables.append(("Classes", "classes", ReportTable("class", columns, rows, numbers=True)))
    if len(evaluation.classes) > MOST_CLASSES:
        tables.append(("Most frequent confusions", "confusions", _confusions(evaluation)))
    return tables


def _confusions(evaluation: Evaluation) -> ReportTable:
    """The pairs of a target and another prediction that occur most often."""
    pairs = []
    for target, counts in enumerate(evaluation.confusion):
        for prediction, count in enumerate(counts):
            if count and target != prediction:
                pairs.append((count, evaluation.classes[target].name, evaluation.classes[prediction].name))
    pairs.sort(key=lambda pair: -pair[0])
    rows = [(target, [Cell(prediction), Cell(f"{count:,}")]) for count, target, prediction in pairs[:PAIRS]]
    return ReportTable("target", ["prediction", "samples"], rows)


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
    longest = 0.0
    for bar in bars:
        longest = max(longest, bar.size, bar.high or 0.0)
    longest = longest or 1.0
    for bar in bars:
        bar.size /= longest
        if bar.low is not None and bar.high is not None:
            bar.low /= longest
            bar.high /= longest
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
        rate = results[f"{results['unit']}_per_second"]
        label = f"{rate['median']:,.0f} {results['unit']}/s"
        over_baseline = results.get("over_baseline")
        if over_baseline:
            label += f", x {over_baseline['median']:.2f}"
        verdict = (results.get("over_before") or {}).get("verdict", "")
        memory = f"{results['peak_memory_bytes'] / 2**20:,.0f} MiB"
        note = f"{verdict}; {memory}" if verdict else memory
        bars.append(Bar(variant["title"], rate["median"], label, rate["low"], rate["high"], note))
    return scale(bars)


def region_bars(record: Mapping[str, Any]) -> list[Bar]:
    """The regions of a step by seconds."""
    step = record["profile"]["seconds"]
    regions = sorted(record["profile"]["regions"].items(), key=lambda item: -item[1])
    bars = []
    for name, seconds in regions:
        bars.append(Bar(name, seconds, f"{1000 * seconds:,.1f} ms, {seconds / step:.0%}"))
    return scale(bars)
