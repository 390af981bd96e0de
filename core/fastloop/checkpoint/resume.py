"""What a checkpoint holds of a run, and how a run goes on from one."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import set_seed
from torch import Tensor
from torch.distributed.tensor import DTensor

from fastloop import checkpoint
from fastloop.errors import CheckpointError, NoCheckpoint, PluginError
from fastloop.recipe import secrets
from fastloop.runtime.random_states import random_states, restore_random_states
from fastloop.runtime.regions import region

if TYPE_CHECKING:
    from fastloop.run import Run

log = logging.getLogger("fastloop")

FIXED_ON_RESUME = ("seed", "batch_size", "lr", "optimizer", "weight_decay", "max_grad_norm")
"""Keys of ``train`` that a resumed run cannot change: its checkpoint's numbers come from them."""


def save(run: Run) -> None:
    """Write a checkpoint of everything that going on needs, and remove the oldest beyond ``train.keep_checkpoints``.

    Raises:
        PluginError: A plugin's state holds what cannot be saved.
        SaveError: It cannot be written, and ``train.on_save_error`` says stop.
    """
    wait_for_save(run)
    run.sync_requests()  # on what became of the last one, before this one can fail too
    accelerator, scheduler = run.accelerator, run.scheduler
    with run.clock("save"), region("save"):
        state = {
            "fastloop": 1,
            "recipe": secrets.hidden(run.recipe.to_dict()),
            "state": run.state.to_dict(),
            "clock": dict(run.clock.seconds),
            "data": run.loaders.fingerprints,
            "random": run.processes.all_gather_object(random_states()),
            "optimizer": run.hooks.optimizer_state(run=run),
            "scheduler": scheduler and scheduler.state_dict(),
            "scaler": accelerator.scaler and accelerator.scaler.state_dict(),
            "plugins": {plugin.name: call(run=run) for plugin, call in run.plugins.each("save_state")},
        }
        path = checkpoint.step_folder(run.folder, run.state.step)
        try:
            pending = run.hooks.write_checkpoint(run=run, folder=path, model=run.hooks.model_state(run=run), state=state)
        except TypeError as error:
            raise PluginError(f"save_state: {error}") from error
        run.saver.start(pending, run.state.step)
    run.sync_requests()
    run.state.save_requested = False  # also when a signal came meanwhile: it is done


def write(run: Run, path: Path, model: dict[str, Tensor], state: dict[str, Any]) -> None:
    """Write a checkpoint, and then remove the oldest.

    Raises:
        SaveError: It cannot be written; the oldest stay.
        TypeError: ``state`` holds what cannot be saved.
    """
    checkpoint.write(path, model, state, run.is_main)
    if run.is_main and (step := checkpoint.step_of(path)) is not None:
        checkpoint.rotate(run.folder, run.recipe.train.keep_checkpoints, step)


def wait_for_save(run: Run) -> None:
    """Wait for the checkpoint that this process is writing; ``run.sync_requests`` acts on a failure."""
    if run.saver.is_pending:
        with run.clock("save"):
            run.saver.wait()


def find(folder: Path, path: Path) -> tuple[Path, list[str]] | None:
    """The checkpoint that ``--resume PATH`` means, and warnings about damaged ones. None: the run's own folder holds none yet.

    Raises:
        CheckpointError: ``PATH`` is another folder and holds none; none is whole; or the run is over and kept none.
    """
    try:
        return checkpoint.find(path)
    except NoCheckpoint:
        if path.resolve() != folder.resolve():
            raise
        try:
            over = json.loads((path / "summary.json").read_text())["status"] == "completed"
        except (OSError, ValueError, KeyError, TypeError):
            over = False
        if over:
            raise CheckpointError(f"{path}: no checkpoint, and the run is complete. Train it anew without --resume.") from None
    log.warning("%s: no checkpoint yet: the run begins at the beginning", path)
    return None


def load(run: Run, path: Path, skipped: list[str]) -> None:
    """Go on from the checkpoint ``path``; ``skipped`` is said aloud.

    Raises:
        CheckpointError: It belongs to another run: other weights, or settings that its numbers depend on.
    """
    for line in skipped:
        log.warning("%s", line)
    model, saved = checkpoint.read(path, _sharded_now(run))
    recipe = secrets.hidden(run.recipe.to_dict())
    check_same(path, saved["recipe"], recipe)
    if "data" in saved:  # else written before there were fingerprints
        check_data(run, path, saved["data"])
    try:
        run.hooks.load_model_state(run=run, state=model)
    except RuntimeError as error:
        raise CheckpointError(f"{path}: not a checkpoint of this model: {str(error).splitlines()[1].strip()}") from None
    try:
        run.hooks.load_optimizer_state(run=run, state=saved["optimizer"])
    except ValueError as error:
        raise CheckpointError(
            f"{path}: not a checkpoint of this optimizer: {error}. Train the same parameters as the run that saved it."
        ) from None
    for name, part in (("scheduler", run.scheduler), ("scaler", run.accelerator.scaler)):
        if (part is None) != (saved[name] is None):
            then, now = ("out" * (saved[name] is None), "out" * (part is None))
            raise CheckpointError(f"{path}: was saved with{then} a {name}, and this run is with{now} one.")
        if part is not None:
            part.load_state_dict(saved[name])
    run.state.restore(saved["state"])
    if run.interrupted or any(saved["recipe"][key] != recipe[key] for key in ("train", "plugins")):
        run.state.stop_reason = None  # other epochs or plugins: what stopped it then may not stop it now
    run.saver.resumed(run.state.step)
    run.clock.seconds |= saved["clock"] | {"startup": run.clock.seconds["startup"]}
    for plugin, call in run.plugins.each("load_state"):
        if plugin.name not in saved["plugins"]:
            log.warning("plugin %r is not in the checkpoint: it starts anew at step %d", plugin.name, run.state.step)
        elif (state := saved["plugins"][plugin.name]) is not None:  # None: it had nothing to keep
            call(run=run, state=state)
    for name in sorted(name for name, state in saved["plugins"].items() if state is not None and name not in run.plugins.names()):
        log.warning("plugin %r is in the checkpoint, and this run is without it", name)
    log.info("resumed from %s at step %d", path, run.state.step)
    if len(saved["random"]) == run.world_size:
        restore_random_states(saved["random"][run.rank])
    else:
        log.info("saved by %d processes, resumed on %d: dropout goes on with other random numbers", len(saved["random"]), run.world_size)
        set_seed(run.recipe.train.seed + run.state.step * run.world_size + run.rank)


def go_back(run: Run, leave_out: list[int]) -> bool:
    """Load the newest checkpoint while the run trains. The step at ``leave_out`` (epoch, samples of it before) is not done again.

    Returns:
        Whether there was a checkpoint to go back to.
    """
    wait_for_save(run)
    newest: Any = None
    if run.is_main:  # which may be writing one: all must take the same
        try:
            newest = checkpoint.find(run.folder)
        except CheckpointError as nothing:
            log.warning("there is nothing to go back to: %s", nothing)
    newest = run.processes.all_gather_object(newest)[0]
    if newest is None:
        return False
    given_up = [*run.state.left_out, leave_out]
    load(run, *newest)
    run.state.left_out = given_up
    log.warning("went back to step %d: goes on without the step that failed", run.state.step)
    return True


def check_data(run: Run, path: Path, saved: dict[str, str]) -> None:
    """Refuse to go on with other data than the checkpoint's, or say so, as ``train.on_data_change`` has it.

    Raises:
        CheckpointError: Names the splits that changed, and how.
    """
    now = run.loaders.fingerprints
    changed = [split for split in {**saved, **now} if saved.get(split) != now.get(split)]
    if not changed:
        return
    listed = "; ".join(f"{split}: {saved.get(split, 'none')}, now {now.get(split, 'none')}" for split in changed)
    message = f"{path}: was saved with other data ({listed})."
    if run.recipe.train.on_data_change == "stop":
        raise CheckpointError(
            f"{message} Resume with the same data, start anew, or go on with what is there now: train.on_data_change=warn."
        )
    log.warning("%s The run goes on with what is there now: of this epoch, samples may come twice or not at all", message)


def _sharded_now(run: Run) -> Callable[[str, torch.Size], Tensor | None]:
    """For ``checkpoint.read``: an empty tensor, sharded as this run shards the weight or the parameter that a name belongs to."""
    model = run.unwrap_model().state_dict()
    parameters = [parameter for group in run.optimizer.param_groups for parameter in group["params"]]

    def like(name: str, shape: torch.Size) -> Tensor | None:
        target: Any = model.get(name.removeprefix("model."))
        if found := re.match(r"state\.optimizer\.state\.(\d+)\.", name):
            index = int(found[1])
            target = parameters[index] if index < len(parameters) else None
        return torch.empty_like(target) if isinstance(target, DTensor) and target.shape == shape else None

    return like


def check_same(path: Path, old: dict[str, Any], now: dict[str, Any]) -> None:
    """Refuse to go on with other settings than those that the checkpoint's numbers come from.

    Raises:
        CheckpointError: Names the key and both values.
    """
    pairs = [(key, old[key], now[key]) for key in ("model", "data")]
    pairs += [(f"train.{key}", old["train"][key], now["train"][key]) for key in FIXED_ON_RESUME]
    for key, was, wanted in pairs:
        if was != wanted:
            raise CheckpointError(
                f"{path}: was saved with {key} = {was!r}, and this run has {wanted!r}. Resume with the same, or start anew."
            )
