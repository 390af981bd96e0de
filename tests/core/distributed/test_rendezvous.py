"""Processes that torchrun starts again: they use its store again, and must not read what earlier ones wrote there.

Modules:
    core/fastloop/distributed/rendezvous.py
"""

from __future__ import annotations

import os
from datetime import timedelta

import torch
from torch.distributed import TCPStore

from fastloop.distributed.rendezvous import store_arguments


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


def test_own_store_is_only_for_torchrun_and_one_machine(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "host-1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    # TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1: rank 0 makes a new store each time
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
    assert store_arguments() == {}
