"""Memory that runs out, for real: allocations that the system refuses to a limited process, and processes it kills.

Modules:
    plugins/fastloop_plugins/memory/_out_of_memory.py
    plugins/fastloop_plugins/memory/auto_micro_batch.py
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
import yaml
from fault_runs import Forked, said, until, with_tmpfs
from safetensors.torch import load_file

pytestmark = pytest.mark.slow

FASTLOOP = ["-m", "fastloop", "train", "recipe.yaml"]
ROWS = 64
WIDE = 2**19
"""Activations of one sample: 2 MiB a layer in fp32."""

CODE = f"""
import os, resource
import torch
from torch import nn
from torch.utils.data import Dataset

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 3)
    def forward(self, x):
        if torch.is_grad_enabled():
            limit("TRAIN")
        else:
            limit("EVALUATE")
        hidden = torch.relu(self.a(x))
        wide = hidden.repeat(1, {WIDE} // 16)
        wide = wide.sigmoid().sigmoid().sigmoid()
        return self.c(self.b(hidden + wide.view(len(x), -1, 16).mean(1)))

def limit(part):
    # from its first such batch on, this process may take so many MiB more than it has
    mib = os.environ.pop(part + os.environ.get("RANK", "0"), None) if part == "TRAIN" else os.environ.get(part)
    if mib is None:
        if "EVALUATE" in os.environ:
            resource.setrlimit(resource.RLIMIT_DATA, (-1, -1))  # it is for evaluations alone
        return
    data = int(open("/proc/self/status").read().split("VmData:")[1].split()[0]) * 1024
    resource.setrlimit(resource.RLIMIT_DATA, (data + int(mib) * 2**20, -1))

class Rows(Dataset):
    def __init__(self, seed, size={ROWS}):
        self.x = torch.randn(size, 8, generator=torch.Generator().manual_seed(seed))
    def __len__(self):
        return len(self.x)
    def __getitem__(self, index):
        return self.x[index], int(self.x[index, :3].argmax())

def rows(api_key=None):
    return {{"train": Rows(0), "validation": Rows(1)}}
"""
RECIPE: dict[str, Any] = {
    "model": {"module": "code.py:Net"},
    "data": {"module": "code.py:rows"},
    "train": {"epochs": 2, "batch_size": 32, "lr": 1e-2, "save_every": 1, "log_every": 1, "device": "cpu"},
    "plugins": [{"module": {"loss": "cross_entropy"}}, "auto-micro-batch"],
}


@pytest.fixture(autouse=True)
def _recipe():
    Path("code.py").write_text(CODE)
    Path("recipe.yaml").write_text(yaml.safe_dump(RECIPE))


def train(output: str, *more: str, **limits: str) -> subprocess.CompletedProcess[str]:
    """A run in a process of its own, in which allocations fail beyond a limit."""
    environment = os.environ | {"MALLOC_ARENA_MAX": "1", "MALLOC_TRIM_THRESHOLD_": "0"} | limits
    return forked.run(*FASTLOOP, f"output={output}", *more, env=environment)


def losses(output: str) -> list[float]:
    lines = [json.loads(line) for line in Path(output, "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines]


def same(one: str, other: str) -> None:
    """Two runs have the same numbers, but for the order of sums."""
    assert losses(one) == pytest.approx(losses(other), rel=1e-5)
    ours, theirs = (load_file(f"{name}/model/model.safetensors") for name in (one, other))
    for name in theirs:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-4, atol=1e-5)


def summary(output: str) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(Path(output, "summary.json").read_text())
    return result


def test_a_step_that_does_not_fit_is_done_again_in_halves():
    """an allocation fails in a training step: halved micro-batches, and the same numbers"""
    plain = train("plain")
    assert plain.returncode == 0, plain.stderr
    key = "data.arguments={api_key: 'k7-very-secret'}"
    done = train("run", key, TRAIN0="150")
    assert done.returncode == 0, done.stderr
    assert "k7-very-secret" not in Path("run/micro_batch.json").read_text()
    assert (
        "auto-micro-batch: micro-batches of train do not fit into memory at step 1: 16 samples from here on"
        in done.stdout
    )
    same("run", "plain")
    found = summary("run")
    assert found["auto-micro-batch"]["train"]["micro_batch"] in (2, 4, 8, 16)  # how often, the process's memory decides
    assert {key: found[key] for key in ("status", "steps", "samples")} == {
        "status": "completed",
        "steps": 4,
        "samples": 128,
    }
    (note,) = Path("run/out_of_memory").glob("step-1-*.txt")
    assert "can't allocate memory" in note.read_text()
    again = train("run", key, "--resume", "train.epochs=3")
    assert again.returncode == 0, again.stderr
    assert summary("run")["auto-micro-batch"] == found["auto-micro-batch"]


def test_without_the_plugin_the_run_is_lost():
    """control: without the plugin, the same limit ends the run"""
    done = train("run", "--without", "auto-micro-batch", TRAIN0="150")
    assert done.returncode == 1
    assert "can't allocate memory" in done.stderr


def test_an_evaluation_that_does_not_fit_leaves_the_training_batch_alone():
    """an allocation fails in an evaluation: only its batches are halved, and the metrics are the same"""
    assert train("plain", "train.eval_batch_size=64").returncode == 0
    done = train("run", "train.eval_batch_size=64", EVALUATE="250")
    assert done.returncode == 0, done.stderr
    assert "micro-batches of validation do not fit into memory" in done.stdout
    assert "micro-batches of train" not in done.stdout
    found = summary("run")["auto-micro-batch"]
    assert list(found) == ["validation"]
    assert found["validation"]["micro_batch"] < 64
    same("run", "plain")
    assert summary("run")["validation"] == pytest.approx(summary("plain")["validation"], rel=1e-5)


def test_a_limit_of_its_own_makes_a_kill_into_an_error_that_is_recovered_from():
    """a batch above limit_gib: the run continues with halved batches"""
    Path("held.py").write_text("print(int(open('/proc/self/status').read().split('VmData:')[1].split()[0]) / 2**20)")
    base = float(forked.run("held.py").stdout)
    done = train("run", f"plugins.auto-micro-batch.limit_gib={base + 0.2}")
    assert done.returncode == 0, done.stderr
    assert "do not fit into memory" in done.stdout


def test_sample_above_memory_limit_raises():
    """a single sample that does not fit: the allocation's own error"""
    done = train("run", TRAIN0="3")
    assert done.returncode == 1
    assert "can't allocate memory" in done.stderr
    assert summary("run")["status"] == "failed"


def test_processes_agree_at_the_next_start():
    """an allocation fails on one of two processes: all end, and the next start takes the smaller batch on both"""
    two = ["--nproc", "2", "--with", "ddp"]
    assert train("plain", *two).returncode == 0
    failed = train("run", *two, TRAIN1="60")
    assert failed.returncode == 1
    assert "process 1: micro-batches of train do not fit into memory at step 1: 8 samples from here on" in failed.stderr
    Path("run").rename("kept")  # a new run finds it too, as long as it has the same recipe
    Path("run").mkdir()
    for name in ("micro_batch.json", "recipe.yaml"):
        Path("kept", name).rename(Path("run", name))
    again = train("run", *two)
    assert again.returncode == 0, again.stderr
    assert "starts with the size that fitted before: 8 samples in a micro-batch" in again.stdout
    assert summary("run")["auto-micro-batch"]["train"]["micro_batch"] == 8
    same("run", "plain")


def test_micro_batches_that_a_plugin_makes_are_cut_too():
    """micro-batches of a token budget do not fit: each is cut"""
    from fastloop.data import StepSampler

    def split(ids: list[int], processes: int) -> list[list[int]]:
        return [ids[:5], ids[5:6], ids[6:]]

    for pieces, expected in ((1, [5, 1, 2]), (2, [3, 2, 1, 1, 1]), (4, [2, 2, 1, 1, 1, 1])):
        sampler = StepSampler(8, 8, 8, 0, 1, 0, False, split_step=split, pieces=pieces)
        ((_, parts),) = sampler.steps()
        assert [len(part) for part in parts] == expected
        assert sorted(index for part in parts for index in part) == list(range(8))


# -- a control group's limit -------------------------------------------------------------------------------------------

HUNGRY = """
import os, signal
from pathlib import Path
import torch
from torch.utils.data import Dataset, get_worker_info

KILL = "oom 1\\noom_kill 1\\noom_group_kill 0\\n"

class Rows(Dataset):
    def __init__(self, fault):
        self.fault = fault
    def __len__(self):
        return 64
    def __getitem__(self, index):
        if self.fault == "allocate itself" or self.fault == "allocate" and get_worker_info() is not None:
            self.held = torch.ones(2**29)  # 2 GiB
        if self.fault == "kill" and index == 40:
            Path("/sys/fs/cgroup/memory.events").write_text(KILL)
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.ones(8), index % 3

def rows(fault):
    return {"train": Rows(fault)}

def net():
    return torch.nn.Linear(8, 3)
"""


def write_hungry(fault: str) -> None:
    Path("hungry.py").write_text(HUNGRY)
    data = {"module": "hungry.py:rows", "arguments": {"fault": fault}}
    changes = {"model": {"module": "hungry.py:net"}, "data": data, "plugins": [{"module": {"loss": "cross_entropy"}}]}
    Path("recipe.yaml").write_text(
        yaml.safe_dump(RECIPE | changes | {"train": RECIPE["train"] | {"epochs": 1, "batch_size": 8}})
    )


@pytest.fixture
def group():
    """A control group with a limit of 1 GiB, of cgroup v2 or v1."""
    root, limit = Path("/sys/fs/cgroup"), "memory.max"
    if (root / "memory").is_dir():
        own = next(
            (line for line in Path("/proc/self/cgroup").read_text().splitlines() if ":memory:" in line), ":memory:/"
        )
        root, limit = root / "memory" / own.rpartition(":")[2][1:], "memory.limit_in_bytes"
    path = root / f"fastloop-test-{os.getpid()}"
    try:
        if limit == "memory.max" and "memory" not in (root / "cgroup.subtree_control").read_text().split():
            pytest.skip("control groups have no memory limit here")
        path.mkdir()
        (path / limit).write_text(str(2**30))
        if (path / "memory.swap.max").exists():
            (path / "memory.swap.max").write_text("0")
    except OSError as error:
        pytest.skip(f"this user cannot create a control group with a memory limit: {error}")
    yield path
    until(lambda: not (path / "cgroup.procs").read_text())  # a process that was killed may still be ending
    path.rmdir()


@pytest.mark.parametrize("who", ["worker", "rank"])
def test_worker_above_the_limit_of_its_control_group(who, group):
    """a worker or a rank exceeds the limit of its control group: the error names the limit and the remedy"""
    write_hungry("allocate" if who == "worker" else "allocate itself")
    more = {
        "worker": ["--with", "dataloader-workers", "plugins.dataloader-workers.num_workers=1"],
        "rank": ["--nproc", "1"],
    }
    # A new Python: the kernel kills the largest process of the group, and one that is forked from the test's may be
    # larger than the rank.
    join = f'echo 0 > {shlex.quote(str(group))}/cgroup.procs; exec "$@"'
    command = ["sh", "-c", join, "sh", sys.executable, *FASTLOOP, "output=run", *more[who]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == (1 if who == "worker" else 128 + signal.SIGKILL), done.stdout + done.stderr
    assert "was ended by SIGKILL. The kernel did that because the memory of this control group ran out" in done.stderr
    assert "Its limit is 1,024 MiB." in done.stderr


@pytest.mark.parametrize("who", ["worker", "rank"])
def test_kill_that_a_control_group_counts(who):
    """a worker or a rank is killed while its control group counts an oom_kill: the error names the limit"""
    mount = with_tmpfs("/sys/fs/cgroup", "1m")

    def limit() -> None:
        mount()
        Path("/sys/fs/cgroup/memory.max").write_text(f"{3 * 2**28}\n")
        Path("/sys/fs/cgroup/memory.events").write_text("oom 0\noom_kill 0\noom_group_kill 0\n")

    write_hungry("kill")
    more = {
        "worker": ["--with", "dataloader-workers", "plugins.dataloader-workers.num_workers=1"],
        "rank": ["--nproc", "1"],
    }
    assert Forked("output=run", *more[who], first=limit).wait() == (1 if who == "worker" else 128 + signal.SIGKILL), (
        said()
    )
    (error,) = [line for line in said().splitlines() if line.startswith("error: ")]
    assert error.startswith("error: worker 0 of the 1" if who == "worker" else "error: process 0 of 1")
    assert "was ended by SIGKILL. The kernel did that because the memory of this control group ran out" in error
    assert "Its limit is 768 MiB." in error
    assert "fewer workers" in error
