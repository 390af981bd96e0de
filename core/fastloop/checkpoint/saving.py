"""Starts to save the state of a run in a checkpoint. ``resume`` restores it.

``pending_save`` notes on each process how the write ended. ``Run._sync_requests`` shares that between the processes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fastloop import checkpoint, log_points
from fastloop.checkpoint.frozen import frozen_parts
from fastloop.errors import PluginError
from fastloop.recipe import secrets
from fastloop.runtime.random_states import random_states
from fastloop.runtime.regions import region

if TYPE_CHECKING:
    from fastloop.run import Run


def save(run: Run) -> None:
    """Start to write a checkpoint. Waits for the previous one first.

    The hook ``write_checkpoint`` may write it while training continues, as ``async-save`` does. ``Run._sync_requests``
    learns the outcome, here or in a later step. Once it is written, the oldest ones beyond ``train.keep_checkpoints``
    are removed.

    Raises:
        PluginError: A plugin's state contains a value that cannot be saved.
        SaveError: The previous checkpoint or this one could not be written, and ``train.on_save_error`` is ``stop``.
    """
    wait_for_save(run)
    run._sync_requests()  # handle a failure of the previous save first
    with run.clock("save"), region("save"):
        log_points.log_pending(run)
        run._shared_buffers.share()
        state = _collect_state(run)
        path = checkpoint.step_folder(run.folder, run.state.step)
        try:
            pending = run.hooks.write_checkpoint(run=run, folder=path, model=run.strategy.model_state(run), state=state)
        except TypeError as error:
            raise PluginError(str(error), code="invalid-state", place="save_state") from error
        run.saver.start(pending, run.state.step)
    run._sync_requests()
    run.state.save_requested = False  # also covers a signal that arrived during the save


def _collect_state(run: Run) -> dict[str, Any]:
    """The content of ``state.json``. Every process must call it, because some parts are gathered from all."""
    scaler = run.accelerator.scaler
    parts = frozen_parts(run)
    return {
        "fastloop": 1,
        "recipe": secrets.hidden(run.recipe.to_dict()),
        "build": run.settings_record.to_dict(),
        "state": run.state.to_dict(),
        "clock": dict(run.clock.seconds),
        "data": run.loaders.fingerprints,
        "scalars": run.scalars.state(run.processes),
        "random": run.processes.all_gather_object(_random_states(run)),
        "frozen": parts.parameters,
        "modes": parts.modes,
        "optimizer": run.strategy.optimizer_state(run),
        "scheduler": None if run.scheduler is None else run.scheduler.state_dict(),
        "scaler": None if scaler is None else scaler.state_dict(),
        "plugins": {plugin.name: call(run=run) for plugin, call in run.plugins.each("save_state")},
    }


def _random_states(run: Run) -> dict[str, Any]:
    """This process's entry of ``random``. ``first`` has split -> the first states of the generators of a stream."""
    states = random_states(run.loaders.own_generators)
    first = {}
    for split, own in run.loaders.stream_generators.items():
        if own.generators:
            first[split] = own.first_states
    if first:
        states["first"] = first
    return states


def write(run: Run, path: Path, model: dict[str, Tensor], state: dict[str, Any], group: Any = None) -> None:
    """Write a checkpoint, then remove the oldest ones.

    Args:
        model: As in ``checkpoint.write``, like ``state``.
        group: The process group that writes sharded tensors together. None: ``run.processes.host_group``.

    Raises:
        SaveError: The checkpoint cannot be written; the old ones are kept.
        TypeError: ``state`` contains a value that cannot be saved.
    """
    checkpoint.write(path, model, state, run.is_main, group or run.processes.host_group)
    step = checkpoint.step_of(path)
    if run.is_main and step is not None:
        checkpoint.rotate(run.folder, run.recipe.train.keep_checkpoints, step)


def wait_for_save(run: Run) -> None:
    """Wait for the checkpoint that this process is writing. ``run._sync_requests`` handles a failure."""
    if run.saver.pending is not None:
        with run.clock("save"):
            run.saver.wait()
