"""cpu-layers on decoders: the kernels against float64, and models with them against the same models without them."""

from __future__ import annotations

import copy
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from fastloop import Machine
from fastloop.recipe import make_recipe
from fastloop.testing import write_texts
from fastloop_plugins.data.packing import Packing
from fastloop_plugins.kernels.target_logits import TargetLogits
from fastloop_plugins.memory.activation_checkpointing import ActivationCheckpointing
from fastloop_plugins.precision.amp import Amp
from fastloop_plugins.training.lora import LoRA
from interrupted_runs import Case, check_interrupted
from text_helpers import build_on_short_texts as run
from text_helpers import train_to_numbers
from torch.nn.functional import silu
from transformers import AutoConfig, AutoModelForCausalLM
from world_rows import DECODER

from fastloop_cpu._cpu_decoder import SOURCE, Gate, RMSNorm, Rotation, use
from fastloop_cpu._native import unavailable_kernels
from fastloop_cpu.cpu_layers import DECODERS, CpuLayers

REASON = unavailable_kernels(SOURCE)
needs_kernel = pytest.mark.skipif(REASON is not None, reason=f"cpu-layers: {REASON}")

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "intermediate_size": 96,
    "max_position_embeddings": 48,
}
LLAMA = {"model_type": "llama", **SIZES}


def draw(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape).to(dtype).requires_grad_()


def exactly(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Copies in float64 that have a gradient of their own."""
    return [tensor.detach().double().requires_grad_() for tensor in tensors]


def assert_near(ours: torch.Tensor, right: torch.Tensor) -> None:
    """Fail if the difference is larger than the rounding to bf16."""
    assert ours.shape == right.shape
    if not ours.numel():
        return
    size = right.square().mean().sqrt()
    difference = (ours - right).square().mean().sqrt()
    assert difference <= 0.004 * size, "bf16 keeps eight bits"


def rms_norm(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + 1e-5) * weight


def build(config: dict[str, Any]) -> Any:
    """A language model of this config, with weights from seed 0."""
    torch.manual_seed(0)
    config = {"vocab_size": 100, "initializer_range": 0.1} | config
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).eval()


def count_calls(monkeypatch: pytest.MonkeyPatch, function: Any) -> list[Any]:
    """A list that has an element for each later call of the kernel."""
    calls: list[Any] = []
    monkeypatch.setattr(function, "apply", lambda *given, apply=function.apply: calls.append(given) or apply(*given))
    return calls


@needs_kernel
@pytest.mark.parametrize("uses_sum", [True, False], ids=["sum", "norm only"])
@pytest.mark.parametrize("kind", ["with branch", "without branch", "bf16"])
@pytest.mark.parametrize("shape", [(1, 32), (3, 5, 96), (0, 32)], ids=str)
def test_a_norm_and_its_gradients_are_those_of_float64(shape, kind, uses_sum):
    torch.manual_seed(len(shape))
    residual = draw(*shape, dtype=torch.bfloat16 if kind == "bf16" else torch.float32)
    branch = draw(*shape) if kind == "with branch" else None
    weight = draw(shape[-1], dtype=torch.float32)
    gradients = [torch.randn(shape).to(residual.dtype), torch.randn(shape).bfloat16()]
    inputs = [residual, weight] if branch is None else [residual, weight, branch]
    outputs = RMSNorm.apply(residual, branch, weight, 1e-5)
    exact = exactly(*inputs)
    total = exact[0] if branch is None else exact[0] + exact[2]
    wanted = [total, rms_norm(total, exact[1])]
    chosen = slice(0, 2) if uses_sum else slice(1, 2)
    ours = torch.autograd.grad(outputs[chosen], inputs, gradients[chosen])
    right = torch.autograd.grad(wanted[chosen], exact, [gradient.double() for gradient in gradients[chosen]])
    assert [output.dtype for output in outputs] == [residual.dtype, torch.bfloat16]
    for one, other in zip((*outputs, *ours), (*wanted, *right), strict=True):
        assert_near(one.detach(), other.detach())


@needs_kernel
def test_a_frozen_norm_passes_the_gradient_of_its_rows():
    residual = draw(4, 32, dtype=torch.float32)
    weight = torch.randn(32)
    gradient = torch.randn(4, 32).bfloat16()
    (ours,) = torch.autograd.grad(RMSNorm.apply(residual, None, weight, 1e-5)[1], residual, gradient)
    (exact,) = exactly(residual)
    (right,) = torch.autograd.grad(rms_norm(exact, weight.double()), exact, gradient.double())
    assert_near(ours, right)


@needs_kernel
@pytest.mark.parametrize("shape", [(1, 32), (3, 5, 96), (0, 32)], ids=str)
def test_a_gate_and_its_gradients_are_those_of_float64(shape):
    torch.manual_seed(0)
    inputs = [(torch.randn(shape) * 3).bfloat16().requires_grad_(), draw(*shape)]
    gradient = torch.randn(shape).bfloat16()
    output = Gate.apply(*inputs)
    exact = exactly(*inputs)
    wanted = silu(exact[0]) * exact[1]
    ours = torch.autograd.grad(output, inputs, gradient)
    right = torch.autograd.grad(wanted, exact, gradient.double())
    for one, other in zip((output, *ours), (wanted, *right), strict=True):
        assert_near(one.detach(), other.detach())


@needs_kernel
def test_a_gate_of_large_numbers_and_of_no_numbers():
    numbers = torch.tensor([0.0, 40.0, -40.0, math.inf, 3e38, -3e38, math.nan, -5.0] * 4)[None].bfloat16()
    ours = Gate.apply(numbers, torch.ones_like(numbers))[0, :8].float()
    assert ours[:2].tolist() == [0.0, 40.0]
    assert ours[2] == pytest.approx(0, abs=1e-15)
    assert ours[3] == math.inf
    assert ours[4] == pytest.approx(3e38, rel=0.01)
    assert ours[5] == 0
    assert ours[6].isnan()
    assert ours[7] == pytest.approx(float(silu(torch.tensor(-5.0))), rel=0.01)


@needs_kernel
@pytest.mark.parametrize("angles", [1, 3], ids=["angles of all texts", "angles of each text"])
@pytest.mark.parametrize("size", [32, 128])
def test_a_rotation_and_its_gradient_are_those_of_float64(angles, size):
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    torch.manual_seed(0)
    heads = draw(3, 5, 2, size)
    cos = torch.randn(angles, 5, size)
    sin = torch.randn(angles, 5, size)
    gradient = torch.randn(3, 2, 5, size).bfloat16()
    output = Rotation.apply(heads.transpose(1, 2), cos, sin)
    (exact,) = exactly(heads)
    wanted, _ = apply_rotary_pos_emb(exact.transpose(1, 2), exact.transpose(1, 2), cos.double(), sin.double())
    (ours,) = torch.autograd.grad(output, heads, gradient)
    (right,) = torch.autograd.grad(wanted, exact, gradient.double())
    assert_near(output.detach(), wanted.detach())
    assert_near(ours, right)


@needs_kernel
@pytest.mark.parametrize(
    ("compute", "reason"),
    [
        (lambda: RMSNorm.apply(torch.zeros(4, 48), None, torch.zeros(48), 1e-5), "48 columns"),
        (lambda: RMSNorm.apply(torch.zeros(4, 64).half(), None, torch.zeros(64), 1e-5), "residual: .*float16"),
        (lambda: RMSNorm.apply(torch.zeros(4, 64), None, torch.zeros(32), 1e-5), "weight: .*64"),
        (lambda: RMSNorm.apply(torch.zeros(4, 64), torch.zeros(3, 64).bfloat16(), torch.zeros(64), 1e-5), "branch"),
        (lambda: RMSNorm.apply(*[torch.zeros(4, 64).bfloat16()] * 2, torch.zeros(64), 1e-5), "residual: .*bfloat16"),
        (lambda: Gate.apply(torch.zeros(4, 64), torch.zeros(4, 64)), "gate: .*float32"),
        (lambda: Gate.apply(torch.zeros(4, 64).bfloat16(), torch.zeros(3, 64).bfloat16()), "up: .*192"),
        (lambda: Rotation.apply(torch.zeros(1, 2, 3, 48).bfloat16(), *[torch.zeros(1, 3, 48)] * 2), "48 columns"),
        (lambda: Rotation.apply(torch.zeros(1, 2, 3, 32).bfloat16(), *[torch.zeros(1, 2, 32)] * 2), "cos: .*64"),
    ],
    ids=["columns", "dtype", "weight", "branch", "sum in bf16", "gate", "up", "size of heads", "angles"],
)
def test_tensors_that_a_kernel_would_leave_are_refused(compute, reason):
    with pytest.raises(ValueError, match=f"cpu-layers: .*{reason}"):
        compute()


@needs_kernel
@pytest.mark.parametrize(
    "compute",
    [
        lambda numbers: RMSNorm.apply(numbers.float(), None, torch.ones(32), 1e-5)[1],
        lambda numbers: Gate.apply(numbers, numbers),
        lambda numbers: Rotation.apply(numbers[None, None], torch.ones(1, 4, 32), torch.ones(1, 4, 32)),
    ],
    ids=["norm", "gate", "rotation"],
)
def test_a_second_derivative_raises(compute):
    numbers = draw(4, 32)
    loss = compute(numbers).square().sum()
    (gradient,) = torch.autograd.grad(loss, numbers, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        (loss + gradient.square().sum()).backward()


@needs_kernel
@pytest.mark.parametrize(
    "others",
    [
        [],
        pytest.param([Packing], marks=pytest.mark.slow),
        [Packing, TargetLogits],
        pytest.param([Packing, ActivationCheckpointing], marks=pytest.mark.slow),
        [lambda: LoRA(r=4, target_modules="all-linear")],
    ],
    ids=["padded", "packed", "target logits", "recomputed", "lora"],
)
def test_a_model_trains_to_the_numbers_that_it_has_without_the_kernels(others, monkeypatch):
    norms = count_calls(monkeypatch, RMSNorm)
    gates = count_calls(monkeypatch, Gate)
    rotations = count_calls(monkeypatch, Rotation)
    plain = train_to_numbers(LLAMA, Amp(dtype="bf16"), *(other() for other in others))
    assert not norms
    fast = train_to_numbers(LLAMA, Amp(dtype="bf16"), CpuLayers(), *(other() for other in others))
    assert len(norms) == 2 * len(gates) == len(rotations) > 0
    assert fast == pytest.approx(plain, rel=0.02)
    assert fast != plain


@needs_kernel
@pytest.mark.parametrize("kind", DECODERS)
def test_gradients_are_as_exact_as_those_of_amp_alone(kind, monkeypatch):
    """For each type, which shows that its layers have these formulas. On SmolLM2-135M and 256 random tokens, the error
    of all gradients is 23% with the plugin, 41% without."""
    model = build({"model_type": kind, **SIZES})
    names = list(model.state_dict())
    ids = torch.randint(100, (4, 40))
    calls = count_calls(monkeypatch, RMSNorm)

    def gradients(enabled: bool) -> torch.Tensor:
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            model(input_ids=ids, labels=ids).loss.backward()
        return torch.cat([weight.grad.double().flatten() for weight in model.parameters()])

    exact = gradients(False)
    amp = (gradients(True) - exact).norm()
    has_norms_of_heads = kind == "qwen3"
    assert use(model) == (10 if has_norms_of_heads else 6)
    assert 0 < (gradients(True) - exact).norm() < 1.2 * amp
    assert len(calls) == (8 if has_norms_of_heads else 4)
    assert torch.equal(gradients(False), exact), "without autocast, the model computes itself"
    assert list(model.state_dict()) == names


def write_files() -> None:
    write_texts(Path())


@pytest.mark.slow
@needs_kernel
def test_a_killed_run_resumes_and_exports_a_model_of_transformers():
    check_interrupted(Case(DECODER, ["cpu-layers"], write=write_files), "SIGKILL", 3)
    _, loaded = AutoModelForCausalLM.from_pretrained("cut/model", output_loading_info=True)
    assert not loaded["missing_keys"]
    assert not loaded["unexpected_keys"]


@needs_kernel
def test_generation_with_a_cache_gives_the_tokens_of_the_model(monkeypatch):
    model = build(LLAMA)
    fast = copy.deepcopy(model)
    use(fast)
    fast = copy.deepcopy(fast)  # as `ema` does
    ids = torch.tensor([[1, 2, 3, 4]])
    rotations = count_calls(monkeypatch, Rotation)
    with torch.autocast("cpu", torch.bfloat16):
        options = {"max_new_tokens": 6, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
        expected = model.generate(ids, **options)
        assert not rotations, "another model of the process keeps its function"
        ours = fast.generate(ids, **options)
    assert len(rotations) == 6 * 4
    assert torch.stack(ours.logits).argmax(-1).tolist() == torch.stack(expected.logits).argmax(-1).tolist()


@needs_kernel
@pytest.mark.parametrize(
    ("module", "norms", "gates"),
    [("input_layernorm", 2, 2), ("mlp", 4, 2), ("mlp.act_fn", 4, 1)],
)
def test_a_module_with_a_hook_has_its_hook_called(module, norms, gates, monkeypatch):
    """A strategy gathers weights in such a hook."""
    model = build(LLAMA)
    use(model)
    hooked = []
    model.model.layers[0].get_submodule(module).register_forward_pre_hook(lambda *given: hooked.append(given))
    calls = [count_calls(monkeypatch, RMSNorm), count_calls(monkeypatch, Gate)]
    with torch.autocast("cpu", torch.bfloat16):
        states = model(input_ids=torch.tensor([[1, 2, 3]]), output_hidden_states=True).hidden_states
    assert len(hooked) == 1
    assert [len(one) for one in calls] == [norms, gates]
    assert {state.dtype for state in states} == {torch.float32}


@pytest.mark.parametrize(
    ("change", "count"),
    [
        ({}, 6),
        ({"hidden_act": "gelu"}, 4),
        ({"intermediate_size": 100}, 4),
        ({"hidden_size": 48}, 4),
        ({"hidden_size": 48, "intermediate_size": 100, "hidden_act": "relu"}, 2),
    ],
    ids=str,
)
def test_modules_without_a_kernel_stay_the_models(change, count):
    with torch.device("meta"):
        assert use(build(LLAMA | change)) == count


@needs_kernel
def test_a_decoder_with_other_formulas_stays_as_it_is(caplog):
    with caplog.at_level(logging.WARNING):
        model = run(LLAMA | {"model_type": "gemma"}, Amp(dtype="bf16"), CpuLayers()).unwrap_model()
    assert "GemmaForSequenceClassification is not one of bert, " in caplog.text
    assert not any("forward" in vars(module) for module in model.base_model.layers.modules())


@pytest.mark.parametrize("kind", ["bert", *DECODERS, "gemma", "gpt2"])
def test_auto_selects_it_for_types_that_have_kernels(kind):
    machine = Machine("cpu", "AVX512", ("fp32", "bf16"), ("bf16",))
    recipe = make_recipe({"model": {"config": {"model_type": kind}}, "plugins": [{"amp": {"dtype": "bf16"}}]})
    assert (CpuLayers.recommend(recipe, machine) is not None) == (kind not in ("gemma", "gpt2"))
