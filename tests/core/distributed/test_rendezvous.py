"""Processes that meet: those that torchrun starts again, late ones, and some whose partner never comes or ends.

Modules:
    core/fastloop/distributed/rendezvous.py
    core/fastloop/distributed/signs_of_life.py
    core/fastloop/distributed/watched_calls.py
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import time
from datetime import timedelta
from pathlib import Path

import forked
import pytest
import torch
from torch.distributed import FileStore, PrefixStore, TCPStore

from fastloop.cli import launch
from fastloop.distributed import rendezvous, signs_of_life
from fastloop.distributed.rendezvous import store_arguments
from fastloop.errors import FastloopError, ProcessLost, UsageError
from fastloop.testing import assert_problem, expect_problem
from fastloop.testing.starting import start


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


def test_a_program_that_never_answers_is_named(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        for name, value in launch.process_variables(1, 2, "127.0.0.1", str(port)).items():
            monkeypatch.setenv(name, value)
        with expect_problem(f"process-lost process 1 of 2 127.0.0.1:{port} answered another MASTER_PORT", ProcessLost):
            store_arguments(timedelta(seconds=0.5))


def shown(error: FastloopError) -> str:
    """An error as a command prints it."""
    return f"error: {error} [{error.problem.code}]"


def end_while_connecting(ends: int) -> str:
    """Connect this process by gloo. Process ``ends`` ends as soon as all have met."""
    signs_of_life.LOST_AFTER = 2.0
    try:
        connection = store_arguments()
        if connection["rank"] == ends:
            os._exit(0)
        signs_of_life.connect_gloo(**connection)
    except ProcessLost as error:
        return shown(error)
    return ""


@pytest.mark.parametrize("ends", [0, 1, 2])
def test_a_process_that_ends_while_gloo_connects_is_named(tmp_path: Path, ends: int):
    ended = start(3, end_while_connecting, ends, folder=tmp_path, limit=60)
    for rank, process in enumerate(ended):
        if rank != ends:
            assert_problem(process.result or process.output, f"process-lost process {rank} of 3 connect process {ends}")


def connect_slowly(seconds: float) -> str:
    """Connect this process by gloo, process 1 later than the others expect. Returns what it logs."""
    signs_of_life.SLOW_AFTER = 0.5
    connection = store_arguments()
    records: list[logging.LogRecord] = []
    signs_of_life.log.addFilter(lambda record: not records.append(record))
    if connection["rank"] == 1:
        alive = PrefixStore("alive", connection["store"].clone())
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            alive.set("1", str(time.monotonic()))
            time.sleep(0.1)
    signs_of_life.connect_gloo(**connection)
    return "\n".join(f"warning: {record.msg} [{record.msg.code}]" for record in records)


def test_slow_connections_of_gloo_are_logged(processes):
    first, _ = processes(2, connect_slowly, 2.0, limit=100)
    assert_problem(first.result, "process-missing process 0 of 2 gloo GLOO_SOCKET_IFNAME")


def claim_rank_0(path: Path) -> str:
    """Write into a store that this process has rank 0, as on two machines with the same ``--node-rank``."""
    store = FileStore(str(path), 2)
    meeting = rendezvous.Meeting("10.0.0.1", 29500, timedelta(seconds=10))
    try:
        rendezvous._own(store, meeting)
        rendezvous._own(store, meeting)  # a later run of this process
    except UsageError as error:
        return shown(error)
    return ""


def test_a_second_process_of_rank_0_is_refused(processes, tmp_path: Path):
    results = sorted(process.result for process in processes(2, claim_rank_0, tmp_path / "store", limit=100))
    assert results[0] == ""
    assert_problem(results[1], "wrong-environment RANK rank 0 10.0.0.1:29500 --node-rank")


def meet_as(ranks: list[int], sizes: list[int], is_late: list[bool], seconds: float = 60.0) -> str:
    """Meet the others with another rank and another number of processes. A late process comes after the run has
    begun. Returns the error."""
    rendezvous.LOG_AFTER = 0.5
    own = int(os.environ["RANK"])
    os.environ |= {"RANK": str(ranks[own]), "WORLD_SIZE": str(sizes[own])}
    begun = Path("begun")
    deadline = time.monotonic() + 60
    while is_late[own] and not begun.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    connection = None
    error = ""
    try:
        connection = store_arguments(timedelta(seconds=seconds))
    except FastloopError as caught:
        error = shown(caught)
    begun.touch()
    end = Path("end")
    if is_late[own]:
        end.touch()
    while any(is_late) and not end.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    del connection  # process 0 has held the store
    return error


def test_a_second_process_of_a_rank_that_comes_late_is_refused(processes):
    first, second, late = processes(3, meet_as, [0, 1, 1], [2, 2, 2], [False, False, True], limit=100)
    assert (first.result, second.result) == ("", "")
    assert_problem(late.result, "wrong-environment RANK process 1 of 2 too late another MASTER_PORT")


@pytest.mark.parametrize("sizes", [[2, 3], [3, 2], [3, 3, 2]])
def test_processes_of_different_world_sizes_are_refused(processes, sizes: list[int]):
    count = len(sizes)
    ended = processes(count, meet_as, [*range(count)], sizes, [False] * count, 10.0, limit=100)
    for rank in (0, count - 1):
        assert_problem(ended[rank].result, f"wrong-environment WORLD_SIZE one of {sizes[0]} one of {sizes[-1]}")


def test_a_process_beyond_the_world_size_of_process_0_is_refused(processes):
    first, third = processes(2, meet_as, [0, 2], [2, 3], [False, False], 4.0, limit=100)
    assert_problem(first.result, "process-lost process 0 of 2 process 1 has not come")
    assert_problem(third.result, "wrong-environment WORLD_SIZE process 2 one of 3 process 0 one of 2")


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
