"""fast-dropout: torch's distribution, gradient and resume, from another generator."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from fastloop_plugins.memory.activation_checkpointing import ActivationCheckpointing
from text_helpers import make_run
from torch import nn
from training_runs import execute

from fastloop_cpu._fast_dropout import AttentionWithDropout, dropout, keep_mask, use
from fastloop_cpu.fast_dropout import FastDropout

BERT = {
    "model_type": "bert",
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
}
BERT |= {"max_position_embeddings": 32}
DATA = {"files": {"train": "a.csv", "validation": "a.csv"}, "label": "label", "max_length": 32}


def within(count: int, total: int, p: float, sigmas: float = 4.5) -> bool:
    """Whether a count is one of ``total`` draws with probability ``p``."""
    return abs(count - total * p) < sigmas * math.sqrt(total * p * (1 - p))


@pytest.mark.parametrize("p", [0.05, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_rate_and_scale(p, dtype):
    torch.manual_seed(0)
    tensor = torch.randn(1001, 999).to(dtype).clamp(min=0.01)
    result = dropout(tensor, p)
    kept = result != 0
    assert within(int(kept.sum()), kept.numel(), 1 - p)
    assert torch.equal(result[kept], (tensor * (1 / (1 - p)))[kept])


def test_the_rate_is_kept_where_few_bits_would_not():
    """0.1 is not a multiple of 1/256: ten million draws would show the difference."""
    torch.manual_seed(1)
    kept = keep_mask((10_000_000,), 0.1, 2) != 0
    assert within(int(kept.sum()), kept.numel(), 0.9)


def test_neighbours_rows_layers_and_steps_are_independent():
    torch.manual_seed(2)
    masks = torch.stack([keep_mask((512, 513), 0.3, 2) != 0 for _ in range(8)])
    total = masks[0].numel()
    for shift in ((0, 1), (0, 2), (0, 3), (0, 4), (1, 0), (4, 4)):
        both = masks[0] & masks[0].roll(shift, (0, 1))
        assert within(int(both.sum()), total, 0.7 * 0.7, 6), shift
    for index in range(1, 8):
        assert within(int((masks[0] & masks[index]).sum()), total, 0.7 * 0.7, 6)
    counts = masks.sum(0).flatten().bincount(minlength=9).double()
    expected = torch.tensor([math.comb(8, k) * 0.7**k * 0.3 ** (8 - k) for k in range(9)]).double() * total
    assert float(((counts - expected) ** 2 / expected).sum()) < 35  # chi-square of 8 degrees: 1 in 30,000


def test_every_seed_draws_its_own_and_the_same_again():
    def draw(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return keep_mask((64, 64), 0.5, 2)

    assert torch.equal(draw(3), draw(3))
    assert not torch.equal(draw(3), draw(4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_goes_where_the_mask_lets_it(dtype):
    torch.manual_seed(0)
    tensor = torch.randn(64, 33).to(dtype).requires_grad_()
    result = dropout(tensor.transpose(0, 1), 0.25)  # strided as it comes
    weight = torch.randn(33, 64).to(dtype)
    (result * weight).sum().backward()
    assert torch.equal(tensor.grad, (weight * (result != 0) * (1 / 0.75)).t())


def test_second_derivatives_have_the_mask():
    """A penalty on gradients differentiates them."""
    tensor = torch.randn(6, 5, dtype=torch.float64, requires_grad=True)

    def dropped(values: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(4)
        return dropout(values.tanh(), 0.4)

    assert torch.autograd.gradcheck(dropped, tensor)
    assert torch.autograd.gradgradcheck(dropped, tensor)


def test_a_second_derivative_of_attention_raises():
    query, key, value = (torch.randn(1, 2, 5, 4, requires_grad=True) for _ in range(3))
    loss = AttentionWithDropout.apply(query, key, value, None, 0.5, 0.2).square().sum()
    (gradient,) = torch.autograd.grad(loss, query, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        (loss + gradient.square().sum()).backward()


@pytest.mark.parametrize("size", [4, 2, 7])
@pytest.mark.parametrize("heads", [None, 1])
def test_attention_is_its_own_formula(heads, size):
    """Values may have other sizes than keys, as in DeepSeek-V3."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 3, 5, width, dtype=torch.float64, requires_grad=True) for width in (4, 4, size))
    bias = None if heads is None else torch.randn(2, heads, 1, 5, dtype=torch.float64)
    torch.manual_seed(7)
    mask = (keep_mask((2, 3, 5, 5), 0.2, 8) != 0) / 0.8
    probabilities = torch.softmax(query @ key.transpose(-1, -2) * 0.5 + (0 if bias is None else bias), -1)
    expected = (probabilities * mask) @ value
    torch.manual_seed(7)
    result = AttentionWithDropout.apply(query, key, value, bias, 0.5, 0.2)
    torch.testing.assert_close(result, expected)
    weight = torch.randn_like(result)
    ours = torch.autograd.grad((result * weight).sum(), (query, key, value))
    theirs = torch.autograd.grad((expected * weight).sum(), (query, key, value))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("kind", ["t5", "beit"])
@pytest.mark.parametrize("drops", [True, False])
def test_a_trained_bias_of_attention_is_added_and_gets_gradients(kind, drops):
    """T5 passes its relative positions as ``position_bias``, BEiT as a mask."""
    import transformers

    torch.manual_seed(0)
    if kind == "t5":
        sizes = {
            "vocab_size": 20,
            "d_model": 16,
            "d_kv": 8,
            "d_ff": 16,
            "num_layers": 1,
            "num_heads": 2,
            "dropout_rate": 0.0,
        }
        model: Any = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, decoder_start_token_id=0))
        inputs = {"input_ids": torch.arange(2, 12)[None], "labels": torch.arange(4, 10)[None]}
    else:
        sizes = {
            "hidden_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "intermediate_size": 16,
            "image_size": 8,
        }
        config = transformers.BeitConfig(**sizes, patch_size=4, use_relative_position_bias=True, drop_path_rate=0.0)
        model = transformers.BeitForImageClassification(config)
        inputs = {"pixel_values": torch.randn(1, 3, 8, 8)}
    name = "relative_attention_bias" if kind == "t5" else "relative_position_bias_table"
    biases = [parameter for key, parameter in model.named_parameters() if name in key]
    with torch.no_grad():
        for bias in biases:
            bias.normal_()
    results = []
    for replaced in (False, True):
        if replaced:
            assert use(model, "fast_dropout_of_test", drops=drops)
        logits = model.train()(**inputs).logits
        results.append([logits, *torch.autograd.grad(logits.logsumexp(-1).sum(), biases)])
    assert all(grad.abs().max() > 0 for grad in results[0][1:])
    for plain, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, plain)


def test_a_model_trains_resumes_to_the_bit_and_evaluates_as_without(tiny_run, tmp_path):
    whole = tiny_run([FastDropout()], device="cpu")
    plain = tiny_run([], device="cpu")
    assert whole.losses != plain.losses
    assert whole.losses[-1] == pytest.approx(plain.losses[-1], abs=0.5)
    tiny_run([FastDropout()], device="cpu", max_steps=9, save_every=9, output=tmp_path / "cut")
    rest = tiny_run([FastDropout()], device="cpu", output=tmp_path / "cut", resume=True)
    assert rest.losses == whole.losses[9:]
    assert all(torch.equal(rest.weights[name], whole.weights[name]) for name in whole.weights)


def test_attention_draws_the_same_masks_without_gradients():
    """A step that computes its rows twice, first without gradients, needs the same masks in both passes."""
    from fastloop_cpu._fast_dropout import attention

    rows = [torch.randn(2, 3, 5, 4) for _ in range(3)]
    found = []
    for enabled in (False, True):
        torch.manual_seed(0)
        with torch.set_grad_enabled(enabled):
            found.append(attention(nn.Module(), *rows, None, dropout=0.5)[0])
    assert torch.equal(*found)


def test_without_dropout_it_changes_nothing(tiny_run):
    from fastloop.testing import tiny_model

    ours = tiny_run([FastDropout()], device="cpu", model=tiny_model(dropout=0.0))
    plain = tiny_run([], device="cpu", model=tiny_model(dropout=0.0))
    assert ours.losses == plain.losses


def test_fast_dropout_logs_model_without_dropout(tiny_run, caplog):
    tiny_run([FastDropout()], device="cpu", model=nn.Linear(8, 3), epochs=1)
    assert "Linear has no dropout" in caplog.text


def text_run(*objects: Any, amp: bool = False, **model: Any) -> Any:
    from fastloop_plugins.precision.amp import Amp

    Path("a.csv").write_text(
        "text,label\n" + "".join(f"{('fine ', 'dull ')[i % 2] * (1 + i % 9)},{i % 2}\n" for i in range(64))
    )
    precision = [Amp(dtype="bf16")] if amp else []
    section = {"config": BERT | model, "tokenizer": {"kind": "word"}}
    return make_run("text-classification", section, DATA, objects=[*objects, *precision], epochs=3, lr=5e-3)


@pytest.mark.slow
@pytest.mark.parametrize("amp", [False, True])
def test_a_transformer_learns_with_it(amp):
    run = text_run(FastDropout(), amp=amp)
    assert run.unwrap_model().config._attn_implementation == "fast_dropout"
    summary = execute(run)
    assert summary["validation"]["accuracy"] > 0.9
    assert "fast_dropout" not in Path("run/model/config.json").read_text()


def test_a_transformer_evaluates_as_without_it():
    ours = text_run(FastDropout())
    plain = text_run()
    batch = next(ours.train_loader.batches()).inputs
    with torch.no_grad():
        losses = [
            run.hooks.compute_loss(run=run, model=run.model.eval(), batch=batch).loss.item() for run in (ours, plain)
        ]
    assert losses[0] == losses[1]


@pytest.mark.slow
def test_padding_is_not_attended_to():
    run = text_run(FastDropout(), hidden_dropout_prob=0.0)
    model = run.model.train()
    batch = next(run.train_loader.batches()).inputs
    longer = {name: torch.nn.functional.pad(batch[name], (0, 7)) for name in ("input_ids", "attention_mask")}
    means = []
    for inputs in (batch, longer):
        torch.manual_seed(0)
        logits = torch.stack(
            [model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits for _ in range(300)]
        )
        means.append(logits.detach().mean(0))
    torch.testing.assert_close(means[0], means[1], atol=0.02, rtol=0.1)


def test_fast_dropout_repeats_masks_on_recomputation():
    def gradients(*plugins: Any) -> list[torch.Tensor]:
        run = text_run(FastDropout(), *plugins)
        batch = next(run.train_loader.batches()).inputs
        torch.manual_seed(5)
        run.hooks.compute_loss(run=run, model=run.model.train(), batch=batch).loss.backward()
        return [parameter.grad for parameter in run.model.parameters()]

    for ours, plain in zip(gradients(ActivationCheckpointing()), gradients(), strict=True):
        torch.testing.assert_close(ours, plain)


@pytest.mark.slow
# within torch's compiler
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute:UserWarning")
def test_compiled_it_still_draws_every_mask():
    torch._dynamo.reset()

    def twice(tensor: torch.Tensor) -> torch.Tensor:
        return torch.stack([dropout(tensor, 0.5), dropout(tensor, 0.5)])

    tensor = torch.ones(64, 64, requires_grad=True)
    result = torch.compile(twice, backend="aot_eager")(tensor)
    assert not torch.equal(result[0], result[1])
    result.sum().backward()
    assert torch.equal(tensor.grad, result.detach().sum(0))
