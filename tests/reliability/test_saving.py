"""After any fault in a save, the checkpoint before it is complete, and an incomplete one is never used.

Modules:
    core/fastloop/checkpoint/lock.py
    core/fastloop/checkpoint/pending_save.py
    core/fastloop/checkpoint/saving.py
"""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import random
import shutil
import signal
import socket
import subprocess
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from itertools import repeat
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
from fault_runs import Forked, mounted, record, said, steps, summary, times, together, train, until, write_recipe

from fastloop import Plugin, RecipeError, hookimpl
from fastloop.checkpoint import MANIFEST, find_newest, read, verify, write
from fastloop.checkpoint.lock import Lock
from fastloop.errors import CheckpointError, SaveError
from fastloop.testing import assert_problem, expect_problem, tiny_model


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 3 MB."""
    with mounted(tmp_path / "disk", "-t", "tmpfs", "-o", "size=3m", "none") as folder:
        yield folder


class Fills(Plugin):
    """Fills a disk to the last byte after one step, and makes room after another."""

    name = "fills"

    def __init__(self, folder: Path, full: int, room: int) -> None:
        super().__init__()
        self.file, self.full, self.room = folder / "filler", full, room

    @hookimpl
    def before_step(self, run: Any) -> None:
        if run.state.step == self.full:
            fill(self.file)
        if run.state.step == self.room:
            self.file.unlink()


def fill(path: Path) -> None:
    """Until nothing goes in any more."""
    with path.open("wb", buffering=0) as file:
        for size in (65536, 1):
            with pytest.raises(OSError, match="No space left on device"):
                deque(map(file.write, repeat(b"x" * size)), maxlen=0)


def save(step: int, run: str = "run") -> Path:
    """A checkpoint of which every number is ``step``."""
    value = torch.full((20000,), float(step))
    return write(Path(run) / "checkpoints" / f"step-{step:08d}", {"weight": value}, {"step": step, "moment": value})


def whole(run: str = "run") -> int:
    """The step of the checkpoint that is found; all of it is of that step."""
    model, state = read(find_newest(Path(run))[0])
    assert model["weight"].eq(state["step"]).all()
    assert state["moment"].eq(state["step"]).all()
    return state["step"]


# -- kills -------------------------------------------------------------------------------------------------------------

KILLS = """
import os, random, signal, sys, threading, time
from pathlib import Path
import torch
from fastloop.checkpoint import find_newest, read, rotate, write

torch.set_num_threads(1)
kills, processes, background = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "async"
run, chance, step = Path("run"), random.Random(int(sys.argv[4])), 0


def save_for_ever(rank, step, said):
    shards = lambda value: value
    if processes > 1:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import distribute_tensor, Shard
        meeting = f"file://{os.getcwd()}/meeting"
        torch.distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=processes)
        mesh = init_device_mesh("cpu", (processes,))
        shards = lambda value: distribute_tensor(value, mesh, [Shard(0)], src_data_rank=None)
        shards(torch.ones(processes)).detach()  # as training: in torch 2.11, a process's first must not be a thread's
    group = torch.distributed.new_group(backend="gloo") if background else None
    while True:
        step += 1
        value = shards(torch.full((20000,), float(step)))
        for again in range(1 + step % 2):  # every other step twice, as at the end of an epoch
            state = {"step": step, "moment": value}
            arguments = (run / "checkpoints" / f"step-{step:08d}", {"weight": value}, state, rank == 0, group)
            if background:  # as async-save: a thread writes while training communicates
                thread = threading.Thread(target=write, args=arguments)
                thread.start()
                for _ in range(20):
                    torch.distributed.all_reduce(torch.ones(100))
                thread.join()
            else:
                write(*arguments)
            if rank == 0:
                rotate(run, 1, step)
                os.write(said, b"~")


def save_in_the_background(step, said):
    while True:
        step += 1
        value = torch.full((20000,), float(step))
        path = run / "checkpoints" / f"step-{step:08d}"
        thread = threading.Thread(target=write, args=(path, {"weight": value}, {"step": step, "moment": value}))
        thread.start()
        thread.join()
        rotate(run, 1, step)
        os.write(said, b"~")


survived = 0
for trial in range(kills):
    Path("meeting").unlink(missing_ok=True)
    pipe, said = os.pipe()
    began, children = step, []
    for rank in range(processes):
        child = os.fork()
        if child == 0:
            try:
                save_in_the_background(step, said) if background and processes == 1 else save_for_ever(rank, step, said)
            finally:
                os._exit(1)
        children.append(child)
    os.close(said)
    finished = 0
    while finished < 1 + trial % 3:
        assert os.read(pipe, 1), "nobody saves"
        finished += 1
    time.sleep(chance.random() * (0.1 if processes > 1 else 0.03))
    first = chance.randrange(processes)
    for child in children[first:] + children[:first] if trial % 2 else children[first:first + 1]:
        os.kill(child, signal.SIGKILL)
    if processes > 1:
        time.sleep(chance.random() * 0.05)  # the others go on for a while, or fail
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    os.close(pipe)
    found, skipped = find_newest(run)
    model, state = read(found)
    assert not skipped, skipped
    assert state["step"] > began, (state["step"], began)
    assert model["weight"].eq(state["step"]).all() and state["moment"].eq(state["step"]).all(), found
    step, survived = state["step"], survived + 1
print(survived)
"""


@pytest.mark.parametrize(
    ("processes", "how", "short"),
    [
        (1, "plain", 25),
        pytest.param(1, "async", 15, marks=pytest.mark.slow),
        pytest.param(2, "plain", 8, marks=pytest.mark.slow),
        pytest.param(2, "async", 6, marks=pytest.mark.slow),
    ],
)
def test_killed_at_any_moment_of_a_save(processes, how, short, record_property):
    """a process is killed at a random moment of a save: the checkpoint before it, or the new one, is found"""
    count = times(short)
    Path("kills.py").write_text(KILLS)
    command = ["kills.py", str(count), str(processes), how, str(random.randrange(10**6))]
    done = forked.run(*command)
    assert done.returncode == 0, f"{command}: {done.stderr}"
    survived = int(done.stdout)
    record_property("faults", count)
    assert survived == count


def test_kill_between_two_renames_keeps_newest_checkpoint():
    """a kill between the renames of a step's checkpoint: that step is found"""
    save(1)
    newest = save(2)
    newest.rename(newest.with_name(f".{newest.name}.old.partial"))
    assert whole() == 2
    save(3)
    assert whole() == 3


# -- no room -----------------------------------------------------------------------------------------------------------


def test_full_disk_keeps_previous_checkpoint(disk):
    """a full disk: the save logs the error, and the checkpoint before it is complete; with free space, saving
    continues"""
    run = str(disk / "run")
    save(1, run)
    for room in (0, 1, 50_000, 100_000, 165_000, 169_000):  # it is full at the first byte, and in each of the files
        fill(disk / "filler")
        with (disk / "filler").open("r+b") as file:
            file.truncate(max(file.seek(0, os.SEEK_END) - room, 0))
        with expect_problem("save-failed 00000002", SaveError):
            save(2, run)
        assert sorted(path.name for path in Path(run, "checkpoints").iterdir()) == ["step-00000001"]
        assert whole(run) == 1
        (disk / "filler").unlink()
    save(2, run)
    assert whole(run) == 2


def same(left: Any, right: Any) -> bool:
    """Two runs of the tiny model: the same losses and weights."""
    return left.losses == right.losses and all(
        left.weights[name].equal(tensor) for name, tensor in right.weights.items()
    )


@pytest.mark.parametrize("plugins", [[], ["async-save"]], ids=["plain", "async"])
def test_full_disk_is_logged_and_training_continues(disk, tiny_run, plugins, caplog):
    """a disk that is full for a while: logged at each save, and the run ends as on an empty disk"""
    arguments: dict[str, Any] = {"save_every": 2, "evaluate_every": 3, "log_every": 1}
    undisturbed = tiny_run(["checkpoint-best"], **arguments)
    run = tiny_run(
        ["checkpoint-best", *plugins, Fills(disk, 5, 14)], output=disk / "run", model=tiny_model(), **arguments
    )
    assert same(run, undisturbed)
    assert run.summary["status"] == "completed"
    assert run.summary["save_errors"] >= 3
    assert run.summary["best"] is not None
    assert_problem(caplog, "save-failed step-00000006")
    assert verify(find_newest(disk / "run")[0]) is None
    assert [path.name for path in (disk / "run" / "checkpoints").glob(".*")] == []
    lines = [json.loads(line) for line in (disk / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line and "split" not in line] == list(range(1, 19)), (
        "late, but all there"
    )


def test_full_disk_stops_run_with_on_failure_stop(disk, tiny_run):
    """a full disk, on_save_error=stop: the run fails, and later resumes to the same numbers"""
    arguments: dict[str, Any] = {"save_every": 4, "on_save_error": "stop"}
    undisturbed = tiny_run(["checkpoint-best"], **arguments)
    with expect_problem("save-failed 00000008 --resume", SaveError):
        tiny_run(["checkpoint-best", Fills(disk, 6, 99)], output=disk / "run", model=tiny_model(), **arguments)
    assert steps(str(disk / "run")) == [4]
    (disk / "filler").unlink()
    resumed = tiny_run(["checkpoint-best"], output=disk / "run", model=tiny_model(), resume=True, **arguments)
    assert resumed.losses == undisturbed.losses[4:]
    assert all(resumed.weights[name].equal(tensor) for name, tensor in undisturbed.weights.items())


@pytest.mark.slow
def test_full_disk_at_the_end_fails_run_and_keeps_checkpoint(disk):
    """a full disk at the export: exit code 1, and --resume exports"""
    write_recipe()
    assert train("output=whole") == 0
    shutil.copytree("whole", disk / "run")
    shutil.rmtree(disk / "run" / "model")
    fill(disk / "filler")
    assert train(f"output={disk / 'run'}", "--resume") in (1, 2)
    assert "No space left on device" in said()
    (disk / "filler").unlink()
    assert train(f"output={disk / 'run'}", "--resume") == 0
    assert record(str(disk / "run"))["model"] == record("whole")["model"]


class Locks(Plugin):
    """Mounts the folder of checkpoints read-only after one step, and writable again after another."""

    name = "locks"

    def __init__(self, folder: Path, shut: int, opened: int) -> None:
        super().__init__()
        self.folder, self.at = str(folder), {shut: "ro", opened: "rw"}

    @hookimpl
    def before_step(self, run: Any) -> None:
        if mode := self.at.get(run.state.step):
            subprocess.run(["mount", "-o", f"remount,bind,{mode}", self.folder], check=True, timeout=600)


def test_read_only_folder_is_logged_and_training_continues(tmp_path, tiny_run, caplog):
    """a folder that is read-only for a while: logged at each save, and the run ends unchanged"""
    arguments: dict[str, Any] = {"save_every": 2}
    undisturbed = tiny_run(["checkpoint-best"], **arguments)
    tiny_run(["checkpoint-best"], epochs=1, output="run", save_every=9)
    checkpoints = tmp_path / "run" / "checkpoints"
    with mounted(checkpoints, "--bind", str(checkpoints)):
        run = tiny_run(
            ["checkpoint-best", Locks(checkpoints, 10, 15)], model=tiny_model(), output="run", resume=True, **arguments
        )
    assert run.losses == undisturbed.losses[9:]
    assert run.summary["save_errors"] >= 2
    assert "Read-only file system" in caplog.text
    assert steps() == [18]


def test_best_weights_that_were_never_saved_are_no_missing_metric(tmp_path, tiny_run, caplog):
    """a folder that is read-only for a whole run: the warning about the best weights names the saves"""
    tiny_run(epochs=1, output="run", save_every=9)
    checkpoints = tmp_path / "run" / "checkpoints"
    with mounted(checkpoints, "--bind", str(checkpoints)):
        run = tiny_run(["checkpoint-best", Locks(checkpoints, 9, 99)], model=tiny_model(), output="run", resume=True)
    assert run.summary["best"] is None
    assert "the best weights were not saved: the last weights stay" in caplog.text


class LosesLoss(Plugin):
    """Replaces the loss of evaluations after one step with NaN."""

    name = "loses-loss"
    runs_after = ("checkpoint-best",)

    def __init__(self, last: int) -> None:
        super().__init__()
        self.last = last

    @hookimpl(wrapper=True)
    def evaluate(self, run: Any) -> Any:
        metrics = yield
        return metrics if run.state.step <= self.last else {"loss": math.nan}


def test_a_resumed_run_knows_that_best_weights_were_not_saved(tmp_path, tiny_run, caplog):
    """a folder that is read-only at the only evaluation with a loss, and a resumed run: the warning names the saves"""
    tiny_run(epochs=1, output="run", save_every=9)
    checkpoints = tmp_path / "run" / "checkpoints"
    arguments: dict[str, Any] = {"epochs": 3, "output": "run", "resume": True, "save_every": 20}
    with mounted(checkpoints, "--bind", str(checkpoints)):
        plugins = ["checkpoint-best", Locks(checkpoints, 10, 18), LosesLoss(18)]
        tiny_run(plugins, model=tiny_model(), max_steps=20, **arguments)
    caplog.clear()
    run = tiny_run(["checkpoint-best", LosesLoss(18)], model=tiny_model(), **arguments)
    assert run.summary["best"] is None
    assert "the best weights were not saved: the last weights stay" in caplog.text


QUOTA = "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))"


@pytest.mark.parametrize("count", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("choice", ["continue", "stop"])
def test_a_quota_error_counts_on_all_processes(choice, count):
    """a limit on file sizes on the process that writes: all processes continue, or all stop"""
    write_recipe(train={"on_save_error": choice}, model={"module": "code.py:Net", "arguments": {"hidden": 4000}})
    strategy = ["--with", "ddp"] if count > 1 else []
    assert [each.wait() for each in together("output=whole", *strategy, count=count)] == [0] * count
    quota = {"FAULT": f"step 6 0 {QUOTA}"}
    codes = [each.wait() for each in together("output=run", *strategy, count=count, environment=quota)]
    assert codes[0] == 1, said()
    assert "File too large" in said()
    if choice == "stop":
        assert codes == [1] * count
        assert steps() == [4]
    else:
        assert summary()["save_errors"] >= 3, "it trained to the end, where the model could not be written either"
        assert summary()["steps"] == 27
    assert find_newest(Path("run"))[0].name == "step-00000004"
    assert [each.wait() for each in together("output=run", *strategy, "--resume", count=count)] == [0] * count
    assert record() == record("whole")


# -- damage ------------------------------------------------------------------------------------------------------------


def test_flipped_bits_are_detected(record_property):
    """a flipped bit or a truncated file in a checkpoint: logged, and the checkpoint before is used"""
    save(1)
    original, count, chance = save(2), times(30), random.Random(times(30))
    survived = 0
    for _ in range(count):
        shutil.copytree(original, "kept")
        path = chance.choice(sorted(original.iterdir()))
        data = bytearray(path.read_bytes())
        place = chance.randrange(len(data))
        if chance.random() < 0.7:
            data[place] ^= 1 << chance.randrange(8)
        else:
            del data[place:]
        path.write_bytes(data)
        _, skipped = find_newest(Path("run"))
        if verify(original) is None:
            assert path.name == MANIFEST  # white space, or a name that nobody reads
            survived += whole() == 2
        else:
            assert skipped[0].startswith(f"{original}: ")
            survived += whole() == 1
            with expect_problem(f"damaged-checkpoint {original}", CheckpointError):
                find_newest(original)
        shutil.rmtree(original)
        Path("kept").rename(original)
    record_property("faults", count)
    assert survived == count


def test_resume_fails_if_all_checkpoints_are_corrupt():
    """every checkpoint is corrupt: exit code 2, and no step is trained"""
    write_recipe(train={"keep_checkpoints": 3})
    assert train("output=run", environment={"FAULT": "step 14 0 me('SIGKILL')"}) == -signal.SIGKILL
    for folder in Path("run/checkpoints").glob("step-*"):
        with (folder / "state.safetensors").open("r+b") as file:
            file.truncate(40)
    before = {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file()}
    assert train("output=run", "--resume") == 2
    assert said().count("damaged (state.safetensors is not what was written)") == 3
    assert {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file()} == before


# -- the best and the last ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_rotation_keeps_the_last_and_the_best_of_every_checkpoint_that_is_kept():
    """the newest checkpoint is corrupt, after a new best: the best of the one before exists"""
    write_recipe(train={"keep_checkpoints": 3, "evaluate_every": 2})
    assert train("output=whole") == 0
    assert train("output=run", environment={"FAULT": "step 23 0 me('SIGKILL')"}) == -signal.SIGKILL
    assert steps() == [12, 16, 20]
    for step in (20, 16):
        (Path("run/checkpoints") / f"step-{step:08d}" / MANIFEST).unlink()
    assert train("output=run", "--resume") == 0
    assert "is lost" not in said()
    assert record() == record("whole")


class Scores(Plugin):
    """Gives evaluations a metric of their own: ``values`` in turn; None is missing."""

    name = "scores"
    adds_metrics = {"score": "max"}

    def __init__(self, *values: float | None) -> None:
        super().__init__()
        self.values = iter(values)

    @hookimpl(wrapper=True, trylast=True)
    def evaluate(self, split: str):
        metrics = yield
        value = next(self.values) if split == "validation" else None
        return metrics if value is None else metrics | {"score": value}


@pytest.mark.parametrize(
    "bad", [float("nan"), float("inf"), float("-inf"), None], ids=["nan", "inf", "-inf", "missing"]
)
@pytest.mark.parametrize("mode", ["min", "max"])
def test_nan_metric_is_never_best(bad, mode, tiny_run, caplog):
    """a metric that is missing, NaN or infinite: logged, and never the best"""
    best = {"checkpoint-best": {"monitor": "score", "mode": mode}}
    stops = {
        "early-stopping": {"monitor": "score", "mode": mode, "patience": 9, "threshold": 0.0 if mode == "min" else 9.0}
    }
    run = tiny_run(
        [Scores(bad, 2.0, bad, 3.0 if mode == "min" else 1.0, bad), best, stops], epochs=5, evaluate_every="epoch"
    )
    best = run.summary["best"]
    assert (best["step"], best["metric"], best["value"]) == (18, "score", 2.0)
    assert best["path"] == "checkpoints/best-00000018"
    assert run.summary["status"] == "completed"
    assert_problem(caplog, "not-finite checkpoint-best score")


@pytest.mark.slow
def test_the_best_is_found_when_the_run_folder_moved():
    """a run folder that is moved between a kill and the resume: the best checkpoint is found"""
    write_recipe()
    assert train("output=whole") == 0
    assert train("output=run", environment={"FAULT": "step 22 0 me('SIGKILL')"}) == -signal.SIGKILL
    Path("far/away").mkdir(parents=True)
    shutil.move("run", "far/away/moved")
    assert train("output=far/away/moved", "--resume") == 0
    assert record("far/away/moved") == record("whole")
    assert (Path("far/away/moved") / summary("far/away/moved")["best"]["path"] / "model.safetensors").is_file()


# -- two runs in one folder --------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("resume", [[], ["--resume"]], ids=["anew", "resume"])
def test_a_second_run_in_the_same_folder_is_refused(resume):
    """a second run in the folder of a running one: exit code 2 before data is read"""
    write_recipe()
    assert train("output=whole") == 0
    first = Forked("output=run", environment={"FAULT": "step 15 0 while not Path('go').exists(): time.sleep(0.01)"})
    until(lambda: steps() == [12])
    second = Forked("output=run", *resume, environment={"FAULT": "data 1 0 Path('read').touch()"})
    assert second.wait() == 2
    assert f"output: run is in use by process {first.pid} on" in said()
    assert not Path("read").exists()
    Path("go").touch()
    assert first.wait() == 0
    assert record() == record("whole")
    assert not Path("run.1").exists()
    assert train("output=run") == 0, "when the first is over, the folder is free"
    assert Path("run.1").exists()


@pytest.mark.slow
def test_a_killed_run_leaves_no_lock():
    """a run is killed while its workers live: the folder is free at once"""
    write_recipe(data={"module": "code.py:rows", "arguments": {"slow": 0.001}})
    first = Forked("output=run", "--with", "dataloader-workers", environment={"FAULT": "step 15 0 me('SIGKILL')"})
    assert first.wait() == -signal.SIGKILL
    assert json.loads(Path("run/.lock").read_text())["pid"] == first.pid
    assert train("output=run", "--resume") == 0, said()
    assert Path("run/.lock").read_text() == ""


@pytest.mark.parametrize("has_locks", [True, False])
def test_the_lock_of_a_live_run_is_not_to_be_removed(has_locks, monkeypatch):
    """a second run on the host of the first: refused, and the lock is not to be removed"""
    if not has_locks:
        monkeypatch.setattr(fcntl, "lockf", no_locks)
    Path("run").mkdir()
    child = os.fork()
    if child == 0:
        Lock(Path("run"), "recipe.yaml")
        signal.pause()
    until(lambda: Path("run/.lock").exists() and Path("run/.lock").read_text())
    with expect_problem(f"folder-in-use {child}", RecipeError) as refused:
        Lock(Path("run"), "recipe.yaml")
    assert ".lock" not in str(refused.value)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    Lock(Path("run"), "recipe.yaml").release()


def test_without_file_locks_a_later_process_with_the_id_of_the_owner_is_no_owner(monkeypatch):
    """a file system without locks, and a host that restarted: the folder is free"""
    monkeypatch.setattr(fcntl, "lockf", no_locks)
    Path("run").mkdir()
    owner = {"pid": os.getpid(), "host": socket.gethostname(), "since": "2001-02-03 04:05:06"}
    Path("run/.lock").write_text(json.dumps(owner))
    Lock(Path("run"), "recipe.yaml").release()


def no_locks(*arguments: Any) -> None:
    """``fcntl.lockf`` on a file system without locks: there is none to be had here."""
    raise OSError(errno.ENOLCK, "No locks available")


def test_without_file_locks_a_process_elsewhere_may_live(monkeypatch):
    """a file system without locks, and an owner on another host: refused, with the file to remove"""
    monkeypatch.setattr(fcntl, "lockf", no_locks)
    Path("run").mkdir()
    Path("run/.lock").write_text(json.dumps({"pid": os.getpid(), "host": "elsewhere", "since": "today"}))
    with expect_problem("folder-in-use run/.lock", RecipeError):
        Lock(Path("run"), "recipe.yaml")


# -- in the background -------------------------------------------------------------------------------------------------


class Big(torch.nn.Sequential):
    """Ten million weights, of which a sample meets a few: a step takes far less than a save."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        super().__init__(torch.nn.Linear(8, 16), torch.nn.Linear(16, 3))
        self.register_buffer("ballast", torch.randn(10_000_000))


class Watches(Plugin):
    """Whether a checkpoint was being written while a step was done."""

    name = "watches"

    def __init__(self) -> None:
        super().__init__()
        self.busy = 0

    @hookimpl
    def after_step(self, run: Any) -> None:
        self.busy += run.saver.pending is not None


@pytest.mark.slow
def test_background_save_equals_foreground_save(tiny_run):
    """control: saving in the background: steps continue during a save, the files are the same to the byte, and the
    run's end waits for the last save"""
    arguments: dict[str, Any] = {"save_every": 4, "keep_checkpoints": 9, "epochs": 1}
    plugins: list[Any] = ["lr-scheduler", {"ema": {"decay": 0.9}}, {"log": False}]
    plain = tiny_run(plugins, model=Big(), output="plain", **arguments)
    watches = Watches()
    tiny_run([*plugins, "async-save", watches], model=Big(), output="async", **arguments)
    assert watches.busy
    assert steps("async") == steps("plain") == [4, 8, 9]
    for step in steps("plain"):
        for name in ("model.safetensors", "state.safetensors"):
            ours, theirs = (
                Path(run, "checkpoints", f"step-{step:08d}", name).read_bytes() for run in ("async", "plain")
            )
            assert ours == theirs, (step, name)
        assert verify(Path("async", "checkpoints", f"step-{step:08d}")) is None
    assert plain.summary["validation"] is not None


@pytest.mark.slow
def test_killed_while_saving_in_the_background_and_resumed(record_property):
    """a run that saves in the background is killed: resumed, it ends with the same numbers"""
    write_recipe()
    assert train("output=whole") == 0
    count, chance = times(4), random.Random(5)
    for index in range(count):
        shutil.rmtree("run", ignore_errors=True)
        fault = {"FAULT": f"step {chance.randrange(5, 27)} 0 time.sleep({chance.random() * 0.02}); me('SIGKILL')"}
        assert train("output=run", "--with", "async-save", environment=fault) == -signal.SIGKILL
        assert train("output=run", "--with", "async-save", "--resume") == 0, index
        assert record()["model"] == record("whole")["model"]
        assert record()["metrics"] == record("whole")["metrics"]
    record_property("faults", count)


def test_a_failure_in_the_background_stops_the_run_when_that_is_chosen(disk, tiny_run):
    """a full disk while the background thread writes: the run fails at the step's end"""
    with expect_problem("save-failed 00000004", SaveError):
        tiny_run(["async-save", Fills(disk, 3, 99)], output=disk / "run", save_every=4, on_save_error="stop")


class FailsLate(Plugin):
    """Writes nothing; of the save after step 4 that turns out when the next one is due."""

    name = "fails-late"

    @hookimpl
    def write_checkpoint(self, run: Any, folder: Path) -> Future[None]:
        written: Future[None] = Future()

        late = threading.Timer(0.5, written.set_exception, [SaveError(f"{folder.name} was not saved: planted")])
        late.start() if run.state.step == 4 else late.function(*late.args)
        return written


@pytest.mark.slow
def test_background_failure_found_at_next_save_is_reported(tiny_run):
    """a background save that fails while the next one waits for it: each failure is counted, the first one stops the
    run"""
    assert tiny_run([FailsLate()], epochs=1, save_every=4).summary["save_errors"] == 3  # after 4, 8 and 9 steps
    with expect_problem("save-failed 00000004", SaveError):
        tiny_run([FailsLate()], epochs=1, save_every=4, on_save_error="stop")
