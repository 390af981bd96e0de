"""pytest-xdist's workers, forked from a process that has collected the tests.

A new Python would import torch, the plugins and every file of tests, which takes 9 s of CPU time. A forked worker finds
them imported, and collects in 2 s.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import pytest
from execnet.gateway_io import popen_bootstrapline
from forked import ForkedPopen, Request, run_in_fork
from zygote import Zygote, adopt_orphans

from fastloop_plugins.tasks.shared.metrics import import_torchmetrics

SAFE_THREADS = ("jemalloc_bg_thd",)
"""Names of threads that a process may fork beside: jemalloc, in pyarrow, holds its locks while a process forks, and
starts its thread anew in the new one."""


@contextmanager
def forked_workers(arguments: Sequence[str]) -> Iterator[None]:
    """Fork the workers that pytest-xdist starts in the block. This process may have no other thread yet.

    Args:
        arguments: Those of pytest.
    """
    popen = subprocess.Popen
    zygote = Zygote.start(_become_worker, partial(_collect, arguments))
    WorkerPopen.zygote = zygote
    subprocess.Popen = WorkerPopen  # type: ignore[misc]
    try:
        yield
    finally:
        subprocess.Popen = popen  # type: ignore[misc]
        zygote.connection.close()
        adopt_orphans(False)  # of the tests: nothing would wait for them


class WorkerPopen(ForkedPopen):
    """A ``Popen`` that forks pytest-xdist's workers."""

    @staticmethod
    def forked_arguments(command: Sequence[Any]) -> Sequence[str] | None:
        return command[2:] if command[-1] == popen_bootstrapline else None  # without python -u


def _collect(arguments: Sequence[str]) -> None:
    """Import the files of tests. Each worker reports those that fail, which it imports again."""
    stderr = os.dup(2)
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    import_torchmetrics()
    pytest.main([*arguments, "--collect-only", "-n", "0"])
    _refuse_threads(stderr)
    os.close(stderr)


def _refuse_threads(stderr: int) -> None:
    """End the tests if their import has started a thread: it may hold a lock, which a forked worker would wait for.

    Args:
        stderr: The file descriptor for the message.
    """
    names: list[str] = []
    for task in Path("/proc/self/task").iterdir():
        if int(task.name) != os.getpid():
            names.append((task / "comm").read_text().strip())
    names = [name for name in names if name not in SAFE_THREADS]
    if not names:
        return
    message = (
        f"tests: found threads that the import of a file has started ({', '.join(names)}), expected none: workers are "
        "forked from this process. Import what starts a thread in a fixture or a test, or pass -n 0.\n"
    )
    os.write(stderr, message.encode())
    os._exit(1)


def _become_worker(request: Request, streams: Sequence[int]) -> NoReturn:
    """Become a worker of pytest-xdist: run the code of ``python -c``."""
    sys.stdout = sys.__stdout__  # pytest captures those of its first process
    sys.stderr = sys.__stderr__
    code = request.arguments[1]
    run_in_fork(lambda: exec(code, {"__name__": "__main__"}), streams)
