"""Real processes for tests: they call a function, form one group over gloo, and end within a time limit.

They are forked from a process that has imported the modules of a training, but no module of the test, so that they
start fast.
"""

from __future__ import annotations

import faulthandler
import gc
import logging
import multiprocessing
import os
import pickle
import runpy
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from multiprocessing import connection
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest

from fastloop.cli import launch
from fastloop.errors import UsageError
from fastloop.plugins.installed import installed, is_own
from fastloop.problem import clause
from fastloop.runtime.tracebacks import user_line
from fastloop.testing.time_limits import kill_group, without_module_list

PRELOADED = [
    "fastloop.testing.runs",
    "fastloop.checkpoint.store",
    "fastloop.cli",
    "torchmetrics.classification",
    "datasets",
    "omegaconf",
    "rich.console",
    "rich.table",
    "fastloop.testing.first_uses",
    "transformers.models.bert.modeling_bert",
    "transformers.models.llama.modeling_llama",
    "torch._dynamo",
    "torch._inductor.config",
    "torch.profiler",
    "deepspeed.accelerator",
]
"""Modules that every started process has imported, beside the modules of fastloop's own plugins. None may start a
thread, which does not survive a fork. Accelerate imports deepspeed, if it is installed, for every model that it
prepares or exports."""
PATIENCE = 10.0
"""Seconds that the other processes get after one has failed."""


@dataclass
class ProcessResult:
    """The result of a process that has ended.

    Attributes:
        code: Its exit code; -n if signal n ended it; None after the time limit.
        result: The return value of its function.
        output: Its text on stdout and stderr.
    """

    code: int | None
    result: Any
    output: str


@cache
def _context() -> Any:
    import torch

    # torchao and deepspeed initialize an accelerator when they are imported, and no forked process can use it then
    if "forkserver" not in multiprocessing.get_all_start_methods() or torch.accelerator.is_available():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    ours = [point.module for point in installed().values() if is_own(point)]
    context.set_forkserver_preload([*PRELOADED, *ours])
    return context


def start(
    count: int, function: Callable[..., Any], *arguments: Any, folder: Path | None = None, limit: float = 600.0
) -> list[ProcessResult]:
    """Call a function in ``count`` new processes, and wait for all. No process is left when this returns.

    Several processes are the ranks of one group: fastloop and Accelerate connect them over gloo. Each computes
    on one thread. The caller's warning filters apply.

    Args:
        function: A function of an importable module, such as the test's own. It, ``arguments`` and the result go
            through pickle.
        folder: The current folder of the processes, made if it is missing; None: the caller's.
        limit: Time limit in seconds; then each process writes its stack and is killed.

    Returns:
        How each ended, by rank.

    Raises:
        UsageError: The function or its arguments cannot be pickled.
    """
    _check_picklable(function, arguments)
    context = _context()
    folder = Path(folder or Path.cwd())
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as aside:
        processes = []
        for rank, variables in enumerate(launch.variables_of_each(count)):
            given = (
                function,
                arguments,
                os.environ | variables,
                folder,
                Path(aside, str(rank)),
                [*warnings.filters],
                limit,
            )
            processes.append(context.Process(target=_work, args=given))
        try:
            for process in processes:
                process.start()
            in_time = _wait(processes, time.monotonic() + limit)
        finally:
            for process in processes:
                _end(process)
        return [
            _process_result(Path(aside, str(rank)), process, in_time, limit) for rank, process in enumerate(processes)
        ]


def _check_picklable(function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    try:
        ForkingPickler.dumps((function, arguments))
    except Exception as error:
        name = getattr(function, "__qualname__", repr(function))
        raise UsageError(
            f"{name} and its arguments cannot be sent to a process: {clause(error)}.",
            code="not-picklable",
            remedy="Define the function at the top level of a module, and pass arguments that pickle can write.",
        ) from error


def _wait(processes: Sequence[Any], deadline: float) -> bool:
    """Wait until all have ended, or, after a failure, until the others had time to end. Returns whether they ended in
    time."""
    while True:
        running = [process for process in processes if process.exitcode is None]
        if not running:
            break
        if any(process.exitcode for process in processes):
            deadline = min(deadline, time.monotonic() + PATIENCE)
        if not connection.wait([process.sentinel for process in running], max(0.0, deadline - time.monotonic())):
            for process in running:
                if hasattr(signal, "SIGABRT"):
                    os.kill(process.pid, signal.SIGABRT)  # faulthandler writes the stack
                    process.join(PATIENCE)
            return any(process.exitcode not in (None, 0, -signal.SIGABRT) for process in processes)
    return True


def _end(process: Any) -> None:
    """End a process and its children."""
    if process.pid is None:
        return
    kill_group(process.pid)
    process.kill()
    process.join()


def _process_result(report: Path, process: Any, in_time: bool, limit: float) -> ProcessResult:
    log = report.with_suffix(".log")
    pickled = report.with_suffix(".result")
    said = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    said = without_module_list(said)
    if process.exitcode == -signal.SIGABRT and not in_time:
        return ProcessResult(None, None, f"{said}\nIt was ended: {limit:g} seconds were over.")
    return ProcessResult(process.exitcode, pickle.loads(pickled.read_bytes()) if pickled.exists() else None, said)


def _work(
    function: Callable[..., Any],
    arguments: Any,
    environment: Mapping[str, str],
    folder: Path,
    report: Path,
    filters: list[Any],
    limit: float,
) -> None:
    """Run the function in a started process."""
    gc.freeze()  # the imported modules: a collection of all objects takes 0.3 s, and copies their pages
    if hasattr(os, "setsid"):
        os.setsid()  # a group, so that its children can be killed with it
        signal.alarm(int(limit + 2 * PATIENCE))  # in case the waiting process has died
    log = os.open(report.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # what it says stands before why it failed
    faulthandler.enable()
    # this process starts its own children with the platform's default method
    multiprocessing.set_start_method(None, force=True)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    import torch

    torch.set_num_threads(1)
    logging.getLogger("fastloop").setLevel(logging.WARNING)  # else a Trainer shows its log, as in a script
    warnings.filters[:] = filters  # type: ignore[index]
    try:
        result = function(*arguments)
    except Exception as error:
        place = user_line(error)
        if place:
            error.add_note(f"fastloop: your code failed at {place}")
        raise
    try:
        report.with_suffix(".result").write_bytes(pickle.dumps(result))
    except Exception as error:
        raise UsageError(
            f"{function.__qualname__} returned a {type(result).__name__} that pickle cannot write: {clause(error)}.",
            code="not-picklable",
        ) from error
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    sys.stdout.flush()


@pytest.fixture(scope="session")
def processes() -> Callable[..., list[ProcessResult]]:
    """Call a function in several real processes: ``first, second = processes(2, train, recipe)``, then
    ``first.result.losses``.

    Like ``start``, but if a process fails, the test fails with the output of all.
    """

    def run(
        count: int, function: Callable[..., Any], *arguments: Any, folder: Path | None = None, limit: float = 600.0
    ) -> list[ProcessResult]:
        ended = start(count, function, *arguments, folder=folder, limit=limit)
        if any(process.code != 0 for process in ended):
            pytest.fail(failure(ended), pytrace=False)
        return ended

    return run


def run_commands(commands: Iterable[Sequence[str | Path]], code: int = 0) -> list[str]:
    """Run commands of fastloop one after the other, each in a new process: ``[(folder, "train", "recipe.yaml")]``. The
    test fails with the output of the first one that ends with another exit code.

    Args:
        commands: The current folder, and the arguments.
        code: The exit code that each must have.

    Returns:
        The text of each on stdout and stderr.
    """
    outputs = []
    for folder, *arguments in commands:
        ended = start(1, _command, [*map(str, arguments)], folder=Path(folder))
        if ended[0].code != code:
            pytest.fail(f"fastloop {' '.join(map(str, arguments))}\n{failure(ended)}", pytrace=False)
        outputs.append(ended[0].output)
    return outputs


def _command(arguments: Sequence[str]) -> None:
    sys.argv = ["fastloop", *arguments]
    runpy.run_module("fastloop", run_name="__main__", alter_sys=True)


def failure(ended: Sequence[ProcessResult]) -> str:
    """How processes ended, and the last output of each."""
    lines = []
    for rank, process in enumerate(ended):
        how = {0: "done", None: "out of time"}.get(process.code, f"exit code {process.code}")
        lines.append(f"process {rank} of {len(ended)}: {how}\n{process.output[-3000:].strip()}")
    return "\n".join(lines)
