"""Several processes: starting them on this machine, and where this one stands among them. Nothing here imports torch.

    fastloop train recipe.yaml --nproc 2
    fastloop train recipe.yaml --nproc 2 --nnodes 2 --node-rank 0 --master 10.0.0.1:29500    # and --node-rank 1 on the other machine

``torchrun``, ``accelerate launch`` and MPI start processes just as well; here a failing process ends the others at once, and what is
shown is its own error.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from fastloop.distributed.signals import EXIT_INTERRUPTED, EXIT_STOPPED, STOP_TIMEOUT, on_signals
from fastloop.errors import UsageError
from fastloop.recipe import secrets
from fastloop.runtime import platform_support
from fastloop.runtime.step_folders import checkpoints

LAUNCHER = "FASTLOOP_LAUNCHER"
"""The variable that tells a process who started it, and how: pid and options."""
PATIENCE = 10.0
"""Seconds that processes get to end by themselves when another has stopped, or when they are to stop at once."""


def _from_environment(*names: str) -> int | None:
    return next((int(value) for name in names if (value := os.environ.get(name, "")).isdecimal()), None)


def world_size() -> int:
    """How many processes this one was started among: by torchrun, accelerate, Intel MPI, Open MPI or MVAPICH, as Accelerate reads them."""
    return _from_environment("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE") or 1


def rank() -> int:
    """Which of them it is."""
    return _from_environment("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK") or 0


def options() -> str:
    """The launcher's options, as part of a command line; empty where it was another one."""
    return os.environ.get(LAUNCHER, "").partition(" ")[2]


def launch(arguments: Sequence[str], nproc: int, nnodes: int, node_rank: int, master: str | None, output: Path) -> int:
    """Run ``fastloop ARGUMENTS`` in ``nproc`` processes and wait for all.

    Args:
        nnodes: Machines that do the same.
        node_rank: Which of them this is.
        master: HOST:PORT on the machine 0; None: this machine is the only one.
        output: The run folder: with a checkpoint in it, a killed run is told how to go on.

    Returns:
        0, or the exit code of the process that failed first; 128 + n for signal n.

    Raises:
        UsageError: It was started by a launcher already, or there is no master.
    """
    if world_size() > 1 or "LOCAL_RANK" in os.environ:
        raise UsageError(f"--nproc {nproc}: another launcher started this process, one of {world_size()}. Leave one of the two out.")
    if nnodes > 1 and master is None:
        raise UsageError(f"--nnodes {nnodes}: needs --master HOST:PORT, an address of node 0 that every node reaches.")
    if not 0 <= node_rank < nnodes:
        raise UsageError(f"--node-rank {node_rank}: expected 0 to {nnodes - 1}, since --nnodes is {nnodes}.")
    host, _, port = (master or f"127.0.0.1:{free_port()}").rpartition(":")
    if not host or not port.isdecimal():
        raise UsageError(f"--master {master}: expected HOST:PORT, such as 10.0.0.1:29500.")
    given = f"--nproc {nproc}"
    if nnodes > 1:
        given += f" --nnodes {nnodes} --node-rank {node_rank} --master {master}"
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "fastloop", *arguments],
            env=os.environ | member(local, nproc, host, port, nnodes, node_rank) | {LAUNCHER: f"{os.getpid()} {given}"},
        )
        for local in range(nproc)
    ]
    index = _wait(processes)
    if index is None:
        codes = [process.returncode for process in processes]
        return EXIT_INTERRUPTED if EXIT_INTERRUPTED in codes else EXIT_STOPPED if any(codes) else 0
    failed = processes[index]
    if failed.returncode > 0:  # it has said why
        return int(failed.returncode)
    name = signal.Signals(-failed.returncode).name
    said = f"process {node_rank * nproc + index} of {nproc * nnodes} (pid {failed.pid}) was ended by {name}."
    if checkpoints(output):
        said += f" Go on from its newest checkpoint with: fastloop {' '.join(arguments)} {given} --resume"
    print(f"error: {secrets.hide(said)}", file=sys.stderr)
    return 128 - int(failed.returncode)


def member(local: int, nproc: int, host: str, port: str, nnodes: int = 1, node_rank: int = 0) -> dict[str, str]:
    """What tells a process where it stands: ``local`` of ``nproc`` on this machine. They share its processors out."""
    return {
        "WORLD_SIZE": str(nproc * nnodes),
        "LOCAL_WORLD_SIZE": str(nproc),
        "RANK": str(node_rank * nproc + local),
        "LOCAL_RANK": str(local),
        "MASTER_ADDR": host,
        "MASTER_PORT": port,
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or str(max(1, cores() // nproc)),
    }


def cores() -> int:
    """Processors that this process may use."""
    return len(platform_support.processors())


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port


def _wait(processes: list[subprocess.Popen[bytes]]) -> int | None:
    """Wait for all; the first that fails ends the others. Returns its index, None when none did. Those that are stopped end together."""
    asked: set[int] = set()
    deadline = float("inf")

    def pass_on(signum: int, frame: Any) -> None:
        nonlocal deadline
        deadline = min(deadline, time.monotonic() + (PATIENCE if signum in asked else STOP_TIMEOUT))
        asked.add(signum)
        for process in processes:
            if process.poll() is None:
                process.send_signal(signum)

    try:
        with on_signals(pass_on):
            while True:
                codes = [process.poll() for process in processes]
                failed = next((index for index, code in enumerate(codes) if code not in (None, 0, EXIT_INTERRUPTED, EXIT_STOPPED)), None)
                if failed is not None or None not in codes:
                    return failed
                if EXIT_INTERRUPTED in codes or EXIT_STOPPED in codes:  # they stop together
                    deadline = min(deadline, time.monotonic() + PATIENCE)
                if time.monotonic() > deadline:
                    print("error: not all processes stopped in time: the others are ended.", file=sys.stderr)
                    return None
                time.sleep(0.05)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()  # alone it has nothing to do; asked to stop, it would wait for the others
                process.wait()


def restarts() -> int:
    """How often torchrun has started these processes again (``--max-restarts``). 0 on several machines, each of which counts its own."""
    alone = os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0) if alone else 0


def resume_from(asked: str | None, output: Path) -> Path | None:
    """What to go on from: ``asked`` is the value of ``--resume``, None without it.

    torchrun on one machine with ``--max-restarts`` starts all processes again when one has failed, with the same arguments: from then on it
    is the run folder's newest checkpoint, if there is one yet. On several machines ``--resume`` says so from the beginning.
    """
    if restarts() and _made_by_an_attempt(output):
        return output
    return None if asked is None else Path(asked or output)


def _made_by_an_attempt(output: Path) -> bool:
    """Whether the run folder is of this start of torchrun. When processes die before they make it, an older run may still be there."""
    told = os.environ.get("TORCHELASTIC_ERROR_FILE")  # .../attempt_1/0/error.json
    try:
        first = Path(told).parents[1].with_name("attempt_0").stat().st_mtime if told else 0.0
        return (output / "recipe.yaml").stat().st_mtime >= first
    except OSError:
        return False


def start_again(environment: Mapping[str, str]) -> None:
    """Where this process lacks variables of ``environment``: start it again with them. One that is set stays as it is."""
    own = sys.orig_argv[len(sys.orig_argv) - len(sys.argv) + 1 :] == sys.argv[1:]  # else the command line is called from within a program
    if own and environment.keys() - os.environ.keys():
        sys.stdout.flush()
        sys.stderr.flush()
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**environment, **os.environ})


def end_with_launcher() -> None:
    """In a process that ``launch`` started: let it not outlive the launcher, however that ends."""
    parent = os.environ.get(LAUNCHER)
    if parent is None or not sys.platform.startswith("linux"):
        return
    set_parent_death_signal = 1  # PR_SET_PDEATHSIG of prctl(2)
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGTERM)
    if os.getppid() != int(parent.partition(" ")[0]):
        sys.exit(128 + signal.SIGTERM)


def leave(code: int) -> NoReturn:
    """End this process without tearing the interpreter down: threads of torch's may still wait for it then, and abort."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
