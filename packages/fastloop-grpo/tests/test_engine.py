"""Engines: plugins that complete the prompts instead of the model."""

import copy
import json

import grpo_cases
import pytest
import torch
from fastloop import Plugin, PluginError, hookimpl
from fastloop.testing import train
from fastloop_plugins.text import Completion
from grpo_cases import END, lines, write_model
from grpo_runs import sampled


class ShiftedEngine(Plugin):
    """Draws from a copy of the model whose weights are shifted, and reports its log-probabilities.

    Args:
        shift: The size of the shift of each weight, as a share of its largest one.
    """

    name = "shifted-engine"
    numerics = "changes-training"

    def __init__(self, shift):
        super().__init__()
        self.shift = shift
        self.calls = []

    def shifted(self, run):
        model = copy.deepcopy(run.unwrap_model()).eval()
        draw = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for weight in model.parameters():
                weight += self.shift * weight.abs().max() * torch.randn(weight.shape, generator=draw)
        return model

    @hookimpl
    def generate_completions(self, run, prompts, count, options, seed):
        self.calls.append((len(prompts), count, options, seed))
        draw = torch.Generator().manual_seed(seed)
        model = self.shifted(run)
        completions = []
        for prompt in prompts:
            for _ in range(count):
                completions.append(self.complete(model, list(prompt), options, draw))
        return completions

    @torch.no_grad()
    def complete(self, model, ids, options, draw):
        new = []
        found = []
        while len(new) < options.max_new_tokens and (not new or new[-1] not in options.end_tokens):
            logits = model(torch.tensor([ids + new])).logits[0, -1] / options.temperature
            token = int(torch.multinomial(logits.softmax(0), 1, generator=draw))
            new.append(token)
            found.append(float(logits.log_softmax(0)[token]))
        return Completion(new, new[-1] in options.end_tokens, found)


OPTIONS = {"max_new_tokens": 3, "temperature": 0.8, "sampler_cap": 1.1}


def test_tokens_of_the_same_model_have_a_weight_of_one(tmp_path):
    engine = ShiftedEngine(0.0)
    train(sampled(tmp_path, OPTIONS, max_steps=2, evaluate_every=None), engine)
    points = [point for point in lines(tmp_path / "run" / "metrics.jsonl") if "split" not in point]
    assert [point["sampler_weight"] for point in points] == pytest.approx([1.0, 1.0], abs=1e-5)
    first, second = (call for call in engine.calls if call[0] == 8)  # evaluations have 6 prompts
    assert first[1] == 4
    assert (first[2].max_new_tokens, first[2].temperature) == (3, 0.8)
    assert first[3] != second[3]


class EndTokens(Plugin):
    """Records the end tokens of each drawing."""

    name = "end-tokens"

    def __init__(self):
        super().__init__()
        self.found = set()

    @hookimpl(wrapper=True)
    def generate_completions(self, options):
        self.found.add(options.end_tokens)
        return (yield)


def test_completions_end_at_the_tokens_at_which_the_exported_model_stops(tmp_path):
    """As those of Qwen, whose models also stop at their padding token."""
    ends = [0, END]
    folder = write_model(tmp_path / "model")
    settings = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps(settings | {"eos_token_id": ends}))
    options = {"rewards": [f"{grpo_cases.__file__}:by_length"]}
    engine = EndTokens()
    train(sampled(tmp_path, options, model={"name": str(folder)}, max_steps=1), engine)
    assert engine.found == {tuple(ends)}
    exported = json.loads((tmp_path / "run" / "model" / "generation_config.json").read_text())
    assert exported["eos_token_id"] == ends


def test_tokens_of_a_shifted_model_are_weighted_by_the_capped_ratio(tmp_path):
    engine = ShiftedEngine(0.3)
    watch = Weights()
    train(sampled(tmp_path, OPTIONS, max_steps=1, evaluate_every=None), engine, watch)
    (point, *_) = lines(tmp_path / "run" / "metrics.jsonl")
    weights = torch.cat(watch.weights)
    assert 0 < float(weights.min()) < 0.9
    assert float(weights.max()) == pytest.approx(1.1)
    assert point["sampler_weight"] == pytest.approx(float(weights.mean()), rel=1e-5)


class Weights(Plugin):
    """Records the ratios of both samplers, and their cap."""

    name = "weights"

    def __init__(self):
        super().__init__()
        self.weights = []

    @hookimpl(wrapper=True)
    def compute_loss(self, batch):
        output = yield
        if "sampled" in batch:
            self.weights.append((batch["old"] - batch["sampled"]).exp().clamp(max=OPTIONS["sampler_cap"]))
        return output


def test_a_reward_rises_with_the_tokens_of_a_shifted_model(tmp_path):
    options = {"max_new_tokens": 2, "num_generations": 8}
    given = {"epochs": 20, "max_steps": 20, "lr": 1e-2, "evaluate_every": None}
    train(sampled(tmp_path, options, max_grad_norm=1.0, **given), ShiftedEngine(0.05))
    rewards = [point["reward"] for point in lines(tmp_path / "run" / "metrics.jsonl") if "split" not in point]
    assert sum(rewards[-5:]) > 1.5 * sum(rewards[:5]) + 0.5


BROKEN = {
    "few": lambda prompts, count: [Completion([1], True)],
    "empty": lambda prompts, count: [Completion([], True)] * (len(prompts) * count),
    "unknown token": lambda prompts, count: [Completion([10**6], True)] * (len(prompts) * count),
    "log-probabilities": lambda prompts, count: [Completion([1], True, [0.0, 0.0])] * (len(prompts) * count),
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_an_engine_returns_is_checked(case, tmp_path):
    class Broken(Plugin):
        name = "broken"
        numerics = "changes-training"

        @hookimpl
        def generate_completions(self, prompts, count):
            return BROKEN[case](prompts, count)

    with pytest.raises(PluginError, match="generate_completions"):
        train(sampled(tmp_path, max_steps=1), Broken())
