"""The lock of a folder, such as a run folder: the file ``.lock``, which names its owner.

It is a POSIX record lock, which ends with its process. ``flock``, which ``filelock`` uses, is inherited by data
workers, and these outlive a killed run by seconds.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from fastloop.errors import RecipeError
from fastloop.runtime import files, platform_support

SINCE = "%Y-%m-%d %H:%M:%S"
"""Format of the local time in a lock."""


@dataclass(frozen=True)
class LockOwner:
    """The process that a lock names.

    Attributes:
        pid: Its process id.
        host: The name of its host.
        since: When it locked the folder: local time in the format ``SINCE``.
    """

    pid: int
    host: str
    since: str

    @classmethod
    def this_process(cls) -> LockOwner:
        """The owner of a lock that this process gets now."""
        return cls(pid=os.getpid(), host=socket.gethostname(), since=time.strftime(SINCE))

    def is_elsewhere(self) -> bool:
        """Whether the process runs on another host, whose processes cannot be looked up."""
        return self.host != socket.gethostname()

    def may_run(self) -> bool:
        """Whether the process may still run. On another host it always may."""
        if self.is_elsewhere():
            return True
        try:
            started: float = psutil.Process(self.pid).create_time()
        except psutil.Error:
            return False
        try:
            locked = time.mktime(time.strptime(self.since, SINCE))
        except ValueError:
            return True
        return started < locked + 1  # else a later process has its id; the time is written in whole seconds

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.since}"


class Lock:
    """Locks a folder for this process.

    The operating system releases the lock when the process ends. Children do not inherit it, unlike a lock of
    ``flock``. On a file system without locks, the folder is in use if the named process exists. That of another host
    cannot be looked up: only then does the message propose to remove the file.

    Args:
        place: The option that names the folder, for messages.
        remedy: The remedy of the error while another process has the lock.

    Raises:
        RecipeError: Another process holds the lock.
        UsageError: The file is a link.
        OSError: The file cannot be created.
    """

    def __init__(self, folder: Path, place: str, remedy: str = "Wait for it to end, or set another output.") -> None:
        path = folder / ".lock"
        self.path = path
        self.file = files.no_follow(str(path), os.O_RDWR | os.O_CREAT)
        try:
            platform_support.lock(self.file)
            # another run has just moved the folder aside, and the path leads to a new file
            in_use = not os.path.samestat(os.fstat(self.file), path.stat())
        except OSError as error:
            is_locked = error.errno in (errno.EACCES, errno.EAGAIN)
            is_removed = error.errno == errno.ENOENT  # by its owner, which has just given up the folder
            in_use = is_locked or is_removed
            owner = self._read_owner()
            if not in_use and owner is not None:  # the file system has no locks
                in_use = owner.may_run()
                if owner.is_elsewhere():
                    remedy += f" If it is surely gone, remove {path}."
        if in_use:
            owner = self._read_owner()
            os.close(self.file)
            raise RecipeError(
                f"{folder} is in use by {owner or 'another process'}.",
                code="folder-in-use",
                place=place,
                remedy=remedy,
            )
        with contextlib.suppress(OSError):  # on a full disk, the lock works without the owner's name
            self._write(LockOwner.this_process())

    def _write(self, owner: LockOwner) -> None:
        os.ftruncate(self.file, 0)
        os.lseek(self.file, 0, os.SEEK_SET)
        os.write(self.file, json.dumps(dataclasses.asdict(owner)).encode())

    def _read_owner(self) -> LockOwner | None:
        """The owner that the file names; None: it is empty or malformed, or cannot be read."""
        try:
            os.lseek(self.file, 0, os.SEEK_SET)
            content = json.loads(os.read(self.file, 1000))
            return LockOwner(pid=int(content["pid"]), host=content["host"], since=str(content["since"]))
        except (OSError, ValueError, LookupError, TypeError):
            return None

    def remove(self) -> None:
        """Remove the file, and release the lock."""
        with contextlib.suppress(OSError):  # Windows does not remove an open file
            self.path.unlink()
        self.release()

    def release(self) -> None:
        """Release the lock."""
        with contextlib.suppress(OSError):
            os.ftruncate(self.file, 0)
            platform_support.unlock(self.file)
        os.close(self.file)
