"""Ids of padding that differ between a model and its tokenizer, and the length that an exported tokenizer has.

Modules:
    plugins/fastloop_plugins/models/vocabulary.py
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from text_helpers import TINY, TINY_GPT, make_run, rows
from training_runs import execute

from fastloop import RecipeError

SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
LLAMA = SIZES | {"model_type": "llama", "num_key_value_heads": 1, "max_position_embeddings": 48}
ROBERTA = SIZES | {"model_type": "roberta", "max_position_embeddings": 50}
T5 = {"model_type": "t5", "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "dropout_rate": 0.0}
GPT = TINY_GPT | {"n_positions": 40}
CLASSES: dict[str, Any] = {"label": "label"}
TARGETS = {"target": "target", "max_target_length": 12}
KINDS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "classifier by the last token": ("text-classification", GPT, CLASSES),
    "classifier by the first token": ("text-classification", SIZES | {"model_type": "bert"}, CLASSES),
    "language model": ("causal-lm", LLAMA, {}),
    "encoder-decoder": ("seq2seq", T5, TARGETS),
}
"""Name -> task, configuration of the model and ``data``."""


@pytest.fixture(autouse=True)
def _files():
    lines = [json.dumps(row | {"target": f"number {index}"}) for index, row in enumerate(rows())]
    Path("rows.jsonl").write_text("\n".join(lines))


def made(task: str, model: dict[str, Any], data: dict[str, Any], **train: Any) -> Any:
    files = {"train": "rows.jsonl", "validation": "rows.jsonl"}
    return make_run(task, model, {"files": files, "max_length": 16} | data, **train)


def pretrain(task: str, config: dict[str, Any], data: dict[str, Any]) -> None:
    """Write a checkpoint to the folder ``base``."""
    run = made(task, {"config": config, "tokenizer": {"kind": "bpe", "vocab_size": 300}}, data)
    run.hooks.export_model(run=run, folder=Path("base"))


def change(file: str, **values: Any) -> None:
    path = Path("base", file)
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def read(file: str) -> Any:
    return json.loads(Path("run/model", file).read_text())


# -- padding -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_another_id_of_padding_becomes_the_tokenizers(kind, caplog):
    from transformers import AutoTokenizer

    task, config, data = KINDS[kind]
    pretrain(task, config, data)
    change("config.json", pad_token_id=40)  # an ordinary token
    if Path("base/generation_config.json").exists():
        change("generation_config.json", pad_token_id=40)
    caplog.set_level(logging.INFO, "fastloop")
    run = made(task, {"name": "base"}, data, epochs=2)
    tokenizer = AutoTokenizer.from_pretrained("base")
    named = [message for message in caplog.messages if f" {tokenizer.pad_token_id} " in message and " 40" in message]
    assert len(named) == 1
    embedding = run.unwrap_model().get_input_embeddings()
    before = embedding.weight.detach().clone()
    execute(run)
    assert read("config.json")["pad_token_id"] == tokenizer.pad_token_id
    if Path("run/model/generation_config.json").exists():
        assert read("generation_config.json")["pad_token_id"] == tokenizer.pad_token_id
    used = {token for row in rows() for token in tokenizer(row["text"])["input_ids"]} - {tokenizer.pad_token_id}
    still = {token for token in used if torch.equal(embedding.weight[token], before[token])}
    assert still == set()


def test_a_text_has_the_same_result_alone_and_in_a_batch_of_the_exported_model():
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    task, config, data = KINDS["classifier by the last token"]
    pretrain(task, config, data)
    change("config.json", pad_token_id=40)
    execute(made(task, {"name": "base"}, data, epochs=2))
    model = AutoModelForSequenceClassification.from_pretrained("run/model").eval()
    tokenizer = AutoTokenizer.from_pretrained("run/model")
    texts = [row["text"] for row in rows()]
    with torch.no_grad():
        together = model(**tokenizer(texts, return_tensors="pt", padding=True)).logits
        alone = [model(**tokenizer(text, return_tensors="pt")).logits[0] for text in texts]
    torch.testing.assert_close(together, torch.stack(alone), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("before", [None, 40])
def test_the_row_of_an_end_token_that_also_pads_is_trained(before):
    task, config, data = KINDS["language model"]
    pretrain(task, config, data)
    change("config.json", pad_token_id=before)
    run = made(task, {"name": "base"}, data, lr=0.1)
    model, end = run.unwrap_model(), run.plugins.plugins[0].text_model.tokenizer.eos_token_id
    assert model.config.pad_token_id == end
    weight = model.get_input_embeddings().weight
    start = weight[end].detach().clone()
    execute(run)
    assert not torch.equal(weight[end], start)


def test_the_row_of_a_new_end_token_that_also_pads_begins_as_the_others():
    run = made("causal-lm", {"config": LLAMA, "tokenizer": {"kind": "bpe", "vocab_size": 300}}, {})
    tokenizer = run.plugins.plugins[0].text_model.tokenizer
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    weight = run.unwrap_model().get_input_embeddings().weight.detach()
    sizes = weight.norm(dim=1)
    assert float(sizes[tokenizer.pad_token_id]) == pytest.approx(float(sizes.median()), rel=0.6)


def test_another_id_from_which_positions_are_counted_is_refused():
    pretrain("text-classification", ROBERTA, CLASSES)
    change("config.json", pad_token_id=1)
    with pytest.raises(RecipeError, match=r"model\.tokenizer: .* id 0 .* id 1,"):
        made("text-classification", {"name": "base"}, CLASSES)


# -- length ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "truncation", [None, {"direction": "Right", "max_length": 7, "strategy": "LongestFirst", "stride": 0}]
)
@pytest.mark.parametrize("kind", KINDS)
def test_an_exported_tokenizer_keeps_the_length_of_the_checkpoint(kind, truncation):
    task, config, data = KINDS[kind]
    pretrain(task, config, data)
    change("tokenizer_config.json", model_max_length=30)
    change("tokenizer.json", truncation=truncation)
    run = made(task, {"name": "base"}, data)
    run.hooks.export_model(run=run, folder=Path("run/model"))
    assert read("tokenizer_config.json")["model_max_length"] == 30
    assert read("tokenizer.json")["truncation"] == truncation
    assert read("tokenizer.json")["padding"] is None


@pytest.mark.parametrize(
    ("config", "data", "length"),
    [
        (TINY, CLASSES, 32),
        (GPT, CLASSES, 40),
        (ROBERTA, CLASSES, 49),  # positions begin at 1, after the id of padding, 0
        (LLAMA, {}, 48),
        (T5, TARGETS, None),  # relative positions
    ],
    ids=lambda value: value.get("model_type") if isinstance(value, dict) else None,
)
def test_an_exported_tokenizer_has_the_length_that_the_model_takes(config, data, length):
    from transformers import AutoTokenizer

    task = "text-classification" if data == CLASSES else "seq2seq" if data else "causal-lm"
    pretrain(task, config, data)
    found = AutoTokenizer.from_pretrained("base").model_max_length
    assert found == length or (length is None and found > 10**9)
    made(task, {"name": "base"}, data | {"max_length": length or 512})  # data.max_length was 16
    if length is not None:
        with pytest.raises(RecipeError, match=r"data\.max_length"):
            made(task, {"name": "base"}, data | {"max_length": length + 1})
    change("tokenizer_config.json", model_max_length=10**30)  # as transformers writes a length that is not known
    run = made(task, {"name": "base"}, data)
    run.hooks.export_model(run=run, folder=Path("exported"))
    assert AutoTokenizer.from_pretrained("exported").model_max_length == (length or 10**30)
