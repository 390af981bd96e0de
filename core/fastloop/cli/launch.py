"""Start the processes of a run on this machine. Does not import torch.

    fastloop train recipe.yaml --nproc 2
    # on two machines; --node-rank 1 on the other one
    fastloop train recipe.yaml --nproc 2 --nnodes 2 --node-rank 0 --master 10.0.0.1:29500

``torchrun``, ``accelerate launch`` and MPI work, too. With this launcher, a failing process ends the others at once,
and only its own error is shown. ``torchrun`` prints a table after each failure, which hides the reason, and imports
torch in a process that does not train. Use it for elastic restarts and rendezvous, which this launcher lacks.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from fastloop.distributed.ranks import LOOPBACK, world_size
from fastloop.distributed.signals import EXIT_INTERRUPTED, EXIT_STOPPED, STOP_TIMEOUT, on_signals
from fastloop.errors import PluginError, UsageError
from fastloop.recipe import secrets
from fastloop.runtime import platform_support
from fastloop.runtime.step_folders import checkpoints

if TYPE_CHECKING:
    from fastloop.plugins.plugin import Plugin
    from fastloop.plugins.resolve import ResolvedRecipe
    from fastloop.recipe import Recipe
    from fastloop.run import Run

LAUNCHER = "FASTLOOP_LAUNCHER"
"""Environment variable with the pid and the options of the launcher."""
GRACE_SECONDS = 10.0
"""Seconds until processes are killed, after another process has stopped or a signal was repeated."""


def options() -> str:
    """The options of ``launch`` as part of a command line; empty for other launchers."""
    return os.environ.get(LAUNCHER, "").partition(" ")[2]


def launch(arguments: Sequence[str], nproc: int, nnodes: int, node_rank: int, master: str | None, output: Path) -> int:
    """Run ``fastloop ARGUMENTS`` in ``nproc`` processes and wait for all of them.

    Args:
        nnodes: Number of machines.
        node_rank: Index of this machine.
        master: HOST:PORT on machine 0; None: there is only this machine.
        output: The run folder. If it contains a checkpoint, the message about a killed process includes the command to
            resume.

    Returns:
        0, or the exit code of the process that failed first; 128 + n for signal n.

    Raises:
        UsageError: Another launcher started this process, or an option is wrong.
    """
    if world_size() > 1 or "LOCAL_RANK" in os.environ:
        raise UsageError(
            f"--nproc {nproc}: another launcher started this process, one of {world_size()}. Leave one of the two out."
        )
    if nnodes > 1 and master is None:
        raise UsageError(f"--nnodes {nnodes}: needs --master HOST:PORT, an address of node 0 that every node reaches.")
    if not 0 <= node_rank < nnodes:
        raise UsageError(f"--node-rank {node_rank}: expected 0 to {nnodes - 1}, since --nnodes is {nnodes}.")
    host, _, port = (master or f"{LOOPBACK}:{free_port()}").rpartition(":")
    if not host or not port.isdecimal():
        raise UsageError(f"--master {master}: expected HOST:PORT, such as 10.0.0.1:29500.")
    launch_options = f"--nproc {nproc}"
    if nnodes > 1:
        launch_options += f" --nnodes {nnodes} --node-rank {node_rank} --master {master}"
    shared = Path.cwd() in (Path(entry).absolute() for entry in sys.path)
    kills = platform_support.kills()
    processes = [
        subprocess.Popen(
            # -m alone adds the current folder to sys.path
            [sys.executable, *([] if shared else ["-P"]), "-m", "fastloop", *arguments],
            env=os.environ
            | member(local, nproc, host, port, nnodes, node_rank)
            | {LAUNCHER: f"{os.getpid()} {launch_options}"},
        )
        for local in range(nproc)
    ]
    index = _wait(processes)
    if index is None:
        codes = [process.returncode for process in processes]
        return EXIT_INTERRUPTED if EXIT_INTERRUPTED in codes else EXIT_STOPPED if any(codes) else 0
    failed = processes[index]
    if failed.returncode > 0:  # the process has printed its error
        return int(failed.returncode)
    name = signal.Signals(-failed.returncode).name
    message = f"process {node_rank * nproc + index} of {nproc * nnodes} (pid {failed.pid}) was ended by {name}."
    if failed.returncode == -platform_support.KILL and platform_support.kills() > kills:
        message += (
            f" {platform_support.explain_kill(kills)} Set a smaller train.micro_batch_size, use fewer "
            "workers, or raise the limit."
        )
    if checkpoints(output):
        message += (
            f" Continue from its newest checkpoint with: {shlex.join(['fastloop', *arguments])} "
            f"{launch_options} --resume"
        )
    print(f"error: {secrets.hide(message)}", file=sys.stderr)
    return 128 - int(failed.returncode)


def member(local: int, nproc: int, host: str, port: str, nnodes: int = 1, node_rank: int = 0) -> dict[str, str]:
    """Environment variables of process ``local`` of ``nproc`` on this machine. The processes share its processors
    equally.

    On one machine, gloo listens on the loopback interface. Otherwise it listens on the address of the machine's name.
    """
    interface = {"linux": "lo", "darwin": "lo0"}.get(sys.platform) if nnodes == 1 and host == LOOPBACK else None
    return ({"GLOO_SOCKET_IFNAME": interface} if interface and not os.environ.get("GLOO_SOCKET_IFNAME") else {}) | {
        "WORLD_SIZE": str(nproc * nnodes),
        "LOCAL_WORLD_SIZE": str(nproc),
        "RANK": str(node_rank * nproc + local),
        "LOCAL_RANK": str(local),
        "MASTER_ADDR": host,
        "MASTER_PORT": port,
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or str(max(1, platform_support.cores() // nproc)),
    }


def local_group(count: int) -> list[dict[str, str]]:
    """The environment variables of each of ``count`` processes on a single machine; none for a single process."""
    port = str(free_port())
    return [member(rank, count, LOOPBACK, port) for rank in range(count)] if count > 1 else [{}]


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
        deadline = min(deadline, time.monotonic() + (GRACE_SECONDS if signum in received else STOP_TIMEOUT))
        received.add(signum)
        for process in processes:
            if process.poll() is None:
                process.send_signal(signum)

    try:
        with on_signals(forward):
            while True:
                codes = [process.poll() for process in processes]
                failed = next(
                    (
                        index
                        for index, code in enumerate(codes)
                        if code not in (None, 0, EXIT_INTERRUPTED, EXIT_STOPPED)
                    ),
                    None,
                )
                if failed is not None or None not in codes:
                    return failed
                if EXIT_INTERRUPTED in codes or EXIT_STOPPED in codes:  # the other processes must stop, too
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
                if time.monotonic() > deadline:
                    print("error: not all processes stopped in time: the others are killed.", file=sys.stderr)
                    return None
                time.sleep(0.05)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()  # on SIGTERM, it would wait for the other processes
                process.wait()


def resume_from(value: str | None, output: Path) -> Path | None:
    """The path to resume from. ``value`` is the value of ``--resume``, None without that option.

    If a process fails, torchrun with ``--max-restarts`` restarts all processes with the same arguments. On one machine,
    a restarted run resumes from its run folder. On several machines, pass ``--resume`` from the start.
    """
    if _restarts() and _is_from_this_job(output):
        return output
    return None if value is None else Path(value or output)


def _restarts() -> int:
    """Number of restarts by torchrun (``--max-restarts``). 0 on several machines, because each of them counts
    separately."""
    is_one_machine = os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0) if is_one_machine else 0


def _is_from_this_job(output: Path) -> bool:
    """Whether this torchrun job created the run folder. If processes fail early, the folder may belong to an older
    run."""
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")  # .../attempt_1/0/error.json
    try:
        started = Path(error_file).parents[1].with_name("attempt_0").stat().st_mtime if error_file else 0.0
        return (output / "recipe.yaml").stat().st_mtime >= started
    except OSError:
        return False


def environment(resolved: ResolvedRecipe) -> dict[str, str]:
    """The environment variables that a recipe's plugins need at process start.

    Raises:
        PluginError: Two plugins need different values, or one returns another type.
    """
    recipe, values = resolved.recipe, dict[str, tuple[str, str]]()
    for plugin, call in resolved.plugins.each("environment"):
        result = call(recipe=recipe)
        if result is None:
            continue
        where = f"{recipe.where}: plugin {plugin.name!r}: environment returned"
        if not isinstance(result, dict):
            raise PluginError(f"{where} a {type(result).__name__}, expected dict[str, str]: variable -> value.")
        for name, value in result.items():
            if not isinstance(name, str) or not isinstance(value, str):
                raise PluginError(f"{where} {name!r}: {value!r}, expected text for both, such as 'NAME': '1'.")
            other, first = values.setdefault(name, (plugin.name, value))
            if first != value:
                raise PluginError(
                    f"{recipe.where}: plugins {plugin.name!r} and {other!r} want different values of {name}: {value!r} "
                    f"and {first!r}. "
                    "Remove one of them."
                )
    return {name: value for name, (_, value) in values.items()}


def resolve_early(recipe: Recipe, objects: Iterable[Plugin] = ()) -> ResolvedRecipe:
    """Resolve a recipe, if possible without importing torch: a process that restarts would import it twice. So the
    requirements on the machine are not checked: call ``registry.check_requirements`` before a run is built.

    Args:
        objects: Plugin objects from Python.
    """
    from fastloop.cli.startup import cpu_machine
    from fastloop.plugins.resolve import resolve

    return resolve(recipe, cpu_machine(recipe.train.device), objects, any_machine=True)


def start_again(resolved: ResolvedRecipe) -> None:
    """Restart this process if variables that a recipe's plugins need are not set. Variables that are set keep their
    values."""
    needed = environment(resolved)
    # False if a program calls the command line
    is_command = sys.orig_argv[len(sys.orig_argv) - len(sys.argv) + 1 :] == sys.argv[1:]
    if is_command and needed.keys() - os.environ.keys():
        sys.stdout.flush()
        sys.stderr.flush()
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**needed, **os.environ})


def end_with_launcher() -> None:
    """End this process with the launcher, even if the launcher is killed. Does nothing if ``launch`` did not start this
    process."""
    parent = os.environ.get(LAUNCHER)
    if parent is None or not sys.platform.startswith("linux"):
        return
    set_parent_death_signal = 1  # PR_SET_PDEATHSIG of prctl(2)
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGTERM)
    if os.getppid() != int(parent.partition(" ")[0]):
        sys.exit(128 + signal.SIGTERM)


def end(run: Run, code: int = 0) -> int:
    """End the process group of this process, and with it the process if it is one of several. Otherwise return the exit
    code."""
    run.processes.barrier()  # launchers end the other processes when one exits with a code other than 0
    run.processes.close()
    if run.world_size > 1:
        leave(code)
    return code


def leave(code: int) -> NoReturn:
    """Exit without finalizing the interpreter, because threads of torch may abort the process then."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
