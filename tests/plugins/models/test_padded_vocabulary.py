"""``model.pad_vocab_to``: the same training as without padding, and an export with the original vocabulary."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from interrupted_runs import Case, check_evaluation, check_interrupted
from safetensors.torch import load_file
from text_helpers import TINY, TINY_GPT, make_run
from training_runs import execute

from fastloop import Plugin, RecipeError
from fastloop.testing import expect_problem
from fastloop_plugins.kernels.fused_loss import FusedLoss
from fastloop_plugins.training.lora import LoRA

SIZES = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 16,
}
MODELS: dict[str, dict[str, Any]] = {
    "tied": TINY_GPT | {"initializer_range": 0.2, "resid_pdrop": 0.1},
    "own head": SIZES | {"model_type": "llama", "num_key_value_heads": 1},
    "head with bias": SIZES | {"model_type": "phi"},
}
DATA = {"files": {"train": "train.txt", "validation": "train.txt"}, "max_length": 16}
TOKENIZER = {"kind": "bpe", "vocab_size": 300}


@pytest.fixture(autouse=True)
def _files():
    Path("train.txt").write_text("\n\n".join(f"one two three four five {i}" for i in range(40)))


def made(kind: str, pad: int | None, *plugins: Plugin, **train: Any) -> Any:
    model = {"config": MODELS[kind], "tokenizer": TOKENIZER, "pad_vocab_to": pad}
    return make_run(
        "causal-lm", model, DATA, plugins, **{"epochs": 2, "max_grad_norm": 1.0, "optimizer": "SGD", "lr": 0.1} | train
    )


def weights(folder: str = "run") -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = load_file(f"{folder}/model/model.safetensors")
    return found


@pytest.mark.parametrize("plugins", [(), (FusedLoss,)], ids=["plain", "fused-loss"])
@pytest.mark.parametrize("kind", MODELS)
def test_training_and_export_are_those_without_padding(kind, plugins):
    expected, before = execute(made(kind, None)), weights()
    run = made(kind, 128, *(plugin(chunk_tokens=50) for plugin in plugins))
    embedding, head = run.unwrap_model().get_input_embeddings(), run.unwrap_model().get_output_embeddings()
    assert len(embedding.weight) == len(head.weight) == 384
    found, after = execute(run), weights()
    assert not embedding.weight[300:].any()
    assert not head.weight[300:].any()
    assert found["validation"] == pytest.approx(expected["validation"], rel=1e-5)
    assert before.keys() == after.keys()
    for name, weight in before.items():
        torch.testing.assert_close(
            after[name], weight, rtol=1e-3, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )
    assert json.loads(Path("run/model/config.json").read_text())["vocab_size"] == 300


def test_the_exported_model_gives_the_logits_of_the_trained_one():
    from transformers import AutoModelForCausalLM

    run = made("tied", 64)
    execute(run)
    model, ids = AutoModelForCausalLM.from_pretrained("run/model"), torch.arange(12)[None]
    with torch.no_grad():
        logits = run.unwrap_model().eval()(ids).logits
        assert logits.shape == (1, 12, 300)
        torch.testing.assert_close(model(ids).logits, logits)


def test_a_pretrained_model_is_padded_and_keeps_its_tokens():
    execute(made("own head", None))
    Path("run").rename("first")
    run = make_run("causal-lm", {"name": "first/model", "pad_vocab_to": 64}, DATA, lr=1e-30)
    assert len(run.unwrap_model().get_output_embeddings().weight) == 320
    execute(run)
    before = weights("first")
    assert all(torch.equal(weight, before[name]) for name, weight in weights().items())


def test_merged_adapters_are_exported_with_the_original_vocabulary():
    run = made("own head", 64, LoRA(r=2, target_modules=["q_proj", "lm_head"]))
    execute(run)
    assert weights()["lm_head.weight"].shape == (300, 16)
    assert weights()["model.embed_tokens.weight"].shape == (300, 16)


def test_a_multiple_that_the_vocabulary_has_changes_nothing():
    run = made("tied", 100)
    assert len(run.unwrap_model().get_input_embeddings().weight) == 300
    assert run.plugins.plugins[0].text_model.vocabulary is None


@pytest.mark.slow
def test_a_run_resumes_evaluates_predicts_and_exports_a_checkpoint(cli):
    model = {"config": MODELS["tied"] | {"n_positions": 48}, "tokenizer": TOKENIZER, "pad_vocab_to": 64}
    train = {"epochs": 3, "lr": 0.01, "save_every": 2}
    check_interrupted(Case({"model": model, "data": DATA}, train=train), "limit", 4)
    check_evaluation(cli)
    code, out, err = cli("predict", "cut", "one two", "plugins.causal-lm.max_new_tokens=4")
    assert code == 0, err
    assert out
    code, _, err = cli("export", "cut", "--checkpoint", "last", "--out", "exported")
    assert code == 0, err
    exported, cut = load_file("exported/model.safetensors"), weights("cut")
    assert all(torch.equal(weight, cut[name]) for name, weight in exported.items())


@pytest.mark.parametrize("value", [0, -64])
def test_a_multiple_below_one_is_refused(value):
    with expect_problem(f"invalid-value recipe.yaml: model.pad_vocab_to: {value} 1", RecipeError):
        made("tied", value)


def test_another_task_has_no_such_option():
    Path("a.csv").write_text("text,label\none,0\ntwo,1\n")
    model = {"config": TINY, "tokenizer": {"kind": "word"}, "pad_vocab_to": 64}
    with expect_problem("unknown-option recipe.yaml model.pad_vocab_to", RecipeError):
        make_run("text-classification", model, {"files": {"train": "a.csv"}, "label": "label"})


def test_a_model_that_cannot_be_resized_is_refused():
    model = {
        "config": {"model_type": "xlstm", "hidden_size": 16, "num_hidden_layers": 1, "num_heads": 2},
        "tokenizer": TOKENIZER,
    }
    expected = "not-resizable recipe.yaml: model.pad_vocab_to: xLSTMForCausalLM AttributeError: pad_vocab_to"
    with expect_problem(expected, RecipeError):
        make_run("causal-lm", model | {"pad_vocab_to": 64}, DATA)
