"""Several processes: a run without a strategy, or with different orders of samples, ends with an error.

Modules:
    core/fastloop/checks/sample_orders.py
    core/fastloop/distributed/accelerator.py
    core/fastloop/distributed/processes.py
"""

from __future__ import annotations

import os
from pathlib import Path

import forked
import pytest

from fastloop.cli import launch
from fastloop.distributed.accelerator import check_local_rank
from fastloop.errors import UsageError
from fastloop.testing import assert_problem, expect_problem


@pytest.mark.slow
def test_two_processes_without_a_strategy_are_refused():
    pytest.importorskip("sklearn")
    ranks = [launch.process_variables(rank, 2, "127.0.0.1", str(launch.free_port())) for rank in (0, 1)]
    train = ("-m", "fastloop", "train", "digits_module", "train.device=cpu", "output=out", "--without", "ddp")
    for command in [forked.Command(*train, env=os.environ | rank) for rank in ranks]:
        assert command.wait(300) == 2
        (error,) = command.stderr.splitlines()
        assert error.startswith("error: ")
        assert "started with 2 processes" in error
        assert "'strategy'" in error
    assert not Path("out").exists()


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_whose_peer_is_missing_ends_after_the_timeout_of_the_strategy(rank: int):
    pytest.importorskip("sklearn")
    variables = launch.process_variables(rank, 2, "127.0.0.1", str(launch.free_port()))
    train = ("-m", "fastloop", "train", "digits_module", "train.device=cpu", "output=out")
    strategy = ("--with", "ddp", "plugins.ddp.timeout=2s")
    command = forked.Command(*train, *strategy, env=os.environ | variables)
    assert command.wait(120) != 0  # torch's default timeout is 30 minutes
    assert_problem(command.stderr, f"process-lost process {rank} of 2 could not connect 2 seconds")
    assert "Traceback" not in command.stderr


@pytest.mark.parametrize(
    ("local_rank", "devices", "visible"),
    [("1", 2, ""), ("0", 1, ""), ("3", 1, "3"), ("", 1, ""), ("-1", 1, "")],
)
def test_a_process_has_a_device_of_its_own(monkeypatch, local_rank: str, devices: int, visible: str):
    """Only the arithmetic: this machine has no accelerator."""
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    check_local_rank("cuda", devices)


@pytest.mark.parametrize(
    ("local_rank", "devices", "visible", "named"),
    [("2", 2, "", "2 devices"), ("1", 1, "", "1 device"), ("2", 2, "0,1", "2 devices")],
)
def test_more_processes_than_devices_are_refused(monkeypatch, local_rank: str, devices: int, visible: str, named: str):
    """Only the arithmetic: this machine has no accelerator."""
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with expect_problem(f"wrong-environment LOCAL_RANK {local_rank} {named} cuda", UsageError):
        check_local_rank("cuda", devices)


SAMPLER = """import torch
from torch.utils.data import BatchSampler, Sampler
from fastloop import Plugin, hookimpl


class Order(Sampler):
    def __init__(self, size, rank):
        self.size, self.rank, self.epoch = size, rank, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return self.size

    def __iter__(self):
        seed = self.epoch * (1 + self.rank)
        return iter(torch.randperm(self.size, generator=torch.Generator().manual_seed(seed)).tolist())


class Ranked(Plugin):
    name = "ranked"
    numerics = "changes-training"

    @hookimpl
    def build_sampler(self, run, split):
        return BatchSampler(Order(len(run.datasets["train"]), run.rank), 8, False) if split == "train" else None
"""


@pytest.mark.slow
def test_orders_that_differ_from_the_second_epoch_on_are_refused():
    pytest.importorskip("sklearn")
    Path("ranked.py").write_text(SAMPLER)
    keys = ("train.device=cpu", "train.epochs=2", "train.batch_size=256", "output=out")
    done = forked.run(
        "-m", "fastloop", "train", "digits_module", *keys, "--with", "./ranked.py,ddp", "--nproc", "2", timeout=300
    )
    assert done.returncode != 0
    assert_problem(done.stderr, "random-order train 1")
    assert "Traceback" not in done.stderr
