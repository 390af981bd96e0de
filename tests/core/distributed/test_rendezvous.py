"""Processes that meet: those that torchrun starts again, late ones, and one whose partner never comes.

Modules:
    core/fastloop/distributed/rendezvous.py
"""

from __future__ import annotations

import os
import signal
import socket
import time
from datetime import timedelta

import forked
import pytest
import torch
from torch.distributed import TCPStore

from fastloop.cli import launch
from fastloop.distributed.rendezvous import store_arguments
from fastloop.testing import assert_problem


def join(port: int) -> tuple[int, int]:
    """Connect this process as one of torchrun; returns its rank and the sum of all ranks."""
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.distributed.init_process_group("gloo", **store_arguments(), timeout=timedelta(seconds=60))
    rank = torch.distributed.get_rank()
    total = torch.tensor(rank)
    torch.distributed.all_reduce(total)
    return rank, int(total)


def test_restarted_processes_use_a_new_part_of_the_store(processes):
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store.set("fastloop/1", "a process that was killed while it waited")
    for world_size in (2, 2, 3):
        ended = processes(world_size, join, store.port)
        assert [process.result for process in ended] == [(rank, sum(range(world_size))) for rank in range(world_size)]


TRAIN = ("-m", "fastloop", "train", "digits_module", "train.device=cpu", "output=out", "--with", "ddp")


def start_rank(rank: int, port: int) -> forked.Command:
    """Start one of two processes alone, as variables do that are left over in a shell."""
    return forked.Command(*TRAIN, env=os.environ | launch.process_variables(rank, 2, "127.0.0.1", str(port)))


def wait_for_warning(command: forked.Command) -> None:
    """Wait until a process has logged that another one is missing."""
    deadline = time.monotonic() + 200
    while "[process-missing]" not in command.stdout:
        assert command.poll() is None, command.stderr
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "number", "code"), [(0, signal.SIGTERM, 75), (1, signal.SIGINT, 130)])
def test_a_process_alone_says_whom_it_waits_for_and_a_signal_ends_it(rank: int, number: int, code: int):
    pytest.importorskip("sklearn")
    port = launch.free_port()
    command = start_rank(rank, port)
    wait_for_warning(command)
    (line,) = command.stdout.splitlines()
    assert_problem(line, f"process-missing process {rank} of 2 127.0.0.1:{port} process {1 - rank} unset MASTER_PORT")
    command.send_signal(number)
    assert command.wait(60) == code


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_that_comes_late_is_waited_for(rank: int):
    pytest.importorskip("sklearn")
    port = launch.free_port()
    first = start_rank(rank, port)
    wait_for_warning(first)
    second = start_rank(1 - rank, port)
    assert (first.wait(300), second.wait(300)) == (0, 0), first.stderr + second.stderr


@pytest.mark.slow
def test_a_port_in_use_is_named():
    pytest.importorskip("sklearn")
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        command = start_rank(0, port)
        assert command.wait(200) == 2
    assert_problem(command.stderr, f"port-in-use {port} MASTER_PORT")
