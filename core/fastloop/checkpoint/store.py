"""Atomic checkpoints: written to a temporary folder, checksummed, synced, renamed.

Tensors in safetensors, the rest in JSON; no pickle.

    checkpoints/step-00000120/
        model.safetensors    the weights under the model's own names
        state.safetensors    every other tensor (optimizer, plugins, random states)
        state.json           counters and structure; refers to tensors by name
        sharded/             sharded tensors, one safetensors file per process
        manifest.json        size and SHA-256 of the other files; written last, so it marks a complete checkpoint

Any number of processes can read sharded tensors, which torch.distributed.checkpoint writes. There is no pointer to the
newest checkpoint: ``find_newest`` lists the folders and verifies them. A save that fails (full disk) removes its files
and keeps the earlier checkpoints.
"""

from __future__ import annotations

import errno
import hashlib
import json
import shlex
import shutil
import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from time import monotonic, sleep
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from fastloop.errors import CheckpointError, NoCheckpoint, SaveError
from fastloop.problem import clause
from fastloop.runtime.files import partial_folder, read_again, replace_folder
from fastloop.runtime.platform_support import sync
from fastloop.runtime.step_folders import MANIFEST, checkpoints, leftovers, remove_old_checkpoints, step_of

VISIBLE_SECONDS = 90.0
"""Seconds until every host sees a new checkpoint: NFS caches the entries of a folder for up to 60 s (``acdirmax`` in
nfs(5))."""


def pack(tree: Any, tensors: dict[str, Tensor], name: str) -> Any:
    """Convert a tree of state to JSON values, and move its tensors into ``tensors`` under path-like names.

    Accepts dicts with any packable keys, lists, tuples, tensors, numpy arrays and scalars, numbers, strings, None.

    Raises:
        TypeError: Any other value; names its path in the tree.
    """
    if tree is None or isinstance(tree, bool | int | float | str):
        return tree
    if isinstance(tree, Tensor):
        return {"__tensor__": _add_tensor(tree.detach(), tensors, name)}
    if isinstance(tree, np.ndarray) and tree.dtype.kind in "biufc":  # bool, integers, floating point and complex
        native = tree.astype(tree.dtype.newbyteorder("="))  # a copy that torch accepts, also of a read-only array
        return {"__array__": _add_tensor(torch.from_numpy(native), tensors, name)}
    if isinstance(tree, np.generic):
        return tree.item()
    if isinstance(tree, tuple):
        return {"__tuple__": [pack(value, tensors, f"{name}.{index}") for index, value in enumerate(tree)]}
    if isinstance(tree, list):
        return [pack(value, tensors, f"{name}.{index}") for index, value in enumerate(tree)]
    if isinstance(tree, Mapping):
        if all(isinstance(key, str) and not key.startswith("__") for key in tree):
            return {key: pack(value, tensors, f"{name}.{key}") for key, value in tree.items()}
        items = []
        for key, value in tree.items():
            items.append([pack(key, tensors, name), pack(value, tensors, f"{name}.{key}")])
        return {"__items__": items}
    raise TypeError(
        f"{name}: a {type(tree).__name__} cannot be saved. Save tensors, numbers, strings, lists, tuples and dicts "
        "of them."
    )


def _add_tensor(tensor: Tensor, tensors: dict[str, Tensor], name: str) -> str:
    while name in tensors:  # {"a": {"b": ...}, "a.b": ...} has the path "a.b" twice
        name += "'"
    tensors[name] = tensor
    return name


def unpack(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The inverse of ``pack``."""
    if isinstance(tree, list):
        return [unpack(value, tensors) for value in tree]
    if not isinstance(tree, dict):
        return tree
    if "__tensor__" in tree:
        return tensors[tree["__tensor__"]]
    if "__array__" in tree:
        return tensors[tree["__array__"]].numpy()
    if "__tuple__" in tree:
        return tuple(unpack(value, tensors) for value in tree["__tuple__"])
    if "__items__" in tree:
        return {unpack(key, tensors): unpack(value, tensors) for key, value in tree["__items__"]}
    return {key: unpack(value, tensors) for key, value in tree.items()}


def save_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write a safetensors file. Tensors that share memory (tied weights) are written as copies."""
    addresses: set[int] = set()
    separate = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu().contiguous()
        storage = tensor.untyped_storage()
        is_part = storage.nbytes() != tensor.nbytes
        is_shared = storage.data_ptr() in addresses
        addresses.add(storage.data_ptr())
        separate[name] = tensor.clone() if is_part or is_shared else tensor
    save_file(separate, path)


def write(
    folder: Path, model: Mapping[str, Tensor], state: Mapping[str, Any], is_main: bool = True, group: Any = None
) -> Path:
    """Write a checkpoint at ``folder``. If the process is killed at any time, ``find_newest`` returns the new
    checkpoint or the one before.

    Every process must call it if tensors are sharded; the main process writes the rest.

    Args:
        model: The model's state dict.
        state: Any value that ``pack`` accepts.
        group: The torch ``ProcessGroup`` that coordinates the writing of sharded tensors: ``run.processes.host_group``,
            or a group of its own for a thread that writes while training continues. None: the default group, which is
            the device's.

    Raises:
        TypeError: ``state`` contains a value that cannot be saved.
        SaveError: The files cannot be written. Raised on every process if tensors are sharded, else on the main
            process.
    """
    aside = partial_folder(folder)
    tensors: dict[str, Tensor] = {}
    packed = pack(state, tensors, "state")
    named = {f"model.{name}": tensor for name, tensor in model.items()} | tensors
    sharded: dict[str, Any] = {name: tensor for name, tensor in named.items() if isinstance(tensor, DTensor)}
    try:
        if is_main:
            shutil.rmtree(aside, ignore_errors=True)
        if sharded:  # first, because a failure on one process raises on all
            _write_shards(sharded, aside / "sharded", group)
        if is_main:
            aside.mkdir(parents=True, exist_ok=True)
            save_tensors(_whole(model), aside / "model.safetensors")
            save_tensors(_whole(tensors), aside / "state.safetensors")
            (aside / "state.json").write_text(json.dumps(packed))
            _finish(aside, folder)
    except Exception as error:
        if is_main:
            shutil.rmtree(aside, ignore_errors=True)  # free the space on a full disk
        if not isinstance(error, OSError | SafetensorError):
            raise
        raise SaveError(f"{folder} was not saved: {error}", code="save-failed") from error
    return folder


def _whole(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors that are not sharded."""
    return {name: tensor for name, tensor in tensors.items() if not isinstance(tensor, DTensor)}


def _write_shards(sharded: dict[str, Any], folder: Path, group: Any) -> None:
    # only here, as in _read_shards: few runs have shards, and the import takes an eighth of a second
    from torch.distributed.checkpoint import state_dict_saver
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

    addresses = set()
    for name, tensor in sharded.items():
        address = tensor.to_local().data_ptr()
        if address in addresses:  # tied weights: safetensors does not support shared memory
            sharded[name] = tensor.clone()
        addresses.add(address)
    torch.distributed.barrier(group)  # the main process has removed leftovers of an interrupted save
    try:
        state_dict_saver.save(
            sharded, storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True), process_group=group
        )
    except CheckpointException as error:
        failures = list(error.failures.values())  # of each process that failed: the error and its traceback
        first_error, _ = failures[0]
        raise first_error from error


def _finish(aside: Path, folder: Path) -> None:
    """Write the manifest of a checkpoint, and rename its folder."""
    written = sorted(path for path in aside.rglob("*") if path.is_file())
    files = {str(path.relative_to(aside)): {"bytes": path.stat().st_size, "sha256": _digest(path)} for path in written}
    (aside / MANIFEST).write_text(json.dumps({"format": 1, "files": files}, indent=1))
    _rename(aside, folder)


def _rename(aside: Path, folder: Path) -> None:
    """Give a complete checkpoint its final name. If its step was saved before a resume, it replaces the old one."""
    sync(folder.parent.parent)  # the first save has made the folder ``checkpoints``
    replace_folder(aside, folder)


def copy(source: Path, folder: Path) -> None:
    """Copy a checkpoint to ``folder``: as a whole, or not at all. The copy is not verified.

    Raises:
        SaveError: The files cannot be read or written.
    """
    aside = partial_folder(folder)
    try:
        shutil.rmtree(aside, ignore_errors=True)
        shutil.copytree(source, aside, symlinks=True)
        _rename(aside, folder)
    except OSError as error:
        shutil.rmtree(aside, ignore_errors=True)  # free the space on a full disk
        raise SaveError(f"{folder} was not copied from {source}: {clause(error)}", code="save-failed") from error


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def verify(folder: Path, wait: bool = False) -> str | None:
    """Check every file of a checkpoint against the manifest. Returns the first problem, or None.

    Args:
        wait: Wait until this host sees a checkpoint that another one wrote.

    Raises:
        CheckpointError: The file system reports stale handles. The checkpoint may be complete.
    """
    deadline = monotonic()
    if wait:
        deadline += VISIBLE_SECONDS
    try:
        problem: str | None = read_again(partial(_compare, folder))
        while problem is not None and monotonic() < deadline:
            sleep(0.5)
            problem = read_again(partial(_compare, folder))
    except OSError as error:
        if error.errno != errno.ESTALE:
            return f"{MANIFEST} cannot be read: {clause(error)}"
        advice = (
            "The checkpoint may be complete: try again when the file system responds, or resume from another "
            "one (--resume PATH)."
        )
        raise CheckpointError(
            f"{folder} cannot be read: {clause(error)}.", code="damaged-checkpoint", remedy=advice
        ) from error
    return problem


def _compare(folder: Path) -> str | None:
    """The first file of a checkpoint that differs from the manifest."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        missing = {"model.safetensors", "state.safetensors", "state.json"} - set(manifest["files"])
        if missing:
            return f"{MANIFEST} does not list {', '.join(sorted(missing))}"
        for name, entry in manifest["files"].items():
            path = folder / name
            if path.parent not in (folder, folder / "sharded") or not path.is_file():
                return f"{name} is missing"
            if path.is_symlink() or (path.parent != folder and path.parent.is_symlink()):
                return f"{name} is a link, which may lead out of the checkpoint"
            if path.stat().st_size != entry["bytes"] or _digest(path) != entry["sha256"]:
                return f"{name} is not what was written"
        for path in (folder / "sharded").glob("*"):  # read() would read all of them
            if f"sharded/{path.name}" not in manifest["files"]:
                return f"{MANIFEST} does not list sharded/{path.name}"
    except FileNotFoundError:
        return f"{MANIFEST} is missing"
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return f"{MANIFEST} cannot be read: {clause(error)}"
    return None


class ResumePoint(NamedTuple):
    """The checkpoint that a run resumes from.

    Attributes:
        checkpoint: Its folder.
        skipped: Warnings about newer checkpoints, which are damaged.
    """

    checkpoint: Path
    skipped: list[str]


def find_newest(path: Path) -> ResumePoint:
    """The checkpoint for ``--resume PATH``: a checkpoint folder itself, or the newest valid checkpoint of a run folder.

    Raises:
        NoCheckpoint: There is no checkpoint.
        CheckpointError: All checkpoints of the run folder are damaged, or the one at ``path`` is.
    """
    is_checkpoint = (path / MANIFEST).exists() or step_of(path) is not None
    if is_checkpoint:
        _check_named(path)
        return ResumePoint(path, [])
    skipped: list[str] = []
    for candidate in _newest_first(path):
        problem = verify(candidate)
        if problem is None:
            return ResumePoint(candidate, skipped)
        if not candidate.name.startswith("."):  # not a leftover of an interrupted save
            skipped.append(f"{candidate}: damaged ({problem})")
    if skipped:
        listed = "\n  ".join(skipped)
        raise CheckpointError(f"No checkpoint to resume from is intact:\n  {listed}", code="damaged-checkpoint")
    raise NoCheckpoint(
        "no checkpoint to resume from.",
        code="no-checkpoint",
        place=str(path),
        expected="a run folder, or one of its checkpoints/step-*",
    )


def _check_named(path: Path) -> None:
    """Check the checkpoint that ``--resume`` names. No other one takes its place.

    Raises:
        NoCheckpoint: It does not exist.
        CheckpointError: It is damaged.
    """
    if not path.exists():
        present = ", ".join(other.name for other in _checkpoints_beside(path))
        raise NoCheckpoint(
            f"there is no such checkpoint. There are: {present or 'none'}.", code="no-checkpoint", place=str(path)
        )
    problem = verify(path)
    if problem is None:
        return
    remedy = "Start a new run without --resume."
    earlier = _find_earlier(path)
    if earlier is not None:
        remedy = f"An earlier checkpoint is intact: `--resume {shlex.quote(str(earlier))}`."
    raise CheckpointError(
        f"the checkpoint is damaged: {problem}.", code="damaged-checkpoint", place=str(path), remedy=remedy
    )


def _checkpoints_beside(path: Path) -> list[Path]:
    """The checkpoints in the same run folder as a checkpoint, oldest first; empty if it is not in one."""
    parent = path.resolve().parent
    if parent.name != "checkpoints":
        return []
    return [path.with_name(other.name) for other in checkpoints(parent.parent)]


def _find_earlier(path: Path) -> Path | None:
    """The newest intact checkpoint of the same run from an earlier step than that of ``path``."""
    step = step_of(path)
    if step is None:
        return None
    for other in reversed(_checkpoints_beside(path)):
        step_of_other = step_of(other)
        if step_of_other is not None and step_of_other < step and verify(other) is None:
            return other
    return None


def _newest_first(folder: Path) -> list[Path]:
    """A run's checkpoints, each followed by leftovers of its step: after an interrupted replacement, these may be
    complete. For example ``step-8``, ``step-4``, ``.step-4.partial``, ``.step-4.old.partial``."""

    def newness(path: Path) -> tuple[Any, bool, bool]:
        is_finished = not path.name.startswith(".")
        is_new = ".old." not in path.name  # not one that its replacement has renamed
        return step_of(path), is_finished, is_new

    return sorted([*checkpoints(folder), *leftovers(folder)], key=newness, reverse=True)


def read(
    folder: Path, like: Callable[[str, torch.Size], Tensor | None] = lambda name, shape: None, group: Any = None
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read ``(model, state)`` of a checkpoint to the CPU.

    Args:
        like: ``like(name, shape)`` returns the ``DTensor`` to read a sharded tensor into, or None to read the full
            tensor. Names are ``model.NAME`` or ``state....``. Every process must call ``read`` if any result is a
            ``DTensor``.
        group: As in ``write``.

    Raises:
        CheckpointError: The files cannot be read.
    """
    try:
        model = read_again(partial(load_file, folder / "model.safetensors"))
        tensors = read_again(partial(load_file, folder / "state.safetensors"))
        if (folder / "sharded").exists():
            for name, tensor in _read_shards(folder / "sharded", like, group).items():
                part = model if name.startswith("model.") else tensors
                part[name.removeprefix("model.")] = tensor
        return model, unpack(json.loads(read_again((folder / "state.json").read_text)), tensors)
    except (OSError, ValueError, KeyError, TypeError, SafetensorError, RecursionError) as error:
        raise CheckpointError(
            f"cannot be read: {clause(error)}.", code="damaged-checkpoint", place=str(folder)
        ) from None


def _read_shards(folder: Path, like: Callable[[str, torch.Size], Tensor | None], group: Any) -> dict[str, Tensor]:
    from torch.distributed.checkpoint import state_dict_loader
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    tensors: dict[str, Tensor] = {}
    for name, metadata in HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata.items():
        assert isinstance(metadata, TensorStorageMetadata)
        target = like(name, metadata.size)
        if target is None:
            target = torch.empty(metadata.size, dtype=metadata.properties.dtype)
        tensors[name] = target
    is_sharded = any(isinstance(tensor, DTensor) for tensor in tensors.values())
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        state_dict_loader.load(
            tensors,
            storage_reader=HuggingFaceStorageReader(str(folder)),
            process_group=group,
            no_dist=not is_sharded,
        )
    return tensors


def steps_to_keep(steps: Iterable[int], keep: int, newest: int) -> list[int]:
    """The steps whose checkpoints stay after a save at the step ``newest``, oldest first: at most ``keep``.

    Later steps do not stay: after a resume from an earlier checkpoint, they do not belong to the current run. An
    example with the steps 2, 4, 6 and 12: after a save at step 6, ``keep=2`` keeps 4 and 6.
    """
    steps_of_run = sorted(step for step in steps if step <= newest)
    return steps_of_run[-keep:]


def rotate(folder: Path, keep: int, newest: int) -> None:
    """After a save at the step ``newest``, remove the checkpoints of a run beyond ``steps_to_keep``, and leftovers of
    interrupted saves. Other files stay."""
    steps = []
    for path in checkpoints(folder):
        step = step_of(path)
        if step is not None:
            steps.append(step)
    remove_old_checkpoints(folder, steps_to_keep(steps, keep, newest))
    if any(step > newest for step in steps):  # they must not return after a loss of power
        sync(folder / "checkpoints")
