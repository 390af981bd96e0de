"""The table at the end of a run, or one line in its place, for a run of a sweep."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer

from fastloop.cli.tables import print_table
from fastloop.metric_modes import direction
from fastloop.problem import counted
from fastloop.recipe import secrets
from fastloop.splits import EVALUATED, VALIDATION

PHASES = ("train", "evaluate", "save", "startup", "compile")
"""Phases whose seconds the table shows."""
BRIEF_VARIABLE = "FASTLOOP_BRIEF_SUMMARY"
"""Environment variable of processes whose run ends with a line in place of the table: ``launch`` sets it to 1."""


def show_summary(summary: Mapping[str, Any], folder: Path) -> None:
    """Print the table at a run's end.

    Args:
        summary: The content of ``summary.json``.
        folder: The run folder.
    """
    from rich.table import Table

    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, text in summary_rows(summary, folder).items():
        table.add_row(name, text)
    print_table(table)


def is_brief() -> bool:
    """Whether the run of this process ends with a line in place of the table: a sweep has many runs."""
    return os.environ.get(BRIEF_VARIABLE) == "1"


def show_line(summary: Mapping[str, Any], folder: Path) -> None:
    """Print a run in one line: ``finished: validation loss 0.3349, accuracy 0.8750; 226 steps; summary: FILE``.

    Args:
        summary: The content of ``summary.json``.
        folder: The run folder.
    """
    rows = summary_rows(summary, folder)
    parts = [f"{name} {rows[name]}" for name in (*EVALUATED, "best") if name in rows]
    parts.append(counted(summary["steps"], "step"))
    parts.append(f"summary: {folder / 'summary.json'}")
    typer.echo(f"{rows['status']}: {'; '.join(parts)}")


def summary_rows(summary: Mapping[str, Any], folder: Path) -> dict[str, str]:
    """The rows of the table: name -> text."""
    rows = {"status": summary["status"]}
    if summary["reason"]:
        rows["status"] += f" ({secrets.hide(summary['reason'])})"
    for split in EVALUATED:
        if summary[split]:
            rows[split] = ", ".join(f"{name} {value:.4f}" for name, value in summary[split].items())
    best = summary["best"]
    if best:
        better = direction(best.get("mode"))  # a plugin of another package may leave it out
        rows["best"] = f"{best.get('metric', '')} {best['value']:.4f} at step {best['step']}{better}".lstrip()
    if summary["model_step"] is not None:
        rows["model"] = describe_model(summary)
    scored: dict[str, list[str]] = {}  # class -> the metrics that score only this one
    for metric, name in summary.get("metric_classes", {}).items():
        scored.setdefault(name, []).append(metric)
    if scored:
        rows["positive"] = "; ".join(f"{name} ({', '.join(metrics)})" for name, metrics in scored.items())
    epochs = counted(summary["epochs"], "whole epoch")
    samples = counted(summary["samples"], "sample")
    rows["steps"] = f"{summary['steps']} ({epochs}, {samples})"
    times = []
    for phase in PHASES:
        seconds = summary[f"{phase}_seconds"]
        if seconds:
            times.append(f"{phase} {seconds:.1f}")
    rows["seconds"] = ", ".join(times)
    rows["speed"] = f"{summary['samples_per_second']:.1f} samples/s"
    if summary["tokens_per_second"]:
        rows["speed"] += f", {summary['tokens_per_second']:.0f} tokens/s"
    processes = counted(summary["world_size"], "process")
    memory = f"{summary['peak_memory_bytes'] / 2**20:.0f} MiB at the peak"
    rows["memory"] = f"{memory}, {summary['device']}, {processes}"
    plugins = []
    for name in summary["plugins"]:
        plugins.append(f"{name} (disabled)" if name in summary["disabled"] else name)
    rows["plugins"] = ", ".join(plugins)
    rows["run folder"] = str(folder)
    return rows


def describe_model(summary: Mapping[str, Any]) -> str:
    """Which weights ``model/`` has: ``weights of step 54, f1 0.9889, the best``. Their metrics follow if they are not
    those of the row ``validation``."""
    step = summary["model_step"]
    best = summary["best"]
    parts = [f"weights of step {step}"]
    if summary["model_weights"] != "trained":
        parts.append(summary["model_weights"])
    is_best = best is not None and best["step"] == step
    shown: dict[str, float] = {}
    if is_best:
        shown[best["metric"]] = best["value"]  # first the metric that chose them
    metrics = summary["model_metrics"] or {}
    if metrics != summary[VALIDATION]:
        shown |= metrics
    parts += [f"{name} {value:.4f}" for name, value in shown.items()]
    if is_best:
        parts.append("the best")
    elif step == summary["steps"]:
        parts.append("the last")
    return ", ".join(parts)
