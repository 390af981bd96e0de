"""The run folder: its checks, its lock and its summary.

An earlier run in the folder is renamed to ``NAME.1``: to overwrite it would lose a run to a forgotten ``--resume``, and
to number the new one would move the path that scripts rely on. The lock is a POSIX record lock, which ends with its
process. ``flock``, which ``filelock`` uses, is inherited by data workers, and these outlive a killed run by seconds.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import errno
import json
import logging
import os
import socket
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from fastloop.distributed import ranks
from fastloop.errors import RecipeError, SaveError
from fastloop.metric_modes import metric_modes
from fastloop.recipe import anchored, secrets
from fastloop.runtime import files, platform_support
from fastloop.runtime.clock import peak_memory

if TYPE_CHECKING:
    from fastloop.run import Run

log = logging.getLogger("fastloop")


SINCE = "%Y-%m-%d %H:%M:%S"
"""Format of the local time in a lock."""


class Lock:
    """Locks a run folder for this process, with the file ``.lock``, which names the owner.

    The operating system releases the lock when the process ends. Children do not inherit it, unlike a lock of
    ``flock``. On a file system without locks, the folder is in use if the named process exists. That of another host
    cannot be looked up: only then does the message propose to remove the file.

    Raises:
        RecipeError: Another process holds the lock.
        UsageError: The file is a link.
        OSError: The file cannot be created.
    """

    def __init__(self, folder: Path, where: str) -> None:
        self.file = files.no_follow(str(folder / ".lock"), os.O_RDWR | os.O_CREAT)
        remedy = "Wait for it to end, or set another output."
        try:
            platform_support.lock(self.file)
            # another run has just moved it aside
            in_use = not os.path.samestat(os.fstat(self.file), (folder / ".lock").stat())
        except OSError as error:
            in_use = error.errno in (errno.EACCES, errno.EAGAIN)
            if not in_use:  # the file system has no locks
                in_use = self._owner_may_live()
                if self._owner_is_elsewhere():
                    remedy += f" If it is surely gone, remove {folder / '.lock'}."
        if in_use:
            owner = self._owner()
            os.close(self.file)
            who = "process {pid} on {host}, since {since}".format(**owner) if owner else "another process"
            raise RecipeError(
                f"{folder} is in use by {who}.", code="folder-in-use", place=f"{where}: output", remedy=remedy
            )
        with contextlib.suppress(OSError):  # on a full disk, the lock works without the owner's name
            owner = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime(SINCE)}
            os.ftruncate(self.file, 0)
            os.lseek(self.file, 0, os.SEEK_SET)
            os.write(self.file, json.dumps(owner).encode())

    def _owner(self) -> dict[str, Any] | None:
        try:
            os.lseek(self.file, 0, os.SEEK_SET)
            owner: dict[str, Any] = json.loads(os.read(self.file, 1000))
            return owner if {"pid", "host", "since"} <= owner.keys() else None
        except (OSError, ValueError, AttributeError):
            return None

    def _owner_is_elsewhere(self) -> bool:
        owner = self._owner()
        return owner is not None and owner["host"] != socket.gethostname()

    def _owner_may_live(self) -> bool:
        owner = self._owner()
        if owner is None or self._owner_is_elsewhere():
            return owner is not None
        try:
            started: float = psutil.Process(owner["pid"]).create_time()
        except psutil.Error:
            return False
        try:
            locked = time.mktime(time.strptime(owner["since"], SINCE))
        except ValueError:
            return True
        return started < locked + 1  # else a later process has its id; the time is written in whole seconds

    def release(self) -> None:
        """Release the lock."""
        with contextlib.suppress(OSError):
            os.ftruncate(self.file, 0)
            platform_support.unlock(self.file)
        os.close(self.file)


def check(run: Run) -> None:
    """Check that the run can use its folder.

    Raises:
        RecipeError: The folder cannot be created, is in use by another process, or holds files that are not a run's.
    """
    existing = next(parent for parent in (run.folder, *run.folder.absolute().parents) if parent.exists())
    if not existing.is_dir() or not _writable(existing):
        raise RecipeError(
            f"{run.folder} cannot be written: {existing} is not a folder that this user may write to.",
            code="folder-not-writable",
            place=f"{run.recipe.where}: output",
        )
    if existing == run.folder and (existing / ".lock").exists() and ranks.rank() == 0:
        Lock(existing, run.recipe.where).release()
    if run.resume_point is None:
        check_contents(run.folder, run.recipe.where)


def check_contents(folder: Path, where: str) -> None:
    """Check that a new run may use a folder: it does not exist, is empty, or holds an earlier run, which ``make`` moves
    aside. Any other one may be a home folder.

    Args:
        where: The recipe, for the message.

    Raises:
        RecipeError: It holds other files.
    """
    if folder.is_dir() and _files(folder) and not (folder / "recipe.yaml").is_file():
        raise RecipeError(
            f"{folder} holds other files than a run's.",
            code="folder-not-empty",
            place=f"{where}: output",
            expected="a new or empty folder, or a run's",
        )


def make(run: Run) -> None:
    """Create the run folder on the main process, and lock it until the run is closed. The folder of an earlier run is
    renamed, not overwritten.

    Raises:
        RecipeError: Another process uses the folder, or it cannot be written.
    """
    if not run.is_main:
        return
    from omegaconf import OmegaConf

    recipe = run.recipe
    if recipe.source is not None:  # make plugin files relative to the run folder
        recipe = dataclasses.replace(recipe, references=anchored(recipe.references, recipe.source.parent))
    resumes = run.resume_point is not None and run.resume_point[0].resolve().is_relative_to(run.folder.resolve())
    try:
        files.make_folder(run.folder)
        lock = Lock(run.folder, run.recipe.where)
        if not resumes and _files(run.folder):
            if not platform_support.RENAMES_OPEN_FOLDERS:
                lock.release()
            log.info("an earlier run was in %s: moved to %s", run.folder, files.move_aside(run.folder))
            if platform_support.RENAMES_OPEN_FOLDERS:
                lock.release()
            files.make_folder(run.folder)
            lock = Lock(run.folder, run.recipe.where)
        run._until_closed.callback(lock.release)
        files.write(
            run.folder / "recipe.yaml",
            OmegaConf.to_yaml(OmegaConf.create(secrets.hidden(recipe.to_dict()))),
            hidden=True,
        )
    except OSError as error:
        raise RecipeError(
            f"{run.folder} cannot be written: {error}.", code="folder-not-writable", place=f"{run.recipe.where}: output"
        ) from error


def summarize(run: Run, status: str, reason: str | None) -> dict[str, Any]:
    """Return the summary of a run, and write it on the main process. Does not wait for other processes, which may have
    ended.

    Raises:
        SaveError: The summary cannot be written.
    """
    state, seconds, metrics = run.state, run.clock.seconds, copy.deepcopy(run.state.metrics)
    summary: dict[str, Any] = {
        "status": status,
        "reason": reason,
        "recipe": str(run.recipe.source.resolve()) if run.recipe.source else None,
        "task": run.plugins.in_slot("task"),
        "steps": state.step,
        "epochs": state.epoch,
        "samples": state.samples,
        "world_size": run.world_size,
        "device": str(run.device),
        "plugins": run.plugins.names(),
        "disabled": run.plugins.disabled,
        "train_seconds": seconds["train"],
        "startup_seconds": seconds["startup"],
        "compile_seconds": 0.0,
        "evaluate_seconds": seconds["evaluate"],
        "save_seconds": seconds["save"],
        "peak_memory_bytes": peak_memory(run.device),
        "validation": metrics.get("validation"),
        "test": metrics.get("test"),
        "best": state.best,
        "metric_modes": metric_modes(run),
        **_exported_weights(run),
        "save_errors": run.saver.errors,
    }
    if state.unreadable:
        summary["unreadable_samples"] = state.unreadable
    try:
        run.hooks.write_summary(run=run, summary=summary)
    finally:  # a run that fails here has a summary, too
        summary["train_seconds"] = max(summary["train_seconds"] - summary["compile_seconds"], 0.0)  # steps compile
        for name, count in (("samples", state.samples), ("tokens", state.tokens)):
            summary[f"{name}_per_second"] = count / summary["train_seconds"] if summary["train_seconds"] else 0.0
        write_summary(run, summary)
    return summary


def _exported_weights(run: Run) -> dict[str, Any]:
    """Which weights ``model/`` has: their step, their kind, and their metrics of the validation split; None: nothing is
    exported, or they were not evaluated."""
    state = run.state
    if not run._exported:
        return {"model_step": None, "model_weights": None, "model_metrics": None}
    step = state.step if state.model_step is None else state.model_step
    metrics = None
    if state.best is not None and step == state.best["step"]:
        metrics = state.best["metrics"]
    elif step == state.evaluated_at:
        metrics = state.metrics.get("validation")
    return {"model_step": step, "model_weights": state.model_weights, "model_metrics": copy.deepcopy(metrics)}


def write_summary(run: Run, summary: dict[str, Any]) -> None:
    """Write ``summary.json`` on the main process.

    Raises:
        SaveError: It cannot be written.
    """
    if run.is_main and run.folder.exists():
        try:
            text = json.dumps(secrets.hidden(summary), indent=2, default=repr)
            files.write(run.folder / "summary.json", text + "\n", hidden=True)
        except OSError as error:
            raise SaveError(f"{run.folder / 'summary.json'} cannot be written: {error}.", code="save-failed") from error


def _files(folder: Path) -> list[Path]:
    """The entries of a folder, except a lock and files that were not written completely."""
    return [path for path in folder.iterdir() if path.name != ".lock" and not path.match(".*.partial")]


def _writable(folder: Path) -> bool:
    """Whether files can be created in a folder. Tries it, because permission bits are not enough (root, read-only
    mounts)."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False
