"""The worker processes that read data: their setup, and how the training process watches them.

fastloop uses private names of torch's data loader only in this file. ``PRIVATE`` lists them for the test that looks for them.
"""

from __future__ import annotations

import os
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from torch import _C
from torch.utils.data import DataLoader, get_worker_info
from torch.utils.data._utils import worker

from fastloop.runtime.platform_support import existing_signals

CHECKED_WITH = "2.13"
"""The torch release whose source these names were read in."""
PRIVATE: dict[Any, tuple[str, ...]] = {
    _C: ("_set_worker_pids", "_remove_worker_pids", "_error_if_any_worker_fails"),
    worker: ("_worker_info",),
}
"""Module of torch -> its private names that are used here."""
PRIVATE_OF_ITERATOR = ("_workers", "_worker_pids_set", "_try_get_data", "_shutdown_workers")
"""The same of the iterator of a ``DataLoader`` with workers. The ``DataLoader`` itself keeps that iterator as ``_iterator``."""


def start_worker(number: int, init: Callable[[int], None] | None) -> None:
    """Set up the signals of worker ``number``, show the user's dataset in ``get_worker_info()``, and call the user's ``init``."""
    _ignore_signals()
    info = get_worker_info()
    assert info is not None
    object.__setattr__(info, "dataset", info.dataset.dataset)  # type: ignore[attr-defined] # frozen
    if init is not None:
        init(number)


def _ignore_signals() -> None:
    """Leave stop signals, which often reach a complete process group, to the training process. Accept SIGTERM only from that process,
    which ends its workers with it."""
    for number in existing_signals("SIGINT", "SIGUSR1"):
        signal.signal(number, signal.SIG_IGN)
    if hasattr(signal, "sigwaitinfo"):  # Linux
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    while signal.sigwaitinfo([signal.SIGTERM]).si_pid != os.getppid():
        pass
    os._exit(0)


def watch(batches: Any) -> list[Any]:
    """Take the workers of a ``DataLoader``'s iterator over from torch, whose signal handler would raise an error wherever training is when
    one ends: see ``next_batch``.

    Returns:
        Their processes; none where the training process reads the data.
    """
    processes: list[Any] = getattr(batches, "_workers", [])
    if processes and batches._worker_pids_set:
        _C._remove_worker_pids(id(batches))
        batches._worker_pids_set = False
    return processes


def wait_in_turns(batches: Any, seconds: float, expired: Callable[[], None]) -> None:
    """Let the iterator wait at most ``seconds`` at a time for its workers. ``expired`` is called after each wait that brought nothing."""
    if "_try_get_data" in vars(batches):  # workers that persist have one iterator for all epochs
        return
    look: Any = weakref.WeakMethod(batches._try_get_data)  # a circle would keep the workers

    def wait() -> tuple[bool, Any]:
        found: tuple[bool, Any] = look()(seconds)
        if not found[0]:
            expired()
        return found

    batches._try_get_data = wait


def next_batch(batches: Iterator[Any], processes: list[Any]) -> Any:
    """The next batch of an iterator whose workers are ``processes``.

    Raises:
        RuntimeError: A worker has ended.
    """
    if not processes:
        return next(batches)
    _C._set_worker_pids(id(batches), tuple(process.pid for process in processes))
    try:
        _C._error_if_any_worker_fails()  # before this
        return next(batches)
    finally:
        _C._remove_worker_pids(id(batches))


def shut_down(loader: DataLoader[Any]) -> None:
    """End the workers that a loader keeps between epochs."""
    iterator: Any = loader._iterator
    if iterator is not None:
        iterator._shutdown_workers()
        loader._iterator = None


def replace_worker_info(info: Any) -> Any:
    """Set what ``get_worker_info()`` returns in this process. Returns what it was."""
    before, worker._worker_info = worker._worker_info, info
    return before
