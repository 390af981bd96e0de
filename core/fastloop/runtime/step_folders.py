"""The folders of a run's checkpoints: ``checkpoints/step-00000120``.

Does not import torch, because the launcher uses it."""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Literal

MANIFEST = "manifest.json"
"""The file that is written last into a checkpoint, so it marks a complete one. See ``fastloop.checkpoint.store``."""
JOB_FILE = ".torchrun-job"
"""The file in a run folder with the name of the torchrun job that trained the run last."""
Kind = Literal["step", "best"]
"""How the name of a checkpoint begins: ``step`` to resume from it, ``best`` for the weights that ``checkpoint-best``
keeps."""


def step_folder(run_folder: Path, step: int) -> Path:
    """The folder of a step's checkpoint."""
    return run_folder / "checkpoints" / f"step-{step:08d}"


def step_of(path: Path, kind: Kind = "step") -> int | None:
    """The step in the name of a complete or incomplete checkpoint's folder; None for any other name.

    An incomplete one is being written, ``.step-4.partial``, or replaced, ``.step-4.old.partial``.
    """
    match = re.fullmatch(rf"{kind}-(\d+)|\.{kind}-(\d+)(?:\.old)?\.partial", path.name)
    return int(match[1] or match[2]) if match else None


def checkpoints(folder: Path, kind: Kind = "step") -> list[Path]:
    """Folders of a run's complete checkpoints, oldest step first."""
    return _by_step(folder, f"{kind}-*", kind)


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


def leftovers(folder: Path, kind: Kind = "step") -> list[Path]:
    """Folders of interrupted saves, oldest step first."""
    return _by_step(folder, f".{kind}-*.partial", kind)


def remove_old_checkpoints(folder: Path, kept_steps: Collection[int], kind: Kind = "step") -> None:
    """Remove a run's checkpoints of other steps than ``kept_steps``, and leftovers of interrupted saves. Other files
    stay."""
    unneeded = leftovers(folder, kind)
    for path in checkpoints(folder, kind):
        if step_of(path, kind) not in kept_steps:
            unneeded.append(path)
    for path in unneeded:
        shutil.rmtree(path, ignore_errors=True)


def _by_step(folder: Path, pattern: str, kind: Kind) -> list[Path]:
    steps: dict[Path, int] = {}
    for path in (folder / "checkpoints").glob(pattern):
        step = step_of(path, kind)
        if step is not None:
            steps[path] = step
    return sorted(steps, key=steps.__getitem__)
