"""Start the processes of a run on this machine. Does not import torch.

    fastloop train recipe.yaml --nproc 2
    # on two machines; --node-rank 1 on the other one
    fastloop train recipe.yaml --nproc 2 --nnodes 2 --node-rank 0 --master 10.0.0.1:29500

``torchrun``, ``accelerate launch`` and MPI work, too. With this launcher, a failing process ends the others at once,
and only its own error is shown. ``torchrun`` prints a table after each failure, which hides the reason, and imports
torch in a process that does not train. Use it for elastic restarts and rendezvous, which this launcher lacks.

The processes write to the standard streams of the launcher. Only the main process shows its log: see ``messages``.
"""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fastloop.cli.messages import print_error
from fastloop.cli.summary import BRIEF_VARIABLE
from fastloop.distributed.ranks import LOOPBACK, unset_remedy, world_size
from fastloop.distributed.signals import EXIT_INTERRUPTED, EXIT_STOPPED, STOP_TIMEOUT, on_signals
from fastloop.errors import UsageError
from fastloop.problem import Problem
from fastloop.runtime import platform_support
from fastloop.runtime.step_folders import checkpoints

LAUNCHER = "FASTLOOP_LAUNCHER"
"""Environment variable of the started processes: the pid and the options of ``launch``, such as ``1234 --nproc 2``."""
GRACE_SECONDS = 10.0
"""Seconds until processes are killed, after another process has stopped or a signal was repeated."""
POLL_SECONDS = 0.05
"""Seconds between two looks at the started processes."""
LOOPBACK_INTERFACES = {"linux": "lo", "darwin": "lo0"}
"""Platform -> name of its loopback interface."""


def options() -> str:
    """The options of ``launch`` as part of a command line; empty for other launchers."""
    _, _, launch_options = os.environ.get(LAUNCHER, "").partition(" ")
    return launch_options


def launch(
    arguments: Sequence[str],
    nproc: int,
    nnodes: int,
    node_rank: int,
    master: str | None,
    output: Path,
    brief: bool = False,
) -> int:
    """Run ``fastloop ARGUMENTS`` in ``nproc`` processes and wait for all of them.

    Args:
        nnodes: Number of machines.
        node_rank: Index of this machine.
        master: HOST:PORT on machine 0; None: there is only this machine.
        output: The run folder. If it contains a checkpoint, the message about a killed process includes the command to
            resume.
        brief: Print a line at the end of the run, and not the table of its results.

    Returns:
        0, or the exit code of the process that failed or stopped first; 128 + n for signal n.

    Raises:
        UsageError: Another launcher started this process, or an option is wrong.
    """
    host, port = _check_options(nproc, nnodes, node_rank, master)
    launch_options = f"--nproc {nproc}"
    if nnodes > 1:
        launch_options += f" --nnodes {nnodes} --node-rank {node_rank} --master {master}"
    command = [*module_command("fastloop"), *arguments]
    earlier_kills = platform_support.kills()
    processes = []
    for local_rank in range(nproc):
        environment = os.environ | process_variables(local_rank, nproc, host, port, nnodes, node_rank)
        environment[LAUNCHER] = f"{os.getpid()} {launch_options}"
        if brief:
            environment[BRIEF_VARIABLE] = "1"
        processes.append(subprocess.Popen(command, env=environment))
    failed = _wait(processes)
    if failed is None:
        codes = [process.returncode for process in processes]
        if EXIT_INTERRUPTED in codes:
            return EXIT_INTERRUPTED
        return EXIT_STOPPED if any(codes) else 0
    process = processes[failed]
    if process.returncode > 0:  # it has printed its error
        return process.returncode
    text = f"process {node_rank * nproc + failed} of {nproc * nnodes} {_explain_signal(process, earlier_kills)}"
    remedy = ""
    if checkpoints(output):
        resume = f"{shlex.join(['fastloop', *arguments])} {launch_options} --resume"
        remedy = f"Continue from its newest checkpoint with `{resume}`."
    print_error(Problem(text, code="process-killed", remedy=remedy))
    return 128 - process.returncode


def _explain_signal(process: subprocess.Popen[bytes], earlier_kills: int) -> str:
    """How a signal ended a process, as the end of a sentence; and why, if the system did it.

    Args:
        earlier_kills: The result of ``kills`` when the process began.
    """
    number = -process.returncode
    text = f"(pid {process.pid}) was ended by {signal.Signals(number).name}."
    if number == platform_support.KILL and platform_support.kills() > earlier_kills:
        text += (
            f" {platform_support.explain_kill(earlier_kills)} Set a smaller train.micro_batch_size, use fewer "
            "workers, or raise the limit."
        )
    return text


def module_command(module: str) -> list[str]:
    """The command that runs a module in a new process. Python imports modules from the current folder there only if it
    does so in this process."""
    if Path.cwd() in [Path(entry).absolute() for entry in sys.path]:
        return [sys.executable, "-m", module]
    return [sys.executable, "-P", "-m", module]  # -m alone would add the current folder to sys.path


def _check_options(nproc: int, nnodes: int, node_rank: int, master: str | None) -> tuple[str, str]:
    """Check the options of ``launch``. Returns host and port of machine 0.

    Raises:
        UsageError: Another launcher started this process, or an option is wrong.
    """
    if world_size() > 1 or "LOCAL_RANK" in os.environ:
        raise UsageError(
            f"another launcher started this process, one of {world_size()}.",
            code="launched-twice",
            place=f"--nproc {nproc}",
            remedy=f"Leave one of the two out. {unset_remedy()}",
        )
    if nnodes > 1 and master is None:
        raise UsageError(
            "needs --master HOST:PORT, an address of node 0 that every node reaches.",
            code="missing-value",
            place=f"--nnodes {nnodes}",
        )
    if not 0 <= node_rank < nnodes:
        raise UsageError(
            code="out-of-range",
            place=f"--node-rank {node_rank}",
            expected=f"0 to {nnodes - 1}, since --nnodes is {nnodes}",
        )
    if master is None:
        return LOOPBACK, str(free_port())
    host, _, port = master.rpartition(":")
    if not host or not port.isdecimal():
        raise UsageError(code="wrong-format", place=f"--master {master}", expected="HOST:PORT, such as 10.0.0.1:29500")
    return host, port


def process_variables(
    local_rank: int, nproc: int, host: str, port: str, nnodes: int = 1, node_rank: int = 0
) -> dict[str, str]:
    """Environment variables of process ``local_rank`` of ``nproc`` on this machine. The processes share its processors
    equally.

    On one machine, gloo listens on the loopback interface. Otherwise it listens on the address of the machine's name.
    """
    threads = max(1, platform_support.cores() // nproc)
    variables = {
        "WORLD_SIZE": str(nproc * nnodes),
        "LOCAL_WORLD_SIZE": str(nproc),
        "RANK": str(node_rank * nproc + local_rank),
        "LOCAL_RANK": str(local_rank),
        "MASTER_ADDR": host,
        "MASTER_PORT": port,
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or str(threads),
    }
    is_one_machine = nnodes == 1 and host == LOOPBACK
    interface = LOOPBACK_INTERFACES.get(sys.platform)
    if is_one_machine and interface is not None and not os.environ.get("GLOO_SOCKET_IFNAME"):
        variables["GLOO_SOCKET_IFNAME"] = interface
    return variables


def variables_of_each(count: int) -> list[dict[str, str]]:
    """The environment variables of each of ``count`` processes on a single machine; none for a single process."""
    if count == 1:
        return [{}]
    port = str(free_port())
    return [process_variables(rank, count, LOOPBACK, port) for rank in range(count)]


def free_port() -> int:
    """A free port of this machine."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        port: int = probe.getsockname()[1]
    return port


def signal_group(pid: int, number: signal.Signals) -> None:
    """Send a signal to the process group of the leader ``pid``, or to ``pid`` alone if the platform has no groups.

    Raises:
        ProcessLookupError: The process has ended.
    """
    if hasattr(os, "killpg"):
        os.killpg(pid, number)
    else:
        os.kill(pid, number)


def _wait(processes: list[subprocess.Popen[bytes]]) -> int | None:
    """Wait for all processes, and forward signals to them. If one fails, kill the others and return its index;
    otherwise return None."""
    received: set[int] = set()
    deadline = float("inf")

    def forward(signum: int, frame: Any) -> None:
        nonlocal deadline
        seconds = GRACE_SECONDS if signum in received else STOP_TIMEOUT
        deadline = min(deadline, time.monotonic() + seconds)
        received.add(signum)
        for process in processes:
            if process.poll() is None:
                process.send_signal(signum)

    try:
        with on_signals(forward):
            while True:
                codes = [process.poll() for process in processes]
                has_stopped = EXIT_INTERRUPTED in codes or EXIT_STOPPED in codes
                for index, code in enumerate(codes):
                    if code is None or code in (0, EXIT_INTERRUPTED, EXIT_STOPPED):
                        continue
                    # A signal may stop one process at once, such as before training. The others then lose the
                    # connection to it, and end with an error and a code above 0: they have not failed themselves.
                    has_lost_connection = has_stopped and code > 0
                    if not has_lost_connection:
                        return index
                if None not in codes:
                    return None
                if has_stopped:  # the other processes must stop, too
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
                if time.monotonic() > deadline:
                    text = "not all processes stopped in time: the others are killed."
                    print_error(Problem(text, code="process-not-stopped"))
                    return None
                time.sleep(POLL_SECONDS)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()  # on SIGTERM, it would wait for the other processes
                process.wait()
