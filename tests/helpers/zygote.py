"""A process without threads that forks others for one with threads, such as torchrun.

A fork copies the memory of all threads, but only the thread that forks continues: a lock that another one held stays
locked for ever. So a launcher with threads may not fork. It asks its zygote, which it forked before its first thread.

    zygote = Zygote.start(become)
    pid = zygote.fork(request, (0, 1, 2))  # become(request, streams) runs in the new process, a child of the caller
"""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

ADOPT_ORPHANS = 36
"""PR_SET_CHILD_SUBREAPER of <sys/prctl.h>: a process whose parent ends becomes a child of this one."""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
SIZE = struct.Struct("!I")
PID = struct.Struct("!i")

Become = Callable[[Any, Sequence[int]], NoReturn]
"""Called in a new process with a request and three file descriptors: stdin, stdout and stderr."""


class Zygote:
    """The connection to a zygote, which ends when this is closed.

    Args:
        connection: Its end of a pair of sockets.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._lock = threading.Lock()

    @classmethod
    def start(cls, become: Become, prepare: Callable[[], None] | None = None) -> Zygote:
        """Fork a zygote from this process, which has no other thread yet.

        Args:
            prepare: The zygote calls it before it forks others.
        """
        adopt_orphans(True)
        ours, theirs = socket.socketpair()
        if os.fork() == 0:
            try:
                ours.close()
                if prepare is not None:
                    prepare()
                _serve(theirs, become)
            finally:
                os._exit(1)  # after an error: the launcher's code must not run here
        theirs.close()
        return cls(ours)

    def fork(self, request: Any, streams: Sequence[int]) -> int:
        """Fork a process for ``become``. Returns its id; it is a child of the process that has started the zygote.

        Raises:
            EOFError: The zygote has ended.
        """
        message = pickle.dumps(request)
        with self._lock:
            socket.send_fds(self.connection, [SIZE.pack(len(message))], streams)
            self.connection.sendall(message)
            return PID.unpack(_receive(self.connection, PID.size))[0]


def adopt_orphans(is_on: bool) -> None:
    """Let processes whose parent ends become children of this one, or no longer."""
    if ctypes.CDLL(None, use_errno=True).prctl(ADOPT_ORPHANS, int(is_on), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


def _serve(connection: socket.socket, become: Become) -> NoReturn:
    """Fork a process for each request, until the connection is closed."""
    # a signal for the group of the launcher is for its other processes
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    while True:
        header, streams, _, _ = socket.recv_fds(connection, SIZE.size, maxfds=3)
        if not header:
            os._exit(0)
        request = pickle.loads(_receive(connection, SIZE.unpack(header)[0]))
        reading, writing = os.pipe()
        between = os.fork()
        if between == 0:
            parent = os.getpid()
            pid = os.fork()
            if pid == 0:
                while os.getppid() == parent:  # until this is a child of the launcher
                    time.sleep(0.001)
                signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
                become(request, streams)
            os.write(writing, PID.pack(pid))
            os._exit(0)
        os.waitpid(between, 0)
        connection.sendall(os.read(reading, PID.size))
        for number in (reading, writing, *streams):
            os.close(number)


def _receive(connection: socket.socket, size: int) -> bytes:
    """Read ``size`` bytes."""
    received = b""
    while len(received) < size:
        part = connection.recv(size - len(received))
        if not part:
            raise EOFError("the zygote has ended, or its launcher")
        received += part
    return received
