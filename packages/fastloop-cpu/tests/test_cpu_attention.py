"""cpu-attention: the kernel against float64, and models with it against the same models without it."""

from __future__ import annotations

import logging
import math
import os
import stat
from contextlib import ExitStack
from itertools import accumulate
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
from fastloop import Machine
from fastloop.recipe import make_recipe
from fastloop.testing import find_problems
from fastloop_plugins.data._varlen import head_size
from fastloop_plugins.data.packing import Packing
from fastloop_plugins.kernels.cls_last_layer import ClsLastLayer
from fastloop_plugins.kernels.compile import Compile
from fastloop_plugins.memory.activation_checkpointing import ActivationCheckpointing
from fastloop_plugins.precision.amp import Amp
from text_helpers import build_on_short_texts as run
from text_helpers import train_to_numbers

from fastloop_cpu import _cpu_attention, _native
from fastloop_cpu._cpu_attention import HEAD_SIZES, SOURCE, RowAttention, attention, unavailable
from fastloop_cpu.cpu_attention import CpuAttention
from fastloop_cpu.cpu_layers import CpuLayers

REASON = unavailable()
needs_kernel = pytest.mark.skipif(REASON is not None, reason=f"cpu-attention: {REASON}")

COULD_PACK = "_ZN2at6native7cpublas10could_packEN3c1010ScalarTypeE"
"""Another function of torch, which writes nothing."""
SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 48,
}
STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
BERT = {"model_type": "bert", **SIZES, **STILL}
GPT2 = {"model_type": "gpt2", "n_layer": 2, "n_head": 2, "n_embd": 64, "n_positions": 48}
GPT2 |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
GROUPED = {"model_type": "llama", **SIZES, "hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}


def ends_of(lengths: list[int]) -> torch.Tensor:
    """0, then the end of each sequence."""
    return torch.tensor(list(accumulate(lengths, initial=0)), dtype=torch.int32)


def kept(
    ends: tuple[torch.Tensor, torch.Tensor], heads: int, key_heads: int, size: int, p: float, seed: int
) -> list[torch.Tensor]:
    """The dropout mask of each sequence. Equal scores give equal weights, and values that are one-hot show which of
    them are kept."""
    queries = int(ends[0][-1])
    keys = int(ends[1][-1])
    spans = [(int(first), int(last)) for first, last in zip(ends[1], ends[1][1:], strict=False)]
    rows = [(int(first), int(last)) for first, last in zip(ends[0], ends[0][1:], strict=False)]
    masks = [
        torch.zeros(heads, last - first, stop - start) for (first, last), (start, stop) in zip(rows, spans, strict=True)
    ]
    for window in range(0, max(stop - start for start, stop in spans), size):
        value = torch.zeros(keys, key_heads, size, dtype=torch.bfloat16)
        for start, stop in spans:
            count = max(min(size, stop - start - window), 0)
            value[start + window : start + window + count] = torch.eye(count, size)[:, None]
        torch.manual_seed(seed)
        zeros = (
            torch.zeros(queries, heads, size, dtype=torch.bfloat16),
            torch.zeros(keys, key_heads, size, dtype=torch.bfloat16),
        )
        output = RowAttention.apply(*zeros, value, ends, 1.0, p, False)
        for mask, (first, last) in zip(masks, rows, strict=True):
            part = mask[:, :, window : window + size]
            part.copy_((output[first:last] != 0).transpose(0, 1)[:, :, : part.shape[2]])
    return masks


def expected(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    ends: Any,
    scale: float,
    p: float,
    causal: bool,
    masks: Any,
) -> torch.Tensor:
    """The same in plain operations of the inputs' dtype."""
    outputs = []
    group = query.shape[1] // key.shape[1]
    for index, mask in enumerate(masks):
        rows = slice(int(ends[0][index]), int(ends[0][index + 1]))
        columns = slice(int(ends[1][index]), int(ends[1][index + 1]))
        keys, values = (tensor[columns].transpose(0, 1).repeat_interleave(group, 0) for tensor in (key, value))
        scores = query[rows].transpose(0, 1) @ keys.transpose(1, 2) * scale
        if causal:
            scores = scores.masked_fill(~torch.ones(scores.shape[1:], dtype=torch.bool).tril(), -math.inf)
        outputs.append((scores.softmax(-1) * mask / (1 - p) @ values).transpose(0, 1))
    return torch.cat(outputs)


@needs_kernel
@pytest.mark.parametrize("p", [0.0, 0.1])
@pytest.mark.parametrize("form", ["all", "causal", "one query"])
@pytest.mark.parametrize("lengths", [[1, 2], [5, 64, 33], [100, 7, 130]], ids=str)
@pytest.mark.parametrize("key_heads", [4, 2])
@pytest.mark.parametrize("size", HEAD_SIZES)
def test_output_and_gradients_are_those_of_float64(size, key_heads, lengths, form, p):
    torch.manual_seed(size + len(form))
    keys = ends_of(lengths)
    ends = (ends_of([1] * len(lengths)) if form == "one query" else keys, keys)
    shapes = [(int(ends[0][-1]), 4), (int(keys[-1]), key_heads), (int(keys[-1]), key_heads)]
    inputs = [torch.randn(*shape, size).bfloat16().requires_grad_() for shape in shapes]
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    gradient = torch.randn(shapes[0][0], 4, size).bfloat16()
    causal = form == "causal"
    masks = kept(ends, 4, key_heads, size, p, seed=9) if p else [torch.ones(())] * len(lengths)
    torch.manual_seed(9)
    output = RowAttention.apply(*inputs, ends, size**-0.5, p, causal)
    wanted = expected(*exact, ends, size**-0.5, p, causal, masks)
    output.backward(gradient)
    wanted.backward(gradient.double())
    gradients = [(one.grad, other.grad) for one, other in zip(inputs, exact, strict=True)]
    for found, right in [(output.detach(), wanted.detach()), *gradients]:
        size_of = right.square().mean().sqrt()
        difference = (found - right).square().mean().sqrt()
        assert difference < 0.008 * max(1.0, size_of), "bf16 keeps eight bits"


@needs_kernel
def test_dropout_has_the_rate_and_its_elements_are_independent():
    ends = (ends_of([256, 256]), ends_of([256, 256]))
    first = torch.stack(kept(ends, 4, 4, 64, 0.3, seed=1))
    second = torch.stack(kept(ends, 4, 4, 64, 0.3, seed=2))
    total = first.numel()

    def near(count: torch.Tensor, probability: float) -> bool:
        return abs(float(count.sum()) - total * probability) < 5 * math.sqrt(total * probability * (1 - probability))

    assert near(first, 0.7)
    assert torch.equal(first, torch.stack(kept(ends, 4, 4, 64, 0.3, seed=1)))
    assert near(first * second, 0.49), "steps are independent"
    for shift, dimension in ((1, 0), (1, 1), (1, 2), (1, 3), (2, 3), (16, 3), (32, 3), (128, 3), (32, 2)):
        assert near(first * first.roll(shift, dimension), 0.49), (shift, dimension)


@needs_kernel
def test_a_second_derivative_raises():
    query, key, value = (torch.randn(20, 2, 32, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    loss = RowAttention.apply(query, key, value, (ends_of([20]), ends_of([20])), 0.2, 0.0, False).square().sum()
    (gradient,) = torch.autograd.grad(loss, query, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        (loss + gradient.square().sum()).backward()


@needs_kernel
def test_numbers_that_are_not_finite_are_not_hidden():
    tensors = [torch.randn(40, 2, 32).bfloat16() for _ in range(3)]
    tensors[1][3, 0, 5] = math.nan
    output = RowAttention.apply(*tensors, (ends_of([20, 20]), ends_of([20, 20])), 0.2, 0.0, False)
    assert output[:20, 0].isnan().all()
    assert output[20:].isfinite().all()
    assert output[:, 1].isfinite().all()


@needs_kernel
@pytest.mark.parametrize("size", [16, 64])
def test_values_of_another_size_keep_the_models_attention(size):
    """DeepSeek-V3 and MiniCPM3 have such heads. The kernel would read past the values, or leave a part of them out."""
    torch.manual_seed(0)
    query, key = (torch.randn(2, 4, 40, 32).bfloat16().requires_grad_() for _ in range(2))
    value = torch.randn(2, 4, 40, size).bfloat16().requires_grad_()
    module = torch.nn.Module()
    module.is_causal = False
    output, _ = attention("sdpa", module, query, key, value, None, scaling=0.2)
    right = torch.nn.functional.scaled_dot_product_attention(query, key, value, scale=0.2).transpose(1, 2)
    assert output.shape == (2, 40, 4, size)
    torch.testing.assert_close(output, right)
    found = torch.autograd.grad(output.float().square().sum(), (query, key, value))
    expected = torch.autograd.grad(right.float().square().sum(), (query, key, value))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"value": torch.zeros(20, 2, 16)}, r"value: found .*\(20, 2, 16\).* expected .*\(20, 2, 32\)"),
        ({"value": torch.zeros(19, 2, 32)}, r"value: found .*\(19, 2, 32\)"),
        ({"key": torch.zeros(20, 2, 64), "value": torch.zeros(20, 2, 64)}, "4 heads of 32 and 2 of 64"),
        ({"key": torch.zeros(20, 3, 32), "value": torch.zeros(20, 3, 32)}, "4 heads of 32 and 3 of 32"),
        ({name: torch.zeros(20, 4, 48) for name in ("query", "key", "value")}, "4 heads of 48"),
        ({"query": torch.zeros(20, 4, 32, dtype=torch.float16)}, "query: found torch.float16"),
        ({"ends": ([0, 12, 21], [0, 12, 20])}, "ends of sequences: .*21.* expected int32 that rises from 0 to 20"),
        ({"ends": ([0, 12, 20], [0, 25, 20])}, "ends of sequences: .*25"),
        ({"ends": ([0, 12, 20], [0, 20])}, "ends of sequences: .* 3 numbers"),
        ({"ends": ([0, 12], [0, 12])}, "from 0 to 20"),
    ],
)
def test_shapes_that_leave_a_tensor_are_refused_before_the_kernel_runs(change, reason, monkeypatch):
    monkeypatch.setattr("fastloop_cpu._cpu_attention.load", lambda source: pytest.fail("the kernel was called"))
    shapes = {"query": (20, 4, 32), "key": (20, 2, 32), "value": (20, 2, 32)}
    given = {name: change.get(name, torch.zeros(shape)) for name, shape in shapes.items()}
    tensors = [tensor.bfloat16() if tensor.dtype == torch.float32 else tensor for tensor in given.values()]
    ends = tuple(torch.tensor(numbers, dtype=torch.int32) for numbers in change.get("ends", ([0, 12, 20], [0, 12, 20])))
    with pytest.raises(ValueError, match=reason):
        RowAttention.apply(*tensors, ends, 0.2, 0.0, False)


@needs_kernel
def test_the_number_of_threads_changes_no_bit(monkeypatch):
    torch.manual_seed(0)
    inputs = [torch.randn(300, 4, 32).bfloat16().requires_grad_() for _ in range(3)]
    ends = ends_of([150, 90, 60])
    found = []
    for threads in (1, 2, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        torch.manual_seed(4)
        output = RowAttention.apply(*inputs, (ends, ends), 0.2, 0.1, True)
        found.append([output, *torch.autograd.grad(output.float().square().sum(), inputs)])
    assert all(torch.equal(one, other) for results in found[1:] for one, other in zip(found[0], results, strict=True))


@needs_kernel
@pytest.mark.parametrize(
    ("config", "others"),
    [
        pytest.param(BERT, [Packing], marks=pytest.mark.slow),
        (BERT, [Packing, ClsLastLayer]),
        pytest.param(BERT, [Packing, ActivationCheckpointing], marks=pytest.mark.slow),
        (GPT2, []),
        pytest.param(GROUPED, [], marks=pytest.mark.slow),
        (GROUPED, [Packing]),
    ],
    ids=["bert", "bert, last layer", "bert, recomputed", "gpt2", "grouped", "grouped, packed"],
)
def test_a_model_trains_to_the_numbers_that_it_has_without_the_kernel(config, others, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    calls = []
    monkeypatch.setattr(
        RowAttention, "apply", lambda *given, apply=RowAttention.apply: calls.append(given) or apply(*given)
    )
    plain = train_to_numbers(config, Amp(dtype="bf16"), *(other() for other in others))
    assert not calls
    fast = train_to_numbers(config, Amp(dtype="bf16"), CpuAttention(), *(other() for other in others))
    assert calls
    assert fast == pytest.approx(plain, rel=0.01)
    assert fast != plain


@needs_kernel
def test_batches_with_padding_keep_the_models_attention(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(RowAttention, "apply", lambda *given: pytest.fail("the kernel has no mask for padding"))
    assert train_to_numbers(BERT, Amp(dtype="bf16"), CpuAttention()) == train_to_numbers(BERT, Amp(dtype="bf16"))


@pytest.mark.parametrize("kind", ["swin", "segformer"])
def test_a_model_with_heads_of_several_sizes_keeps_its_attention(kind, tmp_path, monkeypatch, caplog):
    """Swin's config lists the number of heads of each stage, and Segformer's has no hidden_size."""
    from image_helpers import make_run as image_run

    monkeypatch.chdir(tmp_path)
    stages = {"depths": [1, 1], "num_heads": [2, 4], "embed_dim": 16, "window_size": 2, "patch_size": 2}
    if kind == "segformer":
        stages = {
            "num_encoder_blocks": 1,
            "depths": [1],
            "sr_ratios": [1],
            "hidden_sizes": [16],
            "patch_sizes": [3],
            "strides": [2],
        }
        stages |= {"num_attention_heads": [2], "mlp_ratios": [2]}
    with caplog.at_level(logging.WARNING):
        made = image_run(model={"config": {"model_type": kind, **stages}}, objects=[Amp(dtype="bf16"), CpuAttention()])
    assert (
        "cpu-attention: the model's config gives no single head size (of 32, 64, 128): attention stays as it is"
        in caplog.text
    )
    assert made.unwrap_model().config._attn_implementation == "sdpa"
    caplog.clear()
    made.recipe.selected["cpu-attention"] = "auto: one kernel"  # by `auto`, so there is nothing to correct
    CpuAttention().before_prepare(made, made.unwrap_model())
    assert caplog.text == ""


def test_a_config_with_a_head_size_for_each_layer_gives_none():
    """Gemma 4's configuration raises an error for an attribute that differs between layers."""
    from transformers import AutoConfig

    assert head_size(AutoConfig.for_model("gemma4_unified_text")) is None
    assert head_size(AutoConfig.for_model("llama", hidden_size=64, num_attention_heads=2)) == 32


@pytest.mark.parametrize(
    ("config", "others", "reason"),
    [
        (BERT, [], "not in bf16"),
        (BERT | {"num_attention_heads": 4}, [Amp], "heads have 16 features"),
        (BERT, [Amp, lambda **_: Compile(backend="eager")], "compile's graph"),
    ],
    ids=["fp32", "small heads", "compiled"],
)
def test_what_it_cannot_compute_stays_as_it_is(config, others, reason, tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    with caplog.at_level(logging.WARNING):
        made = run(config, CpuAttention(), *(other(dtype="bf16") for other in others))
    assert reason in caplog.text
    assert made.unwrap_model().config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (None, "no C compiler was found"),
        ("echo 'x.c:1: error: no such option' >&2; exit 1", "error: no such option"),
        ("exit 3", "exit status 3"),
    ],
    ids=["none", "failing", "silent"],
)
def test_a_compiler_that_is_absent_or_fails_is_a_reason(script, reason, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    if script:
        program = tmp_path / "gcc"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(program.stat().st_mode | stat.S_IEXEC)
    with pytest.raises(_native.KernelUnavailable, match=reason):
        _native.load.__wrapped__(SOURCE)
    assert not list(tmp_path.glob("fastloop/kernels/*"))


@needs_kernel
@pytest.mark.parametrize(
    ("symbol", "reason"),
    [("no_such_function", "does not export"), (COULD_PACK, "a product of oneDNN .* is wrong")],
    ids=["absent", "another function"],
)
def test_a_torch_without_the_products_is_a_reason(symbol, reason, monkeypatch):
    monkeypatch.setitem(_cpu_attention.PRODUCTS, "multiply", symbol)
    with pytest.raises(_native.KernelUnavailable, match=reason):
        _cpu_attention.products.__wrapped__()


@needs_kernel
@pytest.mark.parametrize("setting", ["autocast", "default dtype", "inference mode"])
def test_the_first_product_is_right_whatever_is_set_around_it(setting):
    """The first call may be in a forward pass, such as of a model that was exported with the kernel."""
    before = torch.get_default_dtype()
    with ExitStack() as around:
        if setting == "autocast":
            around.enter_context(torch.autocast("cpu", dtype=torch.bfloat16))
        elif setting == "default dtype":
            around.callback(torch.set_default_dtype, before)
            torch.set_default_dtype(torch.bfloat16)
        else:
            around.enter_context(torch.inference_mode())
        assert _cpu_attention.products.__wrapped__() == _cpu_attention.products()


@needs_kernel
def test_a_limit_on_onednn_is_a_reason(monkeypatch):
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert "ONEDNN_MAX_CPU_ISA" in str(unavailable())


@pytest.mark.slow
@needs_kernel
def test_several_processes_compile_at_once_and_the_library_is_kept(tmp_path):
    Path("compile.py").write_text("from fastloop_cpu._cpu_attention import unavailable; print(unavailable())")
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    commands = [forked.Command("compile.py", env=environment) for _ in range(3)]
    assert [command.wait(300) for command in commands] == [0, 0, 0]
    assert [command.stdout.strip() for command in commands] == ["None"] * 3
    kept_files = list(tmp_path.glob("fastloop/kernels/*"))
    assert [file.suffix for file in kept_files] == [".so"]
    changed = kept_files[0].stat().st_mtime_ns
    assert forked.run("compile.py", env=environment).stdout.strip() == "None"
    assert kept_files[0].stat().st_mtime_ns == changed


@pytest.mark.parametrize("plugin", [CpuAttention, CpuLayers])
def test_a_plugin_that_the_user_left_out_is_not_proposed(plugin, caplog):
    """`fastloop predict RUN --without amp`, of a run whose recipe lists the plugins that were selected for it."""
    chosen = plugin()
    built = run(BERT, chosen)
    assert "add amp" in caplog.text
    assert len(find_problems(caplog, "no-effect")) == 1
    caplog.clear()
    built.recipe.plugins["amp"] = False
    with caplog.at_level(logging.INFO, "fastloop"):
        chosen.before_prepare(run=built, model=built.unwrap_model())
    assert "in torch.float32" in caplog.text
    assert "add amp" not in caplog.text
    assert [record.levelname for record in caplog.records] == ["INFO"]


@pytest.mark.parametrize("plugin", [CpuAttention, CpuLayers])
@pytest.mark.parametrize(
    ("amp", "is_selected"),
    [({}, True), ({"dtype": "bf16"}, True), ({"dtype": "fp32", "fp32_matmul": "high"}, False), (False, False)],
    ids=str,
)
def test_a_plugin_is_selected_only_with_the_precision_that_it_needs(plugin, amp, is_selected):
    recipe = make_recipe(
        {
            "model": {"config": {"model_type": "bert"}},
            "data": {"files": "train.csv"},
            "plugins": ["text-classification", {"amp": amp}],
        }
    )
    machine = Machine("cpu", "AVX512", ("fp32", "bf16"), ("bf16",))
    assert (plugin.recommend(recipe, machine) is not None) == is_selected
