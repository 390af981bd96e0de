"""Strangers on the network: they do not reach the processes of a run on one machine."""

from __future__ import annotations

import importlib.util
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import forked
import psutil
import pytest
import yaml

from fastloop.cli import launch

CODE = """
import os, time
from pathlib import Path
import torch
from torch import nn
from torch.utils.data import TensorDataset
from fastloop import Plugin, hookimpl

class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))

def rows():
    x = torch.randn(96, 8, generator=torch.Generator().manual_seed(0))
    return {"train": TensorDataset(x, x[:, :3].argmax(1))}

class Waits(Plugin):
    name = "waits"
    numerics = "bitwise"

    @hookimpl
    def after_step(self, run, loss):
        Path(f"waits{os.environ['RANK']}").touch()
        while not Path("free").exists():
            time.sleep(0.02)
"""
RECIPE: dict[str, Any] = {
    "model": {"module": "code.py:Net"},
    "data": {"module": "code.py:rows"},
    "train": {"epochs": 1, "batch_size": 48, "device": "cpu"},
    "output": "run",
}
OWN = next(
    (
        address.address
        for addresses in psutil.net_if_addrs().values()
        for address in addresses
        if address.family == socket.AF_INET and not address.address.startswith("127.")
    ),
    None,
)
"""An address of this machine that others reach; None: it has none."""
WAIT = 200.0
"""Seconds until a command counts as hanging."""


def wait_for(condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + WAIT
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found


# -- the processes of a run --------------------------------------------------------------------------------------------


@contextmanager
def two_processes(*plugins: Any, **variables: str) -> Iterator[list[tuple[str, int]]]:
    """Train on two processes, and yield the addresses on which they and their children listen. Then the run must
    complete."""
    Path("code.py").write_text(CODE)
    listed = [{"module": {"loss": "cross_entropy"}}, "code.py:Waits", *plugins]
    Path("recipe.yaml").write_text(yaml.safe_dump(RECIPE | {"plugins": listed}))
    Path("free").unlink(missing_ok=True)
    arguments = ["-m", "fastloop", "train", "recipe.yaml"]
    each = (
        [{}] if not variables else [{"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2"} | variables for rank in "01"]
    )
    given = [*arguments, *([] if variables else ["--nproc", "2"])]
    inherited = {name: value for name, value in os.environ.items() if name != "GLOO_SOCKET_IFNAME"} | {
        "OMP_NUM_THREADS": "1"
    }
    commands = [forked.Command(*given, env=inherited | member) for member in each]
    try:
        wait_for(
            lambda: (
                all(Path(f"waits{rank}").exists() for rank in (0, 1)) or any(one.poll() is not None for one in commands)
            )
        )
        assert [command.poll() for command in commands] == [None] * len(commands), [
            command.stderr for command in commands
        ]
        tree = [
            one
            for command in commands
            for one in (psutil.Process(command.pid), *psutil.Process(command.pid).children(recursive=True))
        ]
        found = {
            link.laddr for one in tree for link in one.net_connections("inet") if link.status == psutil.CONN_LISTEN
        }
        yield sorted((address.ip, address.port) for address in found)
        Path("free").touch()
        assert [command.wait(WAIT) for command in commands] == [0] * len(commands), [
            command.stderr for command in commands
        ]
    finally:
        for command in commands:
            command.kill()


def reached_from_outside(listeners: list[tuple[str, int]]) -> list[tuple[str, int]]:
    """The listeners that another machine reaches."""
    found = [address for address in listeners if not address[0].startswith("127.") and address[0] != "::1"]
    for ip, port in listeners if OWN else []:
        with socket.socket() as stranger:
            stranger.settimeout(5)
            if stranger.connect_ex((OWN, port)) == 0:
                found.append((ip, port))
    return sorted(set(found))


STRATEGIES: dict[str, list[Any]] = {
    "the store and the links of ddp": ["ddp"],
    "the store and the links of ddp with data workers": ["ddp", {"dataloader-workers": {"num_workers": 1}}],
    "the store and the links of fsdp": [{"fsdp": {"blocks": ["Linear"]}}],
    "the store and the links of deepspeed": [{"deepspeed": {"stage": 2}}],
}


@pytest.mark.slow
@pytest.mark.parametrize("plugins", STRATEGIES.values(), ids=STRATEGIES.keys())
def test_no_other_machine_reaches_the_processes_of_one_machine(plugins):
    """another machine connects to the processes of a run on one machine: it reaches none of them"""
    if "deepspeed" in str(plugins) and importlib.util.find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed")
    with two_processes(*plugins) as listeners:
        assert len(listeners) >= 3  # the store, and gloo in each process
        assert reached_from_outside(listeners) == []


@pytest.mark.slow
def test_an_explicit_address_stays_as_it_is():
    """control: with a MASTER_ADDR that others reach, the run trains as before, and its store is seen to be open"""
    port = launch.free_port()
    with two_processes("ddp", MASTER_ADDR=OWN or "localhost", MASTER_PORT=str(port)) as listeners:
        assert port in [found for _, found in reached_from_outside(listeners)]


def test_the_user_chooses_the_interface(monkeypatch):
    """control: GLOO_SOCKET_IFNAME, several machines and other addresses are left to the user"""
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert [one["GLOO_SOCKET_IFNAME"] for one in launch.variables_of_each(2)] == ["lo", "lo"]
    assert "GLOO_SOCKET_IFNAME" not in launch.process_variables(0, 1, "10.0.0.1", "29500", nnodes=2)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    assert "GLOO_SOCKET_IFNAME" not in launch.process_variables(0, 2, "127.0.0.1", "29500")
