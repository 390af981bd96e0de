"""attention: the implementation is chosen, said, and gives the same numbers.

Modules:
    plugins/fastloop_plugins/kernels/attention.py
"""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from log_lines import find_lines
from text_helpers import TINY, make_run

from fastloop import PluginError
from fastloop.testing import assert_problem, expect_problem
from fastloop_cpu import _fast_dropout
from fastloop_cpu._fast_dropout import BLOCKED
from fastloop_plugins.kernels.attention import Attention
from fastloop_plugins.kernels.compile import Compile

DATA = {"files": {"train": "a.csv", "validation": "a.csv"}, "label": "label", "max_length": 32}
STILL = TINY | {"dropout": 0.0, "attention_dropout": 0.0, "seq_classif_dropout": 0.0}


def run(*objects, config=STILL):
    Path("a.csv").write_text("text,label\n" + "".join(f"{'good ' * (1 + i % 9)},{i % 2}\n" for i in range(32)))
    return make_run(
        "text-classification", {"config": config, "tokenizer": {"kind": "word"}}, DATA, objects=list(objects)
    )


@pytest.mark.parametrize("implementation", ["eager", "sdpa", "auto", "blocked"])
def test_every_implementation_gives_the_same_loss_and_gradient(implementation):
    made = run(Attention(implementation=implementation))
    plain = run()
    expected = {"auto": BLOCKED, "blocked": BLOCKED}.get(implementation, implementation)
    assert made.unwrap_model().config._attn_implementation == expected
    batch = next(made.train_loader.batches()).inputs
    losses = [one.hooks.compute_loss(run=one, model=one.model, batch=batch).loss for one in (made, plain)]
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-5)
    for loss in losses:
        loss.backward()
    for (name, one), (_, other) in zip(made.model.named_parameters(), plain.model.named_parameters(), strict=True):
        torch.testing.assert_close(
            one.grad, other.grad, rtol=1e-4, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_blocked_leaves_torchs_dropout_and_long_sequences_to_torch(monkeypatch):
    query = torch.randn(1, 2, 8, 4, requires_grad=True)
    monkeypatch.setattr(_fast_dropout.AttentionWithDropout, "apply", lambda *arguments: pytest.fail("computed here"))
    module = torch.nn.Module()
    assert _fast_dropout.attention(module, query, query, query, None, dropout=0.5, drops=False)[0].shape == (1, 8, 2, 4)
    monkeypatch.setattr(_fast_dropout, "LONGEST", 7)
    assert _fast_dropout.attention(module, query, query, query, None)[0].shape == (1, 8, 2, 4)


def test_attention_logs_choice_and_reason(caplog):
    caplog.set_level(logging.INFO, "fastloop")
    run(Attention())
    assert find_lines(caplog, "attention: blocked cpu")


# on loading torch's compiler
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_with_compile_it_is_torchs(caplog):
    caplog.set_level(logging.INFO, "fastloop")
    run(Attention(), Compile())
    assert find_lines(caplog, "attention: sdpa compile")


def test_a_model_that_is_not_transformers_is_left_alone(tiny_run, caplog):
    tiny_run([Attention()], epochs=1)
    assert_problem(caplog, "no-effect")


FNET = {"model_type": "fnet", "hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 16}
XLNET = {"model_type": "xlnet", "d_model": 16, "n_layer": 1, "n_head": 2, "d_inner": 16}


@pytest.mark.parametrize("implementation", ["sdpa", "flex_attention"])
@pytest.mark.parametrize("config", [FNET, XLNET], ids=["fnet", "xlnet"])
def test_an_implementation_that_the_model_does_not_have_is_refused(config, implementation):
    expected = f"unsupported-model plugins.attention.implementation: {implementation!r} ForSequenceClassification eager"
    with expect_problem(expected, PluginError) as raised:
        run(Attention(implementation=implementation), config=config)
    assert "http" not in str(raised.value)


def test_flash_attention_is_refused_where_it_cannot_be():
    with expect_problem("requirement-missing 'attention'", PluginError):
        run(Attention(implementation="flash_attention_2"))
