"""Models that cannot do the task are refused before training: by architecture if that is certain, else by a trial.

Modules:
    plugins/fastloop_plugins/models/checks.py
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from checkpoint_helpers import BERT, DISTILBERT, save_checkpoint, text_recipe, text_run, write_rows
from safetensors.torch import load_file, save_file
from training_runs import execute
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoModelForSpeechSeq2Seq,
    pipeline,
)

from fastloop import Problem, RecipeError
from fastloop.plugins.resolve import resolve
from fastloop.recipe import make_recipe
from fastloop.run import Run
from fastloop.testing import assert_problem, expect_problem, find_problems, start

LM, CLASSIFY = "causal-lm", "text-classification"
LABELLED = {"label": "label"}
BPE = {"tokenizer": {"kind": "bpe", "vocab_size": 300}}
SIZES = {key: value for key, value in BERT.items() if key != "model_type"}
T5 = {"model_type": "t5", "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
BART = {"model_type": "bart", "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "max_position_embeddings": 64}
BART |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
XLNET = {"model_type": "xlnet", "d_model": 16, "n_layer": 1, "n_head": 2, "d_inner": 32}
SMALL = {"num_attention_heads": 2, "attention_head_size": 8, "feed_forward_size": 32, "max_position_embeddings": 64}
REFORMER = {
    "model_type": "reformer",
    "is_decoder": True,
    "hidden_size": 16,
    "attn_layers": ["local"],
    "axial_pos_embds": False,
} | SMALL
REFORMER |= {"local_attn_chunk_length": 8}
LAYERS = {
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
}
FSMT = {
    "model_type": "fsmt",
    "langs": ["en", "de"],
    "src_vocab_size": 301,
    "tgt_vocab_size": 301,
    "d_model": 16,
    "decoder_ffn_dim": 32,
} | LAYERS
PROPHETNET = {
    "model_type": "prophetnet",
    "is_decoder": True,
    "hidden_size": 16,
    "num_encoder_layers": 1,
    "num_decoder_layers": 1,
}
PROPHETNET |= {
    "num_encoder_attention_heads": 2,
    "num_decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
}
PROPHETNET |= {"init_std": 0.5}


@pytest.fixture(autouse=True)
def _rows():
    write_rows(["A", "B"])


def planned(task: str, model: Any, data: dict[str, Any] | None = None) -> Problem:
    """The problem with which `fastloop plan` refuses a model: the data files are not read."""
    Path("rows.jsonl").write_text("this is no JSON")
    recipe = text_recipe(task, model, data)
    plugins = resolve(recipe).plugins
    with pytest.raises(RecipeError) as caught:
        plugins.hooks.check_recipe(recipe=recipe, plugins=plugins)
    return caught.value.problem


def test_an_encoder_whose_label_column_is_forgotten_is_refused_by_plan():
    save_checkpoint(AutoModelForMaskedLM, BERT)
    recipe = make_recipe(
        {"model": {"name": "checkpoint"}, "data": {"files": {"train": "rows.jsonl"}}, "output": "run"},
        Path("recipe.yaml"),
    )
    resolution = resolve(recipe).plugins
    assert LM in resolution.names()
    with pytest.raises(RecipeError) as caught:
        resolution.hooks.check_recipe(recipe=recipe, plugins=resolution)
    assert_problem(caught.value.problem, "invalid-value 'bert' (is_decoder: false) data.label=COLUMN gpt2")
    assert caught.value.problem.place == "recipe.yaml: model.name"


def test_an_encoder_from_scratch_is_refused_by_plan_and_as_a_decoder_it_trains():
    assert_problem(planned(LM, {"config": BERT} | BPE), "invalid-value model.config 'bert'")
    write_rows(["A", "B"])
    summary = execute(text_run(LM, {"config": BERT | {"is_decoder": True}} | BPE))
    assert summary["status"] == "completed"


@pytest.mark.parametrize(
    ("model", "name"),
    [({"model_type": "bert-generation"} | SIZES, "BertGenerationDecoder"), (XLNET, "XLNetLMHeadModel")],
    ids=["bert-generation", "xlnet"],
)
def test_a_model_in_which_a_later_token_changes_an_earlier_logit_is_refused_before_training(model, name):
    with pytest.raises(RecipeError) as caught:
        text_run(LM, {"config": model} | BPE)
    assert_problem(caught.value.problem, f"unsupported-model recipe.yaml: model: {name}")
    assert not Path("run").exists()


def test_a_checkpoint_that_reads_ahead_is_refused_before_training():
    save_checkpoint(AutoModelForCausalLM, XLNET)
    with expect_problem("unsupported-model XLNetLMHeadModel", RecipeError):
        text_run(LM, "checkpoint")


def rename_weights(old: str, new: str) -> None:
    """Rename weights of the checkpoint, as a program with other names of modules would save them."""
    path = Path("checkpoint/model.safetensors")
    weights = {name.replace(old, new): weight for name, weight in load_file(path).items()}
    save_file(weights, path, metadata={"format": "pt"})


@pytest.mark.parametrize("auto", [AutoModel, AutoModelForSequenceClassification], ids=lambda auto: auto.__name__)
def test_a_checkpoint_whose_weights_have_other_names_does_not_train_from_random_ones_without_a_word(auto, caplog):
    save_checkpoint(auto, BERT)
    text_run(CLASSIFY, "checkpoint", LABELLED)
    assert not find_problems(caplog, "weights-missing")
    rename_weights("layer.1.", "layers.1.")
    text_run(CLASSIFY, "checkpoint", LABELLED)
    assert_problem(caplog, "weights-missing recipe.yaml: model.name: 16 encoder.layer.1. encoder.layers.1.")
    rename_weights("e", "E")
    with expect_problem("weights-missing recipe.yaml: model.name: BertModel embeddings EmbEddings", RecipeError):
        text_run(CLASSIFY, "checkpoint", LABELLED)
    assert not Path("run").exists()


@pytest.mark.parametrize(
    "model",
    [
        {"model_type": "gpt2", "n_layer": 2, "n_head": 2, "n_embd": 16},
        {"model_type": "llama", "num_key_value_heads": 2} | SIZES,
        {"model_type": "mixtral", "num_key_value_heads": 2, "num_local_experts": 2} | SIZES,
        {"model_type": "mamba", "hidden_size": 16, "num_hidden_layers": 1},
        BART,
    ],
    ids=lambda model: model["model_type"],
)
def test_causal_models_pass(model):
    assert execute(text_run(LM, {"config": model} | BPE, max_steps=1))["status"] == "completed"


def test_a_model_that_trains_on_some_lengths_only_is_refused_on_others():
    """Reformer takes multiples of its chunk length in train mode, and every length in eval mode."""
    with expect_problem("unsupported-model data.pad_to_multiple_of", RecipeError):
        text_run(LM, {"config": REFORMER} | BPE, {"max_length": 20})
    assert execute(text_run(LM, {"config": REFORMER} | BPE, {"max_length": 16}, max_steps=1))["status"] == "completed"


@pytest.mark.slow
def test_a_language_model_that_reads_the_end_of_a_row_is_refused_with_micro_batches(caplog):
    """ProphetNet's logits depend on the number of tokens behind them. Blocks of equal length are no problem, so a
    warning is enough."""
    with expect_problem(
        "padding-dependent train.micro_batch_size 2 ProphetNetForCausalLM data.padding=max_length", RecipeError
    ):
        text_run(LM, {"config": PROPHETNET} | BPE, {"max_length": 20}, micro_batch_size=2)
    assert execute(text_run(LM, {"config": PROPHETNET} | BPE, {"max_length": 20}, max_steps=1))["status"] == "completed"
    assert "ProphetNetForCausalLM" in caplog.text
    caplog.clear()
    text_run(LM, {"config": PROPHETNET} | BPE, {"max_length": 20, "padding": "max_length"}, micro_batch_size=2)
    assert "ProphetNetForCausalLM" not in caplog.text


def test_an_encoder_decoder_whose_logits_have_the_length_of_its_inputs_is_refused():
    data = {"target": "label", "max_length": 20, "max_target_length": 20}
    assert execute(text_run("seq2seq", {"config": BART} | BPE, data, max_steps=1))["status"] == "completed"
    tokenizer = text_run("seq2seq", {"config": BART} | BPE, data).plugins.plugins[0].text_model.tokenizer
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})  # FSMT starts targets with their end, which pads otherwise
    tokenizer.save_pretrained("padding")
    with expect_problem("unsupported-model FSMTForConditionalGeneration batch_size", RecipeError):
        text_run("seq2seq", {"config": FSMT, "tokenizer": "padding"}, data)


def test_causality_check_changes_no_random_state_or_mode(monkeypatch):
    import torch

    from fastloop_plugins.models import checks as _model_checks

    states = []
    check = _model_checks.check_causal

    def watched(run: Run, model: Any, *arguments: Any) -> Any:
        modes = [module.training for module in model.modules()]
        states.append(torch.get_rng_state())
        found = check(run, model, *arguments)
        states.append(torch.get_rng_state())
        assert [module.training for module in model.modules()] == modes
        return found

    monkeypatch.setattr("fastloop_plugins.tasks.causal_lm.check_causal", watched)
    text_run(LM, {"config": {"model_type": "gpt2", "n_layer": 1, "n_head": 2, "n_embd": 16}} | BPE)
    assert torch.equal(*states)


def reads_ahead_on_two() -> str:
    """On one of two processes, of which only the first has weights."""
    model = {"config": {"model_type": "bert-generation"} | SIZES} | BPE
    try:
        text_run(LM, model, plugins=[{"fsdp": {"meta_device": True}}])
    except RecipeError as error:
        return str(error)
    return "built"


@pytest.mark.slow
def test_processes_without_weights_learn_that_the_model_reads_ahead():
    ended = start(2, reads_ahead_on_two)
    assert [process.code for process in ended] == [0, 0], ended
    assert all("BertGenerationDecoder is not causal" in process.result for process in ended)


@pytest.mark.parametrize(
    ("task", "model", "expected"),
    [
        (CLASSIFY, "whisper", "invalid-value transformers 'whisper' (AutoModelForSequenceClassification)"),
        (LM, "distilbert", "invalid-value transformers 'distilbert' (AutoModelForCausalLM) data.label="),
        (LM, "t5", "invalid-value transformers 't5' (AutoModelForCausalLM)"),
        (CLASSIFY, "t5", "invalid-value 't5' encoder-decoder tokenizer"),
        (CLASSIFY, "bart", "invalid-value 'bart' encoder-decoder"),
    ],
)
def test_an_architecture_without_the_head_is_refused_by_plan(task, model, expected):
    refused = planned(task, {"config": {"model_type": model}}, LABELLED if task == CLASSIFY else None)
    assert_problem(refused, expected)
    assert refused.place == "recipe.yaml: model.config"


def test_a_checkpoint_of_an_architecture_without_the_head_is_refused_by_plan():
    whisper = {"model_type": "whisper", "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "num_mel_bins": 8}
    whisper |= {
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
        "encoder_ffn_dim": 32,
        "decoder_ffn_dim": 32,
    }
    save_checkpoint(AutoModelForSpeechSeq2Seq, whisper, eos_token_id=1, bos_token_id=1, decoder_start_token_id=1)
    assert_problem(planned(CLASSIFY, "checkpoint", LABELLED), "invalid-value model.name transformers 'whisper'")


@pytest.mark.slow
@pytest.mark.parametrize("model", [T5, BART], ids=["t5", "bart"])
def test_an_encoder_decoder_with_a_tokenizer_that_ends_texts_classifies(model):
    save_checkpoint(
        AutoModelForSequenceClassification,
        model,
        ends=True,
        eos_token_id=1,
        decoder_start_token_id=0,
        id2label={0: "A", 1: "B"},
    )
    assert execute(text_run(CLASSIFY, "checkpoint", LABELLED, epochs=12))["validation"]["accuracy"] > 0.9
    classify = pipeline("text-classification", model="run/model")
    assert [found["label"] for found in classify(["a fine film", "a dull film"])] == ["A", "B"]


@pytest.mark.parametrize("model", [T5, BART], ids=["t5", "bart"])
def test_an_encoder_decoder_whose_tokenizer_ends_no_text_is_refused_before_training(model):
    save_checkpoint(AutoModelForSequenceClassification, model, eos_token_id=1, decoder_start_token_id=0)
    with pytest.raises(RecipeError) as caught:
        text_run(CLASSIFY, "checkpoint", LABELLED)
    assert_problem(caught.value.problem, "unsupported-model ForSequenceClassification ValueError tokenizer")


def test_corrupt_model_configuration_is_reported_by_loader(caplog):
    caplog.set_level(logging.INFO, "fastloop")
    save_checkpoint(AutoModelForSequenceClassification, DISTILBERT)
    for text in ("[]", "{", '{"model_type": 3}'):
        Path("checkpoint/config.json").write_text(text)
        with expect_problem("file-unreadable model.name", RecipeError):
            text_run(CLASSIFY, "checkpoint", LABELLED)


def test_a_folder_without_a_tokenizer_is_refused():
    save_checkpoint(AutoModelForSequenceClassification, DISTILBERT)
    for path in Path("checkpoint").glob("*token*"):
        path.unlink()
    with pytest.raises(RecipeError) as caught:
        text_run(CLASSIFY, "checkpoint", LABELLED)
    assert_problem(caught.value.problem, "no-tokenizer model.name")


@pytest.mark.slow
def test_a_model_that_needs_padding_to_train_is_refused_before_training():
    """Reformer pads its input in eval mode only, and its axial positions need exactly 8 x 8 tokens."""
    sizes = {
        "hidden_size": 32,
        "num_attention_heads": 2,
        "attention_head_size": 16,
        "feed_forward_size": 32,
        "is_decoder": False,
    }
    sizes |= {
        "axial_pos_shape": [8, 8],
        "axial_pos_embds_dim": [16, 16],
        "num_buckets": 4,
        "attn_layers": ["local", "lsh"],
    }
    model = {"config": {"model_type": "reformer", "lsh_attn_chunk_length": 8, "local_attn_chunk_length": 8, **sizes}}
    model |= {"tokenizer": {"kind": "word"}}
    expected = "unsupported-model ReformerForSequenceClassification data.pad_to_multiple_of data.padding"
    with expect_problem(expected, RecipeError):
        text_run(CLASSIFY, model, LABELLED)
    padded = text_run(CLASSIFY, model, LABELLED | {"max_length": 64, "pad_to_multiple_of": 64})
    assert execute(padded)["status"] == "completed"
