"""Settings of ``accelerate launch`` that contradict the recipe are refused before data and weights are loaded.

Modules:
    core/fastloop/checks/launcher.py
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from fastloop import PluginError
from fastloop.checks.launcher import STRATEGIES
from fastloop.cli import app
from fastloop.testing import expect_problem
from fastloop_plugins.precision.amp import Amp

RECIPE = {
    "model": {"module": "code.py:Net"},
    "data": {"module": "code.py:rows"},
    "train": {"batch_size": 12, "device": "cpu"},
    "plugins": [{"module": {"loss": "cross_entropy"}}, "ddp"],
    "output": "run",
}
CONTRADICTIONS: list[tuple[dict[str, str], list[str], list[str]]] = [
    (
        {"ACCELERATE_USE_DEEPSPEED": "true"},
        [],
        ["asks for 'deepspeed' (ACCELERATE_USE_DEEPSPEED)", "the recipe lists 'ddp'"],
    ),
    ({"ACCELERATE_USE_FSDP": "true"}, ["--without", "ddp"], ["asks for 'fsdp'", "the recipe lists no strategy"]),
    (
        {"ACCELERATE_MIXED_PRECISION": "bf16"},
        [],
        ["mixed precision 'bf16'", "the recipe's is 'no'", "slot 'precision'"],
    ),
    ({"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}, [], ["the compiler 'INDUCTOR'", "list 'compile' here"]),
    ({"ACCELERATE_USE_PARALLELISM_CONFIG": "true"}, [], ["a parallelism_config", "tensor-parallel"]),
    ({"ACCELERATE_USE_PARALLELISM_CONFIG": "true"}, ["--without", "ddp"], ["a parallelism_config", "shard_within"]),
    ({"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"}, [], ["4 accumulation steps", "train.micro_batch_size"]),
]


@pytest.mark.parametrize(("environment", "options", "parts"), CONTRADICTIONS)
def test_a_contradiction_is_refused_by_plan(monkeypatch, environment, options, parts):
    Path("code.py").write_text("Net = rows = None")
    Path("recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    result = CliRunner().invoke(app, ["plan", "recipe.yaml", *options])
    for part in parts:
        assert part in str(result.exception)


@pytest.mark.parametrize(("environment", "options", "parts"), CONTRADICTIONS)
def test_a_contradiction_is_refused_before_data_is_read(monkeypatch, tiny_run, environment, options, parts):
    class Unread:
        def __len__(self) -> int:
            raise AssertionError("read")

        __getitem__ = __iter__ = __len__

    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with expect_problem("launcher-differs", PluginError):
        tiny_run([], data=Unread())


def test_the_precision_of_the_recipe_is_that_of_its_plugins(monkeypatch, tiny_run):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    assert tiny_run([Amp(dtype="bf16")], max_steps=2).summary["steps"] == 2


def test_a_request_for_the_strategy_of_the_recipe_reaches_no_library(monkeypatch, tiny_run):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    assert tiny_run(["fsdp"], max_steps=2).summary["steps"] == 2
    assert not os.environ.keys() & set(STRATEGIES)
