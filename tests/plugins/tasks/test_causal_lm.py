"""Causal language models: the loss is a mean over target tokens, however the batch is split or padded."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from text_helpers import TINY_GPT, make_run
from training_runs import execute

from fastloop.errors import RecipeError
from fastloop_plugins.datasets.stdlib_source import stdlib_source
from fastloop_plugins.kernels.compile import Compile
from fastloop_plugins.tasks._lm_batches import block_sequences

MODEL = {"config": TINY_GPT, "tokenizer": {"kind": "bpe", "vocab_size": 300}}
DATA = {"files": {"train": "train.txt", "validation": "train.txt"}, "max_length": 16}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


@pytest.fixture(autouse=True)
def _files():
    Path("train.txt").write_text("\n\n".join(f"one two three four five {i}" for i in range(40)))


def test_it_learns_and_the_exported_folder_predicts_the_same():
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run = make_run("causal-lm", MODEL, DATA, epochs=8)
    summary = execute(run)
    assert summary["validation"]["loss"] < 2.5 < math.log(300)
    assert summary["validation"]["perplexity"] == pytest.approx(math.exp(summary["validation"]["loss"]))
    model, tokenizer = AutoModelForCausalLM.from_pretrained("run/model"), AutoTokenizer.from_pretrained("run/model")
    ids = tokenizer("one two three", return_tensors="pt").input_ids
    assert tokenizer.decode(ids[0]) == "one two three"
    with torch.no_grad():
        assert torch.equal(run.model.eval()(ids).logits, model(ids).logits)
    assert model.config.eos_token_id == tokenizer.eos_token_id


def test_texts_are_joined_by_the_end_token_and_cut_into_blocks_without_loss():
    run = make_run("causal-lm", MODEL, DATA)
    tokenizer, dataset = run.plugins.plugins[0].text_model.tokenizer, run.datasets["train"]
    blocks = [dataset[i]["input_ids"].tolist() for i in range(len(dataset))]
    assert {len(block) for block in blocks[:-1]} == {16}
    texts = tokenizer.decode([token for block in blocks for token in block]).split("<|endoftext|>")
    whole = Path("train.txt").read_text().split("\n\n")
    assert texts == [*whole, ""]


def test_weights_are_target_tokens_and_padding_has_no_part_in_the_loss():
    run = make_run("causal-lm", MODEL, DATA)
    collate, dataset = run.loaders.collators["train"], run.datasets["train"]
    long, short = dataset[0], {"input_ids": dataset[1]["input_ids"][:5]}
    batch = collate([long, short])
    assert (batch.tokens, batch.loss_weight) == (16 + 5, 15 + 4)
    assert batch.loss_weight == (batch.inputs["targets"] != -100).sum()

    def loss(batch):
        with torch.no_grad():
            return run.hooks.compute_loss(run=run, model=run.model.eval(), batch=batch.inputs).loss.item()

    apart = [collate([sample]) for sample in (long, short)]
    assert loss(batch) == pytest.approx(sum(loss(one) * one.loss_weight for one in apart) / batch.loss_weight, rel=1e-5)


def test_the_loss_is_that_of_transformers():
    run = make_run("causal-lm", MODEL, DATA)
    batch = run.loaders.collators["train"]([run.datasets["train"][0], run.datasets["train"][1]])
    model = run.model.eval()
    with torch.no_grad():
        ours = run.hooks.compute_loss(run=run, model=model, batch=batch.inputs).loss
        theirs = model(input_ids=batch.inputs["input_ids"], labels=batch.inputs["input_ids"]).loss
    torch.testing.assert_close(ours, theirs)


def test_compile_includes_the_loss_in_its_graph():
    from torch._dynamo import register_backend
    from torch.nn.functional import cross_entropy

    called: list[set[object]] = []

    @register_backend(name="records_calls")
    def record(graph, inputs):
        called.append({node.target for node in graph.graph.nodes})
        return graph.forward

    execute(make_run("causal-lm", MODEL, DATA, [Compile(backend="records_calls", fullgraph=True)], max_steps=1))
    assert called
    assert all(cross_entropy in calls for calls in called)


def test_accumulated_micro_batches_of_unequal_length_give_the_loss_of_the_whole():
    def run(**train):
        made = make_run(
            "causal-lm",
            {"config": TINY_GPT | NO_DROPOUT, "tokenizer": MODEL["tokenizer"]},
            DATA,
            optimizer="SGD",
            lr=0.1,
            **train,
        )
        dataset = made.datasets["train"]
        dataset.lengths[:-1:2] -= 9  # each sample keeps its end: every second one is shorter
        execute(made)
        return made

    whole, split = run(), run(micro_batch_size=1)
    assert whole.state.step == split.state.step > 1
    assert whole.state.metrics["validation"]["loss"] == pytest.approx(
        split.state.metrics["validation"]["loss"], rel=1e-6
    )
    for one, other in zip(whole.model.parameters(), split.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_padding_to_max_length_pads_the_short_last_block():
    run = make_run("causal-lm", MODEL, DATA | {"padding": "max_length"})
    last = {"input_ids": run.datasets["train"][0]["input_ids"][:3]}
    assert run.loaders.collators["train"]([last]).inputs["input_ids"].shape == (1, 16)


def test_a_split_of_less_than_two_tokens_has_nothing_to_learn():
    run = make_run("causal-lm", MODEL, DATA)
    with pytest.raises(RecipeError, match=r"recipe.yaml: data: the test split has no two tokens"):
        block_sequences(run.plugins.plugins[0].data.where, "test", [" "], 8)


def test_an_encoder_is_refused_as_a_language_model():
    with pytest.raises(RecipeError, match=r"model.config: transformers has no causal language model for 'distilbert'"):
        make_run("causal-lm", {"config": {"model_type": "distilbert"}}, DATA)


@pytest.mark.slow
def test_the_standard_library_is_split_by_file_and_always_the_same():
    splits = stdlib_source(largest=20_000)
    paths = {split: [row["path"] for row in rows] for split, rows in splits.items()}
    assert not set(paths["train"]) & set(paths["validation"])
    assert "bisect.py" in paths["train"] + paths["validation"]
    assert not any("site-packages" in path or path.startswith("test/") for path in paths["train"])
    assert 0.05 < len(paths["validation"]) / (len(paths["train"]) + len(paths["validation"])) < 0.2
    assert all(0 < len(row["text"]) <= 20_000 for row in splits["train"])
    assert stdlib_source(largest=20_000) == splits
