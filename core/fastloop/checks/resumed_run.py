"""Checks that a run resumes with the settings, the parts and the data of its checkpoint, before weights are loaded.

Each setting is fixed or free. A run cannot change a fixed setting, because the checkpoint's weights, or the states that
are loaded with them, depend on it. It can change a free one, and a line of the log names both values.
"""

from __future__ import annotations

import json
import logging
import re
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fastloop.checkpoint import unpack
from fastloop.checkpoint.resume import convert_errors
from fastloop.checkpoint.settings_record import (
    OPTIMIZER_CODE,
    ChangedSetting,
    changed_settings,
    differences,
    explain_parameters,
    group_settings,
    plain,
)
from fastloop.errors import CheckpointError
from fastloop.plugins.plugin import hookimpl
from fastloop.problem import Problem, clause
from fastloop.recipe import Train, secrets
from fastloop.runtime.files import read_again

if TYPE_CHECKING:
    from fastloop.run import Run

logger = logging.getLogger("fastloop")

FIXED = (
    "seed", "batch_size", "drop_last", "lr", "optimizer", "weight_decay", "decay_biases_and_norms", "layer_lr_decay",
    "parameter_groups", "max_grad_norm"
)  # fmt: skip
"""Keys of ``train`` that a resumed run cannot change."""

FREE = (
    "epochs", "max_steps", "micro_batch_size", "eval_batch_size", "log_every", "evaluate_every", "save_every",
    "keep_checkpoints", "on_save_error", "on_data_change", "device"
)  # fmt: skip
"""Keys of ``train`` that a resumed run may change."""

PATHS = re.compile(r"data\.(files|images|name|sources\.\d+\.files)(\.|$)")
"""Settings that name files or a folder of data. The same samples may be in other files, such as on the disk of another
machine."""


@hookimpl(trylast=True)
def check_run(run: Run) -> None:
    """Compare the run with its checkpoint.

    Raises:
        CheckpointError: The settings, parts or data differ, or ``state.json`` cannot be read or is malformed.
    """
    if run.resume_point is None:
        return
    path = run.resume_point.checkpoint
    # the main process reads: another host may see the checkpoint late
    saved = run.processes.all_gather_object(read_state(path) if run.is_main else None)[0]
    with convert_errors(f"{path}: malformed state.json. Resume from another checkpoint: "):
        # ``compare_data`` knows whether the rows are the same
        compares_rows = "data" in saved and all(hasattr(data, "fingerprint") for data in run.datasets.values())
        recipe = secrets.hidden(run.recipe.to_dict())
        changed = compare_recipes(path, unpack(saved["recipe"], {}), recipe, paths_are_free=compares_rows)
        has_record = "build" in saved  # checkpoints of early versions have none
        if has_record:
            saved["build"] = unpack(saved["build"], {})
            changed += compare_plugins(run, path, saved["build"]["plugins"])
        if "data" in saved:  # as above
            compare_data(run, path, saved["data"])
        compare_parts(run, path, saved)
        if has_record:
            compare_trained(run, path, saved)
        report_plugins(run, saved)
    if changed:
        listed = ", ".join(f"{one.key} = {one.now!r} (was {one.before!r})" for one in changed)
        logger.info("%s: the run resumes with other settings: %s", path, listed)


def read_state(path: Path) -> Any:
    """The content of a checkpoint's ``state.json``.

    Raises:
        CheckpointError: It cannot be read.
    """
    try:
        return json.loads(read_again((path / "state.json").read_text))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"cannot be read: {clause(error)}.", code="damaged-checkpoint", place=str(path)) from None


def refusal(path: Path, difference: ChangedSetting) -> CheckpointError:
    """The error for a fixed setting that differs."""
    return CheckpointError(
        f"was saved with {difference.key} = {difference.before!r}, and this run has {difference.now!r}.",
        code="resume-differs",
        place=str(path),
        remedy="Resume with the same, or start a new run.",
    )


def compare_recipes(path: Path, old: dict[str, Any], new: dict[str, Any], paths_are_free: bool) -> list[ChangedSetting]:
    """Compare the model, the data and the section ``train``. Returns the free settings that differ.

    Args:
        paths_are_free: Whether the run may change ``PATHS``.

    Raises:
        CheckpointError: A fixed setting differs; names the key and both values.
    """
    if old["model"] != new["model"]:
        raise refusal(path, ChangedSetting("model", old["model"], new["model"]))
    changed = []
    for difference in differences(old["data"], new["data"], "data"):
        if not (paths_are_free and PATHS.match(difference.key)):
            raise refusal(path, ChangedSetting("data", old["data"], new["data"]))
        changed.append(difference)
    for key, now in new["train"].items():
        before = old["train"].get(key, getattr(Train, key))  # a checkpoint of an early version may lack a key
        if before == now:
            continue
        difference = ChangedSetting(f"train.{key}", before, now)
        differs_in_code = key == "optimizer" and without_code(before) == without_code(now)
        if key in FIXED and not differs_in_code:
            raise refusal(path, difference)
        changed.append(difference)
    return changed


def without_code(optimizer: Any) -> Any:
    """The value of ``train.optimizer`` without the arguments that only select the code of a step."""
    if not isinstance(optimizer, dict):
        return optimizer
    return {name: value for name, value in optimizer.items() if name not in OPTIMIZER_CODE}


def compare_plugins(run: Run, path: Path, saved: dict[str, Any]) -> list[ChangedSetting]:
    """Compare the options of the plugins that both runs have. Returns the free options that differ.

    Raises:
        CheckpointError: A fixed option differs; names the key and both values.
    """
    changed = []
    for plugin in run.plugins:
        if plugin.name not in saved:
            continue
        changes_training = plugin.numerics == "changes-training" or plugin.slot == "task"
        default = "fixed" if changes_training else "free"
        now = run.settings_record.plugins[plugin.name]["options"]
        for name, value in now.items():
            before = saved[plugin.name]["options"].get(name)
            if before == value:
                continue
            difference = ChangedSetting(f"plugins.{plugin.name}.{name}", before, value)
            if plugin.on_resume.get(name, default) == "fixed":
                raise refusal(path, difference)
            changed.append(difference)
    return changed


def compare_trained(run: Run, path: Path, saved: dict[str, Any]) -> None:
    """Compare the parameters that the optimizer steps, its settings and those of the scheduler.

    Plugins and user code may build an optimizer or a scheduler with settings that no recipe names.

    Raises:
        CheckpointError: They differ; names the parameters, or the key and both values.
    """
    problem = explain_parameters(saved["build"]["parameters"], run.settings_record.parameters)
    if problem is not None:
        raise CheckpointError(
            f"was saved by a run that trains other parameters: {problem}.",
            code="resume-differs",
            place=str(path),
            remedy="Resume with the same model and the same frozen layers, or start a new run.",
        )
    built = saved["build"]
    groups = [group_settings(group) for group in without_tensors(saved["optimizer"]["param_groups"])]
    for difference in changed_settings(built["groups"], groups, run.settings_record.groups, "optimizer.param_groups"):
        if difference.key.rpartition(".")[2] not in OPTIMIZER_CODE:
            raise refusal(path, difference)
    state = plain(without_tensors(saved["scheduler"]))
    for difference in changed_settings(built["scheduler"], state, run.settings_record.scheduler, "scheduler"):
        raise refusal(path, difference)


def without_tensors(tree: Any) -> Any:
    """A part of a checkpoint's state, with empty tensors in place of those in its file."""
    return unpack(tree, defaultdict(lambda: torch.empty(0)))


def report_plugins(run: Run, saved: dict[str, Any]) -> None:
    """Log the plugins that only the checkpoint or only the run has, if they have a state or change training."""
    built = saved["build"]["plugins"] if "build" in saved else {}
    keeps_state = {plugin.name for plugin, _ in run.plugins.each("load_state")}
    for plugin in run.plugins:
        is_known = plugin.name in built or plugin.name in saved["plugins"]
        if not is_known and (plugin.name in keeps_state or plugin.numerics == "changes-training"):
            logger.warning(
                Problem(
                    f"plugin {plugin.name!r} is not in the checkpoint: it starts at step {saved['state']['step']}.",
                    code="plugin-added",
                )
            )
    here = run.plugins.names()
    for name in sorted({*built, *saved["plugins"]}):
        has_state = saved["plugins"].get(name) is not None
        changes_training = name in built and built[name]["numerics"] == "changes-training"
        if name not in here and (has_state or changes_training):
            logger.warning(
                Problem(f"plugin {name!r} is in the checkpoint, but not in this run.", code="plugin-removed")
            )


def compare_parts(run: Run, path: Path, saved: dict[str, Any]) -> None:
    """Compare the counters' types and the parts of the run with the checkpoint's.

    Raises:
        CheckpointError: Only one of them has a scheduler, or scales losses.
        ValueError: A counter has another type, or is out of range.
    """
    for name, part in (("scheduler", run.scheduler), ("scaler", run.accelerator.scaler)):
        if (part is None) != (saved[name] is None):
            if part is None:
                problem = f"was saved with a {name}, and this run has none"
            else:
                problem = f"was saved without a {name}, and this run has one"
            raise CheckpointError(
                f"{problem}.",
                code="resume-differs",
                place=str(path),
                remedy="Resume with the plugins of the run that saved it.",
            )
    for key, value in saved["state"].items():
        usual = vars(run.state)[key]
        wrong_type = usual is not None and type(value) is not type(usual)
        out_of_range = isinstance(value, int) and not -1 <= value < 2**63
        if wrong_type or out_of_range:
            raise ValueError(f"state.{key}: found {value!r:.40}")


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
    if run.recipe.train.on_data_change == "stop":
        raise CheckpointError(
            f"was saved with other data ({listed}).",
            code="data-changed",
            place=str(path),
            remedy=(
                "Resume with the same data, start a new run, or continue with the current data: "
                "train.on_data_change=warn."
            ),
        )
    logger.warning(
        Problem(
            f"was saved with other data ({listed}). The run continues with the current data: this epoch may repeat or "
            "miss samples.",
            code="data-changed",
            place=str(path),
        )
    )
