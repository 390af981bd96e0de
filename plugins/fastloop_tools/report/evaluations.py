"""Evaluations on the page: metrics in all and by class, the confusion matrix, and samples with the worst results."""

from __future__ import annotations

from typing import Any

from fastloop_tools.inference.picture import Matrix, draw_matrix
from fastloop_tools.report.read import Trained
from fastloop_tools.report.records import Evaluation
from fastloop_tools.report.tables import Cell, Table

MOST_CLASSES, PAIRS = 60, 20
"""Most classes of a matrix on the page. For more classes, a table has the most frequent confusions."""


def shown_evaluations(run: Trained) -> list[dict[str, Any]]:
    """The evaluations of a run, as the template shows them."""
    return [
        {
            "name": run.name,
            "found": found,
            "outdated": _outdated(run, found),
            "matrix": _matrix(found),
            "tables": _tables(found),
        }
        for found in run.evaluations
    ]


def _outdated(run: Trained, found: Evaluation) -> str:
    """A remark if the run has trained on since its evaluation."""
    steps = (run.summary or {}).get("steps")
    if steps is None or found.steps is None or steps == found.steps:
        return ""
    return f"This is the model after {found.steps:,} steps. The run now has {steps:,}: evaluate it again."


def _matrix(found: Evaluation) -> Matrix | None:
    if not 0 < len(found.classes) <= MOST_CLASSES:
        return None
    return draw_matrix([row.name for row in found.classes], found.confusion)


def _tables(found: Evaluation) -> list[tuple[str, str, Table]]:
    """Headings, keys and tables: the metrics of each class and, without a matrix, the most frequent confusions."""
    tables = []
    if found.classes:
        columns, rows = ["precision", "recall", "f1", "samples"], []
        for row in found.classes:
            texts = [f"{value:.4f}" for value in (row.precision, row.recall, row.f1)] + [f"{row.samples:,}"]
            rows.append((row.name, [Cell(text) for text in texts]))
        tables.append(("Classes", "classes", Table("class", columns, rows, numbers=True)))
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
        tables.append(("Most frequent confusions", "confusions", Table("target", ["prediction", "samples"], pairs)))
    return tables
