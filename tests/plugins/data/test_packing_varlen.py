"""packing with one varlen kernel a layer: arguments, gradients, shapes and graphs, with CPU kernels.

Modules:
    plugins/fastloop_plugins/data/_padding_multiples.py
    plugins/fastloop_plugins/data/_varlen.py
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from log_lines import find_lines
from long_form import LONG
from test_packing import DECODERS, DISTILBERT, ENCODERS, Multiple, assert_same, computed, made
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from training_runs import execute
from varlen_helpers import kernels_on_cpu

from fastloop import PluginError
from fastloop.testing import expect_problem
from fastloop_plugins.data import _varlen
from fastloop_plugins.data._packing import PackedCollator
from fastloop_plugins.data._padding_multiples import SHAPES, cheap_multiple, multiple_for
from fastloop_plugins.data.length_bucketing import LengthBucketing
from fastloop_plugins.data.packing import Packing
from fastloop_plugins.kernels.cls_last_layer import ClsLastLayer
from fastloop_plugins.kernels.compile import Compile
from fastloop_plugins.memory.activation_checkpointing import ActivationCheckpointing
from fastloop_plugins.precision.amp import Amp

MODELS = ENCODERS | DECODERS
PER_TOKEN = ("input_ids", "position_ids", "targets")


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with kernels_on_cpu(monkeypatch):
        yield


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    ("name", "more"),
    [
        *(pytest.param(name, [], id=f"{name}-alone") for name in MODELS),
        *(
            pytest.param(
                name,
                [Multiple()],
                marks=[] if name in ("bert", "grouped") else pytest.mark.slow,  # an encoder and a decoder
                id=f"{name}-to a multiple",
            )
            for name in MODELS
        ),
    ],
)
def test_loss_and_gradients_are_those_of_padded_batches(name, more):
    config = MODELS[name]
    packed = made(config, Packing(), *more)
    assert packed.unwrap_model().config._attn_implementation == "fastloop_varlen"
    # the row of the end token has a gradient from each text, which adds up in another order
    assert_same(packed, made(config), rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("config", [ENCODERS["bert"], ENCODERS["distilbert"]], ids=["bert", "distilbert"])
def test_the_last_layer_may_be_computed_at_first_tokens_alone(config):
    assert_same(made(config, ClsLastLayer(), Packing(), Multiple()), made(config))


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_attention_stays_inside_each_sequence(causal):
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, heads, 12, 8, requires_grad=True) for heads in (4, 2, 2))
    ends = torch.tensor([0, 5, 5, 9, 12], dtype=torch.int32)  # the second is empty
    lengths = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 6, "max_length_k": 6}
    output, weights = _varlen.attention(None, query, key, value, None, scaling=0.3, is_causal=causal, **lengths)
    assert (output.shape, weights) == ((1, 12, 4, 8), None)
    gradient = torch.randn_like(output)
    found = torch.autograd.grad(output, (query, key, value), gradient)
    expected = torch.cat(
        [
            torch.nn.functional.scaled_dot_product_attention(
                *part, scale=0.3, is_causal=causal, enable_gqa=True
            ).transpose(1, 2)
            for part in zip(*(tensor.split([5, 4, 3], 2) for tensor in (query, key, value)), strict=True)
        ],
        dim=1,
    )
    torch.testing.assert_close(output, expected)
    for one, other in zip(found, torch.autograd.grad(expected, (query, key, value), gradient), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("multiple", [1, 256], ids=["no padding", "padding longer than any sequence"])
def test_padding_has_finite_outputs_and_no_gradient(multiple):
    packed = made(DECODERS["gpt2"], Packing(), multiple=multiple)
    batch = next(iter(packed.train_loader.batches()))
    loss, _, gradients = computed(packed, batch)
    assert loss == loss
    assert all(gradient.isfinite().all() for gradient in gradients.values())
    width, end = batch.inputs["input_ids"].shape[1], int(batch.inputs["cu_seq_lens_q"][-2])
    assert (width - end > 48) == (multiple == 256)
    inputs = {name: value for name, value in batch.inputs.items() if name != "targets"}
    embedded = packed.model.get_input_embeddings()(inputs.pop("input_ids")).detach().requires_grad_()
    logits = packed.model(inputs_embeds=embedded, use_cache=False, **inputs).logits
    assert logits.isfinite().all()
    torch.nn.functional.cross_entropy(logits[0], batch.inputs["targets"][0]).backward()
    assert not embedded.grad[:, end:].any()
    assert embedded.grad[:, :end].any()


@pytest.mark.usefixtures("kernels")
def test_dropout_repeats_in_backward_and_when_activations_are_recomputed():
    dropping = ENCODERS["bert"] | {"attention_probs_dropout_prob": 0.3}
    results = []
    for plugins in ([], [ActivationCheckpointing()]):
        one = made(dropping, Packing(), *plugins)
        torch.manual_seed(5)
        results.append(computed(one, next(one.train_loader.batches())))
        assert computed(one, next(one.train_loader.batches()))[0] != results[-1][0]
    assert results[0][0] == results[1][0]
    for name, gradient in results[0][2].items():
        torch.testing.assert_close(gradient, results[1][2][name])


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("config", [ENCODERS["bert"], DECODERS["llama"]], ids=["bert", "llama"])
def test_it_trains_in_mixed_precision(config):
    summary = execute(made(config, Packing(), Amp(dtype="bf16"), epochs=1))
    assert summary["validation"]["loss"] < 5


@pytest.mark.usefixtures("kernels")
def test_rows_differ_in_their_number_of_tokens_alone():
    packed = made(ENCODERS["distilbert"], Packing(), multiple=32)
    batches = [batch.inputs for batch in packed.train_loader.batches()]
    assert len(batches) == 5
    assert {inputs["input_ids"].shape[1] % 32 for inputs in batches} == {0}
    constant = [
        {name: getattr(value, "shape", value) for name, value in inputs.items() if name not in PER_TOKEN}
        for inputs in batches
    ]
    assert all(one == constant[0] for one in constant)
    assert constant[0]["cu_seq_lens_q"] == (8 + 2,)
    assert constant[0]["max_length_q"] == constant[0]["max_length_k"] == 32
    for inputs in batches:
        assert inputs["cu_seq_lens_q"][-1] == inputs["input_ids"].shape[1]


@pytest.mark.slow
# within torch's compiler
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute:UserWarning")
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("config", [ENCODERS["one layer"], *([DISTILBERT | {"n_layers": 1}] if LONG else [])])
def test_compiled_it_has_no_graph_break_and_a_graph_a_shape(config):
    compiling = Compile(backend="aot_eager", fullgraph=True, dynamic=False, on_failure="error", cache=False)
    packed = made(config, ClsLastLayer(), Packing(), compiling, multiple=32)
    shapes = []
    for batch in (batch for epoch in range(3) for batch in packed.train_loader.batches(epoch)):
        computed(packed, batch)
        shapes.append(batch.inputs["input_ids"].shape)
    assert 1 < len(set(shapes)) < len(shapes)
    summary: dict[str, Any] = {}
    compiling.write_summary(summary)
    compiling.teardown()
    assert summary["compile"]["graph_breaks"] == 0
    assert summary["compile"]["graphs"] == len(set(shapes))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute:UserWarning")
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("config", [ENCODERS["one layer"], DECODERS["llama"], *([DECODERS["gpt2"]] if LONG else [])])
def test_compiled_for_any_shape_it_computes_the_same(config):
    compiling = Compile(backend="aot_eager", fullgraph=True, on_failure="error", cache=False)
    packed = made(config, Packing(), compiling, multiple=1)
    assert_same(packed, made(config), rtol=1e-4, atol=1e-5)
    summary: dict[str, Any] = {}
    compiling.write_summary(summary)
    compiling.teardown()
    assert summary["compile"]["graph_breaks"] == 0
    assert summary["compile"]["graphs"] <= 3  # blocks of a language model have one length, unless a plugin cuts them


VARYING = {"packed": [ClsLastLayer, Packing], "similar lengths": [LengthBucketing], "padded": []}
"""Plugins whose batches have several shapes."""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute:UserWarning")
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("plugins", VARYING.values(), ids=VARYING)
def test_a_run_compiles_one_graph_to_train_and_one_to_evaluate(plugins):
    """40 texts in batches of 12, and of 4 at the end of an epoch."""
    compiling = Compile(backend="eager", fullgraph=True, on_failure="error", cache=False)
    others = [plugin() for plugin in plugins]
    compiled = made(ENCODERS["one layer"], *others, compiling, multiple=8, batch_size=12, epochs=2)
    shapes = {batch.inputs["input_ids"].shape for batch in compiled.train_loader.batches()}
    counts = execute(compiled)["compile"]
    assert len(shapes) > 1
    assert counts["graphs"] == 2
    assert counts["recompilations"] == 1
    assert counts["recompile_reasons"] == ["GLOBAL_STATE changed: grad_mode "]


class NoHostReads(TorchDispatchMode):
    """Fails where Python reads a tensor's value, for which a GPU's host waits."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in ("_local_scalar_dense", "is_nonzero", "nonzero", "equal"), f"{name} reads from the device"
        return func(*args, **kwargs or {})


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    "config", [ENCODERS["bert"], ENCODERS["distilbert"], DECODERS["llama"]], ids=["bert", "distilbert", "llama"]
)
def test_a_step_reads_nothing_from_the_device(config, monkeypatch):
    packed = made(config, *([ClsLastLayer()] if config in ENCODERS.values() else []), Packing(), multiple=16)
    batch = next(packed.train_loader.batches())
    # The CPU kernel of Python reads where that of a GPU does not.
    monkeypatch.setattr(_varlen.torch.ops.aten, "_flash_attention_forward", stands_in)
    packed.model.train()
    with NoHostReads():
        output = packed.hooks.compute_loss(run=packed, model=packed.model, batch=batch.inputs)
        output.loss.backward()


def stands_in(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    """Reads all of its inputs and no numbers."""
    return query + key.mean() + value.mean() + args[0].sum() + args[1].sum(), query


@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)
def test_torchs_own_shapes_and_gradient_formulas_accept_the_calls(config, monkeypatch):
    monkeypatch.setattr(_varlen, "missing", lambda device, dtype, head_size: None)
    packed = made(
        config,
        *([ClsLastLayer()] if config in ENCODERS.values() and "n_layers" in config else []),
        Packing(),
        multiple=16,
    )
    batch = next(packed.train_loader.batches())
    model = packed.model.to("meta", torch.bfloat16)
    model.config.pad_token_id = None  # GPT-2 looks for padding among the ids
    inputs = {name: value.to("meta") if isinstance(value, Tensor) else value for name, value in batch.inputs.items()}
    output = packed.hooks.compute_loss(run=packed, model=model, batch=inputs)
    output.loss.backward()
    for parameter in model.parameters():
        if parameter.grad is not None:
            assert (parameter.grad.shape, parameter.grad.dtype) == (parameter.shape, torch.bfloat16)
    assert sum(parameter.grad is not None for parameter in model.parameters()) > 10


@pytest.mark.parametrize(
    ("device", "dtype", "size", "why"),
    [
        ("cpu", torch.bfloat16, 64, "the device is cpu"),
        ("cuda", torch.float32, 64, "the precision is torch.float32"),
        ("cuda", torch.float16, 12, "heads have size 12"),
        ("cuda", torch.bfloat16, 264, "heads have size 264"),
    ],
)
def test_where_there_is_no_kernel(device, dtype, size, why):
    assert _varlen.missing(torch.device(device), dtype, size) == why


def test_a_padded_batch_of_several_sequences_is_refused():
    query = torch.ones(2, 1, 3, 8)
    with expect_problem("padded-batch 2", PluginError):
        _varlen.attention(None, query, query, query, None)
    output, _ = _varlen.attention(None, query[:1], query[:1], query[:1], None, is_causal=False)
    assert output.shape == (1, 3, 1, 8)


@pytest.mark.parametrize("config", [ENCODERS["bert"], DECODERS["gpt2"]], ids=["bert", "gpt2"])
def test_a_collator_that_pads_makes_the_same_row(config):
    packed = made(config, Packing())
    collate = packed.loaders.collators["train"].collate
    samples = [packed.datasets["train"][i] for i in range(8)]
    one, other = PackedCollator(collate, 16)(samples), PackedCollator(lambda samples: collate(samples), 16)(samples)
    assert (one.loss_weight, one.tokens) == (other.loss_weight, other.tokens)
    assert one.inputs.keys() == other.inputs.keys()
    for name in set(one.inputs) - {"packed", "input_ids"}:  # of which the padding differs
        assert torch.equal(one.inputs[name], other.inputs[name]), name
    assert torch.equal(one.inputs["input_ids"][:, : one.tokens], other.inputs["input_ids"][:, : one.tokens])
    assert one.inputs["packed"].lengths == other.inputs["packed"].lengths


def test_a_multiple_leaves_few_shapes():
    rows = torch.randint(1500, 4500, (3000,), generator=torch.Generator().manual_seed(0)).tolist()
    multiple = multiple_for(rows, 64)
    shapes = [len({-(-row // tried) for row in rows}) for tried in (multiple - 64, multiple)]
    assert multiple % 64 == 0
    assert shapes[0] > SHAPES >= shapes[1]
    assert multiple_for([100, 120, 130], 64) == 64


@pytest.mark.parametrize(("size", "multiple"), [(64, 1), (400, 8), (4000, 64), (400_000, 64)])
def test_a_multiple_on_a_cpu_adds_few_tokens(size, multiple):
    rows = torch.randint(size // 2, size, (3000,), generator=torch.Generator().manual_seed(0)).tolist()
    assert cheap_multiple(rows) == multiple
    assert sum(-(-row // multiple) * multiple for row in rows) <= 1.02 * sum(rows)


def test_shapes_are_logged(caplog):
    caplog.set_level(logging.INFO, "fastloop")
    made(ENCODERS["bert"], Packing(), multiple=64)
    assert find_lines(caplog, "packing: 64")


class TestOnCuda:
    """The real kernel, in bf16."""

    pytestmark = [
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
        pytest.mark.filterwarnings("ignore"),  # warnings of torch's compiler
    ]
    BERT = ENCODERS["bert"] | {"hidden_size": 128, "intermediate_size": 256}

    def made(self, config: dict[str, Any], *plugins: Any) -> tuple[Any, list[Any]]:
        """A run on the GPU and an epoch's batches there."""
        run = made(config, *plugins, device="auto")
        return run, [batch for (batch,) in run.to_device([batch] for batch in run.train_loader.batches())]

    @pytest.mark.parametrize("config", [BERT, DECODERS["llama"]], ids=["bert", "llama"])
    def test_loss_and_gradients_are_as_near_to_fp32_as_those_of_padded_batches(self, config):
        packed, batches = self.made(config, Packing(), Amp(dtype="bf16"))
        assert packed.unwrap_model().config._attn_implementation == "fastloop_varlen"
        (half, of_half), (full, of_full) = self.made(config, Amp(dtype="bf16")), self.made(config)
        for ours, padded, exact in zip(batches, of_half, of_full, strict=True):
            (loss, _, gradients), (_, _, others), (expected, _, wanted) = (
                computed(packed, ours),
                computed(half, padded),
                computed(full, exact),
            )
            assert loss == pytest.approx(expected, rel=0.02)
            assert gradients.keys() == wanted.keys()
            total = torch.stack([gradient.norm() for gradient in wanted.values()]).norm()
            for name, gradient in wanted.items():
                assert gradients[name].isfinite().all()
                allowed = 2 * (others[name] - gradient).norm() + 0.01 * gradient.norm() + 1e-3 * total
                assert (gradients[name] - gradient).norm() <= allowed, name

    def test_dropout_drops_its_share_and_backward_drops_the_same(self):
        rate, tokens = 0.25, 64
        query = torch.zeros(1, 8, 3 * tokens, tokens, device="cuda", dtype=torch.bfloat16)
        value = (
            torch.eye(tokens, device="cuda", dtype=torch.bfloat16)
            .repeat(3, 1)
            .expand(1, 8, -1, -1)
            .clone()
            .requires_grad_()
        )
        ends = torch.arange(4, device="cuda", dtype=torch.int32) * tokens
        lengths = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": tokens, "max_length_k": tokens}
        found = [
            _varlen.attention(None, query, query, value, None, dropout=rate, is_causal=False, **lengths)[0]
            for _ in range(2)
        ]
        assert (found[0] == 0).float().mean().item() == pytest.approx(rate, abs=0.02)
        assert found[0].float().sum(-1).mean().item() == pytest.approx(1, abs=0.02)
        assert not torch.equal(*found)
        kept = found[0].detach()[0].unflatten(0, (3, tokens)).permute(0, 2, 1, 3)  # (sequences, heads, queries, keys)
        eye = torch.eye(tokens, device="cuda", dtype=torch.bfloat16).repeat(3, 1)[None, :, None].expand_as(found[0])
        (gradient,) = torch.autograd.grad(found[0], value, eye)
        assert torch.equal(gradient[0].unflatten(1, (3, tokens)).transpose(0, 1) != 0, kept.transpose(2, 3) != 0)

    def test_a_step_does_not_wait_for_the_device(self):
        packed, batches = self.made(self.BERT, ClsLastLayer(), Packing(), Amp(dtype="bf16"))
        computed(packed, batches[0])
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            packed.hooks.compute_loss(run=packed, model=packed.model, batch=batches[1].inputs).loss.backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def test_cuda_graphs_are_recorded_once_a_shape_and_replay_other_dropout(self):
        compiling = Compile(mode="reduce-overhead", fullgraph=True, on_failure="error", cache=False)
        packed, batches = self.made(self.BERT, ClsLastLayer(), Packing(), Amp(dtype="bf16"), compiling)
        eager, others = self.made(self.BERT, ClsLastLayer(), Packing(), Amp(dtype="bf16"))
        for _ in range(3):  # warm up, record, replay
            for one, other in zip(batches, others, strict=True):
                assert computed(packed, one)[0] == pytest.approx(computed(eager, other)[0], rel=0.02)
        summary: dict[str, Any] = {}
        compiling.write_summary(summary)
        compiling.teardown()
        assert summary["compile"]["graph_breaks"] == summary["compile"]["cuda_graphs_skipped"] == 0
        dropping, batches = self.made(
            self.BERT | {"attention_probs_dropout_prob": 0.5},
            ClsLastLayer(),
            Packing(),
            Amp(dtype="bf16"),
            Compile(mode="reduce-overhead"),
        )
        losses = [computed(dropping, batches[0])[0] for _ in range(6)]
        assert len(set(losses[3:])) > 1
