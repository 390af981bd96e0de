"""Runs of `fastloop train` with injected faults, in forked processes that a test stops, kills, or lets fail at a place.

A forked process has torch loaded already, so that a hundred of them take about a minute.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch._dynamo
import torchmetrics
import yaml

import fastloop.cli
import fastloop.lifecycle
from fastloop.cli import launch
from fastloop.testing.time_limits import without_module_list

LOADED = (fastloop.cli, fastloop.lifecycle, torch._dynamo, torchmetrics)
"""Import the modules that a run needs, before processes are forked."""
TIMES = ("samples_per_second", "tokens_per_second", "memory_bytes")
REMEMBERED = ("status", "steps", "epochs", "samples", "validation", "test", "best")

CODE = '''
import os, resource, signal, time
from pathlib import Path
import torch
from torch import nn
from torch.utils.data import Dataset

torch.set_num_threads(1)
ME = f"{os.environ.get('RANK', '0')}"


def fault(place):
    """What FAULT says of a place ("PLACE TIMES RANK WHAT") happens there, at that time, to that process."""
    where, times, rank, what = os.environ.get("FAULT", "nowhere 0 0 pass").split(" ", 3)
    if where != place or rank != ME:
        return
    seen = int(os.environ.get("SEEN", "0")) + 1
    os.environ["SEEN"] = str(seen)
    if seen == int(times):
        exec(what)


def me(*names):
    for name in names:
        os.kill(os.getpid(), getattr(signal, name))


class Net(nn.Sequential):
    def __init__(self, hidden=16):
        super().__init__(nn.Linear(8, hidden), nn.ReLU(), nn.Dropout(0.1), nn.Linear(hidden, 3))

    def forward(self, inputs):
        fault("step" if self.training else "evaluation")
        return super().forward(inputs)

    def state_dict(self, *arguments, **options):
        fault("save")
        return super().state_dict(*arguments, **options)


class Rows(Dataset):
    def __init__(self, size, seed, slow=0.0):
        self.x, self.slow = torch.randn(size, 8, generator=torch.Generator().manual_seed(seed)), slow

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        if self.slow:
            time.sleep(self.slow)
        return self.x[index] + 0.01 * torch.randn(8), int(self.x[index, :3].argmax())


def rows(size=67, slow=0.0):
    fault("data")
    return {"train": Rows(size, 0, slow), "validation": Rows(64, 1), "test": Rows(16, 2)}
'''

RECIPE: dict[str, Any] = {
    "model": {"module": "code.py:Net"},
    "data": {"module": "code.py:rows"},
    "train": {"epochs": 3, "batch_size": 8, "lr": 1e-2, "save_every": 4, "evaluate_every": 5, "log_every": 3}
    | {"device": "cpu", "eval_batch_size": 4},
    "plugins": [
        {
            "module": {
                "loss": "cross_entropy",
                "metrics": {"accuracy": {"type": "MulticlassAccuracy", "num_classes": 3}},
            }
        },
        {"checkpoint-best": {"monitor": "loss"}},
        {"lr-scheduler": {"schedule": "cosine", "warmup": 4}},
        {"ema": {"decay": 0.9}},
        {"progress": False},
    ],
}
FASTLOOP = ["-m", "fastloop", "train"]


def times(short: int) -> int:
    """How often a fault is tried: ``short`` times in CI, and FASTLOOP_RELIABILITY times as often by hand."""
    return max(1, round(short * float(os.environ.get("FASTLOOP_RELIABILITY", "1"))))


def write_recipe(**changes: Any) -> None:
    """``recipe.yaml`` and its code, in the current folder."""
    Path("code.py").write_text(CODE)
    train = RECIPE["train"] | changes.pop("train", {})
    Path("recipe.yaml").write_text(yaml.safe_dump(RECIPE | {"train": train} | changes))


def ranks(count: int) -> list[dict[str, str]]:
    """The environments of processes that are one run."""
    if count == 1:
        return [{}]
    port = str(launch.free_port())
    return [launch.process_variables(rank, count, "127.0.0.1", port) for rank in range(count)]


class Forked:
    """``fastloop train recipe.yaml ARGUMENTS`` in a separate process; its output goes to ``said.txt``.

    Args:
        environment: Variables that are added.
        first: Called in the new process before anything else.
    """

    def __init__(
        self, *arguments: str, environment: Mapping[str, str] | None = None, first: Callable[[], Any] = lambda: None
    ) -> None:
        self.code: int | None = None
        self.began = time.monotonic()
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid:
            return
        code: Any = 99
        try:
            said = os.open("said.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(said, 1)
            os.dup2(said, 2)
            faulthandler.enable(2, all_threads=True)  # SIGABRT shows where a hanging process waits
            sys.stdout = os.fdopen(1, "w", closefd=False)
            sys.stderr = os.fdopen(2, "w", closefd=False)
            os.environ.update(environment or {})
            sys.argv = ["fastloop", "train", "recipe.yaml", *arguments]
            from accelerate.state import AcceleratorState

            AcceleratorState._reset_state(reset_partial_state=True)  # of runs that the test process did itself
            first()
            from fastloop.cli import main

            main()
        except SystemExit as end:
            code = end.code or 0
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def send(self, number: int) -> None:
        """A signal."""
        os.kill(self.pid, number)

    def over(self) -> bool:
        """Whether it has ended."""
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.code = os.waitstatus_to_exitcode(status)
        return self.code is not None

    def wait(self, seconds: float = 300) -> int:
        """Its exit code. A process that takes longer is ended, and the test fails with the stacks of its threads."""
        if not self._ends_within(seconds):
            self.send(signal.SIGABRT)
            self.send(signal.SIGCONT)  # a stopped process takes no other signal than SIGKILL
            if not self._ends_within(10):
                self.send(signal.SIGKILL)
                os.waitpid(self.pid, 0)
            shown = without_module_list(said())
            pytest.fail(f"it did not end within {seconds:g} seconds: {shown[-10_000:]}")
        assert self.code is not None
        return self.code

    def _ends_within(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while not self.over():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.002)
        return True


def train(*arguments: str, **more: Any) -> int:
    """The exit code of a run."""
    return Forked(*arguments, **more).wait()


def together(*arguments: str, count: int = 2, environment: Mapping[str, str] | None = None) -> list[Forked]:
    """Forked processes that are one run."""
    return [Forked(*arguments, environment={**each, **(environment or {})}) for each in ranks(count)]


def said() -> str:
    """The output of all runs so far."""
    path = Path("said.txt")
    return path.read_text() if path.exists() else ""


def until(condition: Callable[[], Any], seconds: float = 300) -> None:
    """Wait for something that is to come soon."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, said()[-2000:]
        time.sleep(0.002)


def steps(folder: str = "run") -> list[int]:
    """Steps of the checkpoints that are there."""
    return sorted(int(path.name.removeprefix("step-")) for path in Path(folder, "checkpoints").glob("step-*"))


def summary(folder: str = "run") -> dict[str, Any]:
    """The content of ``summary.json``."""
    found: dict[str, Any] = json.loads(Path(folder, "summary.json").read_text())
    return found


def record(folder: str = "run") -> dict[str, Any]:
    """All of a finished run that must not depend on what happened to it."""
    lines = [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]
    return {
        "model": Path(folder, "model", "model.safetensors").read_bytes(),
        "metrics": [{key: value for key, value in line.items() if key not in TIMES} for line in lines],
        "summary": {key: summary(folder)[key] for key in REMEMBERED},
    }


@contextmanager
def mounted(folder: Path, *options: str) -> Iterator[Path]:
    """Something mounted on a folder for a while; the test is skipped where this user may not mount."""
    folder.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(["mount", *options, str(folder)], capture_output=True, text=True, check=False, timeout=600)
    if done.returncode:
        pytest.skip(f"cannot mount: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True, timeout=600)


NEW_MOUNTS = 0x00020000
"""CLONE_NEWNS of unshare(2)."""
NEW_USER = 0x10000000
"""CLONE_NEWUSER of unshare(2)."""


def with_tmpfs(folder: str, size: str) -> Callable[[], None]:
    """For ``Forked``: the process finds an empty tmpfs of a size at ``folder``. Skips the test where namespaces are not
    permitted."""
    check = ["unshare", "--mount", "--map-root-user", "mount", "-t", "tmpfs", "tmpfs", folder]
    try:
        done = subprocess.run(check, capture_output=True, text=True, check=False, timeout=600)
    except FileNotFoundError:
        pytest.skip("there is no unshare, to give a process its own mounts")
    if done.returncode:
        pytest.skip(f"a process cannot have its own mounts here: {done.stderr.strip()}")

    def enter() -> None:
        user = os.getuid()
        group = os.getgid()
        if ctypes.CDLL(None, use_errno=True).unshare(NEW_MOUNTS | NEW_USER):
            raise OSError(ctypes.get_errno(), "unshare")
        for name, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
            Path("/proc/self", name).write_text(text)
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], check=True, timeout=600)

    return enter
