"""Strangers on the network: they reach neither the processes of a run on one machine, nor the page of a run."""

from __future__ import annotations

import importlib.util
import os
import socket
import threading
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
from fastloop_tools.report.serve import CONNECTIONS, Handler, LivePage, Server

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
    assert [one["GLOO_SOCKET_IFNAME"] for one in launch.local_group(2)] == ["lo", "lo"]
    assert "GLOO_SOCKET_IFNAME" not in launch.member(0, 1, "10.0.0.1", "29500", nnodes=2)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    assert "GLOO_SOCKET_IFNAME" not in launch.member(0, 2, "127.0.0.1", "29500")


# -- the page of `fastloop report --watch` -----------------------------------------------------------------------------


@pytest.fixture
def server(tiny_run: Callable[..., Any]) -> Iterator[Server]:
    """The page of a finished run."""
    tiny_run(["log"], output=Path("run"))
    with Server(LivePage([Path("run")], "run"), 0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def get(server: Server, path: str, host: str = "") -> tuple[int, str]:
    """The status and the content of an answer."""
    with socket.create_connection(server.server_address, timeout=WAIT) as connection:
        connection.sendall(f"GET {path} HTTP/1.0\r\nHost: {host or '127.0.0.1'}\r\n\r\n".encode("latin-1"))
        with connection.makefile("rb") as file:
            head, _, content = file.read().partition(b"\r\n\r\n")
    return int(head.split()[1]), content.decode()


REQUESTS: dict[str, Callable[[str], tuple[str, str]]] = {
    "without a token": lambda token: ("/", ""),
    "the version without a token": lambda token: ("/version", ""),
    "an empty token": lambda token: ("//version", ""),
    "a part of the token": lambda token: (f"/{token[:-1]}/", ""),
    "the token with more behind": lambda token: (f"/{token}x/", ""),
    "the token in other letters": lambda token: (f"/{token.swapcase()}/", ""),
    "the token in the query": lambda token: (f"/?token={token}", ""),
    "a token that is not ASCII": lambda token: ("/t\xf6ken/", ""),
    "another file of the run": lambda token: (f"/{token}/metrics.jsonl", ""),
    "a file above the run": lambda token: (f"/{token}/../run/metrics.jsonl", ""),
    "a name of a web site that leads here": lambda token: (f"/{token}/", "evil.example"),
    "such a name, with a port": lambda token: (f"/{token}/version", "evil.example:80"),
}


@pytest.mark.parametrize("request_of", REQUESTS.values(), ids=REQUESTS.keys())
def test_only_who_knows_the_address_reads_the_page_of_a_run(server, request_of):
    """another user or a web site requests the page of report --watch: refused"""
    status, content = get(server, *request_of(server.token))
    assert status in (403, 404)
    assert "loss" not in content
    assert server.token not in content


def test_the_address_shows_the_page(server):
    """control: the printed address shows the page, which listens on this machine only, and each server has a token of
    its own"""
    assert server.address == f"http://127.0.0.1:{server.server_address[1]}/{server.token}/"
    status, page = get(server, f"/{server.token}/")
    assert (status, "Training loss" in page) == (200, True)
    assert get(server, f"/{server.token}/version", "localhost:1")[0] == 200
    assert reached_from_outside([server.server_address]) == []
    with Server(server.live, 0) as other:
        assert other.token != server.token
        assert len(other.token) >= 20


SLOW: dict[str, bytes] = {
    "connections that send nothing": b"",
    "connections that send half a request": b"GET / HTTP/1.1\r\nHost: 127.0",
}


@pytest.mark.parametrize("sent", SLOW.values(), ids=SLOW.keys())
def test_idle_connections_are_bounded(server, sent, monkeypatch):
    """a hundred open connections: the server keeps few, and answers the user"""
    monkeypatch.setattr(Handler, "timeout", 2 * WAIT)
    before, strangers = threading.active_count(), list[socket.socket]()
    try:
        for _ in range(3):
            for _ in range(CONNECTIONS + 8):
                strangers.append(socket.create_connection(server.server_address, timeout=WAIT))
                strangers[-1].sendall(sent)
            assert get(server, f"/{server.token}/version")[0] == 200
        wait_for(lambda: threading.active_count() - before <= CONNECTIONS)
    finally:
        for stranger in strangers:
            stranger.close()


def test_an_idle_connection_ends(server, monkeypatch):
    """a connection that sends nothing more: it is closed after the timeout"""
    assert 0 < Handler.timeout <= 60
    monkeypatch.setattr(Handler, "timeout", 0.2)
    with socket.create_connection(server.server_address, timeout=WAIT) as stranger:
        stranger.sendall(b"GET / HT")
        assert stranger.recv(100) == b""
