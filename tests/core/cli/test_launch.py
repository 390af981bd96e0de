"""Several processes from the command line: however they are started they are one run, and when one ends, all end.

Modules:
    core/fastloop/cli/launch.py
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import forked
import pytest
import yaml
from log_lines import find_lines
from safetensors.torch import load_file
from typer.testing import CliRunner

from fastloop import PluginError
from fastloop.checks.launcher import check_recipe
from fastloop.cli import app, launch, startup
from fastloop.plugins.manager import PluginSet
from fastloop.recipe import make_recipe
from fastloop.runtime.step_folders import JOB_FILE
from fastloop.testing import assert_problem, find_problems

CODE = """
import os, signal, time
from pathlib import Path
import torch
from torch import nn
from torch.utils.data import Dataset

class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 3))

class Rows(Dataset):
    def __init__(self, fault=None):
        self.x = torch.randn(96, 8, generator=torch.Generator().manual_seed(0))
        self.fault, self.read = fault, 0
        Path(f"pid{os.environ.get('RANK', 0)}").write_text(str(os.getpid()))
    def __len__(self):
        return 96
    def __getitem__(self, index):
        self.read += 1
        if self.fault and self.read == 60 and os.environ["RANK"] == self.fault[-1]:
            if self.fault.startswith("raise"):
                raise ValueError("row 7 is spoilt")
            who = os.getppid() if self.fault.startswith("launcher") else os.getpid()
            os.kill(who, signal.SIGINT if "interrupt" in self.fault else signal.SIGKILL)
            if self.fault.startswith("launcher"):
                time.sleep(0.5)
        return self.x[index], int(self.x[index, :3].argmax())

def rows(fault=None):
    return {"train": Rows(fault), "validation": Rows()}
"""
RECIPE: dict[str, Any] = {
    "model": {"module": "code.py:Net"},
    "data": {"module": "code.py:rows"},
    "train": {"epochs": 3, "batch_size": 12, "lr": 1e-2, "save_every": 2, "device": "cpu"},
    "plugins": [{"module": {"loss": "cross_entropy"}}, "ddp", "lr-scheduler"],
    "output": "run",
}
FASTLOOP = ["-m", "fastloop"]
TRAIN = ["train", "recipe.yaml"]


@pytest.fixture(autouse=True)
def _recipe():
    Path("code.py").write_text(CODE)
    Path("recipe.yaml").write_text(yaml.safe_dump(RECIPE))


def do(*command: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command. Processes of fastloop's own launcher are forked, those of other launchers are new."""
    return forked.run(*command, timeout=600, env=os.environ | (environment or {}))


def numbers(output: str) -> dict[str, Any]:
    summary = json.loads(Path(output, "summary.json").read_text())
    return {
        key: summary[key]
        for key in ("status", "steps", "epochs", "samples", "world_size", "validation", "test", "best", "plugins")
    }


@pytest.mark.slow
def test_two_nodes_give_the_run_of_one():
    command = [sys.executable, *FASTLOOP, *TRAIN, "output=ours", "--nproc", "2"]
    ours = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert ours.returncode == 0, ours.stderr
    assert ours.stdout.count("completed") == 1
    assert ours.stderr == ""
    master = ["--nproc", "1", "--nnodes", "2", "--master", f"127.0.0.1:{launch.free_port()}"]
    with forked.Command(*FASTLOOP, *TRAIN, "output=nodes", *master, "--node-rank", "1") as other:
        done = do(*FASTLOOP, *TRAIN, "output=nodes", *master, "--node-rank", "0")
        assert (done.returncode, other.wait(400)) == (0, 0), done.stderr
    assert numbers("nodes") == numbers("ours")
    assert numbers("ours")["world_size"] == 2


@pytest.mark.slow
def test_raising_process_is_reported_first_and_stops_all():
    done = do(*FASTLOOP, *TRAIN, "data.arguments={fault: raise1}", "--nproc", "2")
    assert done.returncode == 1
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert_problem(errors[0], "reading-failed ValueError: spoilt code.py:23 __getitem__")
    assert "ChildFailedError" not in done.stderr
    assert (
        json.loads(Path("run/summary.json").read_text())["status"] in ("failed", "completed")
        if Path("run/summary.json").exists()
        else True
    )


def test_killed_process_stops_all_and_resume_is_bitwise():
    undisturbed = do(*FASTLOOP, *TRAIN, "output=undisturbed", "--nproc", "2")
    assert undisturbed.returncode == 0, undisturbed.stderr
    killed = do(*FASTLOOP, *TRAIN, "data.arguments={fault: kill1}", "--nproc", "2")
    assert killed.returncode == 128 + signal.SIGKILL
    (line,) = [line for line in killed.stderr.splitlines() if line.startswith("error: ")]
    assert_problem(line, f"process-killed 1 2 {Path('pid1').read_text()} SIGKILL")
    assert line.endswith("--nproc 2 --resume`. [process-killed]")
    Path("code.py").write_text(CODE.replace("self.fault and", "False and"))
    again = do(*FASTLOOP, *TRAIN, "data.arguments={fault: kill1}", "--nproc", "2", "--resume")
    assert again.returncode == 0, again.stderr
    assert re.search(r" run/checkpoints/step-\d+ ", again.stdout)
    ours, theirs = (load_file(f"{name}/model/model.safetensors") for name in ("run", "undisturbed"))
    assert all(ours[name].equal(theirs[name]) for name in theirs | ours)
    assert numbers("run") == numbers("undisturbed")


def test_ctrl_c_saves_once_and_prints_resume_command():
    done = do(*FASTLOOP, *TRAIN, "data.arguments={fault: launcher interrupt0}", "--nproc", "2")
    assert done.returncode == 130, done.stderr
    assert len(find_problems(done.stdout, "interrupted SIGINT")) == 1
    (line,) = [line for line in done.stdout.splitlines() if line.endswith("--nproc 2 --resume")]
    (step,) = map(int, re.findall(r" step (\d+)", line))
    assert Path(f"run/checkpoints/step-{step:08d}/manifest.json").exists()


@pytest.mark.slow
def test_killed_launcher_leaves_no_process():
    done = do(*FASTLOOP, *TRAIN, "data.arguments={fault: launcher kill0}", "--nproc", "2")
    assert done.returncode == -signal.SIGKILL
    deadline = time.monotonic() + 120
    while any(Path("/proc", Path(name).read_text()).exists() for name in ("pid0", "pid1")):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_launch_error_is_printed_once():
    done = do(*FASTLOOP, *TRAIN, "plugins.checkpoint-best.monitor=accurracy", "--nproc", "2")
    assert done.returncode == 2
    assert done.stderr.count("error: ") == 1


@pytest.mark.parametrize(
    ("options", "environment", "expected"),
    [
        (["--nproc", "2"], {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}, "launched-twice --nproc 2: 2."),
        (["--nproc", "2", "--nnodes", "2"], {}, "missing-value --nnodes 2: --master HOST:PORT"),
        (
            ["--nproc", "2", "--nnodes", "2", "--master", "here", "--node-rank", "0"],
            {},
            "wrong-format --master here: HOST:PORT",
        ),
        (
            ["--nproc", "2", "--nnodes", "2", "--master", "a:1", "--node-rank", "2"],
            {},
            "out-of-range --node-rank 2: 0 1 --nnodes",
        ),
    ],
)
def test_invalid_launch_options_are_rejected(options, environment, expected):
    done = do(*FASTLOOP, *TRAIN, *options, environment=environment)
    assert done.returncode == 2
    assert_problem(done.stderr, expected)


def test_processes_without_a_strategy_are_refused_by_plan(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    result = CliRunner().invoke(app, ["plan", "recipe.yaml", "--without", "ddp"])
    assert isinstance(result.exception, PluginError)
    assert_problem(result.exception.problem, "no-strategy 2 'strategy'")


@pytest.mark.parametrize("processes", [1, 2])
def test_plan_adds_ddp_for_several_processes(processes):
    Path("bare.yaml").write_text("extends: quickstart\n")
    result = CliRunner().invoke(app, ["plan", "bare.yaml", "--nproc", str(processes), "-v"])
    assert ("ddp" in result.stdout) == (processes == 2)
    assert bool(find_lines(result.stdout, "ddp 2")) == (processes == 2)


@pytest.mark.slow
def test_processes_without_a_listed_strategy_train_as_with_ddp():
    recipe = {**RECIPE, "plugins": [plugin for plugin in RECIPE["plugins"] if plugin != "ddp"]}
    Path("bare.yaml").write_text(yaml.safe_dump(recipe))
    for file, output in (("recipe.yaml", "listed"), ("bare.yaml", "bare")):
        done = do(*FASTLOOP, "train", file, f"output={output}", "train.epochs=1", "--nproc", "2")
        assert done.returncode == 0, done.stderr
        assert bool(find_lines(done.stdout, "ddp: 2 --without")) == (output == "bare")
    summary = json.loads(Path("bare/summary.json").read_text())
    assert (summary["world_size"], "ddp" in summary["plugins"]) == (2, True)
    ours, theirs = (load_file(f"{output}/model/model.safetensors") for output in ("bare", "listed"))
    assert all(ours[name].equal(theirs[name]) for name in theirs)


ACCELERATE = {"ACCELERATE_MIXED_PRECISION": "no", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
"""Variables of a process that `accelerate launch --num_processes 2 --cpu` starts: it starts one, and gives no rank."""


@pytest.mark.parametrize(
    ("environment", "warned"),
    [(ACCELERATE, True), ({**ACCELERATE, "WORLD_SIZE": "1", "RANK": "0"}, False), ({"MASTER_ADDR": "a"}, False)],
)
def test_one_process_where_several_were_asked_for_is_a_warning(monkeypatch, caplog, environment, warned):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    recipe = make_recipe({"model": {}, "output": "run"})
    check_recipe(recipe, PluginSet([]))
    assert ("--multi_gpu" in caplog.text) == warned


def test_a_strategy_in_a_run_of_one_process_is_logged(caplog, tiny_run):
    caplog.set_level("INFO", logger="fastloop")
    tiny_run(["ddp"], max_steps=1)
    assert "'ddp'" in caplog.text
    assert "--nproc" in caplog.text


def test_plan_shows_the_batch_for_a_number_of_processes():
    result = CliRunner().invoke(app, ["plan", "recipe.yaml", "--nproc", "4"])
    assert "12 samples a step = 3 x 1 micro-step x 4 processes" in result.stdout


@pytest.mark.slow
def test_accelerate_config_file_is_compared_with_recipe():
    Path("accelerate.yaml").write_text(
        yaml.safe_dump(
            {
                "distributed_type": "FSDP",
                "num_processes": 2,
                "mixed_precision": "no",
                "fsdp_config": {"fsdp_version": 2},
            }
        )
    )
    accelerate = [
        "-m",
        "accelerate.commands.launch",
        "--config_file",
        "accelerate.yaml",
        "--main_process_port",
        str(launch.free_port()),
    ]
    refused = do(*accelerate, "-m", "fastloop", *TRAIN)
    assert refused.returncode != 0
    assert (
        refused.stderr.count(
            "accelerate's configuration asks for 'fsdp' (ACCELERATE_USE_FSDP), and the recipe lists 'ddp'"
        )
        == 1
    )
    taken = do(*accelerate, "-m", "fastloop", *TRAIN, "--without", "ddp", "--with", "fsdp")
    assert taken.returncode == 0, taken.stderr
    assert numbers("run")["world_size"] == 2


def test_torchrun_restart_resumes_only_its_own_run(tmp_path, monkeypatch):
    """An attempt that died before it made its folder leaves the folder of another run, which must not be resumed."""
    run = tmp_path / "run"
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "log" / "attempt_1" / "0" / "error.json"))
    run.mkdir()
    (run / "recipe.yaml").touch()
    (run / JOB_FILE).write_text(str(tmp_path / "log of another job"))
    assert startup.resume_from(None, run) is None
    assert startup.resume_from("elsewhere", run) == Path("elsewhere")
    (run / JOB_FILE).write_text(str(tmp_path / "log"))
    os.utime(run / "recipe.yaml", (1e9, 1e9))  # as if the clock had been set back
    assert startup.resume_from(None, run) == startup.resume_from("elsewhere", run) == run
    (run / "recipe.yaml").unlink()
    assert startup.resume_from(None, run) is None
