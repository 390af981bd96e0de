"""The auxiliary loss of a router, ``output_router_logits: true``: training adds it like transformers, or refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from text_helpers import make_run
from training_runs import execute

from fastloop import Plugin, RecipeError
from fastloop.testing import assert_problem, expect_problem
from fastloop_plugins.data.packing import Packing

SIZES = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 48,
}
ROUTED = {
    **SIZES,
    "num_key_value_heads": 1,
    "initializer_range": 0.2,
    "output_router_logits": True,
    "num_experts_per_tok": 2,
}
MODELS = {
    "qwen2_moe": ROUTED | {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "num_experts": 4},
    "mixtral": ROUTED | {"num_local_experts": 4, "router_aux_loss_coef": 0.1},
    "olmoe": ROUTED | {"num_experts": 4},
    "jetmoe": {key: value for key, value in ROUTED.items() if key != "num_attention_heads"}
    | {"num_local_experts": 4, "kv_channels": 8},
}
NLLB = {
    "model_type": "nllb-moe",
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_sparse_step": 2,
    "num_experts": 4,
}
NLLB |= {
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "decoder_sparse_step": 2,
}


def made(kind: str, *plugins: Plugin, config: dict[str, Any] | None = None, **train: Any) -> Any:
    """A run on 12 rows of different lengths, of which the answers have a loss."""
    table = [{"q": f"what is {i} " + "and " * (i % 5), "a": f"it is {i} " + "so " * (i * 3 % 7)} for i in range(12)]
    Path("a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in table))
    data = {"files": {"train": "a.jsonl", "validation": "a.jsonl"}, "prompt": "q", "completion": "a", "max_length": 40}
    model = {"config": {"model_type": kind, **MODELS[kind], **(config or {})}, "tokenizer": {"kind": "word"}}
    return make_run("causal-lm", model, data, plugins, **{"batch_size": 6} | train)


def gradients(model: Any) -> dict[str, torch.Tensor]:
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


def expected(run: Any, batches: list[Any]) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients by transformers' own loss of each micro-batch, weighted by target tokens."""
    model, total = run.unwrap_model(), sum(batch.loss_weight for batch in batches)
    model.zero_grad()
    summed = 0.0
    for batch in batches:
        inputs = {name: value for name, value in batch.inputs.items() if name != "targets"}
        labels = torch.cat([torch.full_like(inputs["input_ids"][:, :1], -100), batch.inputs["targets"][:, :-1]], dim=1)
        loss = model(**inputs, labels=labels, use_cache=False).loss * batch.loss_weight / total
        loss.backward()
        summed += loss.item()
    found = gradients(model)
    model.zero_grad()
    return summed, found


@pytest.mark.parametrize("size", [None, 2], ids=["one batch", "micro-batches"])
@pytest.mark.parametrize("kind", MODELS)
def test_training_adds_the_routers_loss_as_transformers_does(kind, size):
    run = made(kind, micro_batch_size=size)
    batches = list(run.train_loader.batches())[: 6 // (size or 6)]
    assert any((batch.inputs["attention_mask"] == 0).any() for batch in batches)
    loss, wanted = expected(run, batches)
    found = run.accumulate_gradients(batches)
    assert float(found) == pytest.approx(loss, rel=1e-5)
    for name, gradient in gradients(run.unwrap_model()).items():
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-4, atol=1e-6)


def test_the_routers_loss_is_not_small_and_its_absence_is_seen():
    losses = [float(one.accumulate_gradients(list(one.train_loader.batches())[:1])) for one in
              (made("mixtral"), made("mixtral", config={"output_router_logits": False}))]  # fmt: skip
    assert losses[0] > losses[1] * 1.02


def test_packed_rows_have_the_same_routers_loss():
    losses = []
    for plugins in ([], [Packing()]):
        run = made("mixtral", *plugins)
        losses.append(float(run.accumulate_gradients(list(run.train_loader.batches())[:1])))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_evaluation_and_perplexity_are_of_cross_entropy_alone():
    metrics = [
        execute(made("mixtral", config={"output_router_logits": on}, lr=1e-12))["validation"] for on in (True, False)
    ]
    assert metrics[0] == pytest.approx(metrics[1], rel=1e-6)


def test_a_router_with_another_loss_is_refused(monkeypatch):
    from transformers import MixtralForCausalLM

    original = MixtralForCausalLM.forward

    def forward(self: Any, *arguments: Any, **keys: Any) -> Any:
        output = original(self, *arguments, **keys)
        if output.loss is not None:
            output.loss = output.loss + 0.01 * output.aux_loss
        return output

    monkeypatch.setattr(MixtralForCausalLM, "forward", forward)
    with pytest.raises(RecipeError) as caught:
        made("mixtral")
    assert_problem(caught.value.problem, "unsupported-model output_router_logits")


def test_an_encoder_decoder_with_a_routers_loss_is_refused_by_its_key():
    Path("a.jsonl").write_text("".join(json.dumps({"q": f"what is {i}", "a": f"it is {i}"}) + "\n" for i in range(12)))
    data = {"files": {"train": "a.jsonl"}, "text": "q", "target": "a", "max_length": 16, "max_target_length": 16}
    with expect_problem("unsupported-model output_router_logits", RecipeError):
        make_run("seq2seq", {"config": NLLB | {"output_router_logits": True}, "tokenizer": {"kind": "word"}}, data)
