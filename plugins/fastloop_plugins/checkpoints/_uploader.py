"""The thread that uploads a run folder."""

from __future__ import annotations

import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from fastloop import Problem, checkpoint
from fastloop_plugins.checkpoints._remote_folder import RemoteFolder, step_number

logger = logging.getLogger("fastloop")

LONGEST_WAIT = 60.0
"""Seconds between two attempts of an upload, at most."""


class Uploader(threading.Thread):
    """Uploads a run folder, until ``finish``.

    Args:
        folder: The run folder.
        keep: Number of checkpoints to resume from that stay at the URL.
        every: Seconds between two searches for new files.
        retries: Times that a failed upload is repeated.

    Attributes:
        error: The error of the newest upload; None: it succeeded.
        errors: Number of uploads that failed, with their repetitions.
    """

    def __init__(self, remote: RemoteFolder, folder: Path, keep: int, every: float, retries: int) -> None:
        super().__init__(name="remote-output", daemon=True)  # a run that is killed does not wait for it
        self.remote = remote
        self.folder = folder
        self.keep = keep
        self.every = every
        self.retries = retries
        self.error: Exception | None = None
        self.errors = 0
        self._logs: dict[str, tuple[int, int]] = {}  # name -> bytes and time of change, as uploaded
        self._manifests: dict[str, bytes] = {}  # name of a checkpoint -> its manifest, as uploaded
        self._kept: set[str] = set()  # names of the checkpoints that were left at the URL
        self._ended = threading.Event()

    def run(self) -> None:
        """Upload until ``finish``, and then once more."""
        while not self._ended.wait(self.every):
            self.upload()
        self.upload()

    def finish(self) -> None:
        """Upload the files of the ended run, and wait for that."""
        self._ended.set()
        self.join()

    def upload(self) -> None:
        """Upload new files. After an error, try again, and log it if that fails, too."""
        for number in range(self.retries + 1):
            try:
                self._upload_once()
                self.error = None
                return
            except Exception as error:  # each package of fsspec raises errors of its own
                self.error = error
                if number < self.retries:
                    time.sleep(min(2.0**number, LONGEST_WAIT))
        self.errors += 1
        logger.warning(
            Problem(
                f"an upload failed: {type(self.error).__name__}: {self.error}. Training continues.",
                code="upload-failed",
                place=self.remote.url,
            )
        )

    def _upload_once(self) -> None:
        """Upload new files, then remove checkpoints that are no longer kept. A checkpoint follows the logs, because it
        has a position in them, and the best checkpoints that it names."""
        ended = (self.folder / "summary.json").exists()  # before the search: its last checkpoint is there, too
        newest = checkpoint.checkpoints(self.folder)[-1:]
        best = [path for path in checkpoint.checkpoints(self.folder, "best") if (path / checkpoint.MANIFEST).exists()]
        new = [
            path
            for path in (*newest, *best)
            if self._manifests.get(path.name) != (path / checkpoint.MANIFEST).read_bytes()
        ]
        aside = self.folder / ".upload"
        shutil.rmtree(aside, ignore_errors=True)
        for path in new:
            # the run may remove a checkpoint during its upload
            shutil.copytree(path, aside / path.name, copy_function=link_or_copy)
            if not has_all_files(aside / path.name):
                raise FileNotFoundError(f"{path} was removed while it was copied")
        for name in self._names():
            self._put_changed(name)
        for path in reversed(new):
            self.remote.put_checkpoint(aside / path.name, f"checkpoints/{path.name}")
            self._manifests[path.name] = (aside / path.name / checkpoint.MANIFEST).read_bytes()
        shutil.rmtree(aside, ignore_errors=True)
        kept = {path.name for path in (*newest, *best)}
        if newest and kept != self._kept:
            self._remove_old(newest[0], {path.name for path in best})
            self._kept = kept
        if ended:
            self._put_changed("summary.json")  # last: it marks the run as complete

    def _names(self) -> Iterator[str]:
        """The run's files outside ``checkpoints``, without the summary."""
        for path in sorted(self.folder.rglob("*")):
            name = path.relative_to(self.folder)
            if (
                path.is_file()
                and name.parts[0] not in ("checkpoints", "summary.json")
                and not any(map(is_hidden, name.parts))
            ):
                yield name.as_posix()

    def _put_changed(self, name: str) -> None:
        facts = (self.folder / name).stat()
        if self._logs.get(name) != (facts.st_size, facts.st_mtime_ns):
            self.remote.put(self.folder / name, name)
            self._logs[name] = facts.st_size, facts.st_mtime_ns

    def _remove_old(self, newest: Path, best: set[str]) -> None:
        """Remove the checkpoints at the URL beyond the best ones and ``checkpoint.steps_to_keep``, as the run removes
        them from its folder."""
        names = self.remote.names()
        names_by_step = {step_number(path): Path(path).name for path in self.remote.steps(names)}
        kept = set(best)
        for step in checkpoint.steps_to_keep(names_by_step, self.keep, step_number(newest.name)):
            kept.add(names_by_step[step])
        there = {name.split("/")[1] for name in names if name.startswith(("checkpoints/step-", "checkpoints/best-"))}
        for name in sorted(there - kept):
            self.remote.remove(f"checkpoints/{name}")


def link_or_copy(source: str, target: str) -> None:
    """Make a hard link, or a copy where the file system has no links."""
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:
        shutil.copyfile(source, target)


def has_all_files(folder: Path) -> bool:
    """Whether a copy of a checkpoint has each file of its manifest. The run may have removed some before they were
    copied."""
    manifest = json.loads((folder / checkpoint.MANIFEST).read_bytes())
    return all((folder / name).is_file() for name in manifest["files"])


def is_hidden(part: str) -> bool:
    """Whether a file or folder is hidden: a lock, or a file that is being written."""
    return part.startswith(".")
