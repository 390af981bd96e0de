"""``model.tokens``, ``special_tokens`` and ``resize_embeddings``; and tokenizers that have more tokens than a model.

Modules:
    plugins/fastloop_plugins/text/new_tokens.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from interrupted_runs import Case, check_evaluation, check_interrupted
from new_token_runs import FILES, LLAMA, TASKS, model_of, pretrain, write_rows
from text_helpers import make_run
from training_runs import execute

from fastloop import RecipeError
from fastloop.testing import expect_problem

TRAINED = 278
"""Tokens of the tokenizer that is trained on these texts."""


@pytest.fixture(autouse=True)
def _files():
    write_rows()


def rows_of(model: Any) -> int:
    return len(model.get_input_embeddings().weight)


@pytest.mark.parametrize("kind", TASKS)
def test_a_tokenizer_with_more_tokens_is_refused_before_data_is_read(kind):
    from transformers import AutoTokenizer

    task, data = pretrain(kind)
    rows = json.loads(Path("base/config.json").read_text())["vocab_size"]
    tokenizer = AutoTokenizer.from_pretrained("base")
    tokenizer.add_tokens(["<call>"])
    assert len(tokenizer) == rows + 1
    tokenizer.save_pretrained("larger")
    Path("rows.jsonl").write_text("{")  # would be another error
    with expect_problem(f"tokens-differ model.tokenizer: {rows + 1} {rows} <call>", RecipeError):
        make_run(task, {"name": "base", "tokenizer": "larger"}, data)


@pytest.mark.parametrize("kind", TASKS)
def test_new_tokens_are_trained_and_exported(kind):
    from transformers import AutoConfig, AutoTokenizer

    task, data = pretrain(kind)
    before = make_run(task, {"name": "base"}, data)
    run = make_run(task, {"name": "base", "tokens": ["<call>", "one"], "special_tokens": ["<|end|>"]}, data)
    model = run.unwrap_model()
    rows = rows_of(before.unwrap_model())
    text_model = model_of(run)
    assert text_model.new_tokens.ids[0] == rows
    assert rows_of(model) == rows + len(text_model.new_tokens.ids)
    for module in (model.get_input_embeddings(), model.get_output_embeddings()):
        if module is not None:
            assert len(module.weight) == rows_of(model)
    old = before.unwrap_model().state_dict()
    for name, weight in model.state_dict().items():  # a new head is drawn as without new tokens
        same = weight[:rows] if weight.shape != old[name].shape and weight.dim() == 2 else weight
        if weight.dim() == 2 and same.shape == old[name].shape:
            assert torch.equal(same, old[name]), name
    start = model.get_input_embeddings().weight.detach().clone()
    summary = execute(run)
    assert not torch.equal(model.get_input_embeddings().weight[rows], start[rows])

    tokenizer, config = AutoTokenizer.from_pretrained("run/model"), AutoConfig.from_pretrained("run/model")
    assert config.vocab_size == len(tokenizer) == rows_of(model)
    assert tokenizer.convert_tokens_to_ids("<call>") == rows
    ids = tokenizer("two <call> three<|end|>")["input_ids"]
    assert "<call>" in tokenizer.decode(ids, skip_special_tokens=True)
    assert "<|end|>" not in tokenizer.decode(ids, skip_special_tokens=True)
    reloaded = type(model).from_pretrained("run/model").eval()
    inputs = {"input_ids": torch.tensor([ids])}
    if task == "seq2seq":
        inputs["labels"] = torch.tensor([ids])
    with torch.no_grad():
        torch.testing.assert_close(reloaded(**inputs).logits, model.eval()(**inputs).logits)

    again = make_run(task, {"name": "run/model"}, data)  # its tokenizer fits: no option is needed
    loss = again.hooks.evaluate(run=again, split="validation")["loss"]
    assert loss == pytest.approx(summary["validation"]["loss"], rel=1e-5)


def build(model: dict[str, Any], seed: int = 123) -> tuple[Any, Any]:
    """The model of a classifier that is built, not trained, and the random state afterwards."""
    data = {"files": FILES, "max_length": 16, "label": "label"}
    return make_run("text-classification", model, data, seed=seed).unwrap_model(), torch.get_rng_state()


def test_new_rows_depend_on_the_seed_and_change_no_other_random_number():
    pretrain("classifier")
    plain, state = build({"name": "base"})
    model, after = build({"name": "base", "tokens": ["<call>"]})
    again, _ = build({"name": "base", "tokens": ["<call>"]})
    other, _ = build({"name": "base", "tokens": ["<call>"]}, seed=1)
    assert torch.equal(state, after)
    rows = rows_of(plain)
    new = [one.get_input_embeddings().weight.detach()[rows:] for one in (model, again, other)]
    assert torch.equal(new[0], new[1])
    assert not torch.equal(new[0], new[2])
    old = plain.get_input_embeddings().weight.detach()
    torch.testing.assert_close(new[0].mean(0), old.mean(0), atol=3 * float(old.std()), rtol=0)


def test_a_vocabulary_with_spare_rows_is_not_resized(caplog):
    from transformers import AutoModelForCausalLM

    task, data = pretrain("own head")
    model = AutoModelForCausalLM.from_pretrained("base")
    model.resize_token_embeddings(384)
    model.save_pretrained("base")
    run = make_run(task, {"name": "base", "tokens": ["<call>"], "resize_embeddings": True}, data)
    assert rows_of(run.unwrap_model()) == run.unwrap_model().config.vocab_size == 384
    assert model_of(run).new_tokens.ids == [TRAINED]


def test_a_larger_tokenizer_gets_rows_on_request():
    from transformers import AutoTokenizer

    task, data = pretrain("own head")
    tokenizer = AutoTokenizer.from_pretrained("base")
    tokenizer.add_tokens(["<call>", "<answer>"])
    tokenizer.save_pretrained("larger")
    run = make_run(task, {"name": "base", "tokenizer": "larger", "resize_embeddings": True, "tokens": ["<more>"]}, data)
    assert rows_of(run.unwrap_model()) == TRAINED + 3
    assert model_of(run).new_tokens.ids == [TRAINED, TRAINED + 1, TRAINED + 2]


def test_a_padded_vocabulary_has_the_new_tokens():
    task, data = pretrain("own head")
    run = make_run(task, {"name": "base", "tokens": ["<call>"], "pad_vocab_to": 64}, data)
    assert rows_of(run.unwrap_model()) == 320
    execute(run)
    assert json.loads(Path("run/model/config.json").read_text())["vocab_size"] == TRAINED + 1


def test_a_model_from_scratch_has_rows_for_new_tokens():
    model = {"config": LLAMA, "tokenizer": {"kind": "bpe", "vocab_size": 300}, "tokens": ["<call>"]}
    run = make_run("causal-lm", model, {"files": FILES, "max_length": 16})
    assert rows_of(run.unwrap_model()) == TRAINED + 1
    assert model_of(run).tokenizer("<call>")["input_ids"] == [TRAINED]


def test_a_model_on_the_meta_device_has_the_new_rows():
    task, data = pretrain("own head")
    run = make_run(task, {"name": "base", "tokens": ["<call>"]}, data)
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = model_of(run).build(AutoModelForCausalLM)
    shapes = {name: weight.shape for name, weight in run.unwrap_model().state_dict().items()}
    assert {name: weight.shape for name, weight in model.state_dict().items()} == shapes


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"tokens": [" <call>"]}, "tokens"),
        ({"special_tokens": [""]}, "tokens"),
        ({"tokens": ["<call>"], "special_tokens": ["<call>"]}, "special_tokens"),
        ({"tokens": "<call>"}, "tokens"),
        ({"resize_embeddings": True, "config": LLAMA}, "resize_embeddings"),
    ],
)
def test_wrong_options_are_refused(options, key):
    model = {"tokenizer": {"kind": "bpe"}} | options if "config" in options else {"name": "base"} | options
    Path("base").mkdir()
    Path("base/config.json").write_text("{}")
    with pytest.raises(RecipeError, match=rf"recipe.yaml: model\.{key}: "):
        make_run("causal-lm", model, {"files": FILES})


@pytest.mark.slow
def test_a_run_with_new_tokens_resumes_evaluates_and_predicts(cli):
    _, data = pretrain("tied head")
    model = {"name": "base", "tokens": ["<call>"], "special_tokens": ["<|end|>"]}
    check_interrupted(Case({"model": model, "data": data}, train={"epochs": 3, "lr": 0.01}), "limit", 4)
    check_evaluation(cli)
    code, _, err = cli("predict", "cut", "one two", "plugins.causal-lm.max_new_tokens=4")
    assert code == 0, err
    code, _, err = cli("train", "cut/recipe.yaml", "--resume", "model.tokens=[<other>]")
    assert code == 2
    assert "model" in err
