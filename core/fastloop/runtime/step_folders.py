"""The folders of a run's checkpoints: ``checkpoints/step-00000120``. Nothing here imports torch, so that the launcher can look for them."""

from __future__ import annotations

import re
from pathlib import Path

_NAME = re.compile(r"step-(\d+)|\.step-(\d+)(?:\.old)?\.partial")
"""A checkpoint; or one that is being written; or one whose step was saved again."""


def step_folder(run_folder: Path, step: int) -> Path:
    """Where a run keeps the checkpoint of a step."""
    return run_folder / "checkpoints" / f"step-{step:08d}"


def step_of(path: Path) -> int | None:
    """The step of a checkpoint folder, finished or not, by its name; None for any other name."""
    found = _NAME.fullmatch(path.name)
    return int(found[1] or found[2]) if found else None


def checkpoints(folder: Path) -> list[Path]:
    """Checkpoint folders of a run, oldest step first; those under way have another name and are not among them."""
    return _by_step(folder, "step-*")


def leftovers(folder: Path) -> list[Path]:
    """Folders of saves that were cut off, oldest step first."""
    return _by_step(folder, ".step-*.partial")


def _by_step(folder: Path, pattern: str) -> list[Path]:
    steps = {path: step for path in (folder / "checkpoints").glob(pattern) if (step := step_of(path)) is not None}
    return sorted(steps, key=lambda path: steps[path])
