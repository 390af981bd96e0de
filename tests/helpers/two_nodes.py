"""Two machines on one: two network namespaces with an address each, and a link that delays or loses packets or is cut.

    with TwoNodes() as nodes:  # skips the test where this user may not make namespaces
        commands = [nodes.start(node, "-m", "fastloop", "train", "recipe.yaml", ...) for node in (0, 1)]
        nodes.set_link(delay=0.005, loss=0.01)
        nodes.lose(1)

A process passes the packets from one namespace to the other, because `tc netem` is not in every kernel. The files and
the process ids are those of the machine.
"""

from __future__ import annotations

import ctypes
import heapq
import json
import os
import random
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any

import forked
import pytest
from zygote import Zygote

ADDRESSES = ("10.77.0.1", "10.77.0.2")
"""The address of each node."""
INTERFACE = "eth0"
"""The name of each node's interface."""
# ETH_P_ALL, SOL_PACKET and PACKET_VNET_HDR of <linux/if_packet.h>
ALL_PROTOCOLS = 0x0003
PACKET_LEVEL = 263
HEADER_OPTION = 15
LARGEST = 1 << 17
"""Bytes to read at once: more than a packet that the kernel has not yet split, with its header."""


class TwoNodes:
    """The namespaces, and the processes in them. Skips the test where namespaces are not permitted."""

    def __init__(self) -> None:
        command = ["unshare", "--user", "--map-root-user", "--net", sys.executable, __file__, "relay"]
        try:
            self._relay = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
        except OSError as error:
            pytest.skip(f"cannot make network namespaces: {error}")
        assert self._relay.stdout is not None
        line = self._relay.stdout.readline()
        if not line:
            errors = self._relay.communicate(timeout=60)[1].strip().splitlines()
            pytest.skip(f"cannot make network namespaces: {errors[-1]}")
        self._holders: list[int] = json.loads(line)
        self._namespaces = [Path(f"/proc/{pid}/ns/net").readlink() for pid in self._holders]

    def start(self, node: int, *arguments: str, **variables: str) -> forked.Command:
        """Start ``python ARGUMENTS`` on a node, with more environment variables."""
        added = {"GLOO_SOCKET_IFNAME": INTERFACE} | variables
        return forked.Command(__file__, "enter", str(self._holders[node]), *arguments, env=os.environ | added)

    def set_link(self, delay: float = 0.0, loss: float = 0.0) -> None:
        """Change the link.

        Args:
            delay: Seconds that each packet takes, in each direction.
            loss: Share of the packets that are lost: 1 cuts the link. Neither node is informed.
        """
        assert self._relay.stdin is not None
        assert self._relay.stdout is not None
        self._relay.stdin.write(json.dumps({"delay": delay, "loss": loss}) + "\n")
        self._relay.stdin.flush()
        assert self._relay.stdout.readline() == "done\n"

    def lose(self, node: int) -> None:
        """Cut the link, then kill every process of a node. The other node receives no packet about it, as after a loss
        of power."""
        self.set_link(loss=1.0)
        self._kill(node)

    def reset(self) -> None:
        """Kill every process of both nodes, and restore the link."""
        for node in (0, 1):
            self._kill(node)
        self.set_link()

    def _kill(self, node: int) -> None:
        while found := [pid for pid in self._processes(node) if pid != self._holders[node]]:
            for pid in found:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)

    def _processes(self, node: int) -> list[int]:
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has ended, or belongs to another user
                if (folder / "ns/net").readlink() == self._namespaces[node]:
                    found.append(int(folder.name))
        return found

    def __enter__(self) -> TwoNodes:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for node in (0, 1):
            self._kill(node)
        self._relay.communicate(timeout=300)  # closes its input: the relay ends, and with it the namespaces


def relay() -> None:
    """Make the namespaces, print the processes that hold them, and pass packets between them until standard input is
    closed."""
    holders = []
    ends = []
    for node, address in enumerate(ADDRESSES):
        holder = subprocess.Popen(
            ["unshare", "--net", "sh", "-c", "echo ready; exec cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert holder.stdout is not None
        holder.stdout.readline()
        holders.append(holder)
        inside = ["nsenter", "--target", str(holder.pid), "--net", "ip"]
        for command in (
            ["ip", "link", "add", f"wire{node}", "type", "veth", "peer", "name", INTERFACE, "netns", str(holder.pid)],
            ["ip", "link", "set", f"wire{node}", "up"],
            [*inside, "address", "add", f"{address}/24", "dev", INTERFACE],
            [*inside, "link", "set", INTERFACE, "up"],
            [*inside, "link", "set", "lo", "up"],
        ):
            subprocess.run(command, check=True, timeout=600)
        end = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
        # packets keep the checksums and the sizes that the kernel has yet to finish
        end.setsockopt(PACKET_LEVEL, HEADER_OPTION, 1)
        end.bind((f"wire{node}", ALL_PROTOCOLS))
        ends.append(end)
    print(json.dumps([holder.pid for holder in holders]), flush=True)
    _pass_packets(ends)


def _pass_packets(ends: Sequence[socket.socket]) -> None:
    link = {"delay": 0.0, "loss": 0.0}
    lost = random.Random(0)
    numbers = count()
    waiting: list[tuple[float, int, socket.socket, bytes]] = []
    while True:
        while waiting and waiting[0][0] <= time.monotonic():
            *_, end, packet = heapq.heappop(waiting)
            with suppress(OSError):  # a full queue loses packets, too
                end.send(packet)
        ready: list[Any]
        ready, _, _ = select.select([0, *ends], [], [], max(0.0, waiting[0][0] - time.monotonic()) if waiting else None)
        if 0 in ready:
            line = os.read(0, 1000)
            if not line:
                return
            link = json.loads(line)
            print("done", flush=True)
        for end, other in zip(ends, reversed(ends), strict=True):
            if end in ready:
                packet, (_, _, kind, *_) = end.recvfrom(LARGEST)
                if kind != socket.PACKET_OUTGOING and lost.random() >= link["loss"]:
                    heapq.heappush(waiting, (time.monotonic() + link["delay"], next(numbers), other, packet))


def enter(holder: int, arguments: Sequence[str]) -> None:
    """Become ``python ARGUMENTS`` in the namespaces of a process.

    Only commands of fastloop keep the modules of the fork server: for each event, torchrun looks through all imported
    modules. So torchrun starts anew, and the processes that it starts come from its zygote.
    """
    library = ctypes.CDLL(None, use_errno=True)
    for kind in ("user", "net"):
        with Path(f"/proc/{holder}/ns/{kind}").open() as namespace:
            if library.setns(namespace.fileno(), 0):
                raise OSError(ctypes.get_errno(), f"setns: {os.strerror(ctypes.get_errno())}", kind)
    if arguments[1] != "fastloop":
        zygote = Zygote.start(forked.become)
        zygote.connection.set_inheritable(True)
        os.execv(sys.executable, [sys.executable, __file__, "launch", str(zygote.connection.fileno()), *arguments])
    forked._python(arguments, None, None)


def launch(connection: int, arguments: Sequence[str]) -> None:
    """Become ``python ARGUMENTS``, a launcher whose zygote is at a socket."""
    forked.use_zygote(Zygote(socket.socket(fileno=connection)))
    forked._python(arguments, None, None)


if __name__ == "__main__":
    role, *arguments = sys.argv[1:]
    if role == "relay":
        relay()
    elif role == "enter":
        enter(int(arguments[0]), arguments[1:])
    else:
        launch(int(arguments[0]), arguments[1:])
