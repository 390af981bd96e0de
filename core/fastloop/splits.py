"""The splits of a run: their names, and where these appear.

A run trains on ``train``. It evaluates ``validation`` when ``schedule`` decides so, and ``test`` after training, with
the weights that it exports. In a source of data, splits may have other names: ``data.splits`` names them. Rows of
``train`` may take the place of a missing ``validation``: ``rows/held_out.py`` beside the plugins.

The names appear here::

    hooks            the argument split; the keys of the mapping that build_datasets returns
    run              the keys of run.datasets, run.eval_loaders and run.state.metrics
    log_scalars      validation/loss, by name_metrics below; values of training are scalars.CORE_NAMES
    metrics.jsonl    {"split": "validation", "loss": 0.3349}, by evaluated_split below
    summary.json     {"validation": {"loss": 0.3349}, "test": null}, by checkpoint.run_summary
    log              step 226, validation: loss 0.3349, by loop.evaluate
    messages         the validation split is empty; or the place is data: validation

Plugins write the names as strings, which are public. The core uses these constants, and so does code that goes over
several splits.
"""

from __future__ import annotations

from collections.abc import Container, Mapping

TRAIN = "train"
VALIDATION = "validation"
TEST = "test"

SPLITS = (TRAIN, VALIDATION, TEST)
"""All splits of a run."""
EVALUATED = (VALIDATION, TEST)
"""The splits that a run evaluates."""
PREDICT = "predict"
"""The only split of a run that predicts rows which belong to no split, such as those of a file."""

METRIC_PREFIXES = tuple(f"{split}/" for split in EVALUATED)
"""Beginnings of the names of metrics in ``log_scalars``. Plugins log no value with such a name."""


def name_metrics(split: str, metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics of a split, as ``log_scalars`` gets them: ``{"loss": 0.3}`` becomes ``{"validation/loss": 0.3}``."""
    return {f"{split}/{name}": value for name, value in metrics.items()}


def evaluated_split(scalars: Mapping[str, float], evaluated: Container[str]) -> str | None:
    """The split whose metrics ``log_scalars`` gets; None: it gets values of training. Never both.

    Args:
        scalars: The argument of the hook.
        evaluated: The splits that the run evaluates, such as ``run.eval_loaders``.
    """
    first_name = next(iter(scalars))
    split = first_name.partition("/")[0]
    return split if split in evaluated else None
