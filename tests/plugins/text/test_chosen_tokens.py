"""log_probabilities: those of chosen tokens, from chunks, from the places alone, and from all logits, are the same.

Modules:
    plugins/fastloop_plugins/text/chosen_tokens.py
    plugins/fastloop_plugins/text/next_token_loss.py
"""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM

from fastloop import PluginError, RecipeError
from fastloop.recipe import make_recipe
from fastloop.testing import expect_problem
from fastloop_plugins.text import add_loss
from fastloop_plugins.text.chosen_tokens import WithPlaces, chunk_log_probabilities, log_probabilities
from fastloop_plugins.text.chunked_loss import chunked_token_losses
from fastloop_plugins.text.next_token_loss import adapt_head, restore_head, with_loss

SIZES = {
    "vocab_size": 37,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 24,
    "max_position_embeddings": 32,
    "initializer_range": 0.2,
}
MODELS: dict[str, dict[str, Any]] = {
    "own head": SIZES | {"model_type": "llama"},
    "tied": SIZES | {"model_type": "llama", "tie_word_embeddings": True},
    "head with bias": SIZES | {"model_type": "phi"},
    "scaled logits": SIZES | {"model_type": "granite", "logits_scaling": 8.0},
    "capped logits": SIZES | {"model_type": "gemma2", "head_dim": 8, "final_logit_softcapping": 3.0},
}


class OneProcess:
    """Stands for a run of one process, of which only its recipe and the gathering of objects are read."""

    recipe = make_recipe({"output": "run"})

    class processes:
        @staticmethod
        def all_gather_object(value: Any) -> list[Any]:
            return [value]


def built(kind: str) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**MODELS[kind]))
    add_loss(model)
    return model


def inputs() -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """A batch of two rows, of which the second is shorter; its targets, and the places of seven of them."""
    torch.manual_seed(1)
    ids = torch.randint(37, (2, 9))
    targets = torch.full_like(ids, -100)
    targets[0, 3:8], targets[1, 1:3] = ids[0, 4:9], ids[1, 2:4]
    mask = torch.ones_like(ids)
    mask[1, 5:] = 0
    places = (targets.flatten() >= 0).nonzero()[:, 0]
    return {"input_ids": ids, "attention_mask": mask}, targets, places


def values(model: Any, *, places: bool, temperature: float = 1.0) -> tuple[Tensor, dict[str, Tensor]]:
    """The log-probabilities of the chosen tokens, and gradients of their weighted sum."""
    batch, targets, chosen = inputs()
    model.zero_grad()
    found = log_probabilities(model, batch, targets, chosen if places else None, temperature)
    if not places:
        assert found.shape == targets.shape
        assert not found[targets < 0].any()
        found = found.flatten()[chosen]
    (found * torch.linspace(-1, 2, len(found))).sum().backward()
    return found.detach(), {name: weight.grad.clone() for name, weight in model.named_parameters()}


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("kind", MODELS)
def test_chunks_and_places_give_those_of_all_logits(kind, temperature):
    model = built(kind)
    batch, targets, places = inputs()
    logits = model(**batch, use_cache=False).logits.flatten(0, 1).float() / temperature
    expected = -cross_entropy(logits, targets.flatten(), reduction="none", ignore_index=-100)[places].detach()
    whole, gradients = values(model, places=False, temperature=temperature)
    torch.testing.assert_close(whole, expected, rtol=1e-6, atol=1e-6)
    for chunk in (None, 3):
        if chunk is None:
            adapt_head(model)
        else:
            restore_head(model)
            chunk_log_probabilities(OneProcess(), model, chunk)
        assert model.has_adapted_head == (chunk is None or "logits" not in kind)
        for given in (True, False):
            found, own = values(model, places=given, temperature=temperature)
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
            for name, gradient in gradients.items():
                assert (own[name] - gradient).norm() <= 2e-6 * gradient.norm(), name


@pytest.mark.parametrize("asks", [True, False])
def test_a_router_whose_loss_would_be_left_out_is_refused(asks):
    """Tasks on log-probabilities, such as ``dpo``, add no auxiliary loss."""
    experts = {"model_type": "mixtral", "num_local_experts": 2, "output_router_logits": asks}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**SIZES | experts))
    add_loss(model)
    with expect_problem("unsupported-model output_router_logits", RecipeError) if asks else nullcontext():
        chunk_log_probabilities(OneProcess(), model, 4)


def test_a_copy_computes_with_its_own_head():
    model = built("own head")
    chunk_log_probabilities(OneProcess(), model, 4)
    other = copy.deepcopy(model)
    with torch.no_grad():
        model.lm_head.weight.zero_()
    before, _ = values(other, places=True)
    assert values(model, places=True)[0] == pytest.approx(-torch.tensor(37.0).log().item(), abs=1e-5)
    assert before.std() > 0.1


def test_a_head_that_is_replaced_later_computes_all_logits():
    model = built("own head")
    chunk_log_probabilities(OneProcess(), model, 4)
    expected, _ = values(model, places=True)
    plain = nn.Linear(16, 37, bias=False)
    plain.weight = model.lm_head.weight
    model.set_output_embeddings(nn.Sequential(plain))
    found, _ = values(model, places=True)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_losses_and_gradients_under_autocast(dtype):
    torch.manual_seed(0)
    head, hidden, targets = nn.Linear(24, 80), torch.randn(30, 24), torch.randint(80, (30,))
    targets[::7] = -100
    results = []
    for chunk in (None, 7):
        head.zero_grad()
        states = hidden.clone().requires_grad_()
        with torch.autocast("cpu", dtype, enabled=chunk is not None):
            if chunk is None:  # in float32
                losses = cross_entropy(head(states), targets, ignore_index=-100, reduction="none")
            else:
                losses = chunked_token_losses(head, states, targets, None, chunk)
        (losses * torch.linspace(-1, 2, 30)).sum().backward()
        results.append((losses.detach(), states.grad, head.weight.grad.clone(), head.bias.grad.clone()))
    for expected, found in zip(*results, strict=True):
        assert found.dtype == torch.float32
        assert (found - expected).norm() <= (1e-2 if dtype == torch.bfloat16 else 1e-6) * expected.norm()


def test_the_collator_names_the_places():
    from fastloop import Batch

    _, targets, places = inputs()
    batch = WithPlaces(lambda samples: Batch({"targets": targets}, loss_weight=7, tokens=14))([])
    assert batch.inputs["places"].tolist() == places.tolist() == [3, 4, 5, 6, 7, 10, 11]
    assert (batch.loss_weight, batch.tokens) == (7, 14)
    assert "places" not in WithPlaces(lambda samples: Batch({"input_ids": targets}))([]).inputs


def test_a_model_without_add_loss_is_refused():
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**MODELS["own head"]))
    batch, targets, places = inputs()
    with expect_problem("unsupported-model add_loss", PluginError):
        log_probabilities(model, batch, targets, places)
    assert with_loss(model) is None
