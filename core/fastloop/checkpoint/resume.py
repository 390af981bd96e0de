"""Save the state of a run in a checkpoint, and resume from one."""

from __future__ import annotations

import json
import logging
import re
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import set_seed
from torch import Tensor
from torch.distributed.tensor import DTensor

from fastloop import checkpoint, log_points
from fastloop.checkpoint.build_record import with_own_code, with_own_growth, without_parameters
from fastloop.checkpoint.form import check_form
from fastloop.errors import CheckpointError, NoCheckpoint, PluginError
from fastloop.recipe import secrets
from fastloop.runtime.random_states import random_states, restore_random_states
from fastloop.runtime.regions import region

if TYPE_CHECKING:
    from fastloop.plugins.plugin import Plugin
    from fastloop.run import Run

log = logging.getLogger("fastloop")

MALFORMED = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""Errors of a lookup or an operation on a value of another form."""


def save(run: Run) -> None:
    """Write a checkpoint, and remove the oldest ones beyond ``train.keep_checkpoints``.

    Raises:
        PluginError: A plugin's state contains a value that cannot be saved.
        SaveError: The checkpoint cannot be written, and ``train.on_save_error`` is ``stop``.
    """
    wait_for_save(run)
    run._sync_requests()  # handle a failure of the previous save first
    with run.clock("save"), region("save"):
        log_points.log_pending(run)
        run._shared_buffers.share()
        state = {
            "fastloop": 1,
            "recipe": secrets.hidden(run.recipe.to_dict()),
            "build": run.build_record.to_dict(),
            "state": run.state.to_dict(),
            "clock": dict(run.clock.seconds),
            "data": run.loaders.fingerprints,
            "scalars": run.scalars.state(run.processes),
            "random": run.processes.all_gather_object(random_states()),
            "optimizer": run.strategy.optimizer_state(run),
            "scheduler": run.scheduler and run.scheduler.state_dict(),
            "scaler": run.accelerator.scaler and run.accelerator.scaler.state_dict(),
            "plugins": {plugin.name: call(run=run) for plugin, call in run.plugins.each("save_state")},
        }
        path = checkpoint.step_folder(run.folder, run.state.step)
        try:
            pending = run.hooks.write_checkpoint(run=run, folder=path, model=run.strategy.model_state(run), state=state)
        except TypeError as error:
            raise PluginError(str(error), code="invalid-state", place="save_state") from error
        run.saver.start(pending, run.state.step)
    run._sync_requests()
    run.state.save_requested = False  # also covers a signal that arrived during the save


def write(run: Run, path: Path, model: dict[str, Tensor], state: dict[str, Any], group: Any = None) -> None:
    """Write a checkpoint, then remove the oldest ones. Arguments as in ``checkpoint.write``; ``group``: None:
    ``host_group``.

    Raises:
        SaveError: The checkpoint cannot be written; the old ones are kept.
        TypeError: ``state`` contains a value that cannot be saved.
    """
    checkpoint.write(path, model, state, run.is_main, group or run.processes.host_group)
    if run.is_main and (step := checkpoint.step_of(path)) is not None:
        checkpoint.rotate(run.folder, run.recipe.train.keep_checkpoints, step)


def wait_for_save(run: Run) -> None:
    """Wait for the checkpoint that this process is writing. ``run._sync_requests`` handles a failure."""
    if run.saver.pending is not None:
        with run.clock("save"):
            run.saver.wait()


def find_resume_point(folder: Path, path: Path) -> tuple[Path, list[str]] | None:
    """The checkpoint for ``--resume PATH``, and warnings about damaged ones. None: ``path`` is the run's ``folder``,
    without a checkpoint.

    Raises:
        CheckpointError: Another folder has no checkpoint; all checkpoints are damaged; or the run is complete and kept
            none.
    """
    try:
        return checkpoint.find_newest(path)
    except NoCheckpoint:
        if path.resolve() != folder.resolve():
            raise
        with suppress(OSError, ValueError, KeyError, TypeError):
            if json.loads((path / "summary.json").read_text())["status"] == "completed":
                raise CheckpointError(
                    "no checkpoint, and the run is complete.",
                    code="run-complete",
                    place=str(path),
                    remedy="Start a new run without --resume.",
                ) from None
    log.warning("%s: no checkpoint yet: the run starts from the beginning", path)
    return None


def load(run: Run, path: Path, skipped: list[str]) -> None:
    """Restore a run from the checkpoint ``path``.

    Args:
        skipped: Warnings to log.

    Raises:
        CheckpointError: The checkpoint has other weights, or this process does not see it.
    """
    for line in skipped:
        log.warning("%s", line)
    if not run.is_main and (problem := checkpoint.verify(path, wait=True)):
        raise CheckpointError(
            f"process {run.rank} finds: {problem}.",
            code="checkpoint-differs",
            place=str(path),
            remedy="Put the run folder where all processes see the same files.",
        )
    model, saved = checkpoint.read(path, sharded_target(run), run.processes.host_group)
    malformed = f"{path}: malformed state.json. Resume from another checkpoint: "
    with refuse_errors(malformed):
        _restore(run, path, model, saved)
        states = dict(saved["plugins"])
    _restore_plugins(run, path, states)
    log.info("resumed from %s at step %d", path, run.state.step)
    with refuse_errors(malformed, *MALFORMED, RuntimeError):
        _restore_random_states(run, saved["random"])


@contextmanager
def refuse_errors(what: str, *kinds: type[Exception]) -> Iterator[None]:
    """Turn errors of these kinds, by default of ``MALFORMED``, into a CheckpointError."""
    try:
        yield
    except kinds or MALFORMED as error:  # noqa: B030
        raise CheckpointError(
            f"{what}{type(error).__name__}: {' '.join(str(error).split())[:200]}", code="invalid-state"
        ) from error


def _restore(run: Run, path: Path, model: dict[str, Tensor], saved: dict[str, Any]) -> None:
    """Restore the run's state from a checkpoint that was read."""
    with refuse_errors(f"{path}: not a checkpoint of this model: ", RuntimeError):
        run.strategy.load_model_state(run, model)
    optimizer = with_own_code(saved["optimizer"], run.optimizer.param_groups)
    groups = [without_parameters(group) for group in run.optimizer.param_groups]
    if len(optimizer["param_groups"]) == len(groups):  # else the optimizer reports it
        check_form(optimizer["param_groups"], groups, "optimizer.param_groups")
    with refuse_errors(
        f"{path}: not a checkpoint of this optimizer, which needs the parameters of the run that saved it: ", ValueError
    ):
        run.strategy.load_optimizer_state(run, optimizer)
    if run.scheduler is not None:
        check_form(saved["scheduler"], run.scheduler.state_dict(), "scheduler")
        run.scheduler.load_state_dict(saved["scheduler"])
    if len(getattr(run.scheduler, "base_lrs", groups)) != len(groups):
        raise ValueError(f"scheduler.base_lrs: expected one for each of the {len(groups)} parameter groups")
    scaler = run.accelerator.scaler
    if scaler is not None:
        check_form(saved["scaler"], scaler.state_dict(), "scaler")
        scaler.load_state_dict(with_own_growth(saved["scaler"], scaler))
    run.state.restore(saved["state"])
    recipe = secrets.hidden(run.recipe.to_dict())
    if run.interrupted or any(saved["recipe"][key] != recipe[key] for key in ("train", "plugins")):
        run.state.stop_reason = None  # it may not apply to other epochs or plugins
    run.saver.last_saved_step = run.state.step
    run.clock.seconds |= {key: float(value) for key, value in saved["clock"].items()} | {
        "startup": run.clock.seconds["startup"]
    }
    run.scalars.restore(saved["scalars"], run.processes)


def _restore_plugins(run: Run, path: Path, states: dict[str, Any]) -> None:
    """Restore the states of the plugins, by name.

    Raises:
        CheckpointError: A plugin does not understand its state.
    """
    log_points.start(run)
    for plugin, call in run.plugins.each("load_state"):
        state = states.get(plugin.name)
        if state is not None:
            with _refuse_state_of(plugin, path):
                call(run=run, state=state)


@contextmanager
def _refuse_state_of(plugin: Plugin, path: Path) -> Iterator[None]:
    """Turn an error in ``load_state`` into one that names the plugin, the checkpoint and the line.

    Raises:
        CheckpointError: The plugin does not understand its state.
    """
    try:
        yield
    except (*MALFORMED, AssertionError, RuntimeError) as error:
        line = traceback.extract_tb(error.__traceback__)[-1]
        raise CheckpointError(
            f"plugin {plugin.name!r} cannot load its state: {type(error).__name__}: "
            f"{' '.join(str(error).split())[:200]} ({Path(line.filename).name}, line {line.lineno}). The state is "
            "malformed, or of another version of the plugin.",
            code="invalid-state",
            place=str(path),
            remedy="Resume from another checkpoint, or start a new run.",
        ) from error


def _restore_random_states(run: Run, states: list[dict[str, Any]]) -> None:
    """Restore this process's entry of ``states``. With another number of processes, seed with the step and the rank."""
    if len(states) == run.world_size:
        restore_random_states(states[run.rank])
    else:
        log.info("saved by %d processes, resumed on %d: dropout uses other random numbers", len(states), run.world_size)
        set_seed(run.recipe.train.seed + run.state.step * run.world_size + run.rank)


def sharded_target(run: Run) -> Callable[[str, torch.Size], Tensor | None]:
    """For ``checkpoint.read``: returns an empty tensor with this run's sharding of the named weight or optimizer state.
    If the optimizer of a strategy has the method ``empty_shard(shape)``, its result is used instead."""
    model, empty_shard = run.unwrap_model().state_dict(), getattr(run.optimizer, "empty_shard", None)
    parameters = dict(enumerate(parameter for group in run.optimizer.param_groups for parameter in group["params"]))

    def target_like(name: str, shape: torch.Size) -> Tensor | None:
        number = re.match(r"state\.optimizer\.state\.(\d+)\.", name)
        if empty_shard is not None and (number or name.startswith("model.")):
            target = empty_shard(shape)
        else:
            target = parameters.get(int(number[1])) if number else model.get(name.removeprefix("model."))
        return torch.empty_like(target) if isinstance(target, DTensor) and target.shape == shape else None

    return target_like
