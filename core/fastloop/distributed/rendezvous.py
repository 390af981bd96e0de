"""The store in which the processes of a run meet."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from time import monotonic, sleep
from typing import Any

from fastloop.distributed.ranks import LOOPBACK, rank, world_size


def store_arguments(timeout: timedelta | None = None) -> dict[str, Any]:
    """Arguments of ``PartialState``: a store on the loopback address for one machine, and a part of torchrun's store.

    Torch binds the store to all addresses, and anyone who reaches it can write to it. The processes of one machine do
    not need that.

    Torchrun keeps the store when it starts processes again (torch 2.13). The default part still has the addresses of
    the earlier processes, and a process that reads them waits for processes that have ended. Torchrun's count of
    restarts does not identify a start: each machine has its own, and a machine that joins or leaves changes none.

    Args:
        timeout: How long a process waits for the store and for the answer of rank 0; None: torch's default.

    Returns:
        ``store``, ``rank`` and ``world_size``. Empty if torch makes the store: several machines without torchrun, or
        processes that are connected already.
    """
    has_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    host = os.environ.get("MASTER_ADDR", "")
    if not (has_agent or host == LOOPBACK):
        return {}
    from torch.distributed import PrefixStore, TCPStore, default_pg_timeout, is_initialized  # type: ignore[attr-defined]

    if is_initialized():  # by an earlier run of this process
        return {}
    port = int(os.environ.get("MASTER_PORT") or 29500)
    serves = not has_agent and rank() == 0
    fd = socket.create_server((host, port)).detach() if serves else None
    store = TCPStore(
        host,
        port,
        is_master=serves,
        wait_for_workers=False,
        timeout=timeout or default_pg_timeout,
        master_listen_fd=fd,
    )
    return {
        "store": PrefixStore(_name_start(store), store) if has_agent else store,
        "rank": rank(),
        "world_size": world_size(),
    }


def _name_start(store: Any) -> str:
    """A new name from rank 0, the same on every process that starts now. Every process must call it.

    Each other process writes a random key, and rank 0 writes the name under that key. A key may be one that an earlier
    process left in the store, and its successor has not replaced yet: then nobody reads the answer. So rank 0 answers
    again and again, until every process has confirmed that it has the name. At the store's timeout, rank 0 gives up,
    and torch cannot connect the processes.
    """
    own_key = os.urandom(16).hex()
    if rank():
        store.set(f"fastloop/{rank()}", own_key)
        start_name: str = store.get(f"fastloop/{own_key}").decode()  # waits for the answer
        store.add(start_name, 1)
        return start_name
    others = [f"fastloop/{other}" for other in range(1, world_size())]
    deadline = monotonic() + store.timeout.total_seconds()
    while store.add(own_key, 0) < len(others) and monotonic() < deadline:
        answers = [f"fastloop/{key.decode()}" for key in store.multi_get(others)]
        store.multi_set(answers, [own_key] * len(others))
        sleep(0.1)
    return own_key
