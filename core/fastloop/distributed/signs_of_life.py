"""Signs of life of the processes of a run while gloo connects them. Gloo waits for a process that has ended until its
timeout, which is 30 minutes by default."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import wait
from time import monotonic
from typing import Any

import torch
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from fastloop.distributed.ranks import rank, store_maker, world_size
from fastloop.distributed.watched_calls import call_watched, start_call
from fastloop.errors import ProcessLost
from fastloop.problem import Problem, agree

log = logging.getLogger("fastloop")

LOST_AFTER = 20.0
"""Seconds without a sign of life after which a process counts as ended. A loaded machine stalls a process for less."""
BEAT_SECONDS = 0.5
"""Seconds between two signs of life."""
SLOW_AFTER = 10.0
"""Seconds after which a process logs that gloo has not connected it. It needs less than a second."""
CONNECTED = "connected"
"""The last sign of a process: gloo has connected it."""


def connect_gloo(store: Any, **options: Any) -> None:
    """Make the default process group, on gloo. Every process must call it.

    Args:
        store: The store in which the processes have met.
        options: Further arguments of ``init_process_group``.

    Raises:
        ProcessLost: A process has ended before all were connected.
    """
    signs = SignsOfLife(PrefixStore("alive", store.clone()))

    def connect() -> None:
        torch.distributed.init_process_group("gloo", store=store, **options)

    try:
        call_watched(connect, signs.check)
    finally:
        signs.end()


class SignsOfLife:
    """Counts in the store as long as this process runs, and reads the counts of the others, in a thread.

    Args:
        store: A store with a connection of its own. Gloo waits in the one of the group, and lets no other call through.
    """

    def __init__(self, store: Any) -> None:
        self._store = store
        self._over = threading.Event()
        now = monotonic()
        self._began = now
        self._is_logged = False
        self._answered = now
        self._seen = dict.fromkeys(range(world_size()), now)
        self._counts: dict[int, str] = {}
        self._thread = start_call(self._exchange)

    def check(self) -> None:
        """Check that all processes still run, and log if gloo needs long to connect them.

        Raises:
            ProcessLost: One does not.
        """
        now = monotonic()
        if self._thread.done() or now - self._answered > LOST_AFTER:
            raise ProcessLost(
                f"process {rank()} of {world_size()} could not connect to the others: {store_maker()}, which made the "
                "store in which processes meet, has ended or is stopped.",
                code="process-lost",
                remedy="Its output has the reason.",
            )
        lost = [other for other, seen in self._seen.items() if now - seen > LOST_AFTER]
        if lost:
            numbers = ", ".join(map(str, lost))
            named = agree(len(lost), f"process {numbers} has", f"processes {numbers} have")
            raise ProcessLost(
                f"process {rank()} of {world_size()} could not connect to the others: {named} given no sign of life "
                f"for {LOST_AFTER:g} seconds.",
                code="process-lost",
                remedy="Either it has ended, and its output has the reason, or it is stopped.",
            )

        if now - self._began > SLOW_AFTER and not self._is_logged:
            self._is_logged = True
            log.warning(
                Problem(
                    f"process {rank()} of {world_size()} waits for the others: all have come, and gloo has not "
                    f"connected them for {SLOW_AFTER:g} seconds.",
                    code="process-missing",
                    remedy=(
                        "If they are on several machines, set GLOO_SOCKET_IFNAME to the interface by which the others "
                        "reach this machine, such as eth0, and let firewalls permit all ports."
                    ),
                )
            )

    def end(self) -> None:
        """This process is connected, or has given up. No thread is left when this returns, unless the store does not
        answer."""
        self._over.set()
        wait([self._thread], 4 * BEAT_SECONDS)

    def _exchange(self) -> None:
        """Write this process's count and read the others', until this process is connected."""
        others = [other for other in self._seen if other != rank()]
        beats = 0
        while not self._over.is_set():
            beats += 1
            self._store.set(str(rank()), str(beats))
            self._seen[rank()] = self._answered = monotonic()
            for other in others:
                if not self._store.check([str(other)]):
                    continue
                count = self._store.get(str(other)).decode()
                if count == CONNECTED or count != self._counts.get(other):
                    self._seen[other] = monotonic()
                self._counts[other] = count
            self._over.wait(BEAT_SECONDS)
        self._store.set(str(rank()), CONNECTED)
