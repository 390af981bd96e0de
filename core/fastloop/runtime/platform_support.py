"""Operating system services that some platforms lack, and their replacements. Does not import torch.

fastloop is developed on Linux. On macOS and Windows it trains on one process.

    service                          missing on        fastloop's replacement
    file locks of ``fcntl``          Windows           ``msvcrt.locking``; with neither, the owner that the file names
    ``resource``: peak memory        Windows           the peak working set that psutil reports
    ``resource``: page faults        Windows           0
    ``resource``: memory limits      Windows           none: a recipe with a memory limit is refused
    SIGUSR1, SIGKILL                 Windows           the stop signals that exist; SIGTERM, which ends a process at once
    ``sigwaitinfo`` (data workers)   macOS, Windows    none: SIGTERM from any process ends a worker
    processor affinity               macOS, Windows    all processors; no pinning
    process groups                   Windows           only the process ends, not its children
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
"""Whether this platform supports ``limit_memory``."""
RENAMES_OPEN_FOLDERS = os.name != "nt"
"""Whether a folder can be renamed while a process holds one of its files open."""
LOCKED_BYTE = 2**30
"""Position of the byte that ``msvcrt`` locks: after the file's text, because other processes cannot read a locked byte."""


def existing_signals(*names: str) -> tuple[signal.Signals, ...]:
    """The signals of ``names`` that this platform has."""
    return tuple(getattr(signal, name) for name in names if hasattr(signal, name))


def lock(file: int) -> None:
    """Lock an open file for this process, without waiting. The system releases the lock when the process ends.

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
    """Peak resident memory of this process, in bytes."""
    if resource is None:
        import psutil

        facts = psutil.Process().memory_info()
        return int(getattr(facts, "peak_wset", facts.rss))
    peak = int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    return peak if sys.platform == "darwin" else peak * 1024


def page_faults() -> int:
    """Minor page faults of this process so far; 0 if the platform does not count them."""
    return 0 if resource is None else int(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)


def limit_memory(limit: int) -> tuple[int, int]:
    """Limit the data of this process to ``limit`` bytes. Returns the earlier limits, for ``restore_memory_limit``.

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
    """Pin this process to processors, if the platform supports it."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, wanted)


def signal_group(pid: int, number: signal.Signals) -> None:
    """Send a signal to the process group of the leader ``pid``, or to ``pid`` alone if the platform has no groups.

    Raises:
        ProcessLookupError: The process has ended.
    """
    if hasattr(os, "killpg"):
        os.killpg(pid, number)
    else:
        os.kill(pid, number)


def sync(path: Path) -> None:
    """Flush a file, or a folder's list of files, to disk.

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
