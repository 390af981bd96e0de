"""Two machines, which are two network namespaces: a slow link, a cut link, a lost machine, and restarts by torchrun."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
import yaml
from fault_runs import steps, times, until
from long_form import long_form_only
from safetensors.torch import load_file
from two_nodes import ADDRESSES, TwoNodes

from fastloop.testing import assert_problem, find_problems

pytestmark = pytest.mark.slow

ENDS = 400.0
"""Seconds after which a command counts as hanging: far more than a loaded machine needs."""
CUT = 10.0
"""Seconds without the link."""
CODE = """
import os, time
from pathlib import Path
import torch
from torch import nn
from torch.utils.data import Dataset

class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))

class Rows(Dataset):
    def __init__(self, size):
        self.x = torch.randn(size, 8, generator=torch.Generator().manual_seed(size))
        Path(f"pid{os.environ.get('RANK', 0)}").write_text(str(os.getpid()))
    def __len__(self):
        return len(self.x)
    def __getitem__(self, index):
        time.sleep(float(Path("seconds").read_text()))
        return self.x[index], int(self.x[index, :3].argmax())

def rows():
    return {"train": Rows(96), "validation": Rows(12)}
"""
RECIPE: dict[str, Any] = {
    "model": {"module": "code.py:Net"},
    "data": {"module": "code.py:rows"},
    "train": {
        "epochs": 3,
        "batch_size": 12,
        "micro_batch_size": 6,
        "lr": 1e-2,
        "save_every": 4,
        "log_every": 1,
        "device": "cpu",
    },
    "plugins": [{"module": {"loss": "cross_entropy"}}, "ddp", {"watchdog": {"timeout": 10}}, {"progress": False}],
    "output": "run",
}
LAYERS = """
from transformers import LlamaConfig, LlamaForCausalLM

class Llama(nn.Module):
    def __init__(self):
        super().__init__()
        heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 2}
        self.inner = LlamaForCausalLM(LlamaConfig(vocab_size=16, hidden_size=16, intermediate_size=32, **heads))

    def forward(self, x):
        return self.inner(input_ids=(4 * x).long().clamp(-8, 7) + 8).logits[:, -1, :3].float()
"""
MESH = RECIPE | {
    "model": {"module": "code.py:Llama"},
    "train": RECIPE["train"] | {"micro_batch_size": 3},
    "plugins": [RECIPE["plugins"][0], {"fsdp": {"tensor": 2}}, {"watchdog": {"timeout": 20}}, {"progress": False}],
}
TRAIN = ["-m", "fastloop", "train", "recipe.yaml"]
PATIENT = "plugins.watchdog.timeout=120"
"""For runs that lose no machine: a loaded machine may stall a process for seconds."""
TORCHRUN = ["-m", "torch.distributed.run", "--max-restarts", "3", "--monitor-interval", "0.1"]
RENDEZVOUS = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{ADDRESSES[0]}:29500", "--rdzv-conf"]
WAITING = "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=8"
"""How long a rendezvous waits for more machines, and when a machine counts as lost."""

ELASTIC = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""For machines that join later: otherwise torch 2.13 does not send them the address of the first one."""


@pytest.fixture(scope="module")
def namespaces() -> Iterator[TwoNodes]:
    with TwoNodes() as nodes:
        yield nodes


@pytest.fixture
def nodes(namespaces: TwoNodes) -> Iterator[TwoNodes]:
    write_recipe()
    yield namespaces
    namespaces.reset()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of two processes on one machine."""
    folder = tmp_path_factory.mktemp("undisturbed")
    write_recipe(folder)
    done = forked.run(*TRAIN, "--nproc", "2", PATIENT, cwd=folder, timeout=ENDS)
    assert done.returncode == 0, done.stderr
    return folder / "run"


def write_recipe(folder: Path = Path()) -> None:
    (folder / "code.py").write_text(CODE)
    (folder / "recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    set_pace(0.02, folder)


def set_pace(seconds: float, folder: Path = Path()) -> None:
    """Change the time that a row takes, also of a run that is under way."""
    (folder / "seconds.new").write_text(str(seconds))
    (folder / "seconds.new").replace(folder / "seconds")


def write_mesh(folder: Path) -> None:
    """A recipe of ``fsdp`` with divided layers."""
    write_recipe(folder)
    (folder / "code.py").write_text(CODE + LAYERS)
    (folder / "recipe.yaml").write_text(yaml.safe_dump(MESH))


def fastloop(nodes: TwoNodes, *arguments: str) -> list[forked.Command]:
    """Start a run by fastloop's own launcher, with one process on each machine."""
    master = ["--nproc", "1", "--nnodes", "2", "--master", f"{ADDRESSES[0]}:29400"]
    return [nodes.start(node, *TRAIN, *master, "--node-rank", str(node), *arguments) for node in (0, 1)]


def torchrun(
    nodes: TwoNodes, node: int, machines: str, *arguments: str, processes: int = 1, **variables: str
) -> forked.Command:
    """Start a machine of a run by torchrun."""
    found = ["--nproc-per-node", str(processes), "--nnodes", machines, "--local-addr", ADDRESSES[node], *RENDEZVOUS]
    return nodes.start(
        node, *TORCHRUN, *found, f"{WAITING},is_host={1 - node}", *TRAIN, "--resume", *arguments, **variables
    )


def wait(commands: list[forked.Command]) -> None:
    """Wait until both commands have ended well."""
    codes = [command.wait(ENDS) for command in commands]
    assert codes == [0, 0], [command.stdout + command.stderr for command in commands]


def wait_for_checkpoint(commands: list[forked.Command], step: int) -> None:
    """Wait until a checkpoint of this step or a later one exists."""
    until(lambda: max(steps(), default=0) >= step or any(command.poll() is not None for command in commands))
    assert max(steps(), default=0) >= step, [command.stdout + command.stderr for command in commands]


def metrics(run: Path) -> list[dict[str, Any]]:
    """The lines of the log, without what depends on the clock."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: line[key] for key in ("step", "epoch", "split", "loss") if key in line} for line in lines]


def assert_same_bits(run: Path, other: Path) -> None:
    assert metrics(run) == metrics(other)
    ours, theirs = (load_file(folder / "model" / "model.safetensors") for folder in (run, other))
    assert all(ours[name].equal(theirs[name]) for name in ours | theirs)


def test_slow_link_that_is_cut(nodes, undisturbed):
    """a slow link that loses packets and is cut for 10 seconds: the run waits, and ends with the same bits"""
    nodes.set_link(delay=0.005, loss=0.01)
    commands = fastloop(nodes, PATIENT)
    wait_for_checkpoint(commands, 8)
    nodes.set_link(loss=1.0)
    time.sleep(CUT / 2)
    reached = len(metrics(Path("run")))
    time.sleep(CUT / 2)
    assert len(metrics(Path("run"))) == reached, "it trains without the link"
    nodes.set_link(delay=0.005, loss=0.01)
    wait(commands)
    assert_same_bits(Path("run"), undisturbed)


@pytest.mark.parametrize("lost", [0, 1][: times(1)])
def test_lost_machine(nodes, undisturbed, lost):
    """a machine is lost: the other names it and ends; --resume ends with the same bits"""
    commands = fastloop(nodes)
    wait_for_checkpoint(commands, 8)
    nodes.lose(lost)
    other = commands[1 - lost]
    assert other.wait(ENDS) == 1, other.stderr
    assert other.stderr.count("error: ") == 1
    assert_problem(other.stderr, f"no-progress process {lost} 2 --resume")
    nodes.set_link()
    commands = fastloop(nodes, PATIENT, "--resume")
    wait(commands)
    assert " run/checkpoints/step-" in commands[0].stdout
    assert_same_bits(Path("run"), undisturbed)


@long_form_only
def test_torchrun_restarts_both_machines(nodes, undisturbed):
    """a process dies under torchrun --max-restarts: both machines resume to the same bits"""
    commands = [torchrun(nodes, node, "2", PATIENT) for node in (0, 1)]
    wait_for_checkpoint(commands, 8)
    first = int(Path("pid1").read_text())
    os.kill(first, signal.SIGKILL)
    wait(commands)
    assert int(Path("pid1").read_text()) != first
    assert " run/checkpoints/step-" in commands[0].stdout
    assert json.loads(Path("run/summary.json").read_text())["world_size"] == 2
    assert_same_bits(Path("run"), undisturbed)


def test_torchrun_continues_with_other_machines(nodes, undisturbed):
    """a machine joins an elastic run under torchrun, and is lost later: the run resumes each time with the same
    losses"""
    first = torchrun(nodes, 0, "1:2", **ELASTIC)
    wait_for_checkpoint([first], 4)
    # less than the watchdog's timeout for a step, and the run does not end before the other machine is there
    set_pace(0.25)
    second = torchrun(nodes, 1, "1:2", **ELASTIC)
    until(lambda: bool(find_problems(first.stdout, "interrupted SIGTERM")) or first.poll() is not None)
    set_pace(0.1)
    until(lambda: Path("pid1").exists() or first.poll() is not None)
    wait_for_checkpoint([first, second], max(steps()) + 4)
    nodes.lose(1)
    set_pace(0.0)
    assert first.wait(ENDS) == 0, first.stdout + first.stderr
    assert "saved by 1 process, resumed on 2" in first.stdout
    assert "saved by 2 processes, resumed on 1" in first.stdout
    ours, theirs = metrics(Path("run")), metrics(undisturbed)
    assert [line["step"] for line in ours] == [line["step"] for line in theirs]
    assert [line["loss"] for line in ours] == pytest.approx([line["loss"] for line in theirs], rel=1e-5)
    weights, expected = (load_file(run / "model" / "model.safetensors") for run in (Path("run"), undisturbed))
    assert all(torch.allclose(weights[name], expected[name], rtol=1e-4, atol=1e-6) for name in weights | expected)


@long_form_only
def test_torchrun_continues_on_another_mesh(nodes, tmp_path_factory):
    """a machine of a two by two mesh (``fsdp`` with ``tensor``) is lost: the other one resumes on half of the mesh, and
    a new machine joins, with the same losses"""
    folder = tmp_path_factory.mktemp("undisturbed")
    for place in (folder, Path()):
        write_mesh(place)
    plain = [*TRAIN, "--without", "fsdp", PATIENT]
    done = forked.run(*plain, cwd=folder, timeout=ENDS)
    assert done.returncode == 0, done.stderr
    first, second = (torchrun(nodes, node, "1:2", processes=2, **ELASTIC) for node in (0, 1))
    wait_for_checkpoint([first, second], 2)
    nodes.lose(1)
    wait_for_checkpoint([first], max(steps()) + 2)
    nodes.set_link()
    set_pace(0.2)  # the run does not end before the other machine is there
    Path("pid3").unlink()
    third = torchrun(nodes, 1, "1:2", processes=2, **ELASTIC)
    until(lambda: Path("pid3").exists() or first.poll() is not None)
    set_pace(0.0)
    wait([first, third])
    assert "saved by 4 processes, resumed on 2" in first.stdout
    assert "saved by 2 processes, resumed on 4" in first.stdout
    ours, theirs = metrics(Path("run")), metrics(folder / "run")
    assert [line["step"] for line in ours] == [line["step"] for line in theirs]
    assert [line["loss"] for line in ours] == pytest.approx([line["loss"] for line in theirs], rel=1e-5)
