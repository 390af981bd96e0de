"""Build Accelerate's ``Accelerator`` from the settings of plugins and the environment of the processes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

from fastloop.distributed.at_exit import group_at_exit
from fastloop.distributed.groups import check_groups
from fastloop.distributed.processes import Processes, is_connection_error
from fastloop.distributed.ranks import LOCAL_RANK, check_variables, rank, world_size
from fastloop.distributed.rendezvous import store_arguments
from fastloop.distributed.signs_of_life import connect_gloo
from fastloop.errors import PluginError, ProcessLost, UsageError
from fastloop.problem import clause, counted
from fastloop.recipe import Recipe
from fastloop.runtime.hardware import this_machine
from fastloop.settings import Settings

if TYPE_CHECKING:
    from accelerate import Accelerator

PRECISIONS = ("no", "bf16", "fp16")
"""Accelerate's mixed precisions that keep the model's parameters. Its fp8 replaces them after the optimizer was
built."""

VISIBLE_DEVICES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
"""Variables that restrict the devices that a process sees."""


def build_accelerator(recipe: Recipe, settings: Settings) -> tuple[Accelerator, Processes]:
    """Build the run's ``Accelerator``, and connect its processes.

    Raises:
        PluginError: A plugin set a precision that is not in ``PRECISIONS``; or see ``check_groups``.
        UsageError: The variables of the launcher do not describe one group of processes.
    """
    from accelerate import Accelerator

    if settings.mixed_precision not in PRECISIONS:
        raise PluginError(
            f"plugin {settings.writers['mixed_precision']!r} set mixed_precision to {settings.mixed_precision!r}.",
            code="unknown-choice",
            place=recipe.where,
            expected=f"one of: {', '.join(PRECISIONS)}",
            remedy="For another precision, convert layers in before_prepare.",
        )
    check_variables(trains=recipe.inference is None)
    check_groups(recipe, settings, world_size() if recipe.inference is None else 1)
    device = this_machine(recipe.train.device).device
    if device != "cpu":
        check_local_rank(device, torch.accelerator.device_count())
    _forget_earlier_run(device, settings.mixed_precision)
    timeout = None
    if settings.process_timeout is not None:
        timeout = timedelta(seconds=settings.process_timeout)
    _connect(device, settings, timeout)
    handlers = []
    for handler in (settings.ddp_handler, settings.scaler_handler, settings.init_handler):
        if handler is not None:
            handlers.append(handler)
    accelerator = Accelerator(mixed_precision=settings.mixed_precision, cpu=device == "cpu", kwargs_handlers=handlers)
    if accelerator.num_processes != world_size():  # on an accelerator, it needs the local rank
        raise UsageError(
            f"the environment has {counted(world_size(), 'process')}, and torch connected {accelerator.num_processes}.",
            code="wrong-environment",
            remedy=(
                "Set WORLD_SIZE, RANK, LOCAL_RANK, MASTER_ADDR and MASTER_PORT for each process, as torchrun and "
                "--nproc N do."
            ),
        )
    # transformers' TrainingArguments clears the state that all share
    accelerator.state.__dict__ = dict(accelerator.state.__dict__)
    return accelerator, Processes(accelerator, timeout)


def check_local_rank(device: str, devices: int) -> None:
    """Check that this process has a device of its own. Accelerate would give it that of another process.

    A launcher may show each process only its own device: then all use device 0, and the variable that does so is set.

    Args:
        devices: Number of devices of the type ``device`` that this process sees.

    Raises:
        UsageError: There are more processes on this machine than devices.
    """
    local_rank = int(os.environ.get(LOCAL_RANK) or 0)
    is_restricted = any(os.environ.get(name) for name in VISIBLE_DEVICES)
    if local_rank < devices or (devices == 1 and is_restricted):
        return
    raise UsageError(
        f"the environment variable {LOCAL_RANK} is {local_rank}, and this process sees "
        f"{counted(devices, 'device')} of type {device}. Each process of a machine needs one of its own.",
        code="wrong-environment",
        remedy=f"Start at most {counted(devices, 'process')} on this machine, or train with train.device=cpu.",
    )


def _forget_earlier_run(device: str, mixed_precision: str) -> None:
    """Reset the state that Accelerate keeps of an earlier run of this process, if this run has another device or
    precision."""
    from accelerate.state import AcceleratorState, PartialState

    if not AcceleratorState._shared_state:  # there was none
        return
    other_device = world_size() == 1 and PartialState().device.type != device
    if other_device or AcceleratorState().mixed_precision != mixed_precision:
        AcceleratorState._reset_state(reset_partial_state=other_device)


def _connect(device: str, settings: Settings, timeout: timedelta | None) -> None:
    """Let Accelerate connect the processes of the run.

    Args:
        timeout: How long a process waits for another; None: torch's default.

    Raises:
        ProcessLost: Another process did not connect in time.
        UsageError: See ``store_arguments``.
    """
    from accelerate.state import PartialState

    connection: dict[str, Any] = {}
    if settings.init_handler is not None:
        connection |= settings.init_handler.to_kwargs()
    if timeout is not None:
        connection["timeout"] = timeout
    connects = world_size() > 1
    is_connected = connects and torch.distributed.is_initialized()
    try:
        if connects and "init_method" not in connection:
            connection |= store_arguments(timeout)
        if "store" in connection and uses_gloo(device, connection):
            connect_gloo(**connection)
            connection.clear()
        # `cpu` is explicit, because otherwise Accelerate does not connect processes on CPUs
        PartialState(cpu=device == "cpu", **connection)
    except (RuntimeError, torch.distributed.DistError) as error:
        if not is_connection_error(error):
            raise
        raise ProcessLost(
            f"process {rank()} of {world_size()} could not connect to the others: {clause(error)}.",
            code="process-lost",
            remedy=(
                "Start all processes with the same MASTER_ADDR and MASTER_PORT. If one of them has ended, its output "
                "has the reason. If they start at different times, raise the option timeout of the strategy. If they "
                "are on several machines, set GLOO_SOCKET_IFNAME to the interface by which the others reach this "
                "machine, such as eth0."
            ),
        ) from error
    if connects:
        group_at_exit.begin(is_made=not is_connected)


def uses_gloo(device: str, connection: Mapping[str, Any]) -> bool:
    """Whether Accelerate would connect processes by gloo, given these arguments of ``PartialState``."""
    return device == "cpu" and "backend" not in connection and not torch.distributed.is_mpi_available()


def restore_shared_state(accelerator: Accelerator) -> None:
    """Put back the state that Accelerate's classes share, if user code cleared it. Accelerate reads it while it
    prepares."""
    type(accelerator.state)._shared_state.update(vars(accelerator.state))
