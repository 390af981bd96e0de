"""The store in which the processes of a run meet."""

from __future__ import annotations

import errno
import logging
import os
import socket
from collections.abc import Sequence
from datetime import timedelta
from time import monotonic, sleep
from typing import Any

from fastloop.distributed.ranks import (
    LOOPBACK,
    has_torchrun_store,
    launcher_variables,
    rank,
    store_maker,
    unset_remedy,
    world_size,
)
from fastloop.distributed.watched_calls import call_watched
from fastloop.errors import ProcessLost, UsageError
from fastloop.problem import Problem, agree, clause, counted, join_names

log = logging.getLogger("fastloop")

LOG_AFTER = 10.0
"""Seconds after which a process logs for which others it waits. Processes that are started together are together within
a few seconds, on a loaded machine, too."""
CONNECT_SECONDS = 30.0
"""Seconds in which a store must answer a process that waits."""
LONGEST_PAUSE = 1.0
"""Seconds between two looks for the other processes, at most."""
NAMED = 8
"""Processes that a message lists at most."""
OWNER = "fastloop/0"
"""Key of the process with rank 0, in a store that it has made."""
IMPORTED = os.urandom(16).hex()
"""Differs in processes of two machines, which may have the same process id."""
SIZE = "fastloop/size"
"""Key of the number of processes for which process 0 waits, in a store that it has made."""
BEGUN = "fastloop/begun"
"""Key that says that all processes have met, in a store that process 0 has made."""
START_ALL = (
    "Start all processes with the same MASTER_ADDR and MASTER_PORT. If one has ended, its output has the reason."
)
"""The remedy if processes are missing."""


def store_arguments(timeout: timedelta | None = None) -> dict[str, Any]:
    """Arguments of ``PartialState``: a store in which all processes of the run have met.

    torch waits for the others in C++, where Python handles no signal, and for an answer of the store without a limit.
    Here, a process waits in Python, and logs for which others.

    Torch binds a store to all addresses, and anyone who reaches it can write to it. The processes of one machine do not
    need that: their store is at the loopback address.

    Torchrun keeps the store when it starts processes again (torch 2.13). The default part still has the addresses of
    the earlier processes, and a process that reads them waits for processes that have ended. So each start has a part
    of its own. Torchrun's count of restarts does not identify a start: each machine has its own, and a machine that
    joins or leaves changes none.

    Args:
        timeout: How long a process waits for the others; None: torch's default.

    Returns:
        ``store``, ``rank`` and ``world_size``. Empty if the processes are connected already.

    Raises:
        ProcessLost: Not all processes came in time, or another program listens at the address.
        UsageError: The port is in use, another process has the same rank, or processes have different world sizes.
    """
    from torch.distributed import (  # type: ignore[attr-defined]
        DistNetworkError,
        PrefixStore,
        default_pg_timeout,
        is_initialized,
    )

    if is_initialized():  # by an earlier run of this process
        return {}
    host = os.environ["MASTER_ADDR"]
    port = int(os.environ.get("MASTER_PORT") or 29500)
    meeting = Meeting(host, port, timeout or default_pg_timeout)

    def meet() -> Any:
        store = _open_store(meeting)
        return PrefixStore(_name_start(store, meeting), store)

    try:
        store = call_watched(meet, meeting.check_answers)
    except DistNetworkError as error:
        raise ProcessLost(
            f"process {rank()} of {world_size()} could not connect to the others: {store_maker()}, which made the "
            f"store at {host}:{port} in which processes meet, has ended.",
            code="process-lost",
            remedy="Its output has the reason.",
        ) from error
    finally:
        meeting.is_over = True
    return {"store": store, "rank": rank(), "world_size": world_size()}


class Meeting:
    """How long a process has waited for the others, and where.

    Args:
        host: The address of the store.
        port: Its port.
        timeout: How long the process waits.

    Attributes:
        is_over: Whether this process has given up. The thread that still waits then ends, too.
        has_own_store: Whether process 0 makes the store, for the processes of this run only. Torchrun's own store has
            the entries of earlier starts, too.
    """

    def __init__(self, host: str, port: int, timeout: timedelta) -> None:
        self.host = host
        self.port = port
        self.timeout = timeout
        self.is_over = False
        self.has_own_store = not has_torchrun_store()
        self._began = monotonic()
        self._answered = self._began
        self._logged: Sequence[int] = ()

    @property
    def waited(self) -> float:
        """Seconds since the process began to wait."""
        return monotonic() - self._began

    def pause(self, missing: Sequence[int], logs: bool = True, since: float | None = None) -> None:
        """Sleep until the next look, a tenth of the time that the process has waited.

        Args:
            missing: The processes that have not come.
            logs: Whether to log them after ``LOG_AFTER``, once.
            since: The time from which the tenth counts; None: from the beginning.

        Raises:
            ProcessLost: The time is over.
        """
        self._answered = monotonic()
        waited = self.waited
        if self.is_over or waited > self.timeout.total_seconds():
            raise ProcessLost(
                f"process {rank()} of {world_size()} could not connect to the others: "
                f"{self._explain(missing)} within {self.timeout.total_seconds():g} seconds.",
                code="process-lost",
                remedy=f"{START_ALL} If they start at different times, raise the option timeout of the strategy.",
            )
        if logs and waited > LOG_AFTER and not set(missing) <= set(self._logged):
            self._logged = missing
            log.warning(
                Problem(
                    f"process {rank()} of {world_size()} waits for the others: {self._explain(missing)} yet.",
                    code="process-missing",
                    remedy=f"{START_ALL} {unset_remedy()}",
                )
            )
        if since is not None:
            waited = monotonic() - since
        sleep(min(max(waited / 10, 0.01), LONGEST_PAUSE))

    def check_answers(self) -> None:
        """Check that the store answers.

        Raises:
            ProcessLost: It has not done so for too long.
        """
        limit = min(self.timeout.total_seconds(), CONNECT_SECONDS)
        if monotonic() - self._answered > limit + LONGEST_PAUSE:
            raise ProcessLost(
                f"process {rank()} of {world_size()} could not connect to the others: the program at "
                f"{self.host}:{self.port} accepts connections, and has not answered for {limit:g} seconds.",
                code="process-lost",
                remedy=(
                    "If it is another program, give all processes of this run another MASTER_PORT. If it is process 0 "
                    f"of a run, it is stopped: end it. {unset_remedy()}"
                ),
            )

    def _explain(self, missing: Sequence[int]) -> str:
        """Which processes are missing where, as a part of a sentence."""
        numbers = ", ".join(map(str, missing[:NAMED]))
        if len(missing) > NAMED:
            numbers += ", ..."
        named = agree(len(missing), f"process {numbers} has", f"processes {numbers} have")
        asked = f"{counted(world_size(), 'process')} at {self.host}:{self.port}"
        return f"{join_names(launcher_variables())} ask for {asked}, and {named} not come"


def _open_store(meeting: Meeting) -> Any:
    """The store at the address of the launcher. Rank 0 makes it, unless torchrun has done so; others wait until it
    accepts connections.

    Raises:
        ProcessLost: There is no store, or another program answers.
        UsageError: The port is in use.
    """
    from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]

    host, port = meeting.host, meeting.port
    if rank() == 0 and meeting.has_own_store:
        try:
            fd = socket.create_server((host, port)).detach() if host == LOOPBACK else None
            return TCPStore(
                host,
                port,
                is_master=True,
                wait_for_workers=False,
                timeout=meeting.timeout,
                multi_tenant=fd is None,  # a process whose earlier store still lives uses it again
                master_listen_fd=fd,
            )
        except (OSError, DistError) as error:
            is_in_use = getattr(error, "errno", None) == errno.EADDRINUSE or "EADDRINUSE" in str(error)
            if not is_in_use:
                raise
            raise UsageError(
                f"the port {port} of MASTER_PORT is in use: another run or another program listens there.",
                code="port-in-use",
                remedy=f"End it, or give all processes of this run another MASTER_PORT. {unset_remedy()}",
            ) from error
    while not _accepts_connections(host, port):
        meeting.pause([0])
    try:
        store = TCPStore(
            host,
            port,
            is_master=False,
            wait_for_workers=False,
            timeout=min(meeting.timeout, timedelta(seconds=CONNECT_SECONDS)),
        )
    except DistError as error:
        raise ProcessLost(
            f"process {rank()} of {world_size()} could not connect to the others: the program at {host}:{port} does "
            f"not answer as process 0 of a run does: {clause(error)}.",
            code="process-lost",
            remedy=START_ALL,
        ) from error
    store.set_timeout(meeting.timeout)
    return store


def _accepts_connections(host: str, port: int) -> bool:
    """Whether a program accepts connections at an address."""
    try:
        socket.create_connection((host, port), timeout=LONGEST_PAUSE).close()
    except OSError:
        return False
    return True


def _name_start(store: Any, meeting: Meeting) -> str:
    """A new name from rank 0, the same on every process that starts now. Every process must call it.

    Each other process writes a random key, and rank 0 writes the name under that key. A key may be one that an earlier
    process left in the store, and its successor has not replaced yet: then nobody reads the answer. So rank 0 answers
    again and again, until every process has confirmed that it has the name. Then rank 0 writes that the run has begun,
    and all continue together.

    Raises:
        ProcessLost: Not all processes came in time.
        UsageError: Another process has the same rank, or another number of processes.
    """
    own_key = os.urandom(16).hex()
    if rank():
        return _wait_for_name(store, meeting, own_key)
    if meeting.has_own_store:
        _own(store, meeting)
        store.delete_key(BEGUN)  # of an earlier run of this process
        store.set(SIZE, str(world_size()))
    others = range(1, world_size())
    missing = [*others]
    while missing:
        come = [other for other in missing if store.check([f"fastloop/{other}"])]
        for other in come:
            key = store.get(f"fastloop/{other}").decode()
            store.set(f"fastloop/{key}", f"{own_key} {world_size()}")
        missing = []
        for other in others:
            confirmation = f"{own_key}/{other}"
            if not store.check([confirmation]):
                missing.append(other)
                continue
            _check_size(other, int(store.get(confirmation)))
        if missing:
            awaited = [other for other in missing if other not in come]
            meeting.pause(awaited or missing)
    store.set(f"{own_key}/begun", "")
    if meeting.has_own_store:
        store.set(BEGUN, "")
    return own_key


def _own(store: Any, meeting: Meeting) -> None:
    """Write into the store that this process has rank 0. On another machine than that of the store, a process of rank 0
    connects to it, too.

    Raises:
        UsageError: Another process has written that.
    """
    this = f"{os.getpid()} {IMPORTED}"
    owner: str = store.compare_set(OWNER, "", this).decode()
    if owner != this:
        raise UsageError(
            f"another process has the same rank 0, and has made the store at {meeting.host}:{meeting.port}.",
            code="wrong-environment",
            place="RANK",
            remedy=(
                f"Give each of the {world_size()} processes a RANK of its own, from 0. With --nnodes, give each "
                "machine a --node-rank of its own."
            ),
        )


def _wait_for_name(store: Any, meeting: Meeting, own_key: str) -> str:
    """The name that rank 0 has written under ``own_key``.

    Raises:
        ProcessLost: Rank 0 did not write it in time.
        UsageError: Another process has the same rank, or another number of processes.
    """
    own_name = f"fastloop/{rank()}"
    store.set(own_name, own_key)

    def wait_for(key: str, is_named: bool) -> None:
        since = monotonic()
        while not store.check([key]):
            if store.get(own_name).decode() != own_key:
                raise UsageError(
                    f"another process has the same rank {rank()}, and has connected to process 0.",
                    code="wrong-environment",
                    place="RANK",
                    remedy=f"Give each of the {world_size()} processes a RANK of its own, from 0.",
                )
            if not is_named and meeting.has_own_store and meeting.waited > LOG_AFTER:
                _explain_silence(store, meeting)
            meeting.pause([0], logs=False, since=since)  # rank 0 logs for which processes it waits

    wait_for(f"fastloop/{own_key}", is_named=False)
    start_name, size = store.get(f"fastloop/{own_key}").decode().split()
    store.set(f"{start_name}/{rank()}", str(world_size()))
    _check_size(0, int(size))
    wait_for(f"{start_name}/begun", is_named=True)
    return str(start_name)


def _explain_silence(store: Any, meeting: Meeting) -> None:
    """Check why rank 0 does not answer this process.

    Raises:
        UsageError: It waits for fewer processes, or they have begun already.
    """
    if store.check([SIZE]):
        _check_size(0, int(store.get(SIZE)))
    if store.check([BEGUN]):
        raise UsageError(
            f"process {rank()} of {world_size()} came too late: all {world_size()} processes have connected to "
            f"process 0 at {meeting.host}:{meeting.port}, and one of them has the same rank {rank()}.",
            code="wrong-environment",
            place="RANK",
            remedy=(
                f"Give each of the {world_size()} processes a RANK of its own, from 0. For another run, set another "
                "MASTER_PORT."
            ),
        )


def _check_size(other: int, size: int) -> None:
    """Check that another process has the same number of processes.

    Raises:
        UsageError: It has not.
    """
    if size != world_size():
        raise UsageError(
            f"process {rank()} is one of {world_size()}, and process {other} is one of {size}.",
            code="wrong-environment",
            place="WORLD_SIZE",
            remedy="Give all processes of a run the same WORLD_SIZE. For another run, set another MASTER_PORT.",
        )
