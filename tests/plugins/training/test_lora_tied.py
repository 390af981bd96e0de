"""``lora`` on an output layer that is tied to the embedding: the exported model computes what the run computed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from headless_models import logits
from safetensors.torch import load_file
from training_runs import execute

from fastloop import Plugin, PluginError, RecipeError, hookimpl, lifecycle
from fastloop.lifecycle import build
from fastloop.plugins.resolve import resolve
from fastloop.recipe import make_recipe
from fastloop.testing import LANGUAGE, write_texts

pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("error::UserWarning:peft")  # a message of peft would be the only notice

KINDS = {
    "llama": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32},
    "gpt2": {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 48},
    "gemma": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    | {"num_key_value_heads": 2, "head_dim": 8},
    "bloom": {"hidden_size": 16, "n_layer": 1, "n_head": 2},
    "opt": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "ffn_dim": 32}
    | {"word_embed_proj_dim": 16, "max_position_embeddings": 48},
}
"""Type of model -> its options. All of them tie the output layer to the embedding."""
EMBEDDING = {"llama": "embed_tokens", "gpt2": "wte", "gemma": "embed_tokens"}
EMBEDDING |= {"bloom": "word_embeddings", "opt": "embed_tokens"}


def tied_run(options, kind="llama", task=None, objects=(), **model):
    write_texts(Path.cwd())
    config = {"model_type": kind} | (KINDS[kind] | {"tie_word_embeddings": True} if kind in KINDS else model)
    recipe = {**LANGUAGE, "model": {**LANGUAGE["model"], "config": config}, "plugins": [{"lora": options}]}
    recipe["train"] = {"device": "cpu", "epochs": 2, "lr": 0.05, "batch_size": 8}
    return build(resolve(make_recipe({**recipe, **(task or {}), "output": "out"}), objects=objects))


SLOW = pytest.mark.slow
CASES = [
    ("llama", {"target_modules": ["lm_head"]}),
    ("gpt2", {"target_modules": ["c_attn", "wte"]}),
    ("llama", {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]}),
    pytest.param("llama", {"target_modules": ["embed_tokens", "lm_head"]}, marks=SLOW),
    pytest.param("llama", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}, marks=SLOW),
    *(pytest.param(kind, {"target_modules": ["lm_head"]}, marks=SLOW) for kind in KINDS if kind != "llama"),
    *(pytest.param(kind, {"target_modules": [EMBEDDING[kind]]}, marks=SLOW) for kind in KINDS if kind != "gpt2"),
]


@pytest.mark.parametrize(("kind", "options"), CASES)
def test_the_exported_model_has_the_logits_of_the_run(kind, options, monkeypatch):
    batch, trained, export = {"input_ids": torch.arange(4, 20)[None]}, {}, lifecycle._export

    def record_and_export(run):
        trained["logits"] = logits(run.unwrap_model(), batch)
        export(run)

    monkeypatch.setattr(lifecycle, "_export", record_and_export)
    execute(tied_run({"r": 4, **options}, kind))
    exported = transformers.AutoModelForCausalLM.from_pretrained("out/model")
    assert torch.allclose(logits(exported, batch), trained["logits"], atol=1e-4)
    model = transformers.AutoModelForCausalLM.from_pretrained("out/model")
    assert model.config.tie_word_embeddings is False
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    assert not torch.equal(embedding, head)


def test_adapters_beside_tied_weights_leave_them_tied():
    execute(tied_run({"r": 4, "target_modules": ["q_proj"]}))
    assert transformers.AutoConfig.from_pretrained("out/model").tie_word_embeddings is True
    assert "lm_head.weight" not in load_file("out/model/model.safetensors")


class ClearsRow(Plugin):
    """Sets a row of the embedding to zeros, as transformers does with that of a padding token."""

    name = "clears-row"
    numerics = "changes-training"
    runs_before = ("lora",)

    @hookimpl
    def before_prepare(self, model):
        with torch.no_grad():
            model.get_input_embeddings().weight[0] = 0


def test_dora_of_a_layer_with_a_row_of_zeros_is_refused():
    """The row has no norm to divide by."""
    options = {"r": 4, "target_modules": ["lm_head"], "use_dora": True}
    with pytest.raises(PluginError, match="lm_head"):
        tied_run(options, objects=[ClearsRow()])
    tied_run(options)


T5 = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}


@pytest.mark.parametrize("option", ["target_modules", "modules_to_save"])
def test_a_model_that_shares_its_weight_among_more_layers_is_refused_before_training(option):
    write_texts(Path.cwd())
    rows = '{"text": "a b", "target": "b a"}\n' * 16
    for split in ("train", "validation"):
        Path(f"{split}.jsonl").write_text(rows)
    data = {"files": {"train": "train.jsonl", "validation": "validation.jsonl"}}
    task = {"data": data | {"target": "target", "max_length": 8}}
    options = {"target_modules": ["q"]} | {option: ["lm_head"]}
    with pytest.raises(RecipeError, match="lm_head"):
        tied_run(options, "t5", task, **T5)
    assert not Path("out").exists()
