"""The run folder: whether it can be one, how it begins, and the summary that ends it."""

from __future__ import annotations

import json
import logging
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastloop.clock import peak_memory
from fastloop.errors import RecipeError

if TYPE_CHECKING:
    from fastloop.run import Run

log = logging.getLogger("fastloop")


def check(run: Run, resume: Path | None) -> None:
    """Refuse a run folder that cannot be made, or that holds somebody's other files.

    Raises:
        RecipeError: Names the folder.
    """
    existing = next(parent for parent in (run.folder, *run.folder.absolute().parents) if parent.exists())
    if not existing.is_dir() or not _writable(existing):
        raise RecipeError(
            f"{run.recipe.where}: output: {run.folder} cannot be written: {existing} is not a folder that this user may write to."
        )
    if resume is None and existing == run.folder and any(existing.iterdir()) and not (existing / "recipe.yaml").is_file():
        raise RecipeError(  # an earlier run would be moved aside: this may be a home folder
            f"{run.recipe.where}: output: {run.folder} holds other files than a run's. Expected a new or empty folder, or a run's."
        )


def make(run: Run) -> None:
    """Make the run folder. Another run's is moved aside: nothing of it is lost."""
    if not run.is_main:
        return
    goes_on = run.found is not None and run.found[0].resolve().is_relative_to(run.folder.resolve())
    if not goes_on and run.folder.exists() and any(run.folder.iterdir()):
        number = 1
        while (aside := run.folder.with_name(f"{run.folder.name}.{number}")).exists():
            number += 1
        run.folder.rename(aside)
        log.info("an earlier run was in %s: moved to %s", run.folder, aside)
    from omegaconf import OmegaConf

    run.folder.mkdir(parents=True, exist_ok=True)
    OmegaConf.save(OmegaConf.create(run.recipe.to_dict()), run.folder / "recipe.yaml")


def summarise(run: Run, status: str, reason: str | None) -> dict[str, Any]:
    """The summary of a run, as it stands; the main process writes it too. Nothing here waits for other processes: they may be gone."""
    state, seconds = run.state, run.clock.seconds
    summary: dict[str, Any] = {
        "status": status,
        "reason": reason,
        "steps": state.step,
        "epochs": state.epoch,
        "samples": state.samples,
        "world_size": run.world_size,
        "device": str(run.device),
        "plugins": run.resolution.names(),
        "train_seconds": seconds["train"],
        "startup_seconds": seconds["startup"],
        "compile_seconds": 0.0,
        "evaluate_seconds": seconds["evaluate"],
        "save_seconds": seconds["save"],
        "peak_memory_bytes": peak_memory(run.device),
        "evaluate": state.metrics.get("evaluate"),
        "test": state.metrics.get("test"),
        "best": state.best,
    }
    if state.unreadable:
        summary["unreadable_samples"] = state.unreadable
    run.hooks.write_summary(run=run, summary=summary)
    summary["train_seconds"] = max(summary["train_seconds"] - summary["compile_seconds"], 0.0)  # compiling happens inside steps
    for name, count in (("samples", state.samples), ("tokens", state.tokens)):
        summary[f"{name}_per_second"] = count / summary["train_seconds"] if summary["train_seconds"] else 0.0
    if run.is_main and run.folder.exists():
        aside = run.folder / ".summary.json.partial"
        aside.write_text(json.dumps(summary, indent=2) + "\n")
        aside.rename(run.folder / "summary.json")
    return summary


def _writable(folder: Path) -> bool:
    """Whether files can be made in a folder: tried, because permission bits do not tell (root, read-only mounts)."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False
