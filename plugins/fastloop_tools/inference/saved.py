"""Results of ``fastloop evaluate`` in the run folder, where ``fastloop report`` finds them."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fastloop import Problem
from fastloop.problem import clause
from fastloop.recipe import secrets
from fastloop.runtime import files, json_text

log = logging.getLogger("fastloop")


def save(run: Path, record: Mapping[str, Any], settings: Sequence[str]) -> Path | None:
    """Write the results to ``RUN/evaluation/SPLIT.json``; None: the folder cannot be written, which is logged.

    A file or other settings than the run's own add a hash of them to the name, so they replace no other results.
    """
    name = Path(record["file"]).stem if record["file"] else record["split"]
    if record["file"] or settings:
        name += f"-{hashlib.sha256(json.dumps([record['file'], *settings]).encode()).hexdigest()[:4]}"
    path = run / "evaluation" / f"{name}.json"
    try:
        path.parent.mkdir(exist_ok=True)
        files.write(
            path, json_text.dumps(secrets.hidden({**record, "steps": _steps(run)}), indent=2) + "\n", hidden=True
        )
    except OSError as error:
        log.warning(Problem(f"{path} cannot be written: {clause(error)}.", code="file-not-writable", place="evaluate"))
        return None
    return path


def _steps(run: Path) -> int | None:
    """The optimizer steps of a run at the export of its model; None: unknown, as after a resume that ended early."""
    summary = files.read_json_object(run / "summary.json")
    steps = summary.get("steps")
    is_exported = summary.get("model_step", steps) is not None
    return steps if isinstance(steps, int) and is_exported else None
