"""Processes that die, hang or fall behind, and broken links between them: the run ends in time, and names them.

Modules:
    plugins/fastloop_plugins/guards/_heartbeats.py
    plugins/fastloop_plugins/guards/watchdog.py
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import forked
import pytest
import yaml
from fault_runs import until
from log_lines import find_lines
from long_form import LONG
from safetensors.torch import load_file

from fastloop.cli import launch
from fastloop.testing import assert_problem

pytestmark = pytest.mark.slow

TIMEOUT = 10.0
"""Seconds without progress after which the watchdog of a hanging run ends it."""
HANGS = 400.0
"""Seconds after which a command counts as hanging: far more than a loaded machine needs, less than the faults sleep."""
PATIENT = "plugins.watchdog.timeout=120"
"""For runs that do not hang: a loaded machine may stall a process for seconds."""
CODE = """
import ctypes, os, signal, socket, stat, time
from pathlib import Path
import torch
from torch import nn
from torch.utils.data import Dataset

class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 3))

def stuck_here(seconds=1000.0):
    time.sleep(seconds)

def cut_links():
    # both ends of each connection to another process see it closed
    for name in os.listdir("/proc/self/fd"):
        fd = int(name)
        try:
            if not stat.S_ISSOCK(os.fstat(fd).st_mode):
                continue
            with socket.socket(fileno=os.dup(fd)) as link:
                if link.family in (socket.AF_INET, socket.AF_INET6) and link.type == socket.SOCK_STREAM:
                    link.getpeername()  # not one that waits for others to connect
                    link.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass

FAULTS = {
    "raise": lambda: 1 / 0,
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "sleep": stuck_here,
    "late": lambda: stuck_here(LATE),
    "native": lambda: ctypes.PyDLL(None).sleep(1000),  # holds the interpreter
    "cut": cut_links,
}
LATE = 18.0

class Rows(Dataset):
    def __init__(self, fault=None, rank="1", once=""):
        self.x = torch.randn(96, 8, generator=torch.Generator().manual_seed(0))
        self.fault, self.rank, self.once, self.read = fault, rank, once, 0
        Path(f"pid{os.environ.get('RANK', 0)}").write_text(str(os.getpid()))
    def __len__(self):
        return 96
    def __getitem__(self, index):
        self.read += 1
        due = self.fault and self.read == 60 and os.environ.get("RANK", "0") == self.rank
        if due and not (self.once and Path(self.once).exists()):
            if self.once:
                Path(self.once).touch()
            FAULTS[self.fault]()
        return self.x[index], int(self.x[index, :3].argmax())

def rows(fault=None, rank="1", once=""):
    return {"train": Rows(fault, rank, once), "validation": Rows()}
"""
RECIPE: dict[str, Any] = {
    "model": {"module": "code.py:Net"},
    "data": {"module": "code.py:rows"},
    "train": {"epochs": 3, "batch_size": 12, "lr": 1e-2, "save_every": 2, "device": "cpu"},
    "plugins": [{"module": {"loss": "cross_entropy"}}, "ddp", {"watchdog": {"timeout": TIMEOUT}}],
    "output": "run",
}
FASTLOOP = ["-m", "fastloop", "train", "recipe.yaml"]
RANKS = [0, 1] if LONG else [0]
"""The processes that a fault hits. The first one holds the store of the group, and writes the run's files."""


def write_recipe():
    Path("code.py").write_text(CODE)
    Path("recipe.yaml").write_text(yaml.safe_dump(RECIPE))


@pytest.fixture(autouse=True)
def _recipe():
    write_recipe()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The weights of a run of two processes that nothing happens to."""
    with contextlib.chdir(tmp_path_factory.mktemp("undisturbed")):
        write_recipe()
        done = do(*FASTLOOP, "--nproc", "2", "--without", "watchdog")
        assert done.returncode == 0, done.stderr
        return load_file("run/model/model.safetensors")


def do(*command: str, fault: str = "", rank: int = 1, once: str = "") -> subprocess.CompletedProcess[str]:
    """Run a command with a fault in one of its processes. A command that hangs fails by the timeout."""
    data = [f"data.arguments={{fault: {fault}, rank: '{rank}', once: '{once}'}}"] if fault else []
    return forked.run(*command, *data, timeout=HANGS)


# -- hangs -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", RANKS)
def test_hanging_process_is_named_with_its_stack(rank):
    """a rank that hangs in its data: all end with an error that names it, and with their stacks"""
    done = do(*FASTLOOP, "--nproc", "2", fault="sleep", rank=rank)
    assert done.returncode not in (0, -signal.SIGKILL)
    assert_problem(done.stderr, f"no-progress process {rank} 2 data")
    assert_problem(done.stdout, f"no-progress watchdog: process {rank} 2")
    assert "stuck_here" in Path(f"run/watchdog/rank-{rank}.txt").read_text()
    other = Path(f"run/watchdog/rank-{1 - rank}.txt").read_text()
    assert "stuck_here" not in other
    assert "distributed/processes.py" in other, "it waits for the other"


def test_a_process_that_is_stopped_is_named_and_all_end():
    """a rank stopped by SIGSTOP: the others name it, and all end"""
    done = do(*FASTLOOP, "--nproc", "2", fault="stop", rank=1)
    assert done.returncode == 1
    assert_problem(done.stderr, "no-progress process 1 2")
    assert not any(Path("/proc", Path(name).read_text()).exists() for name in ("pid0", "pid1"))
    summary = json.loads(Path("run/summary.json").read_text())
    assert (summary["status"], summary["reason"].startswith("process 1 of 2 ")) == ("failed", True)


def test_one_process_alone_is_watched_too():
    """a single process that hangs: exit code 1, with its stack"""
    done = do(*FASTLOOP, "--without", "ddp", fault="sleep", rank=0)
    assert done.returncode == 1
    assert_problem(done.stderr, "no-progress process 0 1")
    assert "stuck_here" in Path("run/watchdog/rank-0.txt").read_text()


def test_native_code_that_holds_the_interpreter_is_ended_too():
    """a hang in native code that holds the interpreter: it ends with its stack"""
    done = do(*FASTLOOP, "--without", "ddp", fault="native", rank=0)
    assert done.returncode == 1
    assert "Timeout" in done.stderr
    assert "__getitem__" in done.stderr


def test_slow_process_is_named_and_run_continues():
    """a rank that is late: a warning names it, and the run continues"""
    done = do(*FASTLOOP, "plugins.watchdog.timeout=24", "--nproc", "2", fault="late", rank=1)
    assert done.returncode == 0, done.stderr
    assert_problem(done.stdout, "no-progress watchdog: process 1 2")


def test_watchdog_ignores_progressing_run(undisturbed):
    """control: where all moves, the same bits as without the watchdog"""
    done = do(*FASTLOOP, PATIENT, "--nproc", "2")
    assert done.returncode == 0, done.stderr
    watched = load_file("run/model/model.safetensors")
    assert all(watched[name].equal(undisturbed[name]) for name in undisturbed)


# -- deaths and links --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["kill", "raise"])
@pytest.mark.parametrize("rank", RANKS)
def test_killed_process_stops_all(fault, rank):
    """a rank that is killed or raises: all end within seconds, with the cause"""
    done = do(*FASTLOOP, PATIENT, "--nproc", "2", fault=fault, rank=rank)
    assert done.returncode == (137 if fault == "kill" else 1), done.stderr
    assert_problem(done.stderr, "process-killed SIGKILL" if fault == "kill" else "reading-failed ZeroDivisionError")


@pytest.mark.parametrize("rank", RANKS)
def test_killed_process_with_a_busy_worker_is_missed_at_once(rank):
    """a rank is killed while its worker waits for data, and no launcher ends the other: the other one ends"""
    port = str(launch.free_port())
    data = f"data.arguments={{fault: sleep, rank: '{rank}', once: stuck}}"
    workers = ("--with", "dataloader-workers", "plugins.dataloader-workers.num_workers=1")
    commands = []
    for member in (0, 1):
        variables = launch.process_variables(member, 2, launch.LOOPBACK, port)
        commands.append(forked.Command(*FASTLOOP, *workers, PATIENT, data, env=os.environ | variables))
    until(lambda: Path("stuck").exists() or any(command.poll() is not None for command in commands))
    commands[rank].send_signal(signal.SIGKILL)
    other = commands[1 - rank]
    assert other.wait(HANGS) == 1, other.stderr
    assert_problem(other.stderr, f"process-lost process {1 - rank} of 2")


@pytest.mark.parametrize("rank", RANKS)
def test_broken_connection_stops_all(rank):
    """the sockets between two ranks cut: both end within seconds and report the lost connection"""
    done = do(*FASTLOOP, PATIENT, "--nproc", "2", fault="cut", rank=rank, once="done")
    assert done.returncode == 1, done.stderr
    assert_problem(done.stderr, "process-lost process 2")
    again = do(*FASTLOOP, PATIENT, "--nproc", "2", "--resume", fault="cut", rank=rank, once="done")
    assert again.returncode == 0, again.stderr


# -- torchrun ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["kill", "sleep"] if LONG else ["sleep"])
def test_torchrun_restart_resumes_run(fault, undisturbed):
    """a rank that dies or hangs under torchrun --max-restarts 1: all ranks resume, to the same bits"""
    torchrun = ["-m", "torch.distributed.run", "--nproc_per_node", "2", "--max-restarts", "1", "--standalone"]
    more = [*(["--resume"] if fault == "kill" else []), *([] if fault == "sleep" else [PATIENT])]
    done = do(*torchrun, "-m", "fastloop", "train", "recipe.yaml", *more, fault=fault, once="done")
    assert done.returncode == 0, done.stderr
    assert Path("done").exists()
    assert find_lines(done.stdout, "run/checkpoints/step-00000008")
    ours = load_file("run/model/model.safetensors")
    assert all(ours[name].equal(undisturbed[name]) for name in undisturbed)
    assert json.loads(Path("run/summary.json").read_text())["status"] == "completed"


def test_killed_before_the_first_checkpoint_torchrun_starts_anew():
    """a rank dies before the first checkpoint under torchrun: the run begins again"""
    torchrun = ["-m", "torch.distributed.run", "--nproc_per_node", "2", "--max-restarts", "1", "--standalone"]
    short = ["train.save_every=epoch", "train.epochs=1", PATIENT]
    done = do(*torchrun, "-m", "fastloop", "train", "recipe.yaml", *short, fault="kill", once="done")
    assert done.returncode == 0, done.stderr
    assert "run/checkpoints/step-" not in done.stdout, "nothing to resume from"
