"""The run folder: its checks before the run, and its creation.

An earlier run in the folder is renamed to ``NAME.1``: to overwrite it would lose a run to a forgotten ``--resume``, and
to number the new one would move the path that scripts rely on. Checkpoints of the run itself are removed by
``store.rotate``.
"""

from __future__ import annotations

import dataclasses
import logging
import shlex
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from fastloop.checkpoint.lock import Lock
from fastloop.distributed import ranks
from fastloop.distributed.ranks import torchrun_job
from fastloop.errors import RecipeError
from fastloop.problem import clause
from fastloop.recipe import anchored, secrets
from fastloop.recipe.paths import broken_link
from fastloop.runtime import files, platform_support
from fastloop.runtime.step_folders import JOB_FILE

if TYPE_CHECKING:
    from fastloop.run import Run

log = logging.getLogger("fastloop")


def check(run: Run) -> None:
    """Check that the run can use its folder.

    Raises:
        RecipeError: The folder cannot be created, is in use by another process, or holds files that are not a run's.
        SaveError: The disk is full.
    """
    broken = broken_link(run.folder)
    if broken is not None:
        raise RecipeError(
            f"{run.folder} cannot be created: {broken}.",
            code="folder-not-writable",
            place=f"{run.recipe.where}: output",
            remedy="Remove the link, or create the folder that it points to.",
        )
    existing = _nearest_existing(run.folder)
    if not existing.is_dir() or not _writable(existing):
        raise RecipeError(
            f"{run.folder} cannot be written: {existing} is not a folder that this user may write to.",
            code="folder-not-writable",
            place=f"{run.recipe.where}: output",
            remedy="Give another folder.",
        )
    has_lock = existing == run.folder and (existing / ".lock").exists()
    if has_lock and ranks.rank() == 0:
        Lock(existing, f"{run.recipe.where}: output").release()  # raises if another process holds it
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
        other = shlex.quote(f"output={files.free_name(folder, 'run')}")
        raise RecipeError(
            f"{folder} holds {files.list_entries(folder)}, which are not those of a run.",
            code="folder-not-empty",
            place=f"{where}: output",
            expected="a new or empty folder, or that of a run, which is moved aside",
            remedy=f"Train into another one, {other}, or remove the folder if nobody needs it.",
        )


def make(run: Run) -> None:
    """Create the run folder on the main process, lock it until the run is closed, and write ``recipe.yaml``. The folder
    of an earlier run is renamed, not overwritten.

    Raises:
        RecipeError: Another process uses the folder, or it cannot be written.
        SaveError: The disk is full. Nothing that is new stays on it.
    """
    if not run.is_main:
        return
    try:
        with ExitStack() as after_error:
            after_error.callback(files.remove_empty, files.missing_folders(run.folder))
            lock = _create_and_lock(run)
            after_error.callback(_give_up, lock, run.folder)
            _write_recipe(run)
            _write_job(run.folder)
            after_error.pop_all()
        run._exit_stack.callback(lock.release)
    except OSError as error:
        files.refuse_full_disk(error, run.folder)
        raise RecipeError(
            f"{run.folder} cannot be written: {clause(error)}.",
            code="folder-not-writable",
            place=f"{run.recipe.where}: output",
            remedy="Give another folder.",
        ) from error


def _give_up(lock: Lock, folder: Path) -> None:
    """Release the lock of a run folder, and remove it if the folder holds nothing else."""
    if _files(folder):
        lock.release()
    else:
        lock.remove()


def _create_and_lock(run: Run) -> Lock:
    """Create the run folder and lock it, after an earlier run in it was moved aside.

    Raises:
        RecipeError: Another process uses the folder.
        OSError: It cannot be written.
    """
    resumes = False
    if run.resume_point is not None:
        resumes = run.resume_point.checkpoint.resolve().is_relative_to(run.folder.resolve())
    files.make_folder(run.folder)
    place = f"{run.recipe.where}: output"
    lock = Lock(run.folder, place)
    if resumes or not _files(run.folder):
        return lock
    _move_aside(run.folder, lock)
    files.make_folder(run.folder)
    return Lock(run.folder, place)


def move_earlier_run(folder: Path, where: str) -> None:
    """Rename the folder of an earlier run to the first free ``NAME.NUMBER``, and log the new path.

    Args:
        where: The recipe that gets the folder, for messages.

    Raises:
        RecipeError: Another process uses the folder.
        OSError: It cannot be renamed.
    """
    _move_aside(folder, Lock(folder, f"{where}: output"))


def _move_aside(folder: Path, lock: Lock) -> None:
    """Rename the folder of an earlier run and release its lock. Log the new path."""
    if platform_support.RENAMES_OPEN_FOLDERS:
        moved_to = files.move_aside(folder)  # under the lock: no other run starts in the folder
        lock.release()
    else:
        lock.release()
        moved_to = files.move_aside(folder)
    log.info("an earlier run was in %s: moved to %s", folder, moved_to)


def _write_recipe(run: Run) -> None:
    """Write ``recipe.yaml``. The files of plugins in it are relative to the run folder."""
    from omegaconf import OmegaConf

    recipe = run.recipe
    if recipe.source is not None:
        recipe = dataclasses.replace(recipe, references=anchored(recipe.references, recipe.source.parent))
    text = OmegaConf.to_yaml(OmegaConf.create(secrets.hidden(recipe.to_dict())))
    files.write(run.folder / "recipe.yaml", text, hidden=True)


def _write_job(folder: Path) -> None:
    """Write the name of the torchrun job, whose restarts resume the run in its folder."""
    job = torchrun_job()
    if job is not None:
        files.write(folder / JOB_FILE, job, hidden=True)


def _nearest_existing(folder: Path) -> Path:
    """The folder, or the nearest of its parents that exists."""
    for path in (folder, *folder.absolute().parents):
        if path.exists():
            return path
    raise FileNotFoundError(folder)  # the root exists


def _files(folder: Path) -> list[Path]:
    """The entries of a folder, except a lock and files that were not written completely."""
    return [path for path in folder.iterdir() if path.name != ".lock" and not path.match(".*.partial")]


def _writable(folder: Path) -> bool:
    """Whether this user may create files in a folder. Tries it, because permission bits are not enough (root, read-only
    mounts).

    Raises:
        SaveError: The disk is full.
    """
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError as error:
        files.refuse_full_disk(error, folder)
        return False
