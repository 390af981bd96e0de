"""Measured processes that are forked from a server: the numbers of fresh ones, and nothing that outlives the search."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pytest
import yaml

from fastloop.recipe import Recipe, load_recipe
from fastloop.runtime.hardware import Machine
from fastloop_tools.trials.pairs import TrialRunner
from fastloop_tools.trials.server import LIBRARIES, TRANSFORMERS, ForkServer, Servers, libraries, run_worker
from fastloop_tools.trials.worker import Spec

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="forks only on Linux")

CODE = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

def data():
    inputs = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    return {"train": TensorDataset(inputs, inputs[:, :3].argmax(1))}

def net():
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(), nn.Linear(8, 3))
"""
PLUGIN = """
import os
from fastloop import Plugin, hookimpl

class Early(Plugin):
    "Needs a variable from the start."
    name = "early"

    @hookimpl
    def environment(self):
        return {"PLANTED": "1"}

    @hookimpl
    def write_summary(self, summary):
        with open(f"/proc/{os.getppid()}/environ") as file:
            summary["found"] = {"early": "PLANTED=1" in file.read() and os.environ["PLANTED"], "parent": os.getppid()}

    @hookimpl
    def after_step(self, run):
        if run.recipe.train.lr == 0.5:
            os.kill(os.getpid(), 9)
"""


@pytest.fixture
def recipe(monkeypatch: pytest.MonkeyPatch) -> Recipe:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    Path("net.py").write_text(CODE)
    Path("early.py").write_text(PLUGIN)
    tree = {
        "model": {"module": "net.py:net"},
        "data": {"module": "net.py:data"},
        "train": {"batch_size": 8, "device": "cpu", "max_steps": 4, "lr": 0.01},
        "plugins": [{"module": {"loss": "cross_entropy"}}],
    }
    Path("tiny.yaml").write_text(yaml.safe_dump(tree))
    return load_recipe("tiny.yaml")


@pytest.fixture
def runner() -> Iterator[TrialRunner]:
    with closing(TrialRunner(dict(os.environ), Path("cache").resolve(), print, modules=LIBRARIES)) as runner:
        yield runner


def measured(runner: TrialRunner, recipe: Recipe, fresh: bool = False) -> dict:
    return runner.work(recipe, Spec(recipe=recipe.to_dict(), source=None), fresh=fresh)


@pytest.mark.slow
def test_forked_processes_give_the_numbers_of_fresh_ones(recipe, runner):
    assert runner.servers is not None
    fresh, forked, again = (measured(runner, recipe, fresh) for fresh in (True, False, False))
    assert forked["losses"] == again["losses"] == fresh["losses"]
    assert len(fresh["losses"]) == 4
    (plain,) = runner.servers.running.values()

    early = load_recipe("tiny.yaml", with_plugins=["early.py"])
    found = measured(runner, early)["summary"]["found"]
    assert found["early"] == "1"
    assert [server.process.pid for server in runner.servers.running.values()] == [plain.process.pid, found["parent"]]

    killed = measured(runner, load_recipe("tiny.yaml", ["train.lr=0.5"], ["early.py"]))
    assert killed["kind"] == "killed"
    assert "was killed by SIGKILL" in killed["error"]
    wrong = measured(runner, load_recipe("tiny.yaml", ["model.module=net.py:nets"]))
    assert wrong["kind"] == "usage"
    assert "net.py has no 'nets'. Did you mean 'net'?" in wrong["error"]
    endless = recipe.to_dict() | {"train": {"max_steps": 10**9, "epochs": 10**6}}
    late = run_worker(
        Spec(recipe=endless, source=str(recipe.source)),
        {"epochs": 1, "max_steps": None},
        os.environ,
        1.0,
        1,
        runner.servers,
    )
    assert late["kind"] == "timeout"
    assert measured(runner, recipe)["losses"] == fresh["losses"], "the server still serves"
    runner.close()
    assert plain.process.returncode == 0


def test_a_server_serves_again_and_ends_with_its_user(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    Path("made").mkdir()
    Path("made/spec.json").write_text("not JSON")
    servers = Servers(())
    with closing(servers):
        server = servers.get(os.environ, {})
        assert servers.get(os.environ, {}) is server
        found = server.run(folder=str(Path("made").resolve()), environment=dict(os.environ), timeout=None)
        assert found["kind"] == "killed"
        assert "JSONDecodeError" in found["error"]
        assert found["process_seconds"] > 0
        first, second = (servers.get(os.environ, {"PLANTED": value}) for value in "12")
        assert list(servers.running.values()) == [first, second], "the oldest has ended"
        assert server.process.returncode is not None
        second.process.send_signal(signal.SIGKILL)
        second.process.wait()
        assert servers.get(os.environ, {"PLANTED": "2"}) is not second
    assert first.process.returncode is not None


def test_a_server_that_cannot_start_is_an_error_of_the_measurement(monkeypatch, capfd):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    with closing(Servers(("no_such_module",))) as servers:
        found = run_worker(Spec(recipe={}, source=None), {}, dict(os.environ), None, 1, servers)
    assert (found["kind"], found["error"]) == ("killed", "the server of measured processes has ended.")
    assert "No module named 'no_such_module'" in capfd.readouterr().err


def test_a_measured_process_ends_with_its_server(recipe):
    sleeps = "open('pid', 'w').write(str(os.getpid())), __import__('time').sleep(600)"
    Path("slow.py").write_text(PLUGIN.replace('return {"PLANTED": "1"}', sleeps))
    slow = load_recipe("tiny.yaml", with_plugins=["slow.py"])
    Path("spec.json").write_text(json.dumps({"recipe": slow.to_dict(), "source": str(slow.source), "length": {}}))
    for end in (ForkServer.close, lambda server: server.process.kill()):
        server = ForkServer((), os.environ)
        assert server.process.stdin is not None
        request = {"folder": str(Path.cwd()), "environment": dict(os.environ), "timeout": None}
        print(json.dumps(request), file=server.process.stdin, flush=True)
        deadline = time.monotonic() + 300
        while not Path("pid").exists() or not (pid := Path("pid").read_text()):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        end(server)
        while psutil.pid_exists(int(pid)) and psutil.Process(int(pid)).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline, "it outlives the server"
            time.sleep(0.02)
        Path("pid").unlink()
        shutil.rmtree("0")
        server.close()


def test_libraries_follow_the_model_and_the_device(recipe, monkeypatch):
    assert libraries(recipe) == LIBRARIES
    assert libraries(load_recipe("quickstart", ["train.device=cpu"])) == (*LIBRARIES, *TRANSFORMERS)
    monkeypatch.setattr("fastloop.runtime.hardware.this_machine", lambda device: Machine("cuda", "H100", ("fp32",)))
    assert libraries(recipe) is None
