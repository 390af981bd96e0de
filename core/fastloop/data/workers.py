"""What a worker process does before it reads data."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable

from torch.utils.data import get_worker_info

from fastloop.runtime.platform_support import existing_signals


def start_worker(number: int, init: Callable[[int], None] | None) -> None:
    """Set up worker ``number``: its signals, the dataset that ``get_worker_info()`` shows, and what the user's ``init`` does."""
    _leave_signals()
    info = get_worker_info()
    assert info is not None
    object.__setattr__(info, "dataset", info.dataset.dataset)  # type: ignore[attr-defined] # the user's, not what reads it; it is frozen
    if init is not None:
        init(number)


def _leave_signals() -> None:
    """What asks a run to end is for the process that it reads for, and often reaches a whole group or job of processes.
    SIGTERM counts only from that process, which ends its workers by it."""
    for number in existing_signals("SIGINT", "SIGUSR1"):
        signal.signal(number, signal.SIG_IGN)
    if hasattr(signal, "sigwaitinfo"):  # Linux
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    while signal.sigwaitinfo([signal.SIGTERM]).si_pid != os.getppid():
        pass
    os._exit(0)
