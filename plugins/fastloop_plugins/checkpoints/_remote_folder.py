"""A run folder at a URL of fsspec.

URL/checkpoints/step-00000120/     as in the run folder; manifest.json is uploaded last and marks a complete one
URL/metrics.jsonl, ...             logs; summary.json is uploaded after all other files
"""

from __future__ import annotations

import json
import logging
import re
import shutil
from pathlib import Path, PurePosixPath

from fastloop import Problem, checkpoint
from fastloop.errors import CheckpointError
from fastloop.problem import typed_clause
from fastloop.runtime import files

logger = logging.getLogger("fastloop")

SMALL = 2**24
"""Bytes up to which a file is uploaded from a copy in memory: a log may grow during the upload."""

PARTIAL = ".partial"
"""Suffix of a file that is being uploaded to a file system."""


class RemoteFolder:
    """A run folder at a URL.

    Raises:
        ImportError: The package of the URL's protocol is not installed.
        ValueError: There is no such protocol.
    """

    def __init__(self, url: str) -> None:
        from fsspec.core import url_to_fs  # type: ignore[import-untyped]

        self.url = url
        self.files, root = url_to_fs(url, use_listings_cache=False, skip_instance_cache=True)
        self.is_file_system = hasattr(self.files, "auto_mkdir")
        if self.is_file_system:
            self.files.auto_mkdir = True
        self.root = root.rstrip("/")

    def names(self) -> set[str]:
        """The names of all files, relative to the folder."""
        self.files.invalidate_cache()
        return {path.removeprefix(f"{self.root}/") for path in self.files.find(self.root) if not path.endswith(PARTIAL)}

    @staticmethod
    def complete(names: set[str]) -> list[str]:
        """The folders of complete checkpoints among ``names``, the best ones first, then those to resume from, newest
        first."""
        results = {}
        for name in names:
            match = re.fullmatch(rf"(checkpoints/(best|step)-(\d+))/{re.escape(checkpoint.MANIFEST)}", name)
            if match:
                results[match[1]] = (match[2] == "step", -int(match[3]))
        return sorted(results, key=results.__getitem__)

    def steps(self, names: set[str]) -> list[str]:
        """The folders of complete checkpoints to resume from, newest first."""
        return [folder for folder in self.complete(names) if is_step(folder)]

    def results(self) -> list[str]:
        """The results of a run that are there: complete checkpoints, newest first, and the exported model."""
        names = self.names()
        return self.steps(names) + ["model"] * any(name.startswith("model/") for name in names)

    def put(self, path: Path, name: str) -> None:
        """Upload a file. It appears as a whole: an object store does that itself, and in a file system it is
        renamed."""
        target = f"{self.root}/{name}"
        upload = target + PARTIAL * self.is_file_system
        if path.stat().st_size <= SMALL:
            self.files.pipe_file(upload, path.read_bytes())
        else:
            self.files.put_file(str(path), upload)
        if self.is_file_system:
            self.files.mv(upload, target)

    def get(self, name: str, path: Path) -> None:
        """Download a file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self.files.get_file(f"{self.root}/{name}", str(path))

    def manifest(self, folder: str) -> bytes | None:
        """The manifest of a checkpoint; None if it has none, and so is not complete."""
        try:
            content: bytes = self.files.cat_file(f"{self.root}/{folder}/{checkpoint.MANIFEST}")
        except FileNotFoundError:
            return None
        return content

    def remove(self, folder: str) -> None:
        """Remove a checkpoint, its manifest first."""
        if self.manifest(folder) is not None:
            self.files.rm_file(f"{self.root}/{folder}/{checkpoint.MANIFEST}")
        if self.files.exists(f"{self.root}/{folder}"):  # an object store has no empty folders
            self.files.rm(f"{self.root}/{folder}", recursive=True)

    def put_checkpoint(self, source: Path, folder: str) -> None:
        """Upload a checkpoint, its manifest last. Does nothing if it is there."""
        there = self.manifest(folder)
        if there == (source / checkpoint.MANIFEST).read_bytes():
            return
        if there is not None:  # the step was saved again
            self.files.rm_file(f"{self.root}/{folder}/{checkpoint.MANIFEST}")
        for path in sorted(source.rglob("*")):
            if path.is_file() and path.name != checkpoint.MANIFEST:
                self.put(path, f"{folder}/{path.relative_to(source).as_posix()}")
        self.put(source / checkpoint.MANIFEST, f"{folder}/{checkpoint.MANIFEST}")

    def get_checkpoint(self, folder: str, target: Path) -> str | None:
        """Download a checkpoint, verify it, and put it at ``target``.

        Returns:
            None, the problem if it is damaged, or an empty string if its manifest is not complete. On a store that is a
            file system, a kill may leave a part of a manifest.
        """
        aside = files.partial_folder(target)
        shutil.rmtree(aside, ignore_errors=True)
        manifest = self.manifest(folder) or b""
        try:
            content = json.loads(manifest)
        except ValueError:
            return ""
        try:
            listed = [str(name) for name in content["files"]]
            outside = [
                name
                for name in listed
                if PurePosixPath(name).parts not in ((name,), ("sharded", name[8:])) or ".." in name
            ]
            if outside:
                return f"{checkpoint.MANIFEST} lists {outside[0]!r}"
            for name in listed:
                self.get(f"{folder}/{name}", aside / name)
        except (FileNotFoundError, KeyError, TypeError) as error:
            return typed_clause(error)
        (aside / checkpoint.MANIFEST).write_bytes(manifest)
        problem = checkpoint.verify(aside)
        if problem is not None:
            shutil.rmtree(aside)
            return problem
        files.replace_folder(aside, target)
        return None

    def get_newest(self, folder: Path) -> bool:
        """Download the newest complete checkpoint with the logs, if it is newer than those of the run folder
        ``folder``.

        Returns:
            Whether there was a newer one.

        Raises:
            CheckpointError: All are damaged, and the run folder has none.
        """
        names = self.names()
        local = [step_number(path.name) for path in checkpoint.checkpoints(folder)]
        newer = [path for path in self.steps(names) if step_number(path) > max(local, default=-1)]
        if not newer:
            return False
        damaged: list[str] = []
        files.make_folder(folder / "checkpoints")
        for name in sorted(names):  # first, because a resumed run continues the logs
            if not name.startswith(("checkpoints/", "model/", "/")) and ".." not in name:
                self.get(name, folder / name)
        for path in self.complete(names):
            if is_step(path) and path not in newer:
                break
            problem = self.get_checkpoint(path, folder / path)
            if problem:
                logger.warning(Problem(f"damaged ({problem}).", code="damaged-checkpoint", place=f"{self.url}/{path}"))
                damaged += [path] * is_step(path)
            elif problem is None and is_step(path):
                return True
        if damaged and not local:
            raise CheckpointError(f"no checkpoint is intact: {', '.join(damaged)}", code="damaged-checkpoint")
        return False


def is_step(folder: str) -> bool:
    """Whether a checkpoint is one to resume from, not one of the best."""
    return Path(folder).name.startswith("step-")


def step_number(folder: str) -> int:
    """The step of a checkpoint."""
    return int(folder.rpartition("-")[2])
