"""target-logits: the same losses and gradients as the head of all tokens, from fewer rows of the head.

Modules:
    plugins/fastloop_plugins/kernels/target_logits.py
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from long_form import long_form_only
from test_fused_loss import KEYS, MODELS, _rows, check_same, made, trained
from training_runs import execute

from fastloop import Plugin, PluginError, hookimpl
from fastloop.testing import expect_problem
from fastloop_plugins.data.packing import Packing
from fastloop_plugins.kernels.compile import Compile
from fastloop_plugins.kernels.target_logits import TargetLogits
from fastloop_plugins.precision.amp import Amp

__all__ = ["_rows"]  # a fixture of every test
CHANGED = {
    "scaled logits": KEYS | {"model_type": "granite", "logits_scaling": 8.0, "initializer_range": 0.2},
    "capped logits": KEYS
    | {"model_type": "gemma2", "head_dim": 8, "final_logit_softcapping": 3.0, "initializer_range": 0.2},
}


class HeadRows(Plugin):
    """Counts the tokens that the head computes, and those with a loss."""

    name = "head-rows"
    runs_after = ("target-logits",)

    def __init__(self) -> None:
        super().__init__()
        self.computed, self.chosen, self.whole = 0, 0, 0

    @hookimpl
    def before_prepare(self, model: Any) -> None:
        model.get_output_embeddings().register_forward_hook(self.count)

    def count(self, head: Any, inputs: Any, output: torch.Tensor) -> None:
        if head.training:
            self.computed += output.flatten(0, -2).shape[0]

    @hookimpl
    def before_step(self, batches: Any) -> None:
        for batch in batches:
            self.chosen += int((batch.inputs["targets"] >= 0).sum())
            self.whole += batch.inputs["targets"].numel()


@pytest.mark.parametrize("kind", MODELS | CHANGED)
def test_losses_gradients_and_metrics_are_those_of_all_tokens(kind):
    model = (MODELS | CHANGED)[kind]
    (plain, expected), (chosen, found) = trained(model), trained(model, TargetLogits())
    check_same(plain, chosen, 1e-4, 1e-6)
    assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_the_head_computes_the_tokens_with_a_loss(packed):
    rows = HeadRows()
    execute(made(MODELS["tied"], TargetLogits(), *[Packing()] * packed, rows))
    assert 0 < rows.computed == rows.chosen < rows.whole


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plugins", "train"),
    [
        (lambda: [], {"micro_batch_size": 2}),
        (lambda: [Packing()], {}),
        pytest.param(lambda: [Compile(backend="aot_eager", fullgraph=True)], {}, marks=long_form_only),
    ],
    ids=["micro-batches", "packing", "compile"],
)
def test_with(plugins, train):
    plain, expected = trained(MODELS["tied"], *plugins(), **train)
    chosen, found = trained(MODELS["tied"], *plugins(), TargetLogits(), **train)
    check_same(plain, chosen, 1e-4, 1e-6)
    assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_one_graph_computes_any_number_of_tokens():
    plain, chosen = (
        execute(made(MODELS["tied"], Compile(backend="aot_eager"), *more, epochs=3, batch_size=4))["compile"]
        for more in ([], [TargetLogits()])
    )
    assert chosen["graphs"] == plain["graphs"]
    assert chosen["graph_breaks"] == 0


def test_under_bf16_autocast():
    plain, _ = trained(MODELS["tied"], Amp(dtype="bf16"))
    chosen, _ = trained(MODELS["tied"], Amp(dtype="bf16"), TargetLogits())
    assert chosen.losses == pytest.approx(plain.losses, rel=2e-3)


def test_a_head_that_is_no_linear_layer_is_refused():
    class OtherHead(Plugin):
        name = "other-head"
        runs_before = ("target-logits",)

        @hookimpl
        def before_prepare(self, model: Any) -> None:
            model.lm_head = torch.nn.Sequential(model.lm_head)

    with expect_problem("unsupported-model Sequential target-logits", PluginError):
        made(MODELS["tied"], TargetLogits(), OtherHead())
