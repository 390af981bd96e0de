"""Every process trains and evaluates with the persistent buffers that checkpoints and exported models hold.

Modules:
    core/fastloop/distributed/buffers.py
"""

from __future__ import annotations

import importlib.util
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from buffer_runs import HALF, MODELS, all_of, data
from safetensors.torch import load_file
from strategy_helpers import COMPILER

pytestmark = [pytest.mark.slow, *COMPILER]

STRATEGIES = ["ddp", "fsdp"]
if importlib.util.find_spec("deepspeed") is not None:
    STRATEGIES += ["deepspeed 0", "deepspeed 2"]
CHANGED = [(model, strategy) for model in ("updated", "normed") for strategy in STRATEGIES]
CHANGED += [(model, "fsdp") for model in ("detached", "replaced", "late")]
UNCHANGED = [("bare", "fsdp"), ("constant", "fsdp")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("buffers")


@pytest.fixture(scope="module")
def results(processes: Any, folder: Path) -> list[dict[tuple[str, str], Any]]:
    """For each process: (model, strategy) -> the whole and the resumed run."""
    return [ended.result for ended in processes(2, all_of, CHANGED + UNCHANGED, folder=folder)]


@pytest.mark.parametrize("case", CHANGED)
def test_the_validation_loss_is_that_of_the_exported_model(results, folder, case):
    model = MODELS[case[0]]().eval()
    model.load_state_dict(load_file(folder / "-".join(case) / "model/model.safetensors"))
    inputs, targets = data(16, 1).tensors
    loss = torch.nn.functional.mse_loss(model(inputs), targets)
    assert results[0][case]["whole"]["validation"] == pytest.approx(loss.item(), rel=1e-6)


@pytest.mark.parametrize("case", [case for case in CHANGED if case[0] != "late"])
def test_a_resumed_run_is_the_whole_run(results, folder, case):
    whole, resumed = results[0][case]["whole"], results[0][case]["resumed"]
    assert resumed["losses"] == whole["losses"][HALF:]
    assert resumed["validation"] == whole["validation"]
    name = "-".join(case)
    expected = load_file(folder / name / "model/model.safetensors")
    for key, tensor in load_file(folder / f"{name}-resumed/model/model.safetensors").items():
        assert torch.equal(tensor, expected[key]), key


@pytest.mark.parametrize("case", CHANGED)
def test_all_processes_end_with_the_same_buffers(results, case):
    first, second = (process[case]["whole"]["buffers"] for process in results)
    assert first
    for name, buffer in first.items():
        assert torch.equal(second[name], buffer), name
    assert any(buffer.any() for buffer in first.values())


@pytest.mark.parametrize("strategy", STRATEGIES[1:])
@pytest.mark.parametrize("model", ["updated", "normed"])
def test_buffers_are_those_of_ddp(results, model, strategy):
    expected = results[0][model, "ddp"]["whole"]
    ours = results[0][model, strategy]["whole"]
    assert ours["losses"] == pytest.approx(expected["losses"], rel=1e-5)
    for name, buffer in expected["buffers"].items():
        torch.testing.assert_close(ours["buffers"][name], buffer, rtol=1e-5, atol=1e-6)


def test_buffers_that_training_does_not_change_cost_no_exchange(results):
    """After the first two steps. An evaluation and a save follow the fourth step."""
    steps = {}
    for model in ("bare", "constant", "updated"):
        counts = results[0][model, "fsdp"]["whole"]["exchanges"]
        steps[model] = [after - before for before, after in pairwise(counts)]
    assert steps["constant"][2] == steps["bare"][2]
    assert steps["constant"][4:] == steps["bare"][4:]
    assert steps["updated"][4:] == [count + 1 for count in steps["bare"][4:]]
