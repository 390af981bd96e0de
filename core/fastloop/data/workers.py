"""The worker processes that read data: their setup, and how the training process watches them.

Only this file uses private names of torch's data loader. A test looks for the names in ``PRIVATE`` and ``PRIVATE_OF_ITERATOR``.
"""

from __future__ import annotations

import os
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from multiprocessing.queues import Queue
from typing import Any

from torch import _C
from torch._utils import ExceptionWrapper
from torch.utils.data import DataLoader, get_worker_info
from torch.utils.data._utils import worker

from fastloop.runtime.platform_support import existing_signals
from fastloop.state import Batch

CHECKED_WITH = "2.13"
"""The torch release that this file was compared with."""
PRIVATE: dict[Any, tuple[str, ...]] = {
    _C: ("_set_worker_pids", "_remove_worker_pids", "_error_if_any_worker_fails"),
    worker: ("_worker_info",),
    Queue: ("_on_queue_feeder_error",),
}
"""Module of torch, or class of Python -> its private names that this file uses."""
PRIVATE_OF_ITERATOR = ("_workers", "_worker_pids_set", "_try_get_data", "_shutdown_workers")
"""Private attributes of the iterator of a ``DataLoader`` with workers. The ``DataLoader`` keeps that iterator as ``_iterator``."""
_print_error: Any = Queue._on_queue_feeder_error  # type: ignore[attr-defined]


def start_worker(number: int, init: Callable[[int], None] | None) -> None:
    """Set up signals and errors of worker ``number``, show the user's dataset in ``get_worker_info()``, and call the user's ``init``."""
    _ignore_signals()
    Queue._on_queue_feeder_error = _send_error  # type: ignore[attr-defined]
    info = get_worker_info()
    assert info is not None
    object.__setattr__(info, "dataset", info.dataset.dataset)  # type: ignore[attr-defined] # frozen
    if init is not None:
        init(number)


def _send_error(queue: Any, error: Exception, item: Any) -> None:
    """Send the error of a batch that cannot be sent (shared memory is full) in its place. Python only prints it, and the run would wait."""
    if not isinstance(item, tuple) or not isinstance(item[-1], Batch | ExceptionWrapper):
        _print_error(error, item)  # from a queue of the user
        return
    report = item[-1] if isinstance(item[-1], ExceptionWrapper) else ExceptionWrapper(where="in its thread")  # type: ignore[no-untyped-call]
    report.exc_type = RuntimeError  # an error's own class may be the reason that it could not be sent
    queue.put((item[0], report))


def _ignore_signals() -> None:
    """Leave stop signals to the training process: they often reach a complete process group. Accept SIGTERM only from that process."""
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
    """Unregister the workers of a ``DataLoader``'s iterator from torch's signal handler, which raises wherever training is when a worker
    ends. ``next_batch`` checks them instead.

    Returns:
        The worker processes; empty if the training process reads the data.
    """
    processes: list[Any] = getattr(batches, "_workers", [])
    if processes and batches._worker_pids_set:
        _C._remove_worker_pids(id(batches))
        batches._worker_pids_set = False
    return processes


def wait_in_turns(batches: Any, seconds: float, expired: Callable[[], None]) -> None:
    """Make the iterator wait at most ``seconds`` at a time for its workers, and call ``expired`` after each wait without a batch."""
    if "_try_get_data" in vars(batches):  # persistent workers have one iterator for all epochs
        return
    try_get_data: Any = weakref.WeakMethod(batches._try_get_data)  # a reference cycle would keep the workers

    def wait() -> tuple[bool, Any]:
        found: tuple[bool, Any] = try_get_data()(seconds)
        if not found[0]:
            expired()
        return found

    batches._try_get_data = wait


def next_batch(batches: Iterator[Any], processes: list[Any]) -> Any:
    """The next batch of an iterator with the workers ``processes``.

    Raises:
        RuntimeError: A worker has ended.
    """
    _C._set_worker_pids(id(batches), tuple(process.pid for process in processes))
    try:
        _C._error_if_any_worker_fails()  # a worker that ended earlier
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
    """Set the result of ``get_worker_info()`` in this process. Returns the previous one."""
    before, worker._worker_info = worker._worker_info, info
    return before
