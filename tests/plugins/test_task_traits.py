"""Traits of tasks: speed plugins act by what a task declares, whoever wrote the task.

Modules:
    plugins/fastloop_plugins/_task_traits.py
    plugins/fastloop_plugins/text/options.py
"""

from __future__ import annotations

import csv
import dataclasses
import logging
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import text_task
from log_lines import find_lines
from text_helpers import rows
from training_runs import execute

from fastloop import Plugin, PluginError, hookimpl
from fastloop.lifecycle import build
from fastloop.plugins.resolve import resolve
from fastloop.recipe import Recipe, make_recipe
from fastloop.runtime.hardware import Machine, this_machine
from fastloop.testing import expect_problem, find_problems
from fastloop_plugins._task_traits import recipe_traits

CPU = Machine("cpu", "AVX512", ("fp32", "bf16"), ("bf16",))
OLD_GPU = Machine("cuda", "T4", ("fp32", "fp16"), ("fp16",))
H100 = Machine("cuda", "H100", ("fp32", "bf16", "fp16", "fp8"), ("bf16", "fp16", "fp8"))
BERT = {
    "model_type": "bert",
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 40,
}
OURS, THEIRS = "text-classification", f"{text_task.__file__}:ReviewTask"


def recipe(task: str, *plugins: Any, output: str = "run") -> Recipe:
    """A recipe of a text task with two classes."""
    with Path("a.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["text", "label"])
        writer.writeheader()
        writer.writerows(rows())
    files = {"train": "a.csv", "validation": "a.csv"}
    return make_recipe(
        {
            "model": {"config": BERT, "tokenizer": {"kind": "word"}},
            "data": {"files": files, "text": "text", "label": "label", "max_length": 32},
            "train": {"epochs": 2, "batch_size": 8, "lr": 1e-3, "device": "cpu", "save_every": None},
            "plugins": [task, *plugins, {"progress": False}],
            "output": output,
        },
        Path("recipe.yaml"),
    )


def selected(task: str, machine: Machine, **options: Any) -> dict[str, Any]:
    """Plugin -> options, of those that ``auto`` selects."""
    found = resolve(recipe(task, {"auto": options}), machine).recipe
    return {name: found.plugins[name] for name in found.selected}


@pytest.mark.parametrize("numerics", ["reduced-precision", "changes-training"])
@pytest.mark.parametrize("machine", [CPU, OLD_GPU, H100, None], ids=["cpu", "old gpu", "h100", "this machine"])
def test_auto_selects_the_same_plugins_for_the_task_of_another_package(machine, numerics):
    machine = machine or this_machine("cpu")
    ours, theirs = (selected(task, machine, numerics=numerics) for task in (OURS, THEIRS))
    assert {"cls-last-layer"} < ours.keys()
    assert theirs == ours


@pytest.mark.slow
def test_the_task_of_another_package_trains_with_them(caplog):
    runs = [build(resolve(recipe(task, "auto", output=name))) for task, name in ((OURS, "ours"), (THEIRS, "theirs"))]
    ours, theirs = ({plugin.name: plugin for plugin in run.plugins} for run in runs)
    assert {"cls-last-layer", "packing", "fast-dropout"} < theirs.keys()
    assert theirs.keys() - {"review-task"} == ours.keys() - {OURS}
    batch = next(iter(runs[1].train_loader.steps()))[0]
    assert batch.inputs["input_ids"].shape == (1, sum(batch.inputs["packed"].lengths)), "packed"
    for run in runs:
        summary = execute(run)
        assert summary["status"] == "completed"
        assert math.isfinite(summary["validation"]["loss"])
    assert not find_problems(caplog, "plugin-left-out")


def test_its_token_ids_are_cached_on_disk(caplog):
    def ids(*plugins: Any) -> list[int]:
        datasets = build(resolve(recipe(THEIRS, *plugins))).datasets
        assert isinstance(datasets["train"].ids.base, np.memmap) == bool(plugins)
        return [*datasets["train"].ids.tolist(), *datasets["train"].lengths.tolist()]

    caplog.set_level(logging.INFO, "fastloop")
    plain = ids()
    assert ids({"token-cache": {"folder": "cache"}}) == plain
    assert len(list(Path("cache").iterdir())) == 1, "both splits have the same texts"
    caplog.clear()
    assert ids({"token-cache": {"folder": "cache"}}) == plain
    assert find_lines(caplog, "tokens: 24 cache")


def test_a_language_model_of_another_package_has_fused_loss_and_packed_rows():
    """Its collator has ``ragged``, and its model computes the loss in its forward."""
    task, losses = f"{text_task.__file__}:WordTask", []
    for plugins in ([], ["fused-loss"], ["packing", "fused-loss"]):
        listed = recipe(task, *plugins)
        listed.model["config"] = {"model_type": "gpt2", "n_layer": 1, "n_head": 2, "n_embd": 16, "n_positions": 32}
        listed.model["config"] |= {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
        losses.append(execute(build(resolve(listed)))["validation"]["loss"])
    assert losses[0] < 4
    assert losses[1:] == pytest.approx([losses[0]] * 2, rel=1e-4)


def test_a_task_without_traits_gets_no_plugin_for_texts(tmp_path):
    (tmp_path / "plain.py").write_text(
        f"import sys\nsys.path.append({str(Path(text_task.__file__).parent)!r})\nfrom text_task import ReviewTask\n\n"
        "class Plain(ReviewTask):\n    name = 'plain'\n\n    @classmethod\n    def declare_traits(cls, recipe):\n"
        "        return ()\n"
    )
    chosen = selected(f"{tmp_path}/plain.py:Plain", CPU)
    assert "amp" in chosen
    assert not {"cls-last-layer", "packing", "fast-dropout"} & chosen.keys()


class Misspelled(Plugin):
    """A task that declares a trait which does not exist."""

    name = "misspelled"
    slot = "task"

    @classmethod
    def declare_traits(cls, recipe):
        return {"paded"}

    @hookimpl
    def build_datasets(self):
        return {}


def test_an_unknown_trait_is_an_error():
    with expect_problem("invalid-declaration 'misspelled' 'paded' 'padded'", PluginError):
        recipe_traits(recipe(f"{__file__}:Misspelled"))


@pytest.mark.parametrize(
    ("plugin", "task", "trait"),
    [("cls-last-layer", "causal-lm", "output-per-text"), ("fused-loss", OURS, "next-token-loss")],
)
def test_a_plugin_that_needs_a_trait_refuses_other_tasks(plugin, task, trait):
    found = resolve(recipe(task, plugin), CPU)
    expected = f"missing-trait recipe.yaml: '{plugin}' '{trait}' '{task}'"
    with expect_problem(expected, PluginError) as refused:
        found.plugins.hooks.check_recipe(recipe=found.recipe, plugins=found.plugins)
    assert refused.value.problem.proposals == [f"--without {plugin}"]


@pytest.mark.parametrize(
    ("data", "model", "traits"),
    [
        (
            {"text": "text", "label": "l"},
            {},
            {"token-ids", "padded", "output-per-text", "deterministic", "cached-token-ids"},
        ),
        (
            {"text": "text", "label": "l", "padding": "max_length"},
            {},
            {"token-ids", "fixed-length", "output-per-text", "deterministic", "cached-token-ids"},
        ),
        ({"text": "text", "label": "l", "streaming": True}, {}, {"token-ids", "padded", "output-per-text"}),
        ({"tags": "t"}, {}, {"token-ids", "padded", "deterministic", "cached-token-ids"}),
        (
            {"files": {"train": "a.txt"}},
            {},
            {"token-ids", "fixed-length", "deterministic", "cached-token-ids", "next-token-loss"},
        ),
        (
            {"files": {"train": "a.jsonl"}, "messages": "m"},
            {},
            {"token-ids", "padded", "deterministic", "cached-token-ids", "next-token-loss"},
        ),
        ({"target": "t", "text": "text"}, {}, {"token-ids", "deterministic", "cached-token-ids"}),
        ({"images": "a"}, {}, set()),
        ({"module": "data.py:data"}, {"module": "model.py:model"}, set()),
    ],
)
def test_our_tasks_declare_traits_by_their_options(data, model, traits):
    assert recipe_traits(dataclasses.replace(recipe("auto"), plugins={}, model=model, data=data)) == traits
