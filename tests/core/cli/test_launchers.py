"""Each launcher with its settings from arguments, a file or the environment: how many processes train one run, and
which samples each of them sees. A start that cannot be one run is refused with a sentence.

A row of ``STARTS`` or ``REFUSED`` is a start.

Modules:
    core/fastloop/distributed/ranks.py
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import forked
import pytest
import yaml
from safetensors.torch import load_file

from fastloop import UsageError
from fastloop.cli import launch
from fastloop.distributed.ranks import check_variables

ROWS = 24
CODE = f"""
import json
import os
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

from fastloop import Plugin, hookimpl


class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(1, 4), nn.Linear(4, 3))


def rows():
    inputs = torch.arange({ROWS}.0)[:, None]
    return {{"train": TensorDataset(inputs, torch.arange({ROWS}) % 3)}}


class Seen(Plugin):
    "Writes the world size and the samples of each epoch that this process trains on."

    name = "seen"

    def __init__(self):
        super().__init__()
        self.epochs = []

    @hookimpl
    def before_epoch(self):
        self.epochs.append([])

    @hookimpl
    def before_step(self, batches):
        for batch in batches:
            self.epochs[-1] += [int(number) for number in batch.inputs[0][:, 0]]

    @hookimpl
    def after_fit(self, run):
        seen = {{"world_size": run.world_size, "rank": run.rank, "epochs": self.epochs}}
        Path(f"seen-{{os.getpid()}}.json").write_text(json.dumps(seen))
"""
SCRIPT = """
from pathlib import Path

from torch import nn

import code_of_user
from fastloop import Trainer

if __name__ == "__main__":
    Trainer(
        code_of_user.Net(),
        code_of_user.rows()["train"],
        loss=nn.functional.cross_entropy,
        plugins=[code_of_user.Seen()],
        epochs=2,
        batch_size=8,
        lr=1e-2,
        seed=0,
        device="cpu",
        output="run",
    ).fit()
"""
RECIPE: dict[str, Any] = {
    "model": {"module": "code_of_user.py:Net"},
    "data": {"module": "code_of_user.py:rows"},
    "train": {"epochs": 2, "batch_size": 8, "lr": 1e-2, "device": "cpu"},
    "plugins": [{"module": {"loss": "cross_entropy"}}, "./code_of_user.py:Seen"],
    "output": "run",
}
FASTLOOP = ("-m", "fastloop", "train", "recipe.yaml")
SCRIPTED = ("script.py",)
TORCHRUN = ("-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone")
ACCELERATE = ("-m", "accelerate.commands.launch")
TWO = ("--num_processes", "2")
FILE = {"compute_environment": "LOCAL_MACHINE", "num_machines": 1, "num_processes": 2, "mixed_precision": "no"}
"""A configuration file of accelerate."""


@dataclass(frozen=True, kw_only=True)
class Start:
    """A way to start a run.

    Attributes:
        name: For the test's id.
        command: The arguments of ``python``. ``PORT`` stands for a free port.
        environment: Variables, for each of the processes that are started side by side.
        file: Content of accelerate's configuration file, ``accelerate.yaml``.
        world_size: Processes that train one run.
        warns: A text that the output contains.
    """

    name: str
    command: Sequence[str]
    environment: Sequence[Mapping[str, str]] = field(default_factory=lambda: [{}])
    file: Mapping[str, Any] | None = None
    world_size: int = 2
    warns: str = ""


def group(world: str, rank: str, local: str = "") -> list[dict[str, str]]:
    """Variables of two processes that another launcher starts. The names are those of the world size, the rank, and
    maybe the local rank."""
    variables = []
    for index in ("0", "1"):
        own = {world: "2", rank: index, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "PORT"}
        variables.append(own | ({local: index} if local else {}))
    return variables


TORCH = group("WORLD_SIZE", "RANK", "LOCAL_RANK")
MULTI_GPU = FILE | {"distributed_type": "MULTI_GPU"}
STARTS = [
    Start(name="fastloop", command=FASTLOOP, world_size=1),
    Start(name="fastloop nproc", command=(*FASTLOOP, "--nproc", "2")),
    Start(name="script", command=SCRIPTED, world_size=1),
    Start(name="fastloop variables", command=FASTLOOP, environment=TORCH),
    Start(
        name="fastloop variables of one", command=FASTLOOP, environment=[{"WORLD_SIZE": "1", "RANK": "0"}], world_size=1
    ),
    Start(name="script variables", command=SCRIPTED, environment=TORCH),
    Start(
        name="fastloop Open MPI",
        command=FASTLOOP,
        environment=group("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ),
    Start(name="fastloop Intel MPI", command=FASTLOOP, environment=group("PMI_SIZE", "PMI_RANK", "MPI_LOCALRANKID")),
    Start(name="torchrun fastloop", command=(*TORCHRUN, *FASTLOOP)),
    Start(name="torchrun script", command=(*TORCHRUN, *SCRIPTED)),
    Start(
        name="accelerate multi_gpu fastloop",
        command=(*ACCELERATE, "--multi_gpu", *TWO, "--main_process_port", "PORT", *FASTLOOP),
    ),
    Start(
        name="accelerate cpu fastloop",
        command=(*ACCELERATE, "--cpu", *TWO, *FASTLOOP),
        world_size=1,
        warns="--multi_gpu",
    ),
    Start(
        name="accelerate variables fastloop",
        command=(*ACCELERATE, *TWO, *FASTLOOP),
        environment=[{"ACCELERATE_USE_CPU": "true"}],
        world_size=1,
        warns="--multi_gpu",
    ),
    Start(
        name="accelerate file",
        command=(*ACCELERATE, "--config_file", "accelerate.yaml", "--main_process_port", "PORT", *FASTLOOP),
        file=MULTI_GPU,
    ),
    Start(
        name="accelerate file with use_cpu",
        command=(*ACCELERATE, "--config_file", "accelerate.yaml", "--main_process_port", "PORT", *FASTLOOP),
        file=MULTI_GPU | {"use_cpu": True},
    ),
    Start(
        name="accelerate file of MULTI_CPU",
        command=(*ACCELERATE, "--config_file", "accelerate.yaml", "--main_process_port", "PORT", *FASTLOOP),
        file=FILE | {"distributed_type": "MULTI_CPU", "use_cpu": True},
        world_size=1,
        warns="--multi_gpu",
    ),
    Start(
        name="accelerate file script",
        command=(*ACCELERATE, "--config_file", "accelerate.yaml", "--main_process_port", "PORT", *SCRIPTED),
        file=MULTI_GPU,
    ),
]


@dataclass(frozen=True, kw_only=True)
class Refused:
    """A start that cannot be one run.

    Attributes:
        names: Texts that the message contains.
    """

    name: str
    command: Sequence[str] = FASTLOOP
    environment: Mapping[str, str]
    names: Sequence[str]


ADDRESS = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
REFUSED = [
    Refused(name="no rank", environment={"WORLD_SIZE": "2", **ADDRESS}, names=["RANK", "WORLD_SIZE"]),
    Refused(name="no address", environment={"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}, names=["MASTER_ADDR"]),
    Refused(
        name="no port",
        environment={"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"},
        names=["MASTER_PORT"],
    ),
    Refused(
        name="lone local rank",
        environment={"LOCAL_RANK": "0"},
        names=["LOCAL_RANK=0 is set", "WORLD_SIZE, RANK, MASTER_ADDR and MASTER_PORT are not", "`unset LOCAL_RANK`"],
    ),
    Refused(name="rank too high", environment={"WORLD_SIZE": "2", "RANK": "2", **ADDRESS}, names=["RANK", "2"]),
    Refused(name="no number", environment={"WORLD_SIZE": "two", "RANK": "0", **ADDRESS}, names=["WORLD_SIZE", "two"]),
    Refused(name="no world", environment={"RANK": "1", "LOCAL_RANK": "1", **ADDRESS}, names=["RANK", "WORLD_SIZE"]),
    Refused(
        name="tasks of srun",
        environment={"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "SLURM_LOCALID": "1"},
        names=["SLURM_STEP_NUM_TASKS", "WORLD_SIZE"],
    ),
    Refused(name="two launchers", command=(*FASTLOOP, "--nproc", "2"), environment=TORCH[0], names=["--nproc"]),
    Refused(
        name="script no rank",
        command=SCRIPTED,
        environment={"WORLD_SIZE": "2", **ADDRESS},
        names=["RANK", "WORLD_SIZE"],
    ),
    Refused(
        name="script tasks of srun",
        command=SCRIPTED,
        environment={"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0"},
        names=["SLURM_STEP_NUM_TASKS"],
    ),
]


@pytest.fixture(autouse=True)
def _files() -> None:
    Path("code_of_user.py").write_text(CODE)
    Path("script.py").write_text(SCRIPT)
    Path("recipe.yaml").write_text(yaml.safe_dump(RECIPE))


def run_side_by_side(
    command: Sequence[str], environments: Sequence[Mapping[str, str]], limit: float
) -> tuple[list[int], str]:
    """Start a command once for each environment. Returns the exit codes, and all output."""
    port = str(launch.free_port())
    arguments = [port if argument == "PORT" else argument for argument in command]
    started = []
    for environment in environments:
        added = {name: port if value == "PORT" else value for name, value in environment.items()}
        started.append(forked.Command(*arguments, env=os.environ | added))
    codes = [process.wait(limit) for process in started]
    return codes, "".join(process.stdout + process.stderr for process in started)


@pytest.mark.slow
@pytest.mark.parametrize("start", STARTS, ids=lambda start: start.name)
def test_each_sample_is_trained_on_once_an_epoch_over_all_processes(start: Start):
    if start.file is not None:
        Path("accelerate.yaml").write_text(yaml.safe_dump(dict(start.file)))
    codes, output = run_side_by_side(start.command, start.environment, 300)
    assert codes == [0] * len(start.environment), output
    assert start.warns in output
    seen = [json.loads(path.read_text()) for path in Path().glob("seen-*.json")]
    assert sorted(process["rank"] for process in seen) == [*range(start.world_size)]
    assert {process["world_size"] for process in seen} == {start.world_size}
    for epoch in (0, 1):
        samples = [number for process in seen for number in process["epochs"][epoch]]
        assert sorted(samples) == [*range(ROWS)]
        assert {len(process["epochs"][epoch]) for process in seen} == {ROWS // start.world_size}
    summary = json.loads(Path("run/summary.json").read_text())
    assert (summary["world_size"], summary["status"], summary["steps"]) == (start.world_size, "completed", 6)
    assert load_file("run/model/model.safetensors")


@pytest.mark.parametrize(
    "start", [start for start in REFUSED if "--nproc" not in start.command], ids=lambda start: start.name
)
def test_variables_that_are_not_of_one_group_are_refused(monkeypatch: pytest.MonkeyPatch, start: Refused):
    for name, value in start.environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError) as caught:
        check_variables(trains=True)
    for name in start.names:
        assert name in str(caught.value)


def test_tasks_of_srun_may_evaluate_side_by_side(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    check_variables(trains=False)


@pytest.mark.slow
@pytest.mark.parametrize("start", REFUSED, ids=lambda start: start.name)
def test_a_start_that_is_not_one_run_is_refused_before_it_trains(start: Refused):
    (code,), output = run_side_by_side(start.command, [start.environment], 60)
    assert code not in (0, None), output
    assert "Traceback" not in output or start.command == SCRIPTED
    for name in start.names:
        assert name in output
    assert not Path("run").exists()
