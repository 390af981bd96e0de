"""Operating system services that some platforms lack, and what fastloop does without them. Nothing here imports torch.

fastloop is developed on Linux. On macOS and Windows it imports and trains on one process.

    service                          missing on        fastloop's replacement
    file locks of ``fcntl``          Windows           ``msvcrt.locking``; with neither, the owner that the file names
    ``resource``: peak memory        Windows           the peak working set that psutil reports
    ``resource``: page faults        Windows           0
    ``resource``: memory limits      Windows           none: a recipe that asks for one is refused
    SIGUSR1, SIGKILL                 Windows           the stop signals that exist; SIGTERM, which ends a process at once
    ``sigwaitinfo`` (data workers)   macOS, Windows    none: SIGTERM from any process ends a worker
    processor affinity               macOS, Windows    all processors; no pinning
    process groups                   Windows           the process itself is ended, without its children
    ``prctl`` (launched processes)   macOS, Windows    none: a process may outlive a killed launcher
    fsync of a folder                Windows           none: the files in it are synced
    renaming a folder of open files  Windows           files are closed first
"""

from __future__ import annotations

import errno
import os
import signal
import sys
from pathlib import Path
from types import ModuleType

import psutil

fcntl: ModuleType | None
resource: ModuleType | None
msvcrt: ModuleType | None
try:
    import fcntl
except ImportError:
    fcntl = None
try:
    import resource
except ImportError:
    resource = None
try:
    import msvcrt
except ImportError:
    msvcrt = None

KILL: signal.Signals = getattr(signal, "SIGKILL", signal.SIGTERM)
"""The signal that ends a process at once."""
LIMITS_MEMORY = resource is not None
"""Whether ``limit_memory`` works here."""
RENAMES_OPEN_FOLDERS = os.name != "nt"
"""Whether a folder can be renamed while a process holds one of its files open."""
LOCKED_BYTE = 2**30
"""Position of the byte that ``msvcrt`` locks: past the file's text, because no other process can read a locked byte."""


def existing_signals(*names: str) -> tuple[signal.Signals, ...]:
    """The signals of ``names`` that this platform has."""
    return tuple(getattr(signal, name) for name in names if hasattr(signal, name))


def lock(file: int) -> None:
    """Lock an open file for this process, without waiting. The lock ends with the process at the latest.

    Raises:
        OSError: ``EACCES`` or ``EAGAIN``: another process holds the lock. Any other: the file cannot be locked.
    """
    if fcntl is not None:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    elif msvcrt is not None:
        os.lseek(file, LOCKED_BYTE, os.SEEK_SET)
        msvcrt.locking(file, msvcrt.LK_NBLCK, 1)
    else:
        raise OSError(errno.ENOSYS, "this platform has no file locks")


def unlock(file: int) -> None:
    """Release the lock of ``lock`` before the file is closed."""
    if fcntl is None and msvcrt is not None:  # closing the file releases a lock of fcntl
        os.lseek(file, LOCKED_BYTE, os.SEEK_SET)
        msvcrt.locking(file, msvcrt.LK_UNLCK, 1)


def peak_resident_memory() -> int:
    """Largest bytes of memory that this process has held so far."""
    if resource is None:
        facts = psutil.Process().memory_info()
        return int(getattr(facts, "peak_wset", facts.rss))
    peak = int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    return peak if sys.platform == "darwin" else peak * 1024


def page_faults() -> int:
    """Pages of memory that the system has handed to this process so far; 0 where it does not count them."""
    return 0 if resource is None else int(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)


def limit_memory(limit: int) -> tuple[int, int]:
    """Limit the bytes of data that this process may hold.

    Returns:
        The limits before, for ``restore_memory_limit``.

    Call it only if ``LIMITS_MEMORY``.
    """
    assert resource is not None
    before: tuple[int, int] = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, before[1]))
    return before


def restore_memory_limit(before: tuple[int, int]) -> None:
    """Undo ``limit_memory``."""
    assert resource is not None
    resource.setrlimit(resource.RLIMIT_DATA, before)


def processors() -> list[int]:
    """The processors that this process may use, in order."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def cores() -> int:
    """Number of processors that this process may use."""
    return len(processors())


def use_processors(wanted: list[int]) -> None:
    """Keep this process on some processors, where the platform can."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, wanted)


def signal_group(pid: int, number: signal.Signals) -> None:
    """Send a signal to the process group that ``pid`` leads, or to ``pid`` alone where there are no groups.

    Raises:
        ProcessLookupError: It has ended.
    """
    if hasattr(os, "killpg"):
        os.killpg(pid, number)
    else:
        os.kill(pid, number)


def sync(path: Path) -> None:
    """Wait until a file, or the list of files of a folder, is on disk.

    Raises:
        OSError: It cannot be written.
    """
    if os.name == "nt" and path.is_dir():
        return
    handle = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
