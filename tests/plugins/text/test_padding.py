"""Padding is where the model ignores it.

Else, a warning gives its effect, and features that depend on equal results are refused.

Modules:
    plugins/fastloop_plugins/text/padding_check.py
"""

from __future__ import annotations

import json
import logging
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_helpers import save_checkpoint, text_run, write_rows
from text_helpers import make_run, rows
from training_runs import execute
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, pipeline

from fastloop import Plugin, RecipeError
from fastloop.lifecycle import build
from fastloop.plugins.resolve import resolve
from fastloop.recipe import Inference, load_recipe, make_recipe
from fastloop.testing import assert_problem, find_problems
from fastloop_plugins.data.length_bucketing import LengthBucketing
from fastloop_tools.inference.chunks import Chunks

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}
HEADS = {**SIZES, "num_attention_heads": 2}
STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
READING = {
    "fnet": {"model_type": "fnet", **SIZES, "hidden_dropout_prob": 0.0},
    "canine": {"model_type": "canine", **HEADS, **STILL, "max_position_embeddings": 256, "num_hash_buckets": 64},
    "yoso": {"model_type": "yoso", **HEADS, **STILL},
    "convbert": {"model_type": "convbert", **HEADS, **STILL, "embedding_size": 32},
    "convbert, initial": {
        "model_type": "convbert",
        "hidden_size": 64,
        "embedding_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
    },
    "nystromformer": {"model_type": "nystromformer", **HEADS, **STILL, "num_landmarks": 8, "segment_means_seq_len": 8},
}
"""Models of which padding changes each text."""
XLNET = {
    "model_type": "xlnet",
    "d_model": 32,
    "n_layer": 2,
    "n_head": 2,
    "d_inner": 64,
    "initializer_range": 0.2,
    "dropout": 0.0,
}
XLNET |= {"summary_last_dropout": 0.0}
IGNORING = {
    "bert": {"model_type": "bert", **HEADS},
    "roberta": {"model_type": "roberta", **HEADS},
    "deberta-v2": {"model_type": "deberta-v2", **HEADS},
    "modernbert": {"model_type": "modernbert", **HEADS, "num_hidden_layers": 3, "local_attention": 4},
    "longformer": {"model_type": "longformer", **HEADS, "attention_window": 4},
    "big_bird": {"model_type": "big_bird", **HEADS},
    "mobilebert": {"model_type": "mobilebert", **HEADS, "embedding_size": 32, "intra_bottleneck_size": 32},
    "ibert": {"model_type": "ibert", **HEADS},
    "gpt2": {"model_type": "gpt2", "n_layer": 2, "n_head": 2, "n_embd": 32, "initializer_range": 0.2},
    "mixtral": {"model_type": "mixtral", **HEADS, "num_key_value_heads": 1, "num_local_experts": 4},
}
CLASSIFY, TAG = "text-classification", "token-classification"
SHARED = '{"text": "a fine film", "label": "B", "words": ["a", "fine", "film"], "tags": ["A", "B", "A"]}\n' * 9


def made(task: str, config: dict[str, Any], *plugins: Plugin, padding: str = "longest", **train: Any) -> Any:
    """A run on texts of different lengths; one label or tag a text or word."""
    table = rows(24)
    Path("a.csv").write_text(
        "text,label\n" + "".join(f"{row['text']}{' so' * (i % 7)},{row['label']}\n" for i, row in enumerate(table))
    )
    sentences = [
        "".join(f"{word} {'OB'[index % 2]}\n" for index, word in enumerate(row["text"].split())) for row in table
    ]
    Path("a.conll").write_text("\n".join(sentences))
    file = "a.conll" if task == TAG else "a.csv"
    data = {"files": {"train": file, "validation": file}, "max_length": 24, "padding": padding} | (
        {} if task == TAG else {"label": "label"}
    )
    return make_run(task, {"config": config, "tokenizer": {"kind": "word"}}, data, plugins, **train)


def reports(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        record.getMessage()
        for record in caplog.records
        if "padding" in record.getMessage() or "padded" in record.getMessage()
    ]


def alone(run: Any, index: int) -> torch.Tensor:
    """The logits of one text by the model in eval mode, without padding and mask."""
    model = run.unwrap_model().eval()
    with torch.no_grad():
        logits: torch.Tensor = model(
            input_ids=torch.tensor(run.datasets["train"][index]["input_ids"][None]).long()
        ).logits
    return logits


@pytest.mark.parametrize("task", [CLASSIFY, TAG])
@pytest.mark.parametrize("config", READING.values(), ids=READING)
def test_a_model_that_reads_padding_is_reported_with_the_measured_change(caplog, task, config):
    made(task, config)
    (problem,) = find_problems(caplog, "padding-dependent")
    change = re.search(r"([\d.e-]+)%", problem.text)
    assert change is not None
    assert float(change[1]) > 0.001
    assert problem.proposals == ["data.padding=max_length"]


@pytest.mark.parametrize("task", [CLASSIFY, TAG])
@pytest.mark.parametrize("config", IGNORING.values(), ids=IGNORING)
def test_a_model_that_ignores_padding_is_not_reported(caplog, task, config):
    caplog.set_level(logging.INFO, "fastloop")
    made(task, config)
    assert reports(caplog) == []


def test_encoder_decoders_that_ignore_padding_are_not_reported(caplog):
    Path("a.jsonl").write_text("".join(json.dumps({"q": f"what is {i}", "a": f"it is {i}"}) + "\n" for i in range(12)))
    data = {"files": {"train": "a.jsonl"}, "text": "q", "target": "a", "max_length": 16, "max_target_length": 16}
    t5 = {
        "model_type": "t5",
        "d_model": 16,
        "d_kv": 8,
        "d_ff": 32,
        "num_layers": 2,
        "num_heads": 2,
        "initializer_factor": 5.0,
    }
    make_run("seq2seq", {"config": t5, "tokenizer": {"kind": "word"}}, data, micro_batch_size=2)
    assert reports(caplog) == []


@pytest.mark.parametrize("padding", ["longest", "max_length"])
def test_xlnet_is_padded_on_the_left_and_each_text_has_the_logits_that_it_has_alone(caplog, padding):
    caplog.set_level(logging.INFO, "fastloop")
    run = made(CLASSIFY, XLNET, padding=padding)
    (report,) = reports(caplog)
    assert all(word in report for word in ("XLNetForSequenceClassification", "left"))
    assert run.plugins.plugins[0].text_model.tokenizer.padding_side == "left"
    for batch in run.train_loader.batches():
        assert (batch.inputs["attention_mask"][:, -1] == 1).all()
        with torch.no_grad():
            logits = (
                run.unwrap_model()
                .eval()(**{name: value for name, value in batch.inputs.items() if name != "labels"})
                .logits
            )
        for index, found in zip(batch.ids, logits, strict=True):
            torch.testing.assert_close(found, alone(run, index)[0], rtol=1e-4, atol=1e-4)


def test_micro_batches_of_xlnet_make_the_same_step():
    weights = []
    for size in (None, 2):
        run = made(CLASSIFY, XLNET, micro_batch_size=size, max_steps=2, optimizer="SGD")
        execute(run)
        weights.append(run.unwrap_model().state_dict())
    for name, value in weights[0].items():
        torch.testing.assert_close(value, weights[1][name], rtol=1e-3, atol=1e-4)
    assert AutoTokenizer.from_pretrained("run/model").padding_side == "left"


LEFT = {
    "bert": (IGNORING["bert"], "right"),
    "gpt2": (IGNORING["gpt2"], "right"),
    "llama": ({"model_type": "llama", **HEADS, "num_key_value_heads": 1}, "left"),
}
"""Models whose tokenizer pads on the left, and where its export pads: BERT and GPT-2 number the positions of padding,
and the rotary positions of Llama are relative."""


@pytest.mark.parametrize(("config", "side"), LEFT.values(), ids=LEFT)
def test_batches_of_a_pipeline_are_padded_where_padding_changes_no_text(caplog, config, side):
    caplog.set_level(logging.INFO, "fastloop")
    write_rows(["A", "B"])
    save_checkpoint(AutoModelForSequenceClassification, config)
    AutoTokenizer.from_pretrained("checkpoint", padding_side="left").save_pretrained("checkpoint")
    execute(text_run(CLASSIFY, "checkpoint", {"label": "label"}))
    assert AutoTokenizer.from_pretrained("run/model").padding_side == side
    assert len(reports(caplog)) == (side == "right")
    classify = pipeline("text-classification", "run/model", top_k=None)
    texts = ["a fine film 3", "a dull film", "a lovely film 4 5 6 7 8 9 10", "grey"]
    together = classify(texts, batch_size=4)
    apart = [classify([text])[0] for text in texts]
    for found, expected in zip(together, apart, strict=True):
        scores = {label["label"]: label["score"] for label in expected}
        assert {label["label"]: label["score"] for label in found} == pytest.approx(scores, abs=1e-5)


@pytest.mark.parametrize(
    ("plugins", "train", "expected"),
    [
        (
            [],
            {"micro_batch_size": 2},
            "padding-dependent recipe.yaml train.micro_batch_size 2 FNetForSequenceClassification",
        ),
        (
            [LengthBucketing()],
            {},
            "padding-dependent recipe.yaml plugins.length-bucketing FNetForSequenceClassification",
        ),
    ],
    ids=["micro-batches", "length-bucketing"],
)
def test_features_that_would_change_results_are_refused(plugins, train, expected):
    with pytest.raises(RecipeError) as caught:
        made(CLASSIFY, READING["fnet"], *plugins, **train)
    assert_problem(caught.value.problem, expected)
    assert str(caught.value).endswith("or pad all texts alike: data.padding=max_length.")


def test_the_advice_is_right_with_equal_padding_micro_batches_make_the_same_step(caplog):
    weights = []
    for size in (None, 2):
        run = made(CLASSIFY, READING["fnet"], padding="max_length", micro_batch_size=size, max_steps=2, optimizer="SGD")
        execute(run)
        weights.append(run.unwrap_model().state_dict())
    assert reports(caplog) == []
    for name, value in weights[0].items():
        torch.testing.assert_close(value, weights[1][name], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("task", [CLASSIFY, TAG])
def test_a_text_that_a_model_cannot_compute_alone_needs_larger_micro_batches(task):
    """CANINE needs four tokens; with its special tokens, a text of one word has three."""
    Path("a.jsonl").write_text('{"text": "so", "label": "A", "words": ["so"], "tags": ["A"]}\n' + SHARED)
    data = {"files": {"train": "a.jsonl", "validation": "a.jsonl"}, "max_length": 24}
    data |= {"label": "label"} if task == CLASSIFY else {"words": "words", "tags": "tags"}
    model = {"config": READING["canine"], "tokenizer": {"kind": "word"}}
    message = (
        "recipe.yaml: train.micro_batch_size: found 1: CanineFor.* cannot compute .* Use .* two samples or "
        "more. Or pad all texts alike"
    )
    with pytest.raises(RecipeError, match=message):
        make_run(task, model, data, micro_batch_size=1)
    make_run(task, model, data)
    make_run(task, model, data | {"padding": "max_length"}, micro_batch_size=1)


def predicting(task: str, data: dict[str, Any], **train: Any) -> Any:
    """A run that predicts three texts with the model in ``checkpoint``."""
    tree = {"model": {"name": "unused"}, "data": {"files": {"train": "rows.jsonl"}, "max_length": 16} | data}
    tree |= {"train": {"device": "cpu", "batch_size": 8} | train, "plugins": [task, {"module": False}], "output": "run"}
    recipe = make_recipe(tree, Path("recipe.yaml"))
    recipe.inference = Inference(
        Path("checkpoint").resolve(), "predict", ["a film", "a fine and lovely film so long", "dull"], chunk=8
    )
    return build(resolve(recipe), [Chunks(None)])


RWKV = {"model_type": "rwkv", "hidden_size": 16, "num_hidden_layers": 2, "context_length": 128}
PREDICTED = {
    "fnet": (
        CLASSIFY,
        AutoModelForSequenceClassification,
        READING["fnet"],
        {"label": "label"},
        "padding-dependent",
    ),
    "rwkv": ("causal-lm", AutoModelForCausalLM, RWKV, {}, "padding-dependent train.eval_batch_size=1"),
}


@pytest.mark.parametrize(("task", "auto", "config", "data", "end"), PREDICTED.values(), ids=PREDICTED)
def test_batched_predictions_that_depend_on_the_batch_are_refused(task, auto, config, data, end):
    write_rows(["A", "B"])
    save_checkpoint(auto, config, **({"id2label": {0: "A", 1: "B"}} if data else {}))
    with pytest.raises(RecipeError) as caught:
        predicting(task, data)
    assert_problem(caught.value.problem, "padding-dependent recipe.yaml train.eval_batch_size 8")
    assert_problem(caught.value.problem, "padding-dependent train.eval_batch_size=1")
    assert_problem(caught.value.problem, end)
    predicting(task, data, eval_batch_size=1)


def test_batched_predictions_of_a_model_that_ignores_padding_are_made():
    write_rows(["A", "B"])
    save_checkpoint(
        AutoModelForCausalLM, {"model_type": "gpt2", "n_layer": 2, "n_head": 2, "n_embd": 16, "initializer_range": 0.2}
    )
    predicting("causal-lm", {})


@pytest.mark.parametrize("name", ["quickstart", "tokens_names", "seq2seq_dates"])
def test_a_spawned_worker_gets_the_collator_without_the_data(name):
    recipe = load_recipe(name)
    recipe.data["arguments"] = recipe.data.get("arguments", {}) | {"train": 400, "validation": 20, "test": 20}
    run = build(resolve(recipe))
    collate = run.hooks.build_collator(run=run, split="train")
    pickled = pickle.dumps(collate)
    assert len(pickled) < 2**20
    samples = [run.datasets["train"][index] for index in (0, 1)]
    for key, value in collate(samples).inputs.items():
        assert torch.equal(pickle.loads(pickled)(samples).inputs[key], value)
