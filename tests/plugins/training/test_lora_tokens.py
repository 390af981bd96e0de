"""New tokens beside the plugin ``lora``: their rows are trained, merged and exported.

Modules:
    plugins/fastloop_plugins/training/_lora_tokens.py
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from interrupted_runs import Case, check_interrupted
from new_token_runs import TASKS, model_of, pretrain, write_rows
from text_helpers import make_run
from training_runs import execute

from fastloop import PluginError
from fastloop.testing import expect_problem
from fastloop_plugins.training.lora import LoRA

pytest.importorskip("peft")
TARGETS = {
    "tied head": ["c_attn"],
    "own head": ["q_proj"],
    "classifier": ["q_lin"],
    "tags": ["q_lin"],
    "encoder-decoder": ["q"],
    "bias of the head": ["q_proj"],
}
MODEL = {"name": "base", "tokens": ["<call>"], "special_tokens": ["<|end|>"]}


@pytest.fixture(autouse=True)
def _files():
    write_rows()


@pytest.mark.parametrize("kind", TASKS)
def test_new_rows_are_trained_and_merged(kind):
    from transformers import AutoTokenizer

    task, data = pretrain(kind)
    run = make_run(task, MODEL, data, [LoRA(r=2, target_modules=TARGETS[kind])], lr=0.1)
    base = run.unwrap_model().get_base_model()
    start = {name: weight.clone() for name, weight in base.state_dict().items()}
    loss = execute(run)["validation"]["loss"]
    (call, end), tokenizer = model_of(run).new_tokens.ids, AutoTokenizer.from_pretrained("run/model")
    assert tokenizer.convert_tokens_to_ids(["<call>", "<|end|>"]) == [call, end]

    again = make_run(task, {"name": "run/model"}, data)
    assert again.hooks.evaluate(run=again, split="validation")["loss"] == pytest.approx(loss, rel=1e-5)
    exported = again.unwrap_model()
    modules = [exported.get_input_embeddings(), exported.get_output_embeddings()]
    for module in modules:
        if module is None:
            continue
        name = next(name for name, one in exported.named_modules() if one is module)
        before = start.get(f"{name}.weight", start.get(f"{name}.token_adapter.base_layer.weight"))
        changed = (module.weight != before).any(1).nonzero().flatten().tolist()
        assert call in changed
        assert set(changed) <= {call, end}
    if modules[1] is not None and "own" not in kind:
        assert modules[0].weight is modules[1].weight


def test_an_embedding_that_is_trained_in_full_needs_no_rows():
    task, data = pretrain("own head")
    plugin = LoRA(r=2, target_modules=["q_proj"], modules_to_save=["embed_tokens"])
    run = make_run(task, MODEL, data, [plugin], lr=0.1)
    trained = [name for name, weight in run.unwrap_model().named_parameters() if weight.requires_grad]
    assert [name for name in trained if "trainable_tokens_delta" in name and "embed_tokens" in name] == []
    assert any("lm_head" in name for name in trained)
    execute(run)
    assert json.loads(Path("run/model/config.json").read_text())["vocab_size"] == model_of(run).new_tokens.ids[-1] + 1


def test_an_adapter_alone_with_new_rows_is_refused():
    task, data = pretrain("own head")
    with expect_problem("conflicting-values plugins.lora.merge", PluginError):
        make_run(task, MODEL, data, [LoRA(r=2, target_modules=["q_proj"], merge=False)])


@pytest.mark.slow
def test_a_run_resumes_with_its_new_rows():
    _, data = pretrain("tied head")
    lora = {"lora": {"r": 2, "target_modules": ["c_attn"]}}
    check_interrupted(Case({"model": MODEL, "data": data}, [lora], {"lr": 0.1}), "limit", 3)
