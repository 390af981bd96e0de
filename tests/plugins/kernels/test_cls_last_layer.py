"""cls-last-layer: the same losses and gradients with less computed.

Modules:
    plugins/fastloop_plugins/kernels/cls_last_layer.py
"""

from __future__ import annotations

import csv
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from text_helpers import make_run, rows
from training_runs import execute

from fastloop import Plugin, PluginError, hookimpl
from fastloop.testing import expect_problem
from fastloop_cpu.fast_dropout import FastDropout
from fastloop_plugins.kernels.attention import Attention
from fastloop_plugins.kernels.cls_last_layer import ClsLastLayer, at_first
from fastloop_plugins.memory.activation_checkpointing import ActivationCheckpointing
from fastloop_plugins.precision.amp import Amp

SIZES = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 40,
}
OFF = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
DISTILBERT = {
    "model_type": "distilbert",
    "dim": 16,
    "n_layers": 2,
    "n_heads": 2,
    "hidden_dim": 32,
    "max_position_embeddings": 32,
}
DISTILBERT |= {"dropout": 0.0, "attention_dropout": 0.0, "seq_classif_dropout": 0.0}
MODELS: dict[str, dict[str, Any]] = {
    "bert": SIZES | OFF | {"model_type": "bert"},
    "roberta": SIZES | OFF | {"model_type": "roberta"},
    "xlm-roberta": SIZES | OFF | {"model_type": "xlm-roberta"},
    "electra": SIZES | OFF | {"model_type": "electra", "embedding_size": 8},
    "distilbert": DISTILBERT,
}
DATA = {"files": {"train": "a.csv", "validation": "a.csv"}, "label": "label", "max_length": 32}


class Keep(Plugin):
    """Losses and gradients of every step, and how many positions the feed-forward part of each block saw."""

    name = "keep"

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []
        self.gradients: list[dict[str, torch.Tensor]] = []

    @hookimpl
    def before_optimizer_step(self, run) -> None:
        named = run.unwrap_model().named_parameters()
        self.gradients.append({name: value.grad.clone() for name, value in named if value.grad is not None})

    @hookimpl
    def after_step(self, loss) -> None:
        self.losses.append(loss.item())


@pytest.fixture(autouse=True)
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with Path("a.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["text", "label"])
        writer.writeheader()
        writer.writerows(rows())


def trained(model: dict[str, Any], *plugins: Plugin, **train: Any) -> tuple[Keep, dict[str, Any]]:
    keep = Keep()
    run = make_run("text-classification", {"config": model}, DATA, [*plugins, keep], **train)
    return keep, execute(run)


EAGER = [
    pytest.param(kind, "eager", marks=[] if kind == "bert" else pytest.mark.slow)  # one function of transformers
    for kind in MODELS
]


@pytest.mark.parametrize(("kind", "attention"), [*((kind, "sdpa") for kind in MODELS), *EAGER])
def test_losses_gradients_and_metrics_are_those_of_the_whole_layer(kind, attention):
    kernel = Attention(implementation=attention)
    (plain, expected), (short, found) = trained(MODELS[kind], kernel), trained(MODELS[kind], kernel, ClsLastLayer())
    assert short.losses == pytest.approx(plain.losses, rel=1e-5)
    for before, after in zip(plain.gradients, short.gradients, strict=True):
        assert before.keys() == after.keys()
        for name, gradient in before.items():
            torch.testing.assert_close(
                after[name], gradient, rtol=1e-3, atol=2e-6, msg=lambda text, name=name: f"{name}: {text}"
            )
    assert found["validation"]["loss"] == pytest.approx(expected["validation"]["loss"], rel=1e-5)


def test_the_last_layer_sees_one_position_and_the_others_all():
    class Widths(Plugin):
        name = "widths"

        @hookimpl
        def before_prepare(self, model) -> None:
            self.seen: dict[int, set[int]] = {}
            for number, layer in enumerate(model.bert.encoder.layer):
                layer.intermediate.register_forward_hook(
                    lambda _m, given, _o, number=number: self.see(number, given[0].shape[1])
                )

        def see(self, number: int, width: int) -> None:
            self.seen.setdefault(number, set()).add(width)

    widths = Widths()
    trained(MODELS["bert"], ClsLastLayer(), widths)
    assert widths.seen[1] == {1}
    assert min(widths.seen[0]) > 1


@pytest.mark.slow
def test_with_dropout_amp_and_activation_checkpointing():
    model = MODELS["bert"] | {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
    keep, _ = trained(model, ClsLastLayer(), FastDropout(), Amp(), ActivationCheckpointing(), epochs=16)
    assert sum(keep.losses[-3:]) < 0.8 * sum(keep.losses[:3])


def test_a_model_that_is_not_made_so_is_refused():
    model = {"model_type": "gpt2", "n_layer": 2, "n_head": 2, "n_embd": 16, "n_positions": 32}
    with expect_problem("unsupported-model plugins.cls-last-layer: GPT2ForSequenceClassification", PluginError):
        make_run("text-classification", {"config": model}, DATA, [ClsLastLayer()])


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("albert", "RuntimeError: output with shape"),
        ("rembert", "TypeError: attend"),
        ("roformer", "AttributeError: 'RoFormerSelfAttention' object has no attribute 'config'"),
        ("squeezebert", "TypeError: .* unexpected keyword argument 'everything'"),
        ("xlm", "AttributeError: 'MultiHeadAttention' object has no attribute"),
    ],
)
def test_a_model_with_the_names_of_bert_that_computes_otherwise_is_refused(kind, reason):
    more: dict[str, Any] = {
        "rembert": {"input_embedding_size": 16},
        "squeezebert": {"embedding_size": 16},
        "albert": {"embedding_size": 16},
    }
    xlm = {"model_type": "xlm", "emb_dim": 16, "n_layers": 2, "n_heads": 2, "max_position_embeddings": 40}
    model = xlm if kind == "xlm" else SIZES | OFF | {"model_type": kind} | more.get(kind, {})
    with expect_problem("unsupported-model plugins.cls-last-layer:", PluginError) as refused:
        make_run("text-classification", {"config": model}, DATA, [ClsLastLayer()])
    assert re.search(reason, str(refused.value))


def test_a_model_that_reads_other_tokens_is_refused():
    class Mean(Plugin):
        name = "mean"
        runs_before = ("cls-last-layer",)

        @hookimpl
        def before_prepare(self, model) -> None:
            pooler = model.bert.pooler
            whole = pooler.forward
            pooler.forward = lambda states: whole(states.mean(1, keepdim=True))

    with expect_problem("unsupported-model", PluginError):
        make_run("text-classification", {"config": MODELS["bert"]}, DATA, [ClsLastLayer(), Mean()])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's compiler
def test_ends_of_the_queries_stay_int32_when_compiled():
    """FlashAttention takes no other dtype. torch's compiler turns the sum over ones of int32 into numbers of int64."""

    def ends_of_queries(hidden, firsts, ends):
        return at_first(
            lambda *arguments, **options: options["cu_seq_lens_q"], hidden, first_tokens=firsts, cu_seq_lens_k=ends
        )

    ends = torch.tensor([0, 3, 5, 8], dtype=torch.int32)
    found = torch.compile(ends_of_queries)(torch.randn(1, 8, 4), torch.tensor([0, 3]), ends)
    assert found.dtype == torch.int32
    assert found.tolist() == [0, 1, 2, 2]
