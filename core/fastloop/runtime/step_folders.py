"""The folders of a run's checkpoints: ``checkpoints/step-00000120``.

Does not import torch, because the launcher uses it."""

from __future__ import annotations

import hashlib
import re
from contextlib import suppress
from pathlib import Path

MANIFEST = "manifest.json"
"""The file that is written last into a checkpoint, so it marks a complete one. See ``fastloop.checkpoint.store``."""
JOB_FILE = ".torchrun-job"
"""The file in a run folder with the name of the torchrun job that trained the run last."""
_NAME = re.compile(r"step-(\d+)|\.step-(\d+)(?:\.old)?\.partial")
"""A complete checkpoint, one that is being written, or an old one that is being replaced."""


def step_folder(run_folder: Path, step: int) -> Path:
    """The folder of a step's checkpoint."""
    return run_folder / "checkpoints" / f"step-{step:08d}"


def step_of(path: Path) -> int | None:
    """The step in the name of a complete or incomplete checkpoint's folder; None for any other name."""
    match = _NAME.fullmatch(path.name)
    return int(match[1] or match[2]) if match else None


def checkpoints(folder: Path) -> list[Path]:
    """Folders of a run's complete checkpoints, oldest step first."""
    return _by_step(folder, "step-*")


def manifest_digests(folder: Path) -> dict[str, str]:
    """The complete checkpoints of a run: name -> 16 hex digits of the SHA-256 of its manifest, which identify its
    content. A checkpoint that is saved anew under the same name gets others."""
    digests: dict[str, str] = {}
    try:
        found = checkpoints(folder)
    except OSError:  # a process at its limit of open files ends with the error that took them
        return digests
    for checkpoint in found:
        with suppress(OSError):  # a run that still trains removes checkpoints
            manifest = (checkpoint / MANIFEST).read_bytes()
            digests[checkpoint.name] = hashlib.sha256(manifest).hexdigest()[:16]
    return digests


def resume_remedy(folder: Path) -> str:
    """The sentence that proposes to continue a run from its newest checkpoint; empty if its folder has none."""
    return "Continue from the newest checkpoint with `--resume`." if checkpoints(folder) else ""


def leftovers(folder: Path) -> list[Path]:
    """Folders of interrupted saves, oldest step first."""
    return _by_step(folder, ".step-*.partial")


def _by_step(folder: Path, pattern: str) -> list[Path]:
    steps: dict[Path, int] = {}
    for path in (folder / "checkpoints").glob(pattern):
        step = step_of(path)
        if step is not None:
            steps[path] = step
    return sorted(steps, key=steps.__getitem__)
