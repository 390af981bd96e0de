"""fused-loss: the same losses and gradients as cross entropy of all logits, which never exist at once.

Modules:
    plugins/fastloop_plugins/kernels/fused_loss.py
    plugins/fastloop_plugins/text/chunked_loss.py
    plugins/fastloop_plugins/text/head_trial.py
"""

from __future__ import annotations

import json
import weakref
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from interrupted_runs import Case, check_evaluation, check_interrupted
from text_helpers import TINY_GPT, make_run
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from training_runs import execute

from fastloop import Plugin, PluginError, hookimpl
from fastloop.lifecycle import build
from fastloop.plugins.resolve import resolve
from fastloop.recipe import make_recipe
from fastloop.testing import expect_problem
from fastloop_plugins.data.packing import Packing
from fastloop_plugins.kernels.compile import Compile
from fastloop_plugins.kernels.fused_loss import FusedLoss, default_tokens
from fastloop_plugins.precision.amp import Amp
from fastloop_plugins.text.chunked_loss import chunked_loss, chunked_token_losses
from fastloop_plugins.text.next_token_loss import add_loss

SIZES = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 48,
}
KEYS = SIZES | {"num_key_value_heads": 1}
WIDE = {"initializer_range": 0.2}
MODELS: dict[str, dict[str, Any]] = {
    "tied": TINY_GPT | WIDE | {"n_positions": 48, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "own head": KEYS | WIDE | {"model_type": "llama"},
    "head with bias": SIZES | WIDE | {"model_type": "phi"},
    "router": KEYS
    | WIDE
    | {
        "model_type": "mixtral",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "output_router_logits": True,
        "router_aux_loss_coef": 0.1,
    },
}
TOKENIZER = {"kind": "bpe", "vocab_size": 300}


class Keep(Plugin):
    """Losses and gradients of every step."""

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
def _rows():
    """Rows of different lengths, of which the answers have a loss."""
    table = [{"q": f"what is {i} " + "and " * (i % 5), "a": f"it is {i} " + "so " * (i * 3 % 7)} for i in range(16)]
    Path("a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in table))


def made(model: dict[str, Any], *plugins: Plugin, **train: Any) -> Any:
    data = {"files": {"train": "a.jsonl", "validation": "a.jsonl"}, "prompt": "q", "completion": "a", "max_length": 40}
    return make_run("causal-lm", {"config": model, "tokenizer": TOKENIZER}, data, plugins, **{"batch_size": 8} | train)


def trained(model: dict[str, Any], *plugins: Plugin, **train: Any) -> tuple[Keep, dict[str, float]]:
    keep = Keep()
    summary = execute(made(model, *plugins, keep, **train))
    return keep, summary["validation"]


def check_same(plain: Keep, fused: Keep, rtol: float, atol: float) -> None:
    assert fused.losses == pytest.approx(plain.losses, rel=rtol)
    for before, after in zip(plain.gradients, fused.gradients, strict=True):
        assert before.keys() == after.keys()
        for name, gradient in before.items():
            torch.testing.assert_close(
                after[name], gradient, rtol=rtol, atol=atol, msg=lambda text, name=name: f"{name}: {text}"
            )


@pytest.mark.parametrize("kind", MODELS)
def test_losses_gradients_and_metrics_are_those_of_all_logits(kind):
    (plain, expected), (fused, found) = trained(MODELS[kind]), trained(MODELS[kind], FusedLoss(chunk_tokens=7))
    check_same(plain, fused, 1e-4, 1e-6)
    assert found == pytest.approx(expected, rel=1e-5)
    assert found.keys() == {"loss", "perplexity"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plugins", "train"),
    [((), {"micro_batch_size": 2}), ((Packing,), {}), ((Compile,), {})],
    ids=["micro-batches", "packing", "compile"],
)
def test_with(plugins, train):
    def others() -> list[Plugin]:
        return [
            plugin(**({"backend": "aot_eager", "fullgraph": True} if plugin is Compile else {})) for plugin in plugins
        ]

    (plain, expected), (fused, found) = (
        trained(MODELS["tied"], *others(), *more, **train) for more in ((), (FusedLoss(chunk_tokens=64),))
    )
    check_same(plain, fused, 1e-4, 1e-6)
    assert found == pytest.approx(expected, rel=1e-5)


def test_under_bf16_autocast():
    (plain, expected), (fused, found) = (
        trained(MODELS["tied"], Amp(dtype="bf16"), *more) for more in ((), (FusedLoss(chunk_tokens=64),))
    )
    assert fused.losses == pytest.approx(plain.losses, rel=2e-3)
    for name, gradient in plain.gradients[0].items():
        assert (fused.gradients[0][name] - gradient).norm() <= 0.02 * gradient.norm(), name
    assert found["loss"] == pytest.approx(expected["loss"], rel=2e-3)


def losses(
    head: nn.Linear, hidden: torch.Tensor, targets: torch.Tensor, rows: int, dtype: torch.dtype, chunk: int | None
) -> Any:
    """Loss, and gradients of hidden states, weight and bias; ``chunk`` None: from all logits."""
    hidden = hidden.clone().requires_grad_()
    head.zero_grad()
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        if chunk is None:
            loss = cross_entropy(head(hidden)[..., :rows].flatten(0, 1).float(), targets.flatten(), ignore_index=-100)
        else:
            loss = chunked_loss(head, hidden, targets, rows, chunk)
    (3 * loss).backward()  # a share of a step scales the loss
    return loss.detach(), hidden.grad, head.weight.grad.clone(), head.bias.grad.clone()


@pytest.mark.parametrize("chunk", [1, 5, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_ignored_tokens_and_rows_after_the_vocabulary_have_no_part(dtype, chunk):
    torch.manual_seed(0)
    head, hidden, targets = nn.Linear(12, 40), torch.randn(2, 9, 12), torch.randint(37, (2, 9))
    targets[0, :4] = targets[1, -1] = -100
    precise = torch.float32 if dtype == torch.float16 else dtype  # of which the gradients would be too small
    expected, found = losses(head, hidden, targets, 37, precise, None), losses(head, hidden, targets, 37, dtype, chunk)
    for one, other in zip(found, expected, strict=True):
        assert (one - other).norm() <= (1e-6 if precise == torch.float32 else 1e-2) * other.norm()
    assert not found[2][37:].any()
    assert not found[1][0, :4].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_frozen_head_gives_the_same_loss_and_gradient_of_the_hidden_states(dtype):
    torch.manual_seed(0)
    head, hidden, targets = nn.Linear(12, 40), torch.randn(2, 9, 12), torch.randint(40, (2, 9))
    loss, gradient, _, _ = losses(head, hidden, targets, 40, dtype, 4)
    head.requires_grad_(False)
    hidden.requires_grad_()
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        frozen = chunked_loss(head, hidden, targets, 40, 4)
    (3 * frozen).backward()
    assert torch.equal(frozen.detach(), loss)
    assert torch.equal(hidden.grad, gradient)


@pytest.mark.parametrize(
    ("device", "rows", "tokens"), [("cpu", 128_000, 128), ("cpu", 2048, 2048), ("cuda", 2048, 1024), ("cuda", 7, 1024)]
)
def test_a_chunk_on_a_cpu_has_the_tokens_whose_logits_fit_its_cache(device, rows, tokens):
    assert default_tokens(device, rows) == tokens


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the tensors that operations have returned and that still exist.

    Attributes:
        peak: The most bytes so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live, self.peak, self.known = 0, 0, set[int]()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        views = {
            tensor.untyped_storage()._cdata
            for tensor in tree_leaves((args, kwargs))
            if isinstance(tensor, torch.Tensor)
        }
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            storage = tensor.untyped_storage() if isinstance(tensor, torch.Tensor) else None
            if storage is not None and storage._cdata not in self.known | views:
                self.known.add(storage._cdata)
                self.live += storage.nbytes()
                weakref.finalize(storage, self.free, storage._cdata, storage.nbytes())
        self.peak = max(self.peak, self.live)
        return result

    def free(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.live -= size


def peak_bytes(kind: str) -> int:
    """Bytes at the peak of loss and backward pass, for the vocabulary of GPT-2 and two rows of 1,024 tokens."""
    torch.manual_seed(0)
    head, targets = nn.Linear(64, 50_257, bias=False), torch.randint(50_257, (2, 1024))
    hidden = torch.randn(2, 1024, 64, requires_grad=True)
    with LiveBytes() as bytes:
        if kind == "fused":
            loss = chunked_loss(head, hidden, targets, None, 128)
        elif kind == "each token":
            loss = chunked_token_losses(head, hidden.flatten(0, 1), targets.flatten(), None, 128).sum()
        else:
            loss = cross_entropy(head(hidden).flatten(0, 1).float(), targets.flatten())
        loss.backward()
    return bytes.peak


@pytest.mark.slow
def test_the_logits_of_all_tokens_never_exist():
    assert peak_bytes("all logits") > 1_200_000_000
    assert peak_bytes("fused") < 66_000_000
    assert peak_bytes("each token") < 66_000_000


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"model_type": "cohere", "logit_scale": 0.25}, "75% logit_scale: 0.25"),
        ({"model_type": "granite", "logits_scaling": 8.0}, "87% logits_scaling: 8.0"),
        ({"model_type": "gemma2", "head_dim": 8}, "final_logit_softcapping: 30.0 attn_logit"),
    ],
    ids=["cohere", "granite", "gemma2"],
)
def test_a_model_that_changes_its_logits_is_refused(config, reason):
    with expect_problem(f"unsupported-model plugins.fused-loss {reason}", PluginError):
        made(KEYS | config, FusedLoss())


def test_auto_computes_the_tokens_with_a_loss_of_a_model_that_changes_its_logits():
    capped = KEYS | WIDE | {"model_type": "gemma2", "head_dim": 8, "final_logit_softcapping": 3.0}
    recipe = {
        "model": {"config": capped, "tokenizer": TOKENIZER},
        "data": {
            "files": {"train": "a.jsonl"},
            "prompt": "q",
            "completion": "a",
            "max_length": 40,
            "validation_fraction": 0,
        },
        "train": {"epochs": 1, "batch_size": 16, "max_steps": 1, "device": "cpu"},
    }
    losses, rows = [], []
    auto = {"auto": {}, "amp": False, "packing": False, "allocator": False, "cpu-affinity": False}
    for plugins in (auto, {}):
        keep = Keep()
        run = build(resolve(make_recipe(recipe | {"plugins": plugins}), objects=[keep]))
        head = run.unwrap_model().get_output_embeddings()
        head.register_forward_hook(lambda head, inputs, output: rows.append(output.flatten(0, -2).shape[0]))
        execute(run)
        losses += keep.losses
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert rows[0] < rows[1]  # those of the answers, and of all tokens


def test_a_head_that_is_no_linear_layer_is_refused():
    class OtherHead(Plugin):
        name = "other-head"
        runs_before = ("fused-loss",)

        @hookimpl
        def before_prepare(self, model) -> None:
            model.lm_head = nn.Sequential(model.lm_head)

    with expect_problem("unsupported-model", PluginError):
        made(MODELS["tied"], FusedLoss(), OtherHead())


def test_a_model_that_reads_its_logits_is_refused():
    class Reads(Plugin):
        name = "reads"
        runs_before = ("fused-loss",)

        @hookimpl
        def before_prepare(self, model) -> None:
            class Reading(nn.Module):
                def forward(self, logits):
                    return logits[:, :, :]

            inner, reading = type(model).forward, Reading()

            def forward(self, *args, **kwargs):
                output = inner(self, *args, **kwargs)
                output.logits = reading(output.logits)
                return output

            model.forward = MethodType(forward, model)
            add_loss(model)

    with expect_problem("unsupported-model GPT2LMHeadModel IndexError", PluginError):
        made(MODELS["tied"], FusedLoss(), Reads())


def test_it_needs_the_task():
    with expect_problem("missing-trait 'fused-loss' 'next-token-loss' 'text-classification'", PluginError):
        make_run(
            "text-classification", {"config": TINY_GPT}, {"files": {"train": "a.csv"}, "label": "label"}, [FusedLoss()]
        )


@pytest.mark.slow
def test_a_run_resumes_predicts_and_evaluates(cli):
    task = {
        "model": {"config": MODELS["tied"], "tokenizer": TOKENIZER},
        "data": {
            "files": {"train": "a.jsonl", "validation": "a.jsonl"},
            "prompt": "q",
            "completion": "a",
            "max_length": 40,
        },
    }
    fused = {"fused-loss": {"chunk_tokens": 20}}
    check_interrupted(Case(task, [fused], {"epochs": 3, "lr": 0.01}), "limit", 4)
    check_evaluation(cli)
    code, out, err = cli("predict", "cut", "what is 3", "plugins.causal-lm.max_new_tokens=4")
    assert code == 0, err
    assert out
