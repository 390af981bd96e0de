"""A loss of torch beside a model of transformers with logits for each token: the numbers of the model's own loss.

Modules:
    plugins/fastloop_plugins/tasks/shared/user_losses.py
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    DistilBertConfig,
    DistilBertForMaskedLM,
    DistilBertForTokenClassification,
    GPT2Config,
    GPT2LMHeadModel,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.trainer_pt_utils import LabelSmoother

from fastloop import Plugin, Trainer, UsageError, hookimpl
from fastloop.lifecycle import execute, open_run
from fastloop.plugins.resolve import resolve
from fastloop.recipe import make_recipe
from fastloop.testing import assert_problem, expect_problem, find_problems

QUIET: list[Any] = [{"log": False}, {"progress": False}]
TOKENS = 20
LENGTH = 7


def gpt2() -> Any:
    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=TOKENS, n_embd=16, n_layer=1, n_head=2, n_positions=16, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
        )
    )


def distilbert(kind: Any, **settings: Any) -> Any:
    torch.manual_seed(0)
    config = DistilBertConfig(
        vocab_size=TOKENS, dim=16, n_layers=1, n_heads=2, hidden_dim=32, max_position_embeddings=16, dropout=0,
        attention_dropout=0, **settings,
    )  # fmt: skip
    return kind(config)


def t5() -> Any:
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=TOKENS, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, dropout_rate=0,
        decoder_start_token_id=0,
    )  # fmt: skip
    return T5ForConditionalGeneration(config)


MODELS = {
    "causal language model": gpt2,
    "masked language model": lambda: distilbert(DistilBertForMaskedLM),
    # as many classes as tokens in a text, with which cross_entropy accepts (N, tokens, classes)
    "tags": lambda: distilbert(DistilBertForTokenClassification, num_labels=LENGTH),
    "encoder and decoder": t5,
}


def texts(classes: int = LENGTH) -> list[dict[str, Tensor]]:
    """16 texts. The first ones have more labels than the others."""
    draw = torch.Generator().manual_seed(0)
    rows = []
    for number in range(16):
        ids = torch.randint(1, TOKENS, (LENGTH,), generator=draw)
        labels = ids % classes
        labels[: number % 6] = -100
        rows.append({"input_ids": ids, "labels": labels})
    return rows


class Keep(Plugin):
    """Keeps the loss of each step."""

    name = "keep"

    def __init__(self, values: list[float]) -> None:
        super().__init__()
        self.values = values

    @hookimpl
    def after_step(self, loss: Tensor) -> None:
        self.values.append(loss.item())


def losses_of(model: Any, loss: Any, **settings: Any) -> list[float]:
    """The loss of each step."""
    values: list[float] = []
    settings = {"epochs": 2, "batch_size": 8, "lr": 1e-2, "device": "cpu"} | settings
    Trainer(model, texts(), loss=loss, plugins=[*QUIET, Keep(values)], **settings).fit()
    return values


@pytest.fixture(autouse=True)
def _in_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("micro", [8, 2], ids=["one micro-batch", "four micro-batches"])
@pytest.mark.parametrize("name", MODELS)
def test_cross_entropy_gives_the_numbers_of_the_models_own_loss(name, micro):
    own = losses_of(MODELS[name](), None, micro_batch_size=micro, output="own")
    given = losses_of(MODELS[name](), nn.CrossEntropyLoss(), micro_batch_size=micro, output="given")
    assert given == pytest.approx(own, rel=1e-5)
    whole = losses_of(MODELS[name](), functional.cross_entropy, output="whole")
    assert whole == pytest.approx(own, rel=1e-4), "micro-batches count their targets"


def test_label_smoothing_of_a_causal_language_model_is_that_of_transformers():
    model = gpt2()
    batch = {name: torch.stack([row[name] for row in texts()[:8]]) for name in ("input_ids", "labels")}
    with torch.no_grad():
        expected = LabelSmoother(epsilon=0.3)(model(**batch), batch["labels"], shift_labels=True)
    loss = nn.CrossEntropyLoss(label_smoothing=0.3)
    trainer = Trainer(model, texts()[:8], loss=loss, batch_size=8, output="run", plugins=QUIET, device="cpu")
    assert trainer.validate(texts()[:8])["loss"] == pytest.approx(expected.item(), rel=1e-5)


def over_tokens(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def test_another_loss_of_a_causal_language_model_is_refused():
    with expect_problem("labels-not-shifted loss: cross_entropy compute_loss", UsageError):
        losses_of(gpt2(), over_tokens)


def test_another_loss_of_tags_gets_all_tokens():
    own = losses_of(MODELS["tags"](), None, output="own")
    assert losses_of(MODELS["tags"](), over_tokens, output="given") == pytest.approx(own, rel=1e-5)


CODE = """
import torch
from torch.nn.functional import cross_entropy
import models_of_test


def model():
    return models_of_test.gpt2()


def without_logits():
    return models_of_test.WithoutLogits(models_of_test.gpt2())


def data():
    return {"train": models_of_test.texts()}


def over_tokens(logits, labels):
    return cross_entropy(logits.flatten(0, 1), labels.flatten())
"""


class WithoutLogits(nn.Module):
    """Returns a loss alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": self.model(input_ids=input_ids, labels=labels).loss}


def first_loss_of_recipe(monkeypatch: pytest.MonkeyPatch, loss: Any, model: str = "model") -> float:
    """The loss of the first step of a recipe, over four micro-batches."""
    monkeypatch.setitem(sys.modules, "models_of_test", sys.modules[__name__])
    Path("own_code.py").write_text(CODE)
    tree = {
        "model": {"module": f"own_code.py:{model}"},
        "data": {"module": "own_code.py:data"},
        "train": {"epochs": 1, "batch_size": 16, "micro_batch_size": 4, "device": "cpu"},
        "plugins": [{"module": {} if loss is None else {"loss": loss}}, *QUIET],
    }
    values: list[float] = []
    with open_run(resolve(make_recipe(tree, Path("recipe.yaml"))), [Keep(values)]) as run:
        execute(run)
    return values[0]


def test_the_loss_of_a_recipe_replaces_that_of_a_model_of_transformers(monkeypatch):
    own = first_loss_of_recipe(monkeypatch, None)
    assert first_loss_of_recipe(monkeypatch, "cross_entropy") == pytest.approx(own, rel=1e-5)
    smoothed = first_loss_of_recipe(monkeypatch, {"name": "cross_entropy", "label_smoothing": 0.5})
    assert abs(smoothed - own) > 1e-4
    with expect_problem("labels-not-shifted recipe.yaml: plugins.module.loss", UsageError):
        first_loss_of_recipe(monkeypatch, "own_code.py:over_tokens")


def test_a_loss_of_a_recipe_that_is_not_used_is_mentioned(monkeypatch, caplog):
    first_loss_of_recipe(monkeypatch, "cross_entropy", model="without_logits")
    assert_problem(caplog, "loss-not-used plugins.module.loss logits WithoutLogits")
    assert len(find_problems(caplog, "loss-not-used")) == 1
