"""Dropout: off in training by default, of adapters too, and kept in what a run exports."""

import json
import math

import pytest
import torch
from fastloop import Plugin, hookimpl
from fastloop.testing import train
from preference_runs import recipe, tokenizer

RATES = {"attn_pdrop": 0.1, "embd_pdrop": 0.1, "resid_pdrop": 0.1}
LORA = {"lora": {"r": 2, "dropout": 0.1, "target_modules": ["c_attn"], "merge": False}}
CASES = {
    "dpo": ("dpo", {}),
    "ipo": ("dpo", {"loss": "ipo", "beta": 0.5}),
    "orpo": ("dpo", {"loss": "orpo"}),
    "kto": ("kto", {}),
    "reward-model": ("reward-model", {}),
}
"""Case -> task and options."""
EQUAL_POLICIES = {"dpo": math.log(2), "ipo": 1.0, "kto": 0.5}
"""Case -> the loss of a policy that equals its reference."""
ADAPTERS = [("dpo", False), ("dpo", True), ("ipo", True), ("orpo", False), ("kto", True), ("reward-model", False)]
"""Case, and whether adapters are trained. The other combinations are slow tests, and so are those of ``KEPT``."""
KEPT = [("dpo", False), *((case, True) for case in CASES)]
"""Case, and whether dropout is disabled."""
STEPS = {"epochs": None, "max_steps": 2, "save_every": None}


def each_case(few):
    """Each case with False and True. Combinations that are not in ``few`` are slow."""
    parameters = []
    for case in CASES:
        for value in (False, True):
            marks = [] if (case, value) in few else [pytest.mark.slow]
            parameters.append(pytest.param(case, value, marks=marks))
    return parameters


class StopAtFirstStep(Plugin):
    """Stops a run as Ctrl-C does."""

    name = "stop-at-first-step"

    @hookimpl
    def after_step(self, run):
        if run.state.step == 1:
            run.signals.record("SIGINT")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Two GPT-2 with the same weights: ``dropping`` has dropout, and ``still`` has none."""
    from transformers import GPT2Config, GPT2LMHeadModel

    folder = tmp_path_factory.mktemp("models")
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer()), pad_token_id=0, eos_token_id=1, **sizes, **RATES))
    model.save_pretrained(folder / "dropping")
    model.config.update(dict.fromkeys(RATES, 0.0))
    model.save_pretrained(folder / "still")
    for name in ("dropping", "still"):
        tokenizer().save_pretrained(folder / name)
    return folder


def make(folder, case, model, plugins=(), **options):
    """A recipe of a case."""
    task, given = CASES[case]
    return recipe(folder, task, {**given, **options}, plugins=plugins, model={"name": str(model)}, **STEPS)


@pytest.mark.parametrize(("case", "adapters"), each_case(ADAPTERS))
def test_a_model_with_dropout_trains_without_it(case, adapters, models, tmp_path):
    plugins = [LORA] if adapters else []
    still = [{"lora": {**LORA["lora"], "dropout": 0.0}}] if adapters else []
    losses = train(make(tmp_path / "dropping", case, models / "dropping", plugins)).losses
    assert losses == train(make(tmp_path / "still", case, models / "still", still)).losses
    assert len(losses) == 2
    if case in EQUAL_POLICIES:
        assert losses[0] == pytest.approx(EQUAL_POLICIES[case], rel=1e-6)
    exported = tmp_path / "dropping" / "run" / "model"
    config = json.loads((exported / ("base_config.json" if adapters else "config.json")).read_text())
    assert RATES.items() <= config.items()
    if adapters:
        assert json.loads((exported / "adapter_config.json").read_text())["lora_dropout"] == 0.1


@pytest.mark.parametrize("case", CASES)
def test_dropout_can_be_kept(case, models, tmp_path):
    kept = train(make(tmp_path / "kept", case, models / "dropping", [LORA], disable_dropout=False))
    without = train(make(tmp_path / "without", case, models / "dropping", [LORA]))
    assert abs(kept.losses[0] - without.losses[0]) > 1e-5


@pytest.mark.parametrize(("case", "disable_dropout"), each_case(KEPT))
def test_a_resumed_run_equals_a_whole_one_to_the_bit(case, disable_dropout, models, tmp_path):
    given = {"disable_dropout": disable_dropout}
    whole = train(make(tmp_path / "whole", case, models / "dropping", [LORA], **given))
    parts = make(tmp_path / "parts", case, models / "dropping", [LORA], **given)
    begun = train(parts, StopAtFirstStep())
    resumed = train(parts, resume=tmp_path / "parts" / "run")
    assert begun.losses + resumed.losses == whole.losses
    for name, weight in whole.weights.items():
        assert torch.equal(resumed.weights[name], weight), name
