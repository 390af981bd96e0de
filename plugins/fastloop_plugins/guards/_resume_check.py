"""Checks that a run resumes with the settings, the parts and the data of its checkpoint, before weights are loaded.

Part of every run, like the core's own implementations of hooks; no recipe names it.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastloop import hookimpl
from fastloop.checkpoint import unpack
from fastloop.checkpoint.resume import refuse_errors
from fastloop.errors import CheckpointError
from fastloop.recipe import Train, secrets
from fastloop.runtime.files import read_again

if TYPE_CHECKING:
    from fastloop import Run

logger = logging.getLogger("fastloop")

FIXED_ON_RESUME = (
    "seed", "batch_size", "lr", "optimizer", "weight_decay", "decay_biases_and_norms", "layer_lr_decay",
    "parameter_groups", "max_grad_norm"
)  # fmt: skip
"""Keys of ``train`` that a resumed run cannot change, because the checkpoint's weights depend on them."""


@hookimpl(trylast=True)
def check_run(run: Run) -> None:
    """Compare the run with its checkpoint.

    Raises:
        CheckpointError: The settings, parts or data differ, or ``state.json`` cannot be read or is malformed.
    """
    if run.resume_point is None:
        return
    path = run.resume_point[0]
    # the main process reads: another host may see the checkpoint late
    saved = run.processes.all_gather_object(read_state(path) if run.is_main else None)[0]
    with refuse_errors(f"{path}: malformed state.json. Resume from another checkpoint: "):
        compare_settings(path, unpack(saved["recipe"], {}), secrets.hidden(run.recipe.to_dict()))
        if "data" in saved:  # checkpoints of early versions have no fingerprints
            compare_data(run, path, saved["data"])
        compare_parts(run, path, saved)


def read_state(path: Path) -> Any:
    """The content of a checkpoint's ``state.json``.

    Raises:
        CheckpointError: It cannot be read.
    """
    try:
        return json.loads(read_again((path / "state.json").read_text))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}.") from None


def compare_parts(run: Run, path: Path, saved: dict[str, Any]) -> None:
    """Compare the counters' types and the parts of the run with the checkpoint's.

    Raises:
        CheckpointError: Only one of them has a scheduler, or scales losses.
        ValueError: A counter has another type, or is out of range.
    """
    for name, part in (("scheduler", run.scheduler), ("scaler", run.accelerator.scaler)):
        if (part is None) != (saved[name] is None):
            then, now = "out" * (saved[name] is None), "out" * (part is None)
            raise CheckpointError(f"{path}: was saved with{then} a {name}, and this run is with{now} one.")
    for key, value in saved["state"].items():
        wrong_type = (usual := vars(run.state)[key]) is not None and type(value) is not type(usual)
        if wrong_type or (isinstance(value, int) and not -1 <= value < 2**63):
            raise ValueError(f"state.{key}: found {value!r:.40}")


def compare_settings(path: Path, old: dict[str, Any], new: dict[str, Any]) -> None:
    """Compare the settings that weights depend on.

    Raises:
        CheckpointError: Names the key and both values.
    """
    pairs = [(key, old[key], new[key]) for key in ("model", "data")]
    pairs += [
        (f"train.{key}", old["train"].get(key, getattr(Train, key)), new["train"][key]) for key in FIXED_ON_RESUME
    ]
    for key, before, now in pairs:
        if before != now:
            raise CheckpointError(
                f"{path}: was saved with {key} = {before!r}, and this run has {now!r}. Resume with the same, or start "
                "a new run."
            )


def compare_data(run: Run, path: Path, saved: dict[str, str]) -> None:
    """Compare the data with the checkpoint's. If they differ, raise or log, according to ``train.on_data_change``.

    Raises:
        CheckpointError: Names the splits that changed, and their fingerprints.
    """
    current = run.loaders.fingerprints
    changed = [split for split in {**saved, **current} if saved.get(split) != current.get(split)]
    if not changed:
        return
    listed = "; ".join(f"{split}: {saved.get(split, 'none')}, now {current.get(split, 'none')}" for split in changed)
    message = f"{path}: was saved with other data ({listed})."
    if run.recipe.train.on_data_change == "stop":
        raise CheckpointError(
            f"{message} Resume with the same data, start a new run, or continue with the current data: "
            "train.on_data_change=warn."
        )
    logger.warning("%s The run continues with the current data: this epoch may repeat or miss samples", message)
