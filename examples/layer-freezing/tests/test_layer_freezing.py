"""Tests of layer-freezing: its behaviour, and fastloop's conformance tests."""

import pytest
import torch
from fastloop import PluginError, RecipeError
from fastloop.testing import IMAGES, Conformance
from torch import nn

from layer_freezing import LayerFreezing

FIRST = 8 * 16 + 16
"""Weights of the tiny model's first layer."""
LAST = 16 * 3 + 3
"""Weights of its second layer."""


def test_from_the_step_on_the_first_layer_stays_as_it_is_and_the_last_trains_on(tiny_run):
    plain = tiny_run()
    before = tiny_run(max_steps=8)
    frozen = tiny_run([LayerFreezing(start=0.2, until=0.4)])  # of 18 steps: 8 are less than 0.4 of them
    assert frozen.losses[:9] == plain.losses[:9]
    assert frozen.losses[9:] != plain.losses[9:]
    for name in frozen.weights:
        assert torch.equal(frozen.weights[name], before.weights[name]) == name.startswith("0."), name
    found = {"layers": 2, "frozen": 1, "parameters_with_gradients": [FIRST + LAST, LAST]}
    assert frozen.summary["layer-freezing"] == found


def test_layers_are_frozen_one_after_another(tiny_run):
    model = nn.Sequential(
        nn.Linear(8, 8), *(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(8)), nn.Linear(8, 3)
    )
    found = tiny_run([LayerFreezing(share=0.4, start=0.0, until=0.5)], model=model).summary["layer-freezing"]
    assert (found["layers"], found["frozen"]) == (10, 4)
    assert found["parameters_with_gradients"] == [72 * 9 + 27 - 72 * frozen for frozen in range(5)]


def test_what_comes_before_the_layers_is_frozen_with_the_first(tiny_run):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Linear(8, 8)
            self.blocks = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
            self.head = nn.Linear(8, 3)

        def forward(self, inputs):
            hidden = self.embed(inputs)
            for block in self.blocks:
                hidden = block(hidden).relu()
            return self.head(hidden)

    found = tiny_run([LayerFreezing()], model=Model()).summary["layer-freezing"]
    assert found["parameters_with_gradients"] == [72 * 3 + 27, 72 + 27]


def test_a_run_that_goes_on_for_longer_thaws_nothing(tiny_run, tmp_path):
    short = tiny_run([LayerFreezing(until=0.4)], output=tmp_path / "run")
    longer = tiny_run([LayerFreezing(until=0.4)], output=tmp_path / "run", epochs=8, resume=True)
    assert longer.summary["steps"] == 72
    assert longer.summary["layer-freezing"] == short.summary["layer-freezing"]
    assert torch.equal(longer.weights["0.weight"], short.weights["0.weight"])
    assert not torch.equal(longer.weights["3.weight"], short.weights["3.weight"])


def test_it_says_when_there_is_nothing_to_freeze(tiny_run, caplog):
    found = tiny_run([LayerFreezing()], model=nn.Linear(8, 3)).summary["layer-freezing"]
    assert "layer-freezing: nothing to freeze: share 0.5 of the 0 layers found in Linear is none" in caplog.text
    assert found["frozen"] == 0
    tiny_run([LayerFreezing(share=0.3)])
    assert "share 0.3 of the 2 layers found in Sequential is none" in caplog.text


def test_it_refuses_what_cannot_be(tiny_run):
    with pytest.raises(RecipeError, match=r"layer-freezing\.start: found 0\.6"):
        LayerFreezing(start=0.6)
    model = nn.ModuleDict({"encoder": nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3))})
    with pytest.raises(
        PluginError, match="layers: the model has no ModuleList or Sequential 'encodr'. Did you mean 'encoder'"
    ):
        tiny_run([LayerFreezing(layers="encodr")], model=model)


def test_it_refuses_a_run_of_unknown_length(tiny_run):
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter([(torch.zeros(8), torch.tensor(0))] * 16)

    with pytest.raises(PluginError, match="the data has no known length. Set train.max_steps"):
        tiny_run([LayerFreezing()], data=Stream())


class TestConformance(Conformance):
    plugin = "layer-freezing"
    task = IMAGES
