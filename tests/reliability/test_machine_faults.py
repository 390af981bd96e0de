"""Faults of a machine: a stalled process, a clock that jumps, a slow disk, full shared memory, a slow network disk."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import file_trace
import pytest
from fault_runs import (
    FASTLOOP,
    Forked,
    record,
    said,
    steps,
    together,
    train,
    until,
    with_tmpfs,
    write_recipe,
)
from long_form import LONG, long_form_only

from fastloop.testing import assert_problem, find_problems

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return file_trace.build(tmp_path_factory.mktemp("shim"), Path(file_trace.__file__).with_name("fault_shim.c"))


def test_stopped_process_continues():
    """a rank stopped for longer than several heartbeats: the run warns, and ends with the same numbers"""
    write_recipe()
    watched = ["--with", "ddp", "--with", "watchdog", "plugins.watchdog.timeout=20"]
    assert [each.wait() for each in together("output=whole", *watched)] == [0, 0], said()
    processes = together("output=run", *watched, environment={"FAULT": "step 6 1 me('SIGSTOP')"})
    until(lambda: bool(find_problems(said(), "no-progress process 1 2")))
    processes[1].send(signal.SIGCONT)
    assert [each.wait() for each in processes] == [0, 0], said()
    assert record() == record("whole")


def test_clock_that_jumps(shim):
    """the time of day jumps by hours: the watchdog ends nothing, and the numbers are the same"""
    write_recipe()
    assert train("output=whole") == 0, said()
    command = [
        sys.executable,
        *FASTLOOP,
        "recipe.yaml",
        "output=run",
        "--with",
        "watchdog",
        "plugins.watchdog.timeout=60",
    ]
    jumps = {"LD_PRELOAD": str(shim), "CLOCK_JUMPS": "7200"}
    done = subprocess.run(command, env=os.environ | jumps, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    assert not find_problems(done.stdout + done.stderr, "no-progress")
    lines = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert all(line["samples_per_second"] > 0 for line in lines if "split" not in line)
    assert record() == record("whole")


# -- network file systems and slow disks -------------------------------------------------------------------------------

BARE = ("--without", "checkpoint-best")
STALE = [("create", 2), ("fsync", 4), ("rename", 2)]
"""A function of the shim, and the number of the call that fails, in the folder of checkpoints."""
if LONG:
    STALE += [("write", 3), ("mkdir", 2), ("fsync", 11)]
SAVES = """
for call, number in STALE:
    fault = {"STALE_PATH": "checkpoints", "STALE_CALL": call, "STALE_NUMBER": str(number)}
    assert train(f"output={call}-{number}", *BARE, environment=fault) == 0, (call, number)
assert train("output=whole", *BARE) == 0
"""
STALE_READS = [("open", 1, 1), ("open", 6, 2), ("read", 1, 2), ("read", 4, 1)]
"""A function of the shim, the number of the first call that fails, and the number of such calls, in the newest
checkpoint. The sixth open is that of the weights, by safetensors."""
RESUMES = """
assert train("output=stopped", *BARE, environment={"FAULT": "step 22 0 me('SIGKILL')"}) == -9
for call, number, times in STALE_READS:
    fault = {"STALE_PATH": "step-00000020", "STALE_CALL": call, "STALE_NUMBER": str(number), "STALE_TIMES": str(times)}
    shutil.copytree("stopped", f"{call}-{number}")
    assert train(f"output={call}-{number}", *BARE, "--resume", environment=fault) == 0, (call, number)
fault["STALE_TIMES"] = "1000000"
shutil.copytree("stopped", "lost")
assert train("output=lost", *BARE, "--resume", environment=fault) == 2
assert train("output=whole", *BARE) == 0
"""
LATE = """
two = ("--with", "ddp")
stopped = together("output=run", *two, environment={"FAULT": "step 22 0 me('SIGKILL')"})
assert stopped[0].wait() == -9
stopped[1].send(signal.SIGKILL)
stopped[1].wait()
fault = {"LATE_PATH": "step-00000020", "LATE_RANK": "1", "LATE_SECONDS": "2"}
assert [each.wait() for each in together("output=run", *two, "--resume", environment=fault)] == [0, 0]
assert [each.wait() for each in together("output=whole", *two)] == [0, 0]
"""
SLOW = """
from fastloop_plugins.observe import speed_check
speed_check.SAVING = 1.0
speed_check.LEFT = 0.0
fault = {"SLOW_PATH": "checkpoints", "SLOW_MILLISECONDS": "60"}
for output, more in (("plain", ()), ("async", ("--with", "async-save"))):
    run, most = Forked(f"output={output}", *BARE, *more, environment=fault), 0
    while not run.over():
        most = max(most, len(list(Path(output, "checkpoints").glob(".step-*.partial"))))
        time.sleep(0.002)
    assert run.wait() == 0
    assert most == 1, f"{most} saves at a time"
assert train("output=whole", *BARE) == 0
"""
DRIVER = """
import os, shutil, traceback
from pathlib import Path
from fault_runs import *
for name, (settings, code) in SCENARIOS.items():
    Path(name).mkdir()
    os.chdir(name)
    write_recipe(train=settings)
    try:
        exec(code)
    except BaseException:
        Path("error.txt").write_text(traceback.format_exc())
    os.chdir("..")
"""
SCENARIOS: dict[str, tuple[dict[str, int], str]] = {
    "saves": ({}, SAVES),
    "resumes": ({"keep_checkpoints": 2}, RESUMES),
    "late": ({"keep_checkpoints": 2}, LATE),
    "slow": ({}, SLOW),
}
"""Name of a folder -> settings of ``train``, and code that runs there, in a process with the shim."""


@pytest.fixture(scope="module")
def ran(shim: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which all scenarios ran. One process runs them, because its start takes longer than most."""
    folder = tmp_path_factory.mktemp("ran")
    values = {"BARE": BARE, "STALE": STALE, "STALE_READS": STALE_READS, "SCENARIOS": SCENARIOS}
    (folder / "driver.py").write_text("".join(f"{name} = {value!r}\n" for name, value in values.items()) + DRIVER)
    added = {"LD_PRELOAD": str(shim), "PYTHONPATH": str(Path(file_trace.__file__).parent)}
    command = [sys.executable, "driver.py"]
    done = subprocess.run(
        command, cwd=folder, env=os.environ | added, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def scenario(ran: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Changes to the folder of the scenario that the test names. Fails with the scenario's error."""
    monkeypatch.chdir(ran / request.param)
    error = Path("error.txt")
    assert not error.exists(), error.read_text() + said()[-3000:]


@pytest.mark.usefixtures("scenario")
@pytest.mark.parametrize("scenario", ["saves"], indirect=True)
def test_stale_file_handle_during_a_save(record_property):
    """a call of a save fails with ESTALE: logged, training continues, and the next save succeeds"""
    whole = record("whole")
    for call, number in STALE:
        run = f"{call}-{number}"
        found = record(run)
        assert found["model"] == whole["model"], run
        assert found["metrics"] == whole["metrics"], run
        assert json.loads(Path(run, "summary.json").read_text())["save_errors"] == 1, run
        assert steps(run) == [27], run
    assert said().count("Stale file handle") >= len(STALE)
    record_property("faults", len(STALE))


@pytest.mark.usefixtures("scenario")
@pytest.mark.parametrize("scenario", ["resumes"], indirect=True)
def test_stale_file_handle_while_a_checkpoint_is_read(record_property):
    """a checkpoint that fails with ESTALE on resume: it is read again, or the run ends; no older checkpoint is used"""
    for call, number, _ in STALE_READS:
        assert record(f"{call}-{number}") == record("whole"), call
    assert said().count("resumed from") == said().count("step-00000020 at step 20") == len(STALE_READS)
    assert "error: lost/checkpoints/step-00000020 cannot be read: [Errno 116] Stale file handle" in said()
    assert steps("lost") == [16, 20]
    record_property("faults", len(STALE_READS) + 1)


@pytest.mark.usefixtures("scenario")
@pytest.mark.parametrize("scenario", ["late"], indirect=True)
def test_checkpoint_that_a_rank_sees_late():
    """the newest checkpoint is visible to one rank seconds later: it waits, and the numbers are the same"""
    assert "step-00000020 at step 20" in said()
    assert record() == record("whole")


@pytest.mark.usefixtures("scenario")
@pytest.mark.parametrize("scenario", ["slow"], indirect=True)
def test_slow_disk(record_property):
    """a disk that takes long for each fsync: one save at a time, a warning, and the same numbers"""
    assert record("plain") == record("async") == record("whole")
    warnings = [line for line in said().splitlines() if "speed-check: saves took" in line]
    assert len(warnings) == 2, warnings
    assert "write in the background (`--with async-save`)" in warnings[0]
    assert "--with async-save" not in warnings[1]
    record_property("faults", 2)


# -- shared memory and quotas ------------------------------------------------------------------------------------------

BIG = """
import torch
from torch import nn

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 32
    def __getitem__(self, index):
        return torch.full((65536,), index / 32), index % 3

def rows():
    return {"train": Rows()}

def net():
    return nn.Linear(65536, 3)

def collate(samples):
    return torch.stack([sample for sample, _ in samples]), torch.tensor([label for _, label in samples])
"""


@pytest.mark.parametrize(
    ("size", "collate"), [("1m", "null"), ("1m", "big.py:collate"), ("16k", "null")], ids=["fetch", "send", "start"]
)
def test_full_shared_memory(size, collate):
    """/dev/shm without room for a worker's batch or queues: the run ends at once and names the remedy"""
    Path("big.py").write_text(BIG)
    Path("recipe.yaml").write_text(
        json.dumps(
            {
                "model": {"module": "big.py:net"},
                "data": {"module": "big.py:rows"},
                "train": {"batch_size": 8, "epochs": 1, "lr": 1e-3, "device": "cpu"},
                "plugins": [{"module": {"loss": "cross_entropy"}}, {"dataloader-workers": {"num_workers": 1}}],
                "output": "run",
            }
        )
    )
    full = with_tmpfs("/dev/shm", size)
    assert Forked(f"plugins.module.collate={collate}", first=full).wait(200) == 1
    (error,) = [line for line in said().splitlines() if line.startswith("error: ")]
    assert "reading a batch failed" in error
    assert re.search(r"No space left on device|unable to allocate shared memory", error)
    assert (
        f"of {'1.0' if size == '1m' else '0.0'} MiB of /dev/shm are free. Make it larger (docker run --shm-size=8g)"
        in error
    )
    assert Forked("plugins.dataloader-workers.num_workers=0", first=full).wait(200) == 0, said()


@pytest.mark.parametrize("limit", [26, pytest.param(30, marks=long_form_only), 33])
def test_few_open_files(limit):
    """a limit on open files that workers exceed: one error with the remedy, and no traceback of workers"""
    write_recipe(plugins=[{"module": {"loss": "cross_entropy"}}, {"dataloader-workers": {"num_workers": 2}}])
    command = f"ulimit -n {limit}; exec {shlex.join([sys.executable, *FASTLOOP, 'recipe.yaml'])}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 1
    assert "Traceback" not in done.stdout + done.stderr
    assert_problem(done.stderr.splitlines()[-1], "too-many-files open files ulimit -n")


LEAK = """
import torch

opened = []

def net():
    return torch.nn.Linear(4, 1)

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 4000

    def __getitem__(self, index):
        opened.append(open("/dev/null"))
        return torch.ones(4), torch.ones(1)

def rows():
    return {"train": Rows()}
"""


LIMITS = [(0, 256), (1, 252), (1, 254), (1, 256), (2, 254), (2, 256)]
"""Data workers, and the limit of open files. The call that first fails depends on both."""


@pytest.mark.parametrize(("workers", "limit"), LIMITS if LONG else [(0, 256), (1, 254), (2, 256)])
def test_dataset_that_leaves_files_open(workers, limit):
    """a dataset that closes no file: the error names its line and the remedy, also if a batch cannot be handed over"""
    Path("leak.py").write_text(LEAK)
    write_recipe(
        model={"module": "leak.py:net"},
        data={"module": "leak.py:rows"},
        plugins=[{"module": {"loss": "mse_loss"}}, {"dataloader-workers": {"num_workers": workers}}],
    )
    command = f"ulimit -n {limit}; exec {shlex.join([sys.executable, *FASTLOOP, 'recipe.yaml'])}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 1
    expected = "reading-failed leak.py:14 __getitem__ Close files after use ulimit -n"
    assert_problem(done.stderr.splitlines()[-1], expected)


LEAKING_MODEL = """
import torch

opened = []

class Net(torch.nn.Linear):
    def forward(self, inputs):
        opened.append(open("/dev/null"))
        return super().forward(inputs)

def net():
    return Net(4, 1)

def rows():
    return {"train": torch.utils.data.TensorDataset(torch.ones(4000, 4), torch.ones(4000, 1))}
"""


def test_model_that_leaves_files_open():
    """a model that closes no file: the error names its line and the remedy, and reads no metadata of packages"""
    Path("leak.py").write_text(LEAKING_MODEL)
    write_recipe(
        model={"module": "leak.py:net"},
        data={"module": "leak.py:rows"},
        plugins=[{"module": {"loss": "mse_loss"}}],
    )
    command = f"ulimit -n 64; exec {shlex.join([sys.executable, *FASTLOOP, 'recipe.yaml'])}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 1
    assert_problem(done.stderr.splitlines()[-1], "user-code-failed leak.py:8 forward Close files after use ulimit -n")


def test_quota_of_processor_time():
    """a quota of one processor on a machine with more: one thread, and no data worker"""
    group = with_tmpfs("/sys/fs/cgroup", "1m")

    def quota() -> None:
        group()
        Path("/sys/fs/cgroup/cpu.max").write_text("100000 100000\n")

    write_recipe()
    more = ("plugins.dataloader-workers.num_workers=auto", "--with", "dataloader-workers", "--with", "cpu-affinity")
    assert Forked("output=run", *BARE, *more, first=quota).wait() == 0, said()
    assert "dataloader-workers: auto is 0 (of 1 processors)" in said()
    assert "cpu-affinity: 1 thread on cores" in said()
