"""generate: the completions of transformers, in the order of the prompts, while a run trains."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from generation_runs import DATA, LLAMA, MODEL, PROMPTS, Complete, completed, completions_by_strategy
from long_form import long_form_only
from text_helpers import make_run
from training_runs import execute
from transformers import AutoModelForCausalLM

from fastloop_plugins.data.packing import Packing
from fastloop_plugins.kernels.compile import Compile
from fastloop_plugins.text.generation import cut_at_end, pad_prompts
from fastloop_plugins.training.lora import LoRA

GREEDY = {"max_new_tokens": 6, "do_sample": False}
SAMPLED = {"max_new_tokens": 8, "do_sample": True, "temperature": 1.5, "top_k": 0}


@pytest.fixture(autouse=True)
def _rows():
    write_rows(Path())


def write_rows(folder: Path) -> None:
    rows = [{"q": f"what is {i} " + "and " * (i % 3), "a": f"it is {i}"} for i in range(8)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_completions_are_those_of_the_exported_model():
    complete = completed(settings=GREEDY)
    model = AutoModelForCausalLM.from_pretrained("run/model")
    expected = []
    for prompt in PROMPTS:
        ids = model.generate(torch.tensor([prompt]), **GREEDY)[0, len(prompt) :].tolist()
        expected.append(ids)
    before, after = complete.completions
    assert [each.ids for each in after] == expected
    assert [each.ended for each in after] == [len(ids) < 6 or ids[-1] == model.config.eos_token_id for ids in expected]
    assert [each.ids for each in before] != expected
    assert complete.training == [True, True]


@pytest.mark.parametrize(
    "plugins",
    [
        pytest.param(lambda: [Packing()], id="packing"),
        pytest.param(lambda: [LoRA(r=2)], id="lora"),
        pytest.param(lambda: [Compile(backend="aot_eager")], id="compile", marks=[pytest.mark.slow, long_form_only]),
    ],
)
def test_plugins_change_no_completion(plugins):
    expected = [each.ids for each in completed(settings=GREEDY).completions[0]]
    assert [each.ids for each in completed(*plugins(), settings=GREEDY).completions[0]] == expected


def losses(*plugins: Any) -> dict[str, torch.Tensor]:
    """The weights after training with dropout."""
    config = LLAMA | {"attention_dropout": 0.5}
    made = make_run("causal-lm", MODEL | {"config": config}, DATA, plugins, batch_size=4)
    execute(made)
    return {name: weight.clone() for name, weight in made.unwrap_model().state_dict().items()}


def test_a_seed_repeats_completions_and_leaves_the_training_as_it_is():
    first, second, other = (Complete(SAMPLED, count=3, seed=seed) for seed in (1, 1, 2))
    plain, *trained = losses(), losses(first), losses(second), losses(other)
    for weights in trained:
        for name, weight in plain.items():
            assert torch.equal(weights[name], weight), name
    ids = [[[each.ids for each in part] for part in one.completions] for one in (first, second, other)]
    assert ids[0] == ids[1] != ids[2]
    assert len(ids[0][0]) == 3 * len(PROMPTS)
    assert ids[0][0][0] != ids[0][0][1]


def test_no_prompts_have_no_completions(monkeypatch):
    monkeypatch.setattr("generation_runs.PROMPTS", [])
    assert completed(settings=GREEDY).completions == [[], []]


@pytest.mark.parametrize(
    ("ids", "ends", "expected", "ended"),
    [
        ([5, 6, 2, 2], 2, [5, 6, 2], True),
        ([5, 9, 2], [2, 9], [5, 9], True),
        ([5, 6], [2], [5, 6], False),
        ([5, 6], None, [5, 6], False),
        ([2], 2, [2], True),
    ],
)
def test_a_completion_ends_with_its_first_end_token(ids, ends, expected, ended):
    completion = cut_at_end(ids, ends)
    assert (completion.ids, completion.ended) == (expected, ended)


def test_prompts_are_padded_on_the_left():
    inputs = pad_prompts([[5, 6, 7], [8]], 0, torch.device("cpu"))
    assert inputs["input_ids"].tolist() == [[5, 6, 7], [0, 0, 8]]
    assert inputs["attention_mask"].tolist() == [[1, 1, 1], [0, 0, 1]]


@pytest.mark.slow
def test_strategies_gather_weights_or_are_refused_by_name(processes, tmp_path):
    write_rows(tmp_path)
    strategies: dict[str, dict[str, Any]] = {
        "ddp": {},
        "fsdp": {},
        "fsdp kept": {"reshard_after_forward": False},
        "deepspeed": {"stage": 3},
        "tensor-parallel": {},
        "fsdp divided": {"tensor": 2},
    }
    first, second = processes(2, completions_by_strategy, strategies, folder=tmp_path)
    expected = [[each.ids for each in part][:3] for part in completed(settings=GREEDY).completions]
    for name in ("ddp", "fsdp", "fsdp kept", "deepspeed"):
        assert first.result[name] == expected, name
        assert second.result[name] == [[], []], name
    for name in ("tensor-parallel", "fsdp divided"):
        assert f"plugin {name.partition(' ')[0]!r} divides the weights" in first.result[name]
