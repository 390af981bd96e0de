"""The summary of a run, ``summary.json`` in the run folder: written after a run, also after one that failed.

Plugins add values in the hook ``write_summary``: `log` adds the versions of packages.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from fastloop.errors import SaveError
from fastloop.metric_modes import metric_modes
from fastloop.problem import clause
from fastloop.recipe import secrets
from fastloop.runtime import files, json_text
from fastloop.runtime.memory import peak_memory
from fastloop.runtime.step_folders import manifest_digests
from fastloop.splits import TEST, VALIDATION

if TYPE_CHECKING:
    from fastloop.run import Run


def summarize(run: Run, status: str, reason: str | None) -> dict[str, Any]:
    """Return the summary of a run, with the values of the hook ``write_summary``, and write it on the main process.
    Does not wait for other processes, which may have ended.

    Raises:
        SaveError: The summary cannot be written.
    """
    state = run.state
    seconds = run.clock.seconds
    metrics = copy.deepcopy(state.metrics)
    summary: dict[str, Any] = {
        "status": status,
        "reason": reason,
        "recipe": str(run.recipe.source.resolve()) if run.recipe.source else None,
        "task": run.plugins.in_slot("task"),
        "steps": state.step,
        "epochs": state.epoch,
        "samples": state.samples,
        "world_size": run.world_size,
        "device": str(run.device),
        "plugins": run.plugins.names(),
        "disabled": run.plugins.disabled,
        "train_seconds": seconds["train"],
        "startup_seconds": seconds["startup"],
        "compile_seconds": 0.0,
        "evaluate_seconds": seconds["evaluate"],
        "save_seconds": seconds["save"],
        "peak_memory_bytes": peak_memory(run.device),
        VALIDATION: metrics.get(VALIDATION),
        TEST: metrics.get(TEST),
        "best": state.best,
        "metric_modes": metric_modes(run),
        **_exported_weights(run),
        "checkpoints": manifest_digests(run.folder),
        "save_errors": run.saver.errors,
    }
    if state.unreadable:
        summary["unreadable_samples"] = state.unreadable
    try:
        run.hooks.write_summary(run=run, summary=summary)
    finally:  # a run that fails here has a summary, too
        _add_throughput(run, summary)
        write_summary(run, summary)
    return summary


def _exported_weights(run: Run) -> dict[str, Any]:
    """Which weights ``model/`` has: their step, their kind, and their metrics of the validation split; None: nothing is
    exported, or they were not evaluated."""
    state = run.state
    if not run._exported:
        return {"model_step": None, "model_weights": None, "model_metrics": None}
    step = state.step if state.model_step is None else state.model_step
    metrics = None
    if state.best is not None and step == state.best["step"]:
        metrics = state.best["metrics"]
    elif step == state.evaluated_at:
        metrics = state.metrics.get(VALIDATION)
    return {"model_step": step, "model_weights": state.model_weights, "model_metrics": copy.deepcopy(metrics)}


def _add_throughput(run: Run, summary: dict[str, Any]) -> None:
    """Take the seconds of compilation out of those of training, in whose steps it happens, and add the throughput."""
    seconds = max(summary["train_seconds"] - summary["compile_seconds"], 0.0)
    summary["train_seconds"] = seconds
    summary["samples_per_second"] = run.state.samples / seconds if seconds else 0.0
    summary["tokens_per_second"] = run.state.tokens / seconds if seconds else 0.0


def write_summary(run: Run, summary: dict[str, Any]) -> None:
    """Write ``summary.json`` on the main process.

    Raises:
        SaveError: It cannot be written.
    """
    if not run.is_main or not run.folder.exists():
        return
    path = run.folder / "summary.json"
    try:
        text = json_text.dumps(secrets.hidden(summary), indent=2, default=repr)
        files.write(path, text + "\n", hidden=True)
    except OSError as error:
        raise SaveError(f"{path} cannot be written: {clause(error)}.", code="save-failed") from error
