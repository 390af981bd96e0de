"""Find the metric that does not fit an output, and explain why."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, SupportsFloat

from torch import Tensor

from fastloop import Output, UsageError
from fastloop.errors import MetricError
from fastloop.problem import typed_clause
from fastloop.runtime.tracebacks import user_line
from fastloop_plugins.guards.metric_check import MetricCheck
from fastloop_plugins.tasks.shared.broadcasts import BroadcastWatch

if TYPE_CHECKING:
    from torchmetrics import Metric, MetricCollection

    from fastloop import Run

COUNTS = ("num_classes", "num_labels", "num_outputs")
"""Arguments of torchmetrics' metrics for the number of columns of predictions."""


def find_problem(run: Run, split: str, output: Output) -> str | None:
    """Try each metric separately, and reset it. Returns the first problem, or None."""
    assert run.metrics is not None
    where = run.recipe.where
    for name, metric in run.metrics.items():
        label = f"{where}: the metric {name!r} ({type(metric).__name__})"
        missing = [key for key in ("predictions", "targets") if getattr(output, key) is None]
        if missing:
            return (
                f"{label} has nothing to measure: a batch of {split} gave no {' and no '.join(missing)}. "
                "Have the model return `logits` and the batch hold `labels`, or leave the metric out."
            )
        try:
            with BroadcastWatch(output.predictions, output.targets):
                metric.update(output.predictions, output.targets)
            for key, value in batch_values(metric, name, output).items():
                problem = find_shape_problem(where, key, split, value)
                if problem is not None:
                    return problem
        except Exception as error:
            return explain(label, split, output, error, metric)
        finally:
            metric.reset()
    return None


def batch_values(metric: Metric, name: str, output: Output) -> Mapping[str, Any]:
    """Name -> value of a metric for one batch on this process; empty if the metric cannot compute it."""
    # it would wait for processes without samples
    if any(getattr(part, "dist_sync_on_step", False) for part in metric.modules()):
        return {}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a batch may contain only one class
            # a metric whose call raised would never sync again
            value = metric.clone()(output.predictions, output.targets)
    except UsageError:  # a function of arrays that broadcasts them
        raise
    except Exception:
        return {}
    return value if isinstance(value, Mapping) else {name: value}


def find_shape_problem(where: str, name: str, split: str, value: Any) -> str | None:
    """The message for the value of a metric that is not one number, or None."""
    if isinstance(value, Tensor):
        is_number = value.numel() == 1
        what = describe(value)
    else:
        is_number = isinstance(value, SupportsFloat)
        what = f"a value {describe(value)}"
    if is_number:
        return None
    return (
        f"{where}: the metric {name!r} gives {what} for {split}, expected one number. Average over classes or "
        "outputs, such as by average: macro, or choose another metric."
    )


def describe(value: Any) -> str:
    """The shape and dtype of a tensor, ``(8, 3) float32``; the type of anything else."""
    if not isinstance(value, Tensor):
        return f"of type {type(value).__name__}"
    return f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"


def explain_error(run: Run, split: str, error: MetricError) -> str:
    """The message for the metrics of an evaluation that failed: which metric, and why."""
    where = run.recipe.where
    cause = error.__cause__
    for name, value in error.values.items():
        problem = find_shape_problem(where, str(name), split, value)
        if problem is not None:
            return problem
    assert run.metrics is not None
    assert isinstance(cause, Exception)
    label = f"{where}: {find_label(run.metrics, cause)}"
    if error.output is None:
        reason = typed_clause(cause)
        advice = "Choose a metric, or arguments of it, that fit the predictions and targets."
        return f"{label} failed for {split}: {reason}. {advice}"
    return find_problem(run, split, error.output) or explain(label, split, error.output, cause)


def find_label(metrics: MetricCollection, error: Exception) -> str:
    """``the metric 'accuracy'``: the one whose method raised the error. If the collection itself raised it: all
    names."""
    names = {id(metric): repr(str(name)) for name, metric in metrics.items(copy_state=False)}
    for frame, _ in traceback.walk_tb(error.__traceback__):
        owner = id(frame.f_locals.get("self"))
        if owner in names:
            return f"the metric {names[owner]}"
    return f"one of the metrics {', '.join(names.values())}"


def explain(label: str, split: str, output: Output, error: Exception, metric: Metric | None = None) -> str:
    """The message for a metric that failed: shapes and dtypes of its arguments, its error, the line of user code, and
    what to do."""
    reason = typed_clause(error)
    line = user_line(error, [MetricCheck])
    if line:
        reason += f" ({line})"
    return (
        f"{label} cannot measure a batch of {split}: predictions {describe(output.predictions)}, targets "
        f"{describe(output.targets)}. "
        f"{reason}. {advise(output, metric)}"
    )


def advise(output: Output, metric: Metric | None) -> str:
    """Name the argument of the metric to change, if the shapes show it."""
    predictions = output.predictions
    if isinstance(predictions, Tensor) and predictions.dim() > 1:
        columns = predictions.shape[1]
        for key in COUNTS:
            count = getattr(metric, key, None)
            if isinstance(count, int) and count != columns:
                return (
                    f"The predictions have {columns} columns and the metric has {key}={count}: set {key} to {columns}."
                )
    return "Choose a metric, or arguments of it, that fit these shapes and dtypes."
