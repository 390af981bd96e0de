"""A ``DataLoader`` that sets its worker processes up, watches them, and explains how they failed.

Only this file uses private names of torch's data loader. A test looks for the names in ``PRIVATE`` and
``PRIVATE_OF_ITERATOR``.
"""

from __future__ import annotations

import copy
import errno
import multiprocessing
import os
import re
import shutil
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing import connection
from multiprocessing.queues import Queue
from queue import Empty
from time import monotonic
from traceback import walk_tb
from types import TracebackType
from typing import Any

from torch import _C
from torch._utils import ExceptionWrapper
from torch.utils.data import DataLoader, get_worker_info
from torch.utils.data._utils import worker
from torch.utils.data.dataloader import _BaseDataLoaderIter

from fastloop import Batch
from fastloop.data.loader import explain_error
from fastloop.errors import DataError, FastloopError
from fastloop.runtime import platform_support
from fastloop.runtime.files import CLOSE_FILES, TOO_MANY_FILES, reached_open_files
from fastloop.runtime.forks import without_stdin
from fastloop.runtime.main_module import ADVICE, EXIT_IMPORTED

CHECKED_WITH = "2.13"
"""The torch release that this file was compared with."""
PRIVATE: dict[Any, tuple[str, ...]] = {
    _C: ("_set_worker_pids", "_remove_worker_pids", "_error_if_any_worker_fails"),
    Queue: ("_on_queue_feeder_error",),
    worker: ("_worker_info", "ExceptionWrapper"),
}
"""Module of torch, or class of Python -> its private names that this file uses."""
PRIVATE_OF_ITERATOR = (
    "_workers",
    "_workers_status",
    "_worker_pids_set",
    "_worker_result_queue",
    "_tasks_outstanding",
    "_try_put_index",
    "_try_get_data",
    "_shutdown_workers",
)
"""Private attributes of the iterator of a ``DataLoader`` with workers. The ``DataLoader`` keeps that iterator as
``_iterator``."""
POLL_SECONDS = 5.0
"""Seconds between checks for dead workers while waiting for a batch."""
OPEN_FILES_PER_WORKER = 4
"""Files that a worker keeps open in the training process: both ends of its queue, its exit, and one while it starts."""
OPEN_FILES = 16
"""Files that all workers together need: their queue of batches, and the connections that send a batch."""
EXIT_SECONDS = 5.0
"""Seconds to wait for a worker's exit code after its connections broke, and for the error of its dataset if it did not
end."""
PARENT_SECONDS = 1.0
"""Seconds between two looks of a worker whether the training process still lives."""
NAMED_WORKERS = re.compile(r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\)")
"""The start of torch's error about workers that ended. ``DataLoader worker (pid(s) 71, 72) exited unexpectedly`` gives
``71, 72``."""
FROM_WORKER = re.compile(r"Caught \w+ in DataLoader worker process")
"""The start of an error that a worker sent in place of a batch: its dataset or collator raised it."""
PIN_THREAD_ENDED = "Pin memory thread exited unexpectedly"
"""Torch's error after a connection to a worker broke in the thread that pins batches."""
_print_error: Any = Queue._on_queue_feeder_error  # type: ignore[attr-defined]


class WorkerError(ExceptionWrapper):
    """An error that a worker sends in place of a batch. Torch's class raises an error with the traceback as its text;
    this one raises an error of fastloop as it was, with its fields.

    Attributes:
        error: The error of fastloop; None: another one.
    """

    def __init__(self, exc_info: Any = None, where: str = "in background") -> None:
        super().__init__(exc_info, where)  # type: ignore[no-untyped-call]
        error = sys.exc_info()[1] if exc_info is None else exc_info[1]
        # a copy has no traceback, whose frames would keep the batch
        self.error = copy.copy(error) if isinstance(error, FastloopError) else None

    def reraise(self) -> None:
        """Raise the error in the training process."""
        if self.error is not None:
            raise self.error
        super().reraise()  # type: ignore[no-untyped-call]


class WatchedLoader(DataLoader[Any]):
    """A ``DataLoader`` with workers, for ``Settings.loader_class``. Arguments are those of ``DataLoader``.

    Torch's signal handler raises wherever training is when a worker ends. Here only the wait for a batch raises.

    Attributes:
        limit: Seconds to wait for a batch; 0: no limit. With torch's ``timeout``, a dead worker is noticed only at its
            end.
        processes: The worker processes of the current pass.
    """

    def __init__(
        self, dataset: Any, timeout: float = 0.0, worker_init_fn: Callable[[int], None] | None = None, **options: Any
    ) -> None:
        super().__init__(dataset, worker_init_fn=partial(start_worker, init=worker_init_fn), **options)
        self.limit = timeout
        self.kills = platform_support.kills()
        self.processes: list[Any] = []
        self.waiting_since = 0.0

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override] # torch's iterator, with other errors
        """The batches of a pass.

        Raises:
            DataError: A batch could not be read, or a worker died or hangs.
        """
        batches: Any = None
        try:
            self.waiting_since = monotonic()
            if self._iterator is None:  # else the workers run already
                self.processes = []  # those of the pass before have ended
                check_open_files(
                    OPEN_FILES_PER_WORKER * self.num_workers + 2 * (self.prefetch_factor or 0) + OPEN_FILES
                )
            with without_stdin(), completing_workers():
                batches = super().__iter__()
            self.processes = unregister_workers(batches)
            if self.limit:
                wait_in_turns(batches, min(self.limit, POLL_SECONDS), self._check_limit)
            iterator = iter(batches)
            while True:
                self.waiting_since = monotonic()
                try:
                    batch = next_batch(iterator, self.processes)
                except StopIteration:
                    return
                yield batch
        except FastloopError:
            raise
        except Exception as error:
            number = self._find_ended(error, batches)
            if number is not None:
                raise self._explain_end(number) from None  # the error shows only where torch noticed it
            if is_unsent(error):
                sent = None if batches is None else find_sent_error(batches)
                if sent is not None:
                    raise _explain(sent) from sent
                raise _explain_limit(error) from None
            raise _explain(error) from error

    def _check_limit(self) -> None:
        if monotonic() - self.waiting_since > self.limit:
            raise DataError(
                f"no batch in {self.limit:g} seconds: a worker that reads data hangs, or the limit is too low for it.",
                code="worker-hangs",
            )

    def _find_ended(self, error: Exception, batches: Any) -> int | None:
        """The number of the worker whose end caused an error of torch; None: the error has another reason.

        Args:
            batches: Torch's iterator; None: it was not made.
        """
        message = str(error)
        named = NAMED_WORKERS.match(message)
        if isinstance(error, RuntimeError) and named is not None:
            pids = [int(pid) for pid in named[1].split(",")]
            return first_ended({n: process for n, process in enumerate(self.processes) if process.pid in pids})
        is_broken = isinstance(error, OSError | EOFError) and not FROM_WORKER.match(message)
        if not is_broken and PIN_THREAD_ENDED not in message:
            return None
        # of an iterable dataset, a worker whose share has ended exits with code 0
        unfinished = {
            number: process
            for number, process in enumerate(self.processes)
            if batches is None or batches._workers_status[number]
        }
        # a worker's connections break before it has an exit code
        ready = connection.wait([process.sentinel for process in unfinished.values()], EXIT_SECONDS)
        for process in unfinished.values():
            if process.sentinel in ready:
                process.join(EXIT_SECONDS)
        return first_ended(unfinished)

    def _explain_end(self, number: int) -> DataError:
        process = self.processes[number]
        if process.exitcode == EXIT_IMPORTED:
            return DataError(f"the workers that read data could not start. {ADVICE}", code="worker-not-started")
        name = signal.Signals(-process.exitcode).name if process.exitcode < 0 else ""
        cause = f"was ended by {name}" if name else f"ended with exit code {process.exitcode}"
        advice = (
            shared_memory_advice()
            if name == "SIGBUS"
            else "To debug it, read the data in the training process (num_workers: 0)."
        )
        if name == "SIGKILL":
            advice = (
                f"{platform_support.explain_kill(self.kills)} Use fewer workers, or let them read less ahead "
                "(prefetch_factor)."
            )
        return DataError(
            f"worker {number} of the {len(self.processes)} that read data (pid {process.pid}) {cause}.",
            code="worker-killed",
            remedy=advice,
        )

    def close(self) -> None:
        """End the workers."""
        iterator: Any = self._iterator
        if iterator is not None:
            iterator._shutdown_workers()
            self._iterator = None
        for process in self.processes:
            if process.exitcode is None:
                process.kill()  # a hanging worker would block the exit of the interpreter


def is_unsent(error: Exception) -> bool:
    """Whether a batch was read, and a worker that did not end could not hand it over: the connection broke, or no file
    is left for the memory that the batch is in."""
    message = str(error)
    if FROM_WORKER.match(message) and "shared memory" not in message:
        return False
    return reached_open_files(error) or isinstance(error, EOFError | ConnectionError) or PIN_THREAD_ENDED in message


def find_sent_error(batches: Any) -> Exception | None:
    """The error of the dataset or the collator that a worker sends in place of a later batch. None: none arrives in
    ``EXIT_SECONDS``.

    A dataset that leaves files open reaches the limit in its own line, or when the worker hands a batch over. Then one
    of the next batches fails in the dataset's line. An error needs no further file to be sent.
    """
    end = monotonic() + EXIT_SECONDS
    while True:
        batches._tasks_outstanding -= 1
        batches._try_put_index()  # the worker reads one more batch
        try:
            _, data = batches._worker_result_queue.get(timeout=max(end - monotonic(), 0.0))
        except Empty:
            return None
        except (OSError, EOFError, RuntimeError):  # one more batch that the worker could not hand over
            continue
        if isinstance(data, ExceptionWrapper):
            try:
                data.reraise()  # type: ignore[no-untyped-call]
            except Exception as error:
                if FROM_WORKER.match(str(error)) and not is_unsent(error):
                    error.__suppress_context__ = True
                    return error


def first_ended(processes: dict[int, Any]) -> int | None:
    """The number of the first worker that failed, else of the first one that ended; None: all run.

    Torch ends a worker with exit code 0 after a ``KeyboardInterrupt``.

    Args:
        processes: Number of a worker -> its process.
    """
    for number, process in processes.items():
        if process.exitcode:
            return number
    for number, process in processes.items():
        if process.exitcode == 0:
            return number
    return None


def check_open_files(needed: int) -> None:
    """Check that the process may open more files. Workers that may not print tracebacks.

    Raises:
        OSError: It may not.
    """
    opened: list[int] = []
    try:
        while len(opened) < needed:
            opened.append(os.open(os.devnull, os.O_RDONLY))
    finally:
        for number in opened:
            os.close(number)


@contextmanager
def completing_workers() -> Iterator[None]:
    """If a worker cannot be started, such as at the limit of processes, let torch's iterator end the workers before it.
    Torch notes their states after the last one, and without them, its destructor prints a traceback."""
    try:
        yield
    except OSError as error:
        for frame, _ in walk_tb(error.__traceback__):
            iterator = frame.f_locals.get("self")
            if isinstance(iterator, _BaseDataLoaderIter) and not hasattr(iterator, "_workers_status"):
                workers = getattr(iterator, "_workers", [])
                iterator._workers_status = [True] * len(workers)  # type: ignore[attr-defined]
        raise


def _explain_limit(error: Exception) -> DataError:
    """The error of a process that reached its limit of open files, in a line that is not the user's.

    Args:
        error: One that names the limit, or that of a connection to a worker that did not end.
    """
    if reached_open_files(error):
        return DataError(TOO_MANY_FILES.text, code=TOO_MANY_FILES.code, remedy=TOO_MANY_FILES.remedy)
    return DataError(
        "a worker that reads data could not hand a batch over, and did not end: it has reached its limit of open "
        "files.",
        code=TOO_MANY_FILES.code,
        remedy=CLOSE_FILES,
    )


def _explain(error: Exception) -> DataError:
    message = explain_error(error)
    is_full = "shared memory" in message or getattr(error, "errno", 0) == errno.ENOSPC
    if reached_open_files(error):
        is_full = False
    return DataError(f"{message}. {shared_memory_advice()}" if is_full else message, code="reading-failed")


def shared_memory_advice() -> str:
    """Advice for full shared memory, with its free space."""
    room = ""
    with suppress(OSError):
        usage = shutil.disk_usage("/dev/shm")  # only Linux has it
        room = f": {usage.free / 2**20:,.1f} of {usage.total / 2**20:,.1f} MiB of /dev/shm are free"
    return (
        f"Workers send batches through shared memory{room}. Make it larger (docker run --shm-size=8g), use fewer "
        "workers or a smaller prefetch_factor, or read the data in the training process (num_workers: 0)."
    )


def start_worker(number: int, init: Callable[[int], None] | None) -> None:
    """Set up signals and errors of worker ``number``, show the user's dataset in ``get_worker_info()``, and call the
    user's ``init``."""
    _ignore_signals()
    sys.excepthook = _print_unless_limited
    worker.ExceptionWrapper = WorkerError  # type: ignore[attr-defined]
    Queue._on_queue_feeder_error = _send_error  # type: ignore[attr-defined]
    info = get_worker_info()
    assert info is not None
    object.__setattr__(info, "dataset", info.dataset.dataset)  # type: ignore[attr-defined] # frozen
    if init is not None:
        init(number)


def _print_unless_limited(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an uncaught error, but not one about the limit of open files. Python's thread that hands batches over calls
    this, and the training process reports the limit."""
    if not reached_open_files(error):
        sys.__excepthook__(kind, error, trace)


def _send_error(queue: Any, error: Exception, item: Any) -> None:
    """Send the error of a batch that cannot be sent (shared memory is full) in its place. Python only prints it, and
    the run would wait."""
    if not isinstance(item, tuple) or not isinstance(item[-1], Batch | ExceptionWrapper):
        _print_error(error, item)  # from a queue of the user
        return
    report = item[-1] if isinstance(item[-1], WorkerError) else WorkerError(where="in its thread")
    report.error = None
    report.exc_type = RuntimeError  # an error's own class may be the reason that it could not be sent
    queue.put((item[0], report))


def _ignore_signals() -> None:
    """Leave stop signals to the training process: they often reach a complete process group. Accept SIGTERM only from
    that process. End soon after it, also while the dataset waits."""
    for number in platform_support.existing_signals("SIGINT", "SIGUSR1", "SIGHUP"):
        signal.signal(number, signal.SIG_IGN)
    if hasattr(signal, "sigwaitinfo"):  # Linux
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        trainer = multiprocessing.parent_process()
        assert trainer is not None
        threading.Thread(target=_end_with_parent, args=(os.getppid(), trainer.pid), daemon=True).start()


def _end_with_parent(parent: int, trainer: int | None) -> None:
    """End this worker when the training process sends SIGTERM, or has ended.

    A worker that is forked has the connections of the training process. As long as it lives, the other processes of the
    run do not see that the training process was killed.

    Args:
        parent: The process that has started this one: the training process, or Python's fork server.
        trainer: The training process.
    """
    while os.getppid() == parent:
        received = signal.sigtimedwait([signal.SIGTERM], PARENT_SECONDS)
        if received is not None and received.si_pid == trainer:
            break
    os._exit(0)


def unregister_workers(batches: Any) -> list[Any]:
    """Remove the workers of a ``DataLoader``'s iterator from torch's signal handler, and return their processes."""
    processes: list[Any] = batches._workers
    if batches._worker_pids_set:
        _C._remove_worker_pids(id(batches))
        batches._worker_pids_set = False
    return processes


def wait_in_turns(batches: Any, seconds: float, expired: Callable[[], None]) -> None:
    """Make the iterator wait at most ``seconds`` at a time for its workers, and call ``expired`` after each wait
    without a batch."""
    if "_try_get_data" in vars(batches):  # persistent workers have one iterator for all epochs
        return
    try_get_data: Any = weakref.WeakMethod(batches._try_get_data)  # a reference cycle would keep the workers

    def wait() -> tuple[bool, Any]:
        result: tuple[bool, Any] = try_get_data()(seconds)
        if not result[0]:
            expired()
        return result

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
