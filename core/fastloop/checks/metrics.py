"""Try the task's metrics on a batch before training, and explain their failures.

An error names the metric, the split, and the shapes and dtypes of the metric's arguments.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fastloop.errors import UsageError
from fastloop.evaluation import evaluating
from fastloop.runtime.random_states import preserve_random_states
from fastloop.runtime.tracebacks import user_line

if TYPE_CHECKING:
    from torchmetrics import Metric

    from fastloop.data import Loader
    from fastloop.run import Run
    from fastloop.state import Output

log = logging.getLogger("fastloop")

COUNTS = ("num_classes", "num_labels", "num_outputs")
"""Arguments of torchmetrics' metrics for the number of columns of predictions."""


def check(run: Run) -> None:
    """Update every metric once with the first batch of each evaluation split, and reset it.

    The model is in eval mode and runs uncompiled; random states are restored. Iterable datasets are left out, because some can be read
    only once. Every process must call this.

    Raises:
        UsageError: A metric does not fit the task's predictions and targets, on any process.
    """
    if run.metrics is None:
        return
    for split, loader in run.eval_loaders.items():
        if loader.sampler is None:
            continue
        with preserve_random_states():
            problem = next(filter(None, run.processes.all_gather_object(_try_batch(run, split, loader))), None)
        if problem:
            raise UsageError(problem)


@contextmanager
def explain_failures(run: Run, split: str, output: Output | None) -> Iterator[None]:
    """Raise the failure of a metric as an error that names the metric.

    Args:
        output: The output for the newest batch, if any.

    Raises:
        UsageError: A metric failed.
    """
    try:
        yield
    except UsageError:
        raise
    except Exception as error:
        if run.metrics is None or output is None:
            raise
        raise UsageError(_find_problem(run, split, output) or _explain(run, "a metric", split, output, error)) from error


def check_number(run: Run, split: str, name: str, value: Any) -> None:
    """Check that the value of a metric is one number.

    Raises:
        UsageError: It is not; names the metric and the value's shape.
    """
    if problem := _check_scalar(run, name, split, value):
        raise UsageError(problem)


@torch.no_grad()
def _try_batch(run: Run, split: str, loader: Loader) -> str | None:
    """Evaluate one batch. Returns the first problem, or None."""
    try:
        with evaluating(run.model):
            ((batch,),) = run.to_device([list(islice(loader.batches(), 1))])
            with torch.compiler.set_stance("force_eager"):
                output = run.hooks.compute_loss(run=run, model=run.model, batch=batch.inputs)
    except torch.OutOfMemoryError:
        if run.world_size > 1:  # other processes may wait in a collective operation of the model
            raise
        log.warning("a batch of %s does not fit into memory: its metrics were not tried", split)
        return None
    finally:
        if run.world_size > 1:
            _reshard(run.model)
    return _find_problem(run, split, output) if batch.samples else None


def _reshard(model: torch.nn.Module) -> None:
    """Free the weights that FSDP gathered for a forward pass, because no backward pass will free them."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _find_problem(run: Run, split: str, output: Output) -> str | None:
    """Try each metric separately, and reset it. Returns the first problem, or None."""
    assert run.metrics is not None
    for name, metric in run.metrics.items():
        missing = [key for key in ("predictions", "targets") if getattr(output, key) is None]
        if missing:
            return (
                f"{_label(run, name, metric)} has nothing to measure: a batch of {split} gave no {' and no '.join(missing)}. "
                "Have the model return `logits` and the batch hold `labels`, or leave the metric out."
            )
        try:
            metric.update(output.predictions, output.targets)
            for key, value in _batch_values(metric, name, output).items():
                if problem := _check_scalar(run, key, split, value):
                    return problem
        except Exception as error:
            return _explain(run, _label(run, name, metric), split, output, error, metric)
        finally:
            metric.reset()
    return None


def _batch_values(metric: Metric, name: str, output: Output) -> Mapping[str, Any]:
    """Name -> value of a metric for one batch on this process; empty if the metric cannot compute it."""
    if any(getattr(part, "dist_sync_on_step", False) for part in metric.modules()):  # it would wait for processes without samples
        return {}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a batch may contain only one class
            value = metric(output.predictions, output.targets)
    except Exception:
        return {}
    return value if isinstance(value, Mapping) else {name: value}


def _label(run: Run, name: str, metric: Metric) -> str:
    return f"{run.recipe.where}: the metric {name!r} ({type(metric).__name__})"


def _check_scalar(run: Run, name: str, split: str, value: Any) -> str | None:
    if not isinstance(value, Tensor) or value.numel() == 1:
        return None
    return (
        f"{run.recipe.where}: the metric {name!r} gives {_describe(value)} for {split}, expected one number. "
        "Average over classes, such as average: macro, or choose another metric."
    )


def _explain(run: Run, label: str, split: str, output: Output, error: Exception, metric: Metric | None = None) -> str:
    reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
    reason += f" ({line})" if (line := user_line(error)) else ""
    return (
        f"{label} cannot measure a batch of {split}: predictions {_describe(output.predictions)}, targets {_describe(output.targets)}. "
        f"{type(error).__name__}: {reason}. {_advice(output, metric)}"
    )


def _describe(value: Any) -> str:
    if not isinstance(value, Tensor):
        return f"of type {type(value).__name__}"
    return f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"


def _advice(output: Output, metric: Metric | None) -> str:
    predictions = output.predictions
    if isinstance(predictions, Tensor) and predictions.dim() > 1:
        columns = predictions.shape[1]
        for key in COUNTS:
            count = getattr(metric, key, None)
            if isinstance(count, int) and count != columns:
                return f"The predictions have {columns} columns and the metric has {key}={count}: set {key} to {columns}."
    return "Choose a metric, or arguments of it, that fit these shapes and dtypes."
