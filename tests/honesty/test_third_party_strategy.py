"""The conformance suite tries a strategy of another package on two real processes, save and resume included.

Modules:
    core/fastloop/testing/studies.py
"""

from __future__ import annotations

import os
import xml.etree.ElementTree as ElementTree

import forked
import pytest

pytestmark = pytest.mark.slow

ALL_REDUCE = '''"""Data parallel training: one all-reduce for all gradients of a step, after backward.

    plugins:
      - all-reduce
"""

import torch
from fastloop import Strategy, hookimpl


class AllReduce(Strategy):
    """Averages gradients over the processes, each of which holds the whole model."""

    name = "all-reduce"
    numerics = "reassociated"

    def prepare(self, run, model, optimizer):
        if run.world_size == 1:
            return super().prepare(run, model, optimizer)
        for tensor in model.state_dict().values():
            torch.distributed.broadcast(tensor, 0)
        return model, optimizer

    @hookimpl
    def after_backward(self, run):
        gradients = [parameter.grad for parameter in run.model.parameters() if parameter.grad is not None]
        flat = run.processes.all_reduce_mean(torch.cat([gradient.flatten() for gradient in gradients]))
        for gradient, mean in zip(gradients, flat.split([gradient.numel() for gradient in gradients])):
            gradient.copy_(mean.view_as(gradient))
'''
EXCHANGE = ALL_REDUCE[ALL_REDUCE.index("    @hookimpl\n    def after_backward") :]
NO_EXCHANGE = ALL_REDUCE.replace(EXCHANGE, "")
LOCAL_SGD = (
    NO_EXCHANGE.replace('"reassociated"', '"changes-training"\n    keeps_weights_equal = False')
    + """
    def _average(self, run):
        for tensor in run.unwrap_model().state_dict().values():
            run.processes.all_reduce_mean(tensor)

    @hookimpl
    def after_step(self, run):
        if run.state.step % 4 == 0:
            self._average(run)

    @hookimpl
    def after_fit(self, run):
        self._average(run)
"""
)
"""Local SGD (Stich, 2019, "Local SGD Converges Fast and Communicates Little").
A checkpoint between two averages lacks the weights of process 1."""

FAILS_ON_ONE = (
    ALL_REDUCE
    + """
    @hookimpl
    def after_step(self, run):
        if run.state.step == 3 and run.processes.rank == 1:
            raise OSError("the disk of process 1 is gone")
"""
)
STRATEGIES = {
    "fails-on-one": FAILS_ON_ONE,
    "all-reduce": ALL_REDUCE,
    "no-exchange": NO_EXCHANGE,
    "local-sgd": LOCAL_SGD,
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, tuple[str, str]]]:
    """Strategy -> test -> outcome and message, of the suite that its author runs."""
    folder = tmp_path_factory.mktemp("author")
    lines = ["from fastloop.testing import Conformance"]
    for name, code in STRATEGIES.items():
        module = name.replace("-", "_")
        info = folder / "site" / f"{module}-1.0.dist-info"
        info.mkdir(parents=True)
        (folder / "site" / f"{module}.py").write_text(code.replace("all-reduce", name))
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[fastloop.plugins]\n{name} = {module}:AllReduce\n")
        lines.append(f"class Test_{module}(Conformance):\n    plugin = {name!r}")
    (folder / "test_author.py").write_text("\n\n".join(lines) + "\n")
    (folder / "conftest.py").write_text('pytest_plugins = ["fastloop.testing"]\n')
    (folder / "pytest.ini").write_text("[pytest]\npythonpath = site\nfilterwarnings = error\n")
    environment = os.environ | {"FASTLOOP_TEST_STRATEGIES": "ddp"}
    done = forked.run(
        *forked.PYTEST, "-k", "processes", "--junitxml=report.xml", cwd=folder, env=environment, timeout=900
    )
    assert done.returncode == 1, done.stdout + done.stderr
    found: dict[str, dict[str, tuple[str, str]]] = {}
    for case in ElementTree.parse(folder / "report.xml").iter("testcase"):
        name = case.get("classname", "").rpartition("Test_")[2].replace("_", "-")
        result = next((child for child in case if child.tag in ("failure", "error", "skipped")), None)
        outcome = ("passed", "") if result is None else (result.tag, str(result.get("message")))
        found.setdefault(name, {})[case.get("name", "")] = outcome
    return found


def test_a_strategy_is_tried_with_itself_and_not_with_ddp(outcomes):
    assert outcomes["all-reduce"]["test_processes[all-reduce]"] == ("passed", "")
    outcome, why = outcomes["all-reduce"]["test_processes[ddp]"]
    assert outcome == "skipped"
    assert "fill the slot 'strategy'" in why


def test_strategy_without_gradient_exchange_fails_conformance(outcomes):
    outcome, message = outcomes["no-exchange"]["test_processes[no-exchange]"]
    assert outcome == "failure"
    assert "process 1 trains other weights than process 0 under the strategy 'no-exchange'" in message


def test_the_error_of_the_process_that_failed_first_is_shown(outcomes):
    outcome, message = outcomes["fails-on-one"]["test_processes[fails-on-one]"]
    assert outcome == "failure"
    assert "its training failed on process 1 of two with 'fails-on-one'" in message
    assert "the disk of process 1 is gone" in message


def test_strategy_with_incomplete_checkpoint_fails_conformance(outcomes):
    outcome, message = outcomes["local-sgd"]["test_processes[local-sgd]"]
    assert outcome == "failure"
    promised = (
        "the same result from a run that was interrupted after step 9 and resumed, on two processes with 'local-sgd'"
    )
    assert promised in message
    assert "other losses from step 10 on" in message or "other weights" in message
