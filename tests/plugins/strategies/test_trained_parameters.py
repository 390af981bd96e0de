"""Under every strategy the optimizer steps the model's parameters; an error names a plugin that replaces them late."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from parameter_runs import all_of
from strategy_helpers import COMPILER

pytestmark = [pytest.mark.slow, *COMPILER]

COMPILE = {"compile": {"backend": "aot_eager", "cache": False}}
STRATEGIES: dict[str, list[Any]] = {
    "ddp": ["ddp"],
    "ddp bf16": ["ddp", {"amp": {"dtype": "bf16"}}],
    "ddp compiled": ["ddp", COMPILE],
    "ddp ema": ["ddp", "ema"],
    "fsdp": ["fsdp"],
    "fsdp bf16": ["fsdp", {"amp": {"dtype": "bf16"}}],
    "fsdp compiled": ["fsdp", COMPILE],
    "fsdp meta": [{"fsdp": {"meta_device": True}}],
}
if importlib.util.find_spec("deepspeed") is not None:
    STRATEGIES |= {f"deepspeed {stage}": [{"deepspeed": {"stage": stage}}] for stage in (0, 1, 2, 3)}
    STRATEGIES["deepspeed bf16"] = [{"deepspeed": {"stage": 2}}, {"amp": {"dtype": "bf16"}}]
    STRATEGIES["deepspeed compiled"] = [{"deepspeed": {"stage": 2}}, COMPILE]
REPLACED = [name for name in STRATEGIES if name in ("ddp", "fsdp", *(f"deepspeed {stage}" for stage in (0, 1, 2, 3)))]
RUNS = [{"name": name, "plugins": plugins} for name, plugins in STRATEGIES.items()]
RUNS += [
    {"name": f"{name}, {hook}", "plugins": STRATEGIES[name], "replaces": hook}
    for name in REPLACED
    for hook in ("before_prepare", "after_prepare", "before_fit")
]
UNUSED = {"ddp": {"find_unused_parameters": True}}
RUNS += [
    {"name": "frozen later", "plugins": [UNUSED], "freezes": "before_fit"},
]


@pytest.fixture(scope="module")
def results(processes: Callable[..., list[Any]], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Results of the main process by name."""
    folder: Path = tmp_path_factory.mktemp("parameters")
    result: dict[str, Any] = processes(2, all_of, RUNS, folder=folder)[0].result
    return result


@pytest.mark.parametrize("name", [*STRATEGIES, *(f"{name}, before_prepare" for name in REPLACED)])
def test_every_parameter_is_in_the_optimizer_and_changes(results, name):
    assert (results[name]["error"], results[name]["warnings"]) == (None, [])
    hidden = name.startswith("deepspeed") and not name.startswith("deepspeed 0")  # their gradients are not in `grad`
    assert results[name]["step"] == (None if hidden else 1)


@pytest.mark.parametrize("name", REPLACED)
def test_a_weight_that_is_replaced_too_late_is_refused_with_the_plugin(results, name):
    error = results[f"{name}, after_prepare"]["error"]
    for name in ("'replaces'", "after_prepare", "head (weight)."):
        assert name in error


@pytest.mark.parametrize("name", REPLACED)
def test_a_weight_that_is_replaced_before_the_first_step_is_refused_with_the_plugin(results, name):
    error = results[f"{name}, before_fit"]["error"]
    for name in ("'replaces'", "head (weight)", "before_fit"):
        assert name in error


@pytest.mark.parametrize("skips", [False, True], ids=["used by all", "used by one"])
def test_ddp_refuses_parameters_that_it_does_not_average(processes, tmp_path, skips):
    """Each process would train other weights. All end, also one whose batch does not reach the layer."""
    run = {"name": "frozen when built", "plugins": [UNUSED], "freezes": "before_prepare", "skips": skips}
    for process in processes(2, all_of, [run], folder=tmp_path, limit=120.0):
        error = process.result["frozen when built"]["error"]
        for name in ("step 2", "frozen when the run was built", "before_fit", "plugins.ddp.find_unused_parameters"):
            assert name in error


def test_ddp_averages_parameters_that_are_frozen_once_it_is_built(results):
    result = results["frozen later"]
    assert result["error"] is None
    first, second = result["after"]
    assert first == second != result["before"]
