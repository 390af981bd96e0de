"""Text classification: it learns, counts its samples and tokens, and exports a model that transformers loads.

Modules:
    plugins/fastloop_plugins/models/hub.py
    plugins/fastloop_plugins/tasks/text_classification.py
    plugins/fastloop_plugins/text/batches.py
    plugins/fastloop_plugins/text/model.py
    plugins/fastloop_plugins/text/model_options.py
"""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from log_lines import find_lines
from text_helpers import TINY, TINY_GPT, make_run, rows, write_rows
from training_runs import execute

from fastloop.errors import RecipeError
from fastloop.recipe import make_recipe
from fastloop.testing import assert_problem, expect_problem
from fastloop_plugins.models.hub import build_from_config
from fastloop_plugins.tasks.causal_lm import CausalLM
from fastloop_plugins.tasks.text_classification import TextClassification

TASK = "text-classification"
DATA = {
    "files": {"train": "train.csv", "validation": "train.csv", "test": "test.csv"},
    "label": "label",
    "max_length": 32,
}


@pytest.fixture(autouse=True)
def _files():
    write_rows("train.csv", rows(32, labels=("bad", "good")))
    write_rows("test.csv", rows(12, labels=("bad", "good")))


@pytest.fixture
def pretrained() -> str:
    """A folder as the hub's are: an encoder without a head, and its tokenizer."""
    run = make_run(TASK, {"config": TINY}, DATA)
    folder = Path("pretrained")
    run.model.distilbert.save_pretrained(folder)
    run.plugins.plugins[0].text_model.tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("kind", ["word", "bpe"])
def test_it_learns_and_the_exported_folder_predicts_the_same(kind):
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    run = make_run(TASK, {"config": TINY, "tokenizer": {"kind": kind, "vocab_size": 400}}, DATA, epochs=15)
    summary = execute(run)
    assert summary["test"]["accuracy"] == summary["test"]["f1"] == 1.0
    assert summary["tokens_per_second"] > summary["samples_per_second"] > 0

    model = AutoModelForSequenceClassification.from_pretrained("run/model")
    tokenizer = AutoTokenizer.from_pretrained("run/model")
    batch = next(iter(run.eval_loaders["test"].batches())).inputs
    texts = [row["text"] for row in rows(8)]
    encoded = tokenizer(texts, padding=True, return_tensors="pt")
    assert torch.equal(encoded["input_ids"], batch["input_ids"])
    run.model.eval()
    with torch.no_grad():
        ours = run.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        theirs = model(input_ids=encoded["input_ids"], attention_mask=encoded["attention_mask"]).logits
    assert torch.equal(ours, theirs)
    assert [model.config.id2label[i] for i in theirs.argmax(1).tolist()] == ["bad", "good"] * 4
    assert model.config.label2id == {"bad": 0, "good": 1}


def test_pretrained_folder_trains_in_float32_and_logs_new_head(pretrained, caplog):
    from transformers import AutoModel

    AutoModel.from_pretrained(pretrained).half().save_pretrained(pretrained)
    caplog.set_level(logging.INFO, "fastloop")
    run = make_run(TASK, {"name": pretrained}, DATA, epochs=15)
    assert {parameter.dtype for parameter in run.model.parameters()} == {torch.float32}
    assert find_lines(caplog, "classifier.bias, classifier.weight")
    assert execute(run)["test"]["accuracy"] == 1.0


def test_head_for_other_labels_is_replaced_with_a_message(pretrained, caplog):
    from transformers import AutoModelForSequenceClassification

    AutoModelForSequenceClassification.from_pretrained(pretrained, num_labels=5).save_pretrained(pretrained)
    caplog.set_level(logging.INFO, "fastloop")
    run = make_run(TASK, {"name": pretrained}, DATA)
    assert run.model.classifier.out_features == 2
    assert find_lines(caplog, "classifier.bias, classifier.weight")


def test_batches_are_padded_to_the_longest_of_the_batch_and_count_real_tokens():
    run = make_run(TASK, {"config": TINY}, DATA)
    plugin, dataset = run.plugins.plugins[0], run.datasets["train"]
    for batch in run.train_loader.batches():
        mask, ids = batch.inputs["attention_mask"], batch.inputs["input_ids"]
        assert ids.dtype == mask.dtype == batch.inputs["labels"].dtype == torch.int64
        assert ids.shape[1] == mask.sum(1).max() < 32
        assert batch.tokens == mask.sum()
        assert batch.loss_weight == batch.samples == len(ids)
        assert (ids[mask == 0] == plugin.text_model.tokenizer.pad_token_id).all()
    assert dataset.lengths.sum() == sum(batch.tokens for batch in run.train_loader.batches())


def test_padding_to_max_length_changes_no_prediction():
    longest, always = (
        make_run(TASK, {"config": TINY}, DATA),
        make_run(TASK, {"config": TINY}, DATA | {"padding": "max_length"}),
    )
    for short, long in zip(longest.eval_loaders["test"].batches(), always.eval_loaders["test"].batches(), strict=True):
        assert long.inputs["input_ids"].shape[1] == 32
        assert long.tokens == short.tokens
        outputs = [
            run.hooks.compute_loss(run=run, model=run.model.eval(), batch=batch.inputs)
            for run, batch in ((longest, short), (always, long))
        ]
        torch.testing.assert_close(outputs[0].predictions, outputs[1].predictions)


def test_padding_goes_up_to_a_multiple_but_never_beyond_max_length():
    run = make_run(TASK, {"config": TINY}, DATA | {"max_length": 10, "pad_to_multiple_of": 8})
    collate = run.hooks.build_collator(run=run, split="train")
    long = run.datasets["train"][4]
    short = long | {"input_ids": long["input_ids"][:5]}
    assert len(long["input_ids"]) == 10
    assert collate([short]).inputs["input_ids"].shape == (1, 8)
    assert collate([short, long]).inputs["input_ids"].shape == (2, 10)


def test_accumulation_gives_the_gradient_of_the_whole_batch():
    model = {"config": TINY | {"dropout": 0.0, "seq_classif_dropout": 0.0, "attention_dropout": 0.0}}
    whole, split = (make_run(TASK, model, DATA, optimizer="SGD", lr=0.1, micro_batch_size=size) for size in (8, 2))
    metrics = [execute(run)["validation"]["loss"] for run in (whole, split)]
    assert metrics[0] == pytest.approx(metrics[1], rel=1e-6)


@pytest.mark.slow
def test_the_same_seed_gives_the_same_run_in_its_vocabulary_and_losses():
    summaries = [execute(make_run(TASK, {"config": TINY}, DATA)) for _ in range(2)]
    vocabularies = [json.loads(Path(folder, "model/tokenizer.json").read_text()) for folder in ("run", "run.1")]
    assert vocabularies[0] == vocabularies[1]
    assert summaries[0]["test"] == summaries[1]["test"]


def test_a_compiled_model_is_exported_under_its_own_names():
    from safetensors.torch import load_file

    run = make_run(TASK, {"config": TINY}, DATA)
    run.model = torch.compile(run.model, backend="eager")
    run.hooks.export_model(run=run, folder=Path("model"))
    assert not any("_orig_mod" in name for name in load_file("model/model.safetensors"))


def test_it_is_on_by_default_where_data_names_a_label():
    def tasks(**sections):
        recipe = make_recipe(sections)
        return [cls.name for cls in (TextClassification, CausalLM) if cls.auto_enable(recipe)]

    assert tasks(data={"name": "imdb", "label": "label"}) == ["text-classification"]
    assert tasks(data={"name": "imdb"}) == ["causal-lm"]
    assert tasks(data={"name": "imdb", "label": "label"}, model={"module": "m:M"}) == []
    assert tasks() == []


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ({}, "exclusive-options recipe.yaml"),
        ({"name": "x", "config": TINY}, "exclusive-options recipe.yaml"),
        ({"nmae": "x"}, "unknown-option recipe.yaml model.nmae 'name'"),
        ({"config": {"dim": 4}}, "missing-value model.config.model_type"),
        (
            {"config": {"model_type": "distilbrt"}},
            "unknown-model model.config.model_type 'distilbrt' 'distilbert'",
        ),
        (
            {"config": TINY | {"n_layer": 2}},
            "unknown-option model.config.n_layer 'n_layers'",
        ),
        ({"config": TINY | {"dim": "wide"}}, "invalid-value model.config 'dim'"),
        ({"config": TINY | {"dim": 15}}, "invalid-value model.config config.n_heads 2 config.dim 15"),
        ({"config": TINY | {"n_layers": 20_000}}, "too-large model.config.n_layers 20,000 10,000"),
        ({"config": {"model_type": "gpt2", "n_layer": 10**9}}, "too-large model.config.n_layer 1,000,000,000"),
        ({"config": TINY | {"dim": 2**21}}, "too-large model.config parameters GiB"),
        ({"config": TINY | {"hidden_dim": 10**14}}, "too-large model.config parameters GiB"),
        ({"config": TINY | {"vocab_size": 10**14}}, "too-large model.config parameters GiB"),
        ({"config": TINY | {"vocab_size": 9}}, "conflicting-values model.config.vocab_size 9"),
        (
            {"config": TINY | {"max_position_embeddings": 16}},
            "out-of-range data.max_length 32 16",
        ),
        ({"config": {"model_type": "clap"}}, "invalid-value model.config 'clap'"),
        ({"config": TINY, "tokenizer": {"kind": "words"}}, "invalid-value model.tokenizer.kind 'words'"),
        (
            {"config": TINY, "tokenizer": {"kind": "bpe", "vocab_size": 100}},
            "out-of-range model.tokenizer.vocab_size 100 300",
        ),
        ({"config": TINY, "attn_implementation": "fast"}, "invalid-value model.config"),
        ({"name": "no/such/folder"}, "file-missing model.name no/such/folder"),
        ({"name": "."}, "file-missing model.name config.json save_pretrained"),
        (
            {"name": "x", "tokenizer": {"kind": "word"}},
            "unknown-option model.tokenizer model.config",
        ),
        ({"name": ".", "revision": "v2"}, "unknown-option model.revision"),
        ({"config": TINY, "tokenizer": {"kind": "word"}, "revision": "v2"}, "unknown-option model.revision"),
    ],
)
def test_a_wrong_model_section_is_refused_with_its_key(model, expected):
    with pytest.raises(RecipeError) as caught:
        make_run(TASK, model, DATA)
    assert_problem(caught.value.problem, expected)


class FailsOnMeta:
    """Builds a model whose code reads a tensor's value, as old code of models does."""

    @staticmethod
    def from_config(config):
        dropout = torch.linspace(0, 1, 3)[1].item()
        return torch.nn.Dropout(dropout)


def test_a_model_that_cannot_be_built_without_memory_is_built():
    from transformers import AutoConfig

    large = AutoConfig.for_model("distilbert", vocab_size=10**9)
    assert build_from_config(FailsOnMeta, large, "model.config").p == 0.5


def test_a_damaged_model_folder_is_refused(pretrained):
    Path(pretrained, "model.safetensors").write_bytes(b"damaged")
    with expect_problem("file-unreadable model.name", RecipeError):
        make_run(TASK, {"name": pretrained}, DATA)


@pytest.mark.slow
def test_a_decoder_without_a_padding_token_classifies_too():
    execute(
        make_run(
            "causal-lm",
            {"config": TINY_GPT, "tokenizer": {"kind": "bpe", "vocab_size": 300}},
            {"files": {"train": "train.csv"}, "max_length": 16},
        )
    )
    config = Path("run/model/tokenizer_config.json")
    config.write_text(
        json.dumps({key: value for key, value in json.loads(config.read_text()).items() if key != "pad_token"})
    )
    run = make_run(TASK, {"name": "run/model"}, DATA | {"max_length": 16}, epochs=15)
    assert run.model.config.pad_token_id is not None
    assert execute(run)["test"]["accuracy"] > 0.9


@pytest.mark.parametrize("kind", ["word", "bpe"])
def test_a_tokenizer_that_transformers_reads_as_another_one_is_refused(kind):
    """Transformers reads every saved tokenizer of a Qwen2 model as Qwen2Tokenizer: a text of known words had no token
    after the export."""
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }
    tokenizer = {"kind": kind, "vocab_size": 400}
    with expect_problem("unsupported-tokenizer model.tokenizer qwen2 Qwen2Tokenizer", RecipeError):
        make_run(TASK, {"config": {"model_type": "qwen2", **sizes}, "tokenizer": tokenizer}, DATA)
    make_run(TASK, {"config": {"model_type": "qwen3", **sizes}, "tokenizer": tokenizer}, DATA)  # control
