"""The end of a script whose run had several processes: gloo's threads must not abort it.

Modules:
    core/fastloop/distributed/at_exit.py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import file_trace
import pytest
from long_form import long_form_only

from fastloop.cli import launch

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="the threads of a process are read from /proc")


def start(*arguments: str, env: Mapping[str, str]) -> subprocess.Popen[str]:
    """Start a script in a new Python, which ends as Python does, unlike a forked one."""
    return subprocess.Popen([sys.executable, *arguments], env=os.environ | env, stderr=subprocess.PIPE, text=True)


BUSY = """
import ctypes
import sys
import time

import torch

from fastloop.distributed.at_exit import group_at_exit

torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
tensor = torch.ones(3)
torch.distributed.all_reduce(tensor)
ctypes.CDLL(None).delay_gloo(20)
if sys.argv[1] == "registered":
    group_at_exit.begin(is_made=False)
torch.distributed.all_reduce(tensor)
sys.setswitchinterval(10)
end = time.perf_counter() + 0.3
while time.perf_counter() < end:
    pass
"""
"""A script whose thread of gloo waits for the GIL when the script ends: the thread is late by 20 ms, and the script
keeps the GIL for 300 ms."""


@pytest.mark.slow
@LINUX
@pytest.mark.parametrize(("handler", "code", "starts"), [("registered", 0, 2), ("not registered", -6, 4)])
def test_a_script_waits_for_a_thread_that_still_drops_tensors(tmp_path: Path, handler: str, code: int, starts: int):
    """Without the handler, the same script must abort: else this test would not notice that the handler is gone."""
    library = file_trace.build(tmp_path, Path(file_trace.__file__).with_name("slow_workers.c"))
    Path("busy.py").write_text(BUSY)
    codes = set()
    for _ in range(starts):  # without the handler, the thread may be so late that Python has ended
        with start("busy.py", handler, env={"LD_PRELOAD": str(library)}) as script:
            script.communicate(timeout=120)
        codes.add(script.returncode)
        if code and code in codes:
            break
    assert code in codes
    assert code or codes == {0}


SCRIPT = """
import atexit
import json
import os
import sys
import threading
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

from fastloop import Plugin, Trainer, hookimpl
from fastloop.distributed.at_exit import worker_activities


def record():
    facts = {
        "group": torch.distributed.is_initialized(),
        "threads": [thread.name for thread in threading.enumerate()],
        "asleep": all(worker.sleeps for worker in worker_activities().values()),
        "before": before,
    }
    Path(f"end-{os.environ['RANK']}.json").write_text(json.dumps(facts))


class Fails(Plugin):
    name = "fails"

    @hookimpl
    def after_step(self, run):
        if run.state.step == 2:
            raise ValueError("this run fails")


atexit.register(record)  # runs last
before = None
if __name__ == "__main__":
    inputs = torch.arange(24.0)[:, None]
    plugins = [sys.argv[1]]
    if "own" in sys.argv:
        torch.distributed.init_process_group("gloo")
    if "fails" in sys.argv:
        plugins.append(Fails())
    data = TensorDataset(inputs, torch.arange(24) % 3)
    model = nn.Sequential(nn.Linear(1, 4), nn.Linear(4, 3))
    settings = {"epochs": 1, "batch_size": 8, "lr": 1e-2, "seed": 0, "device": "cpu"}
    trainer = Trainer(model, data, data, loss=nn.functional.cross_entropy, plugins=plugins, output="run", **settings)
    trainer.validate()  # a run that ends in order, before the one of fit
    trainer.fit()
    before = torch.distributed.is_initialized()
"""


@pytest.mark.slow
@LINUX
@pytest.mark.parametrize(
    ("arguments", "code", "before", "after"),
    [
        (["ddp"], 0, True, False),
        pytest.param(["fsdp"], 0, True, False, marks=long_form_only),
        # the script has made the group, and may still need it
        pytest.param(["ddp", "own"], 0, True, True, marks=long_form_only),
        (["ddp", "fails"], 1, None, True),  # the other process may wait in it
    ],
    ids=["ddp", "fsdp", "own group", "failed run"],
)
def test_a_script_ends_without_its_group_and_threads(arguments: list[str], code: int, before: bool | None, after: bool):
    Path("script.py").write_text(SCRIPT)
    port = str(launch.free_port())
    members = [launch.process_variables(rank, 2, "127.0.0.1", port) for rank in (0, 1)]
    started = [start("script.py", *arguments, env=member) for member in members]
    errors = [process.communicate(timeout=120)[1] for process in started]
    assert [process.returncode for process in started] == [code, code], errors
    for rank in (0, 1):
        facts = json.loads(Path(f"end-{rank}.json").read_text())
        assert (facts["before"], facts["group"]) == (before, after)
        assert facts["threads"] == ["MainThread"]
        assert facts["asleep"]


FEW_FILES = """
import resource

from fastloop.distributed.at_exit import group_at_exit

group_at_exit.begin(is_made=False)
opened = open("/dev/null")
resource.setrlimit(resource.RLIMIT_NOFILE, (opened.fileno() + 1, opened.fileno() + 1))
"""
"""A script that ends at its limit of open files."""


@LINUX
def test_a_script_at_its_limit_of_open_files_ends_without_a_traceback():
    Path("few.py").write_text(FEW_FILES)
    with start("few.py", env={}) as script:
        _, error = script.communicate(timeout=120)
    assert (script.returncode, error) == (0, "")
