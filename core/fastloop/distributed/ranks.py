"""Rank and world size from the environment, before torch is imported."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from fastloop.errors import UsageError
from fastloop.problem import agree, join_names

WORLD_SIZES = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
"""Variables with the number of processes: of torchrun and accelerate, Intel MPI, Open MPI and MVAPICH. Accelerate reads
them, too."""
RANKS = ("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK")
"""Variables of the same launchers with the index of this process."""
SLURM_TASKS = "SLURM_STEP_NUM_TASKS"
"""Variable of Slurm's srun with the number of processes that it started side by side. torch does not read it."""
LOOPBACK = "127.0.0.1"
"""The address on which the processes of one machine meet. No other machine reaches it."""
LOCAL_RANK = "LOCAL_RANK"
"""Variable with the index of this process on its machine, from 0. -1 stands for a single process. torch and Accelerate
connect processes if it is set."""
VARIABLES = (*WORLD_SIZES, *RANKS, LOCAL_RANK, "MASTER_ADDR", "MASTER_PORT")
"""Variables by which processes find each other."""


def _from_environment(*names: str) -> int | None:
    for name in names:
        value = os.environ.get(name, "")
        if value.isdecimal():
            return int(value)
    return None


_planned: ContextVar[int | None] = ContextVar("_planned", default=None)


@contextmanager
def planned(processes: int | None) -> Iterator[None]:
    """Let ``world_size`` return another number inside the block, to show how a recipe would run; None: do not."""
    token = _planned.set(processes)
    try:
        yield
    finally:
        _planned.reset(token)


def world_size() -> int:
    """Number of processes, from the variables of a launcher."""
    processes = _planned.get()
    if processes is not None:
        return processes
    return _from_environment(*WORLD_SIZES) or 1


def rank() -> int:
    """Index of this process, from 0."""
    return _from_environment(*RANKS) or 0


def has_torchrun_store() -> bool:
    """Whether processes meet in the store of torchrun, and process 0 makes none."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def store_maker() -> str:
    """Who has made the store in which processes meet, for messages."""
    return "torchrun" if has_torchrun_store() else "process 0"


def launcher_variables() -> list[str]:
    """The names of the variables that are set by which processes find each other."""
    return [name for name in VARIABLES if os.environ.get(name)]


def unset_remedy() -> str:
    """The remedy for variables that are left over from another run."""
    return f"If the variables are left over from another run, run `unset {' '.join(launcher_variables())}` first."


def set_all_remedy() -> str:
    """The remedy for variables that do not fit together."""
    return f"Start the processes with --nproc N or torchrun, which set all variables. {unset_remedy()}"


def torchrun_job() -> str | None:
    """The name of the torchrun job that started this process, equal on all of its restarts: the folder of its log
    files, which torchrun creates under a new name. None: torchrun did not start it."""
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not error_file:
        return None
    # JOB/attempt_1/0/error.json: the attempt, then the rank
    return str(Path(error_file).parents[2])


def check_variables(trains: bool) -> None:
    """Check that the variables of a launcher describe one group of processes. torch would wait for processes that do
    not come.

    Args:
        trains: Whether the run trains a model. Other commands may run side by side on their own.

    Raises:
        UsageError: A variable is missing, or is wrong.
    """
    _check_numbers()
    sizes = [name for name in WORLD_SIZES if os.environ.get(name)]
    ranks = [name for name in RANKS if os.environ.get(name)]
    is_local = os.environ.get(LOCAL_RANK, "-1") not in ("-1", "")
    if world_size() > 1 or is_local:
        _check_complete(sizes, ranks)
    if rank() >= world_size():
        size = f"{sizes[0]} is {world_size()}" if sizes else "WORLD_SIZE is not set"
        raise UsageError(
            f"the environment variable {ranks[0]} is {rank()}, and {size}. Expected a rank below the number of "
            "processes.",
            code="wrong-environment",
            remedy=set_all_remedy(),
        )
    tasks = _from_environment(SLURM_TASKS) or 1
    if trains and tasks > 1 and not sizes:
        raise UsageError(
            f"srun started {tasks} tasks ({SLURM_TASKS}), and WORLD_SIZE is not set: each task would train a model of "
            "its own into the same folder.",
            code="wrong-environment",
            remedy=(
                "Start one task on each machine, and in it `fastloop train RECIPE --nproc N --nnodes M --node-rank "
                "$SLURM_NODEID --master HOST:PORT`. Or set WORLD_SIZE, RANK, LOCAL_RANK, MASTER_ADDR and MASTER_PORT. "
                f"For separate runs, unset {SLURM_TASKS}."
            ),
        )


def _check_numbers() -> None:
    """Check that the variables of a launcher that hold a number do so.

    Raises:
        UsageError: One holds another text.
    """
    for name in (*WORLD_SIZES, *RANKS, LOCAL_RANK, "MASTER_PORT"):
        value = os.environ.get(name, "")
        is_number = value.isdecimal() or (name == LOCAL_RANK and value == "-1")
        if value and not is_number:
            raise UsageError(
                f"the environment variable {name} is {value!r}, expected a whole number.",
                code="wrong-environment",
                remedy=set_all_remedy(),
            )


def _check_complete(sizes: Sequence[str], ranks: Sequence[str]) -> None:
    """Check that a process of a launcher has all variables that it needs.

    Args:
        sizes: The variables with the number of processes that are set.
        ranks: Those with the index of this process.

    Raises:
        UsageError: Some are not set.
    """
    missing = []
    if not sizes:
        missing.append("WORLD_SIZE")
    if not ranks:
        missing.append("RANK")
    if not os.environ.get("MASTER_ADDR"):
        missing.append("MASTER_ADDR")
    # Accelerate has a default port for MPI
    is_mpi = bool(sizes) and sizes[0] != "WORLD_SIZE"
    if not is_mpi and not os.environ.get("MASTER_PORT"):
        missing.append("MASTER_PORT")
    if not missing:
        return
    present = [f"{name}={os.environ[name]}" for name in launcher_variables()]
    variables = agree(len(present), "variable", "variables")
    present_are = agree(len(present), "is", "are")
    missing_are = agree(len(missing), "is", "are")
    raise UsageError(
        f"the environment {variables} {join_names(present)} {present_are} set, and {join_names(missing)} {missing_are} "
        "not. Each process that a launcher starts needs all of them.",
        code="wrong-environment",
        remedy=set_all_remedy(),
    )
