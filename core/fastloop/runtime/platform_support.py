"""Operating system services that some platforms lack, and their replacements. Does not import torch.

fastloop is developed on Linux. On macOS and Windows it trains on one process.

    service                          missing on        fastloop's replacement
    file locks of ``fcntl``          Windows           ``msvcrt.locking``; with neither, the owner that the file names
    ``resource``: peak memory        Windows           the peak working set that psutil reports
    ``resource``: page faults        Windows           0
    ``resource``: memory limits      Windows           none: a recipe with a memory limit is refused
    control groups                   macOS, Windows    none: no limit of processors or memory is known
    SIGUSR1, SIGKILL                 Windows           the stop signals that exist; SIGTERM, which kills a process
    ``sigwaitinfo`` (data workers)   macOS, Windows    none: SIGTERM from any process ends a worker
    processor affinity               macOS, Windows    all processors; no pinning
    process groups                   Windows           only the process ends, not its children
    ``prctl`` (started processes)    macOS, Windows    none: a process may outlive a killed launcher
    fsync of a folder                Windows           none: the files in it are synced
    renaming a folder of open files  Windows           files are closed first
"""

from __future__ import annotations

import ctypes
import errno
import importlib
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType


def _module(name: str) -> ModuleType | None:
    """A module of the standard library; None: this platform lacks it."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


PR_SET_PDEATHSIG = 1
"""The operation of Linux's prctl(2) that sets the signal which a process gets when its parent ends."""

fcntl = _module("fcntl")
resource = _module("resource")
msvcrt = _module("msvcrt")

KILL: signal.Signals = getattr(signal, "SIGKILL", signal.SIGTERM)
"""The signal that ends a process at once."""
RENAMES_OPEN_FOLDERS = os.name != "nt"
"""Whether a folder can be renamed while a process holds one of its files open."""
CONTROL_GROUPS = Path("/sys/fs/cgroup")
"""The root of cgroup v2, and the parent of the roots of cgroup v1."""
VERSION_1 = {"memory.max": "memory.limit_in_bytes", "memory.events": "memory.oom_control"}
"""Names of files in cgroup v2 -> in v1."""
LOCKED_BYTE = 2**30
"""Position of the byte that ``msvcrt`` locks: after the file's text, because other processes cannot read a locked
byte."""


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


def signal_at_end_of_parent(number: int) -> None:
    """Send this process a signal when the thread that started it ends, also if that is killed. Does nothing if the
    platform has no ``prctl``. If the parent has ended before, ``os.getppid`` shows it."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


def processors() -> list[int]:
    """The processors that this process may use, in order."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def cores() -> int:
    """Number of processors that this process may use: of its affinity, and at most its control group's quota
    (``cpu.max``), rounded up."""
    quotas = [-(-int(quota) // int(period)) for quota, period in control_group("cpu.max") if quota != "max"]
    return min([len(processors()), *quotas])


def control_group(name: str) -> Iterator[list[str]]:
    """The words of a file of cgroup v2, such as ``memory.max``, in this process's control group and in each one around
    it; also for v1."""
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            controllers, group = line.split(":", 2)[1:]
            if controllers not in ("", "memory"):
                continue
            file_name = VERSION_1.get(name, name) if controllers else name
            file = CONTROL_GROUPS / controllers / group[1:] / file_name
            for folder in file.parents:
                with suppress(OSError):
                    yield (folder / file_name).read_text().split()


def host_memory() -> int:
    """Bytes of memory that the processes of this control group may hold: all of the machine, or fewer by a limit."""
    import psutil

    limits = [int(words[0]) for words in control_group("memory.max") if words != ["max"]]
    total: int = psutil.virtual_memory().total
    return min([total, *limits])


def kills() -> int:
    """Processes of this control group that the kernel has killed because memory ran out; 0 if that is not known."""
    events = next(control_group("memory.events"), ["oom_kill", "0"])
    return int(events[events.index("oom_kill") + 1])


def explain_kill(before: int) -> str:
    """Why a process was ended by SIGKILL. ``before``: the result of ``kills`` when the process began."""
    if kills() <= before:
        return "The system does that when memory runs out (see dmesg)."
    limit = min([float(words[0]) for words in control_group("memory.max") if words != ["max"]], default=2.0**60)
    # cgroup v1 writes a huge number for no limit
    shown = f" Its limit is {limit / 2**20:,.0f} MiB." if limit < 2**60 else ""
    return (
        f"The kernel did that because the memory of this control group ran out (its count oom_kill has grown).{shown}"
    )


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
