"""ReferenceModel: the model before training, while another one is trained.

Modules:
    plugins/fastloop_plugins/text/reference_model.py
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from generation_runs import DATA, LLAMA, MODEL
from test_generate import write_rows
from text_helpers import make_run
from training_runs import execute

from fastloop import Plugin, hookimpl
from fastloop.plugins.resolve import resolve
from fastloop.recipe import make_recipe
from fastloop_plugins.data._packing import Lengths
from fastloop_plugins.data.packing import Packing
from fastloop_plugins.text import ReferenceModel, compute
from fastloop_plugins.training.lora import LoRA
from fastloop_tools.plan.memory.model import open_fake


@pytest.fixture(autouse=True)
def _rows(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path)


class Refers(Plugin):
    """Computes logits of the model before training, and of the trained one: before the first step and at the end."""

    name = "refers"
    runs_after = ("lora",)
    runs_before: tuple[str, ...] = ("activation-checkpointing", "slot:strategy")
    inputs: Mapping[str, Any] = {"input_ids": torch.arange(5)[None]}

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.training: list[bool] = []

    @hookimpl
    def before_prepare(self, run: Any, model: Any) -> None:
        self.reference = ReferenceModel(run, model)

    def compare(self, run: Any) -> None:
        with self.reference.computing(run) as model:
            before = compute(model, self.inputs, use_cache=False).logits
            assert not before.requires_grad
            self.training.append(model.training)
        self.training.append(run.model.training)
        run.model.eval()
        with torch.no_grad():
            self.found.append((before, compute(run.model, self.inputs, use_cache=False).logits))
        run.model.train()

    def second_models(self, run: Any) -> list[torch.nn.Module]:
        return self.reference.models

    @hookimpl
    def before_step(self, run: Any) -> None:
        if run.state.step == 0:
            self.compare(run)

    @hookimpl
    def after_fit(self, run: Any) -> None:
        self.compare(run)


def refers(*plugins: Plugin, model: dict[str, Any] = MODEL, **train: Any) -> Refers:
    plugin = Refers()
    execute(make_run("causal-lm", model, DATA, [*plugins, plugin], batch_size=4, **train))
    return plugin


@pytest.mark.parametrize("adapters", [False, True], ids=["whole model", "adapters"])
def test_it_stays_as_the_model_was(adapters):
    plugin = refers(*[LoRA(r=2)] * adapters, model=MODEL | {"config": LLAMA | {"attention_dropout": 0.5}})
    (before, trained_before), (after, trained_after) = plugin.found
    torch.testing.assert_close(before, trained_before)
    torch.testing.assert_close(after, before)
    assert (trained_after - before).abs().max() > 1e-3
    assert plugin.training == [False, True, False, True]
    assert (plugin.reference.copy is None) == adapters


def train_adapter() -> dict[str, Any]:
    """Train an adapter, in the folder adapted, and return the section ``model`` of its base."""
    execute(make_run("causal-lm", MODEL, DATA, [], batch_size=4))
    shutil.move("run/model", "base")
    base = {"name": "base"}
    execute(make_run("causal-lm", base, DATA, [LoRA(r=2, merge=False)], batch_size=4, lr=0.1))
    shutil.move("run/model", "adapted")
    return base


def test_an_adapter_that_a_run_continues_is_a_part_of_it():
    base = train_adapter()
    plugin = refers(LoRA(adapter="adapted"), model=base)
    (before, trained_before), (after, trained_after) = plugin.found
    torch.testing.assert_close(before, trained_before)
    torch.testing.assert_close(after, before)
    assert plugin.reference.copy is not None
    assert (trained_after - before).abs().max() > 1e-3


def test_a_plugin_that_changes_the_attention_later_changes_that_of_the_reference(monkeypatch):
    """Packed rows of two texts, which must not attend to each other."""
    monkeypatch.setattr(Refers, "runs_before", (*Refers.runs_before, "packing"))
    packed = {"input_ids": torch.arange(8)[None], "position_ids": torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2]])}
    packed["packed"] = Lengths([5, 3])
    monkeypatch.setattr(Refers, "inputs", packed)
    plugin = refers(Packing())
    (before, trained_before), (after, _) = plugin.found
    torch.testing.assert_close(before, trained_before)
    torch.testing.assert_close(after, before)


PLANNED = """
from fastloop import Plugin, hookimpl
from fastloop_plugins.text import ReferenceModel

class Refers(Plugin):
    name = "refers"
    runs_after = ("lora",)
    runs_before = ("activation-checkpointing", "slot:strategy")

    @hookimpl
    def before_prepare(self, run, model):
        self.reference = ReferenceModel(run, model)

    def second_models(self, run):
        return self.reference.models
"""


@pytest.mark.parametrize(
    "lora",
    [
        None,
        {"r": 2},
        {"r": 2, "init_lora_weights": "gaussian"},
        {"r": 2, "init_lora_weights": "orthogonal"},
        {"r": 2, "init_lora_weights": "pissa"},
        {"r": 2, "init_lora_weights": False},
        {"adapter": "adapted"},
    ],
    ids=str,
)
def test_a_plan_counts_a_second_model_if_a_run_has_one(lora):
    """The plan decides by the options of `lora`, and the run by the logits of its model."""
    model = MODEL
    if lora is not None and "adapter" in lora:
        model = train_adapter()
    adapters = [] if lora is None else [LoRA(**lora)]
    plugin = refers(*adapters, model=model)
    expected = sum(weight.nbytes for second in plugin.reference.models for weight in second.parameters())
    Path("refers.py").write_text(PLANNED)
    plugins = [{"causal-lm": {}}, {"./refers.py": {}}]
    if lora is not None:
        plugins.append({"lora": lora})
    recipe = make_recipe(
        {"model": model, "data": DATA, "train": {"epochs": 1, "batch_size": 4, "device": "cpu"}, "plugins": plugins}
    )
    with open_fake(resolve(recipe), "no", 4) as fake:
        planned = sum(tensor.nbytes for tensor in fake.second_weights if isinstance(tensor, torch.nn.Parameter))
    assert planned == expected
