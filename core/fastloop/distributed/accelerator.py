"""Build Accelerate's ``Accelerator`` from the settings of plugins and the environment of the processes."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any

from fastloop.distributed.processes import Processes
from fastloop.distributed.ranks import LOOPBACK, rank, world_size
from fastloop.errors import PluginError
from fastloop.plugins.installed import part
from fastloop.recipe import Recipe
from fastloop.runtime.hardware import this_machine
from fastloop.settings import Settings

if TYPE_CHECKING:
    from accelerate import Accelerator

    from fastloop.plugins.manager import PluginSet


PRECISIONS = ("no", "bf16", "fp16")
"""Accelerate's mixed precisions that keep the model's parameters. Its fp8 replaces them after the optimizer was
built."""


def build_accelerator(recipe: Recipe, resolution: PluginSet, settings: Settings) -> tuple[Accelerator, Processes]:
    """Build the run's ``Accelerator``, and connect its processes.

    Raises:
        PluginError: A plugin set a precision that is not in ``PRECISIONS``; or see ``check_processes``.
    """
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, PartialState

    if settings.mixed_precision not in PRECISIONS:
        raise PluginError(
            f"{recipe.where}: plugin {settings.writers['mixed_precision']!r} set mixed_precision to "
            f"{settings.mixed_precision!r}. Expected one of: {', '.join(PRECISIONS)}. For another precision, convert "
            "layers in before_prepare."
        )
    part("plugin-checks").check_processes(recipe, resolution, world_size() if recipe.inference is None else 1)
    # explicit, because otherwise Accelerate does not connect processes on CPUs
    cpu = this_machine(recipe.train.device).device == "cpu"
    if AcceleratorState._shared_state and AcceleratorState().mixed_precision != settings.mixed_precision:
        AcceleratorState._reset_state(reset_partial_state=False)  # an earlier run of this process had another precision
    timeout = None if settings.process_timeout is None else timedelta(seconds=settings.process_timeout)
    connection = settings.init_handler.to_kwargs() if settings.init_handler else {}
    PartialState(cpu=cpu, **connection, **({"timeout": timeout} if timeout else {}), **_own_store())
    handlers = [*filter(None, (settings.ddp_handler, settings.scaler_handler, settings.init_handler))]
    accelerator = Accelerator(mixed_precision=settings.mixed_precision, cpu=cpu, kwargs_handlers=handlers)
    # transformers' TrainingArguments clears the state that all share
    accelerator.state.__dict__ = dict(accelerator.state.__dict__)
    return accelerator, Processes(accelerator, timeout)


def restore_shared_state(accelerator: Accelerator) -> None:
    """Put back the state that Accelerate's classes share, if user code cleared it. Accelerate reads it while it
    prepares."""
    type(accelerator.state)._shared_state.update(vars(accelerator.state))


def _own_store() -> dict[str, Any]:
    """Arguments of ``PartialState``: a store on the loopback address for one machine, and a part of torchrun's store.

    Torch binds the store to all addresses, and anyone who reaches it can write to it. The processes of one machine do
    not need that.

    Torchrun keeps the store when it starts processes again (torch 2.13). The default part still has the addresses of
    the earlier processes, and a process that reads them waits for processes that have ended. Torchrun's count of
    restarts does not identify a start: each machine has its own, and a machine that joins or leaves changes none.
    """
    has_agent, host = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True", os.environ.get("MASTER_ADDR", "")
    if world_size() == 1 or not (has_agent or host == LOOPBACK):
        return {}
    from torch.distributed import PrefixStore, TCPStore, default_pg_timeout, is_initialized  # type: ignore[attr-defined]

    if is_initialized():  # by an earlier run of this process
        return {}
    port, serves = int(os.environ.get("MASTER_PORT") or 29500), not has_agent and rank() == 0
    fd = socket.create_server((host, port)).detach() if serves else None
    store = TCPStore(
        host, port, is_master=serves, wait_for_workers=False, timeout=default_pg_timeout, master_listen_fd=fd
    )
    return {
        "store": PrefixStore(_name_start(store), store) if has_agent else store,
        "rank": rank(),
        "world_size": world_size(),
    }


def _name_start(store: Any) -> str:
    """A new name from rank 0, the same on every process that starts now. Every process must call it.

    Each other process writes a random key, and rank 0 answers under that key. Keys of earlier processes may be in the
    store, too: nobody reads the answers to them. So rank 0 answers until every process has confirmed, or until the
    store's timeout: then the connection of the processes fails.
    """
    mine, others = os.urandom(16).hex(), [f"fastloop/{other}" for other in range(1, world_size())]
    if rank():
        store.set(f"fastloop/{rank()}", mine)
        store.add(name := store.get(f"fastloop/{mine}").decode(), 1)
        return str(name)
    deadline = monotonic() + store.timeout.total_seconds()
    while store.add(mine, 0) < len(others) and monotonic() < deadline:
        store.multi_set([f"fastloop/{key.decode()}" for key in store.multi_get(others)], [mine] * len(others))
        sleep(0.1)
    return mine
