"""Every suggestion that `fastloop plan` prints can be followed: the command resolves, and the recipe then fits.

Modules:
    plugins/fastloop_tools/plan/memory/change.py
"""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from checkpoint_helpers import write_rows
from long_form import LONG
from scale_runs import tiny
from typer.testing import CliRunner

from fastloop.cli import app
from fastloop.memory_estimates import Layout, Weight
from fastloop.plugins.installed import load
from fastloop.plugins.resolve import resolve
from fastloop.recipe import load_recipe
from fastloop.runtime.hardware import this_machine
from fastloop_tools.plan.memory.activations import Activations, extrapolate
from fastloop_tools.plan.memory.change import Command, smallest_change
from fastloop_tools.plan.memory.estimate import estimate

PROCESSES = 2


@pytest.fixture(autouse=True)
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_rows(("A", "B"))


def write_recipe(*plugins: Any, **train: Any) -> str:
    tree = tiny("decoder", *plugins, **train).to_dict()
    tree["train"]["device"] = "auto"  # on a CPU, nothing can be offloaded
    Path("recipe.yaml").write_text(yaml.safe_dump(tree))
    return "recipe.yaml"


def plan(*words: str) -> str:
    found = CliRunner().invoke(app, ["plan", *words])
    assert found.exit_code == 0, f"{found.output}{found.exception}"
    return found.stdout


def suggested(output: str) -> list[str]:
    """The arguments of the `fastloop train` that the output ends with."""
    lines = output[output.index("fastloop train") :].splitlines()
    assert all(line.endswith(" \\") for line in lines[:-1])
    words = shlex.split(" ".join(line.removesuffix("\\") for line in lines))
    assert words[:2] == ["fastloop", "train"]
    return words[2:]


def resolves(words: list[str]) -> None:
    """Resolve a recipe with arguments of the command line, as on a machine with a GPU."""
    options = {name: words[words.index(name) + 1].split(",") for name in ("--with", "--without") if name in words}
    overrides = [word for word in words[1:] if "=" in word]
    recipe = load_recipe(words[0], overrides, options.get("--with", []), options.get("--without", []))
    plugins = resolve(recipe, replace(this_machine("cpu"), device="cuda")).plugins
    plugins.hooks.check_recipe(recipe=recipe, plugins=plugins)


@pytest.mark.slow
@pytest.mark.parametrize(
    "plugins",
    [
        [{"deepspeed": {"stage": 3, "offload_optimizer": True, "offload_parameters": True}}],
        [{"fsdp": {"blocks": ["LlamaDecoderLayer"]}}],
    ],
)
def test_the_command_of_each_variant_selects_it(plugins):
    file = write_recipe(*plugins)
    recipe = load_recipe(file)
    variants = estimate(recipe, PROCESSES).variants
    for variant in variants:
        command = Command(file, nproc=PROCESSES).changed(recipe, variant, variants)
        assert command.is_accepted()
        changed = load_recipe(file, command.overrides, command.with_plugins, command.without_plugins)
        layout = Layout(weights=(Weight(shape=(4, 4)),), processes=PROCESSES, options=changed.plugins[variant.plugin])
        selected = [row.name for row in load(variant.plugin).estimate_memory(layout) if row.listed]
        assert selected == [variant.name]
        assert ("activation-checkpointing" in changed.plugins) == variant.checkpointing


@pytest.mark.slow
def test_a_change_that_other_plugins_refuse_is_not_suggested():
    file = write_recipe("ddp", "channels-last")
    command, recipe = Command(file), load_recipe(file)
    variants = estimate(recipe, 2).variants
    accepted = {variant.name for variant in variants if command.changed(recipe, variant, variants).is_accepted()}
    refused = {variant.name for variant in variants if variant.plugin in ("deepspeed", "fsdp")}
    assert {variant.name for variant in variants} - accepted == refused
    only = [replace(variant, fits=variant.name == "fsdp", listed=False) for variant in variants]
    assert smallest_change(only) is not None
    assert smallest_change(only, lambda variant: variant.name in accepted) is None


def test_the_line_about_details_can_be_followed():
    (line,) = [line for line in plan(write_recipe("ddp")).splitlines() if "shows each plugin's effect" in line]
    words = shlex.split(line.split("`")[1])
    assert words[:2] == ["fastloop", "plan"]
    assert "DistributedDataParallel" in plan(*words[2:])


CASES: dict[str, tuple[list[Any], list[str]]] = {
    "none": ([], []),
    "ddp": (["ddp"], ["train.lr=0.5"]),
    "tensor-parallel": (["tensor-parallel"], []),
    "given": ([], ["--with", "tensor-parallel", "--without", "activation-checkpointing,progress"]),
    "offloaded": ([{"deepspeed": {"stage": 1, "offload_optimizer": True}}], []),
    "held": ([{"fsdp": {"hold_gradients": True, "reshard_after_forward": False}}, "activation-checkpointing"], []),
    "override": (["ddp"], ["plugins.fsdp.reshard_after_forward=false", "--without", "ddp", "--with", "fsdp"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES if LONG else ["ddp", "offloaded", "override"])
def test_the_printed_command_resolves_and_then_fits(case, monkeypatch):
    plugins, words = CASES[case]
    file = write_recipe(*plugins)
    machine = ["--nproc", str(PROCESSES), "--device-memory"]
    measured: list[Activations] = []

    def measure(*arguments: Any) -> Activations:
        measured.append(extrapolate(*arguments))
        return measured[-1]

    with monkeypatch.context() as patched:
        patched.setattr("fastloop_tools.plan.memory.share.extrapolate", measure)
        found = plan(file, *words, *machine, "1KiB")
    totals = sorted(
        float(line.split()[-3])
        for line in found.splitlines()
        if re.match(r"\*?(ddp|fsdp|zero|tensor).* (yes|no)$", line)
    )
    memory = f"{totals[len(totals) // 4] * 1.01:.2f}MiB"
    again = iter(measured)
    with monkeypatch.context() as patched:  # the device's memory changes no measurement
        patched.setattr("fastloop_tools.plan.memory.share.extrapolate", lambda *_: next(again))
        command = suggested(plan(file, *words, *machine, memory))
    assert next(again, None) is None
    resolves(command)
    start = command.index("--nproc")
    assert command[start : start + 2] == ["--nproc", str(PROCESSES)]
    del command[start : start + 2]
    assert "The recipe fits: " in plan(*command, *machine, memory)
