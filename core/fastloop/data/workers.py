"""What a worker process does before it reads data."""

from __future__ import annotations

import os
import signal
import threading


def leave_signals(worker: int) -> None:
    """In a worker: what asks a run to end is for the process that it reads for, and often reaches a whole group or job of processes.
    SIGTERM counts only from that process, which ends its workers by it."""
    for number in (signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    if hasattr(signal, "sigwaitinfo"):  # Linux
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    while signal.sigwaitinfo([signal.SIGTERM]).si_pid != os.getppid():
        pass
    os._exit(0)
