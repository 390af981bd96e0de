"""int8-linears: the kernel against whole numbers and float64, and predictions with it against those without it."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path

import pytest
import torch
from fastloop.recipe import Inference
from fastloop.testing import run_commands
from text_helpers import build_on_short_texts

from fastloop_cpu import _native
from fastloop_cpu._int8_changes import Changes, Values, values_of_columns
from fastloop_cpu._int8_linears import multiply, quantize, unavailable, use
from fastloop_cpu.int8_linears import Int8Linears

REASON = unavailable()
needs_kernel = pytest.mark.skipif(REASON is not None, reason=f"int8-linears: {REASON}")

BERT = {
    "model_type": "bert",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 128,
    "max_position_embeddings": 48,
}
FLOAT = torch.float32
BF16 = torch.bfloat16


def draw_whole_numbers(rows: int, columns: int, least: int, largest: int) -> torch.Tensor:
    """Whole numbers in float32, of which each row has the least and the largest one."""
    numbers = torch.randint(least, largest + 1, (rows, columns)).float()
    numbers[:, 0] = least
    numbers[:, -1] = largest
    return numbers


@needs_kernel
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(0, 16, 64), (1, 16, 64), (7, 48, 192), (101, 384, 128)])
def test_whole_numbers_that_fit_into_8_bits_are_multiplied_exactly(rows, inputs, outputs, threads):
    torch.manual_seed(rows)
    numbers = draw_whole_numbers(rows, inputs, -100, 155)
    weight = draw_whole_numbers(outputs, inputs, -127, 127)
    bias = torch.randint(-9, 10, (outputs,)).float()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = multiply(numbers, quantize(weight), bias, FLOAT)
        without_bias = multiply(numbers, quantize(weight), None, FLOAT)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found, numbers @ weight.T + bias)
    assert torch.equal(without_bias, numbers @ weight.T)


@needs_kernel
@pytest.mark.parametrize("dtype", [FLOAT, BF16])
@pytest.mark.parametrize("result", [FLOAT, BF16])
def test_a_product_is_as_near_to_float64_as_8_bits_permit(dtype, result):
    """A rounded number is at most half a step from the exact one."""
    torch.manual_seed(0)
    numbers = (torch.randn(5, 7, 96) * torch.logspace(-3, 3, 7)[:, None]).to(dtype)
    weight = torch.randn(64, 96)
    bias = torch.randn(64)
    found = multiply(numbers, quantize(weight), bias, result)
    assert found.dtype == result
    assert found.shape == (5, 7, 64)

    exact = numbers.double()
    steps = (exact.amax(-1).clamp(min=0) - exact.amin(-1).clamp(max=0))[..., None] / 255
    weight_steps = (weight.abs().amax(1, keepdim=True) / 127).double()
    right = exact @ weight.double().T + bias
    bound = steps / 2 * weight.double().abs().sum(1) + exact.abs().sum(-1, keepdim=True) * weight_steps.T / 2
    bound += steps * weight_steps.T * 96 / 4 + right.abs() * (2**-8 if result == BF16 else 1e-5) + 1e-5
    difference = (found.double() - right).abs()
    assert (difference <= bound).all()
    assert difference.max() > 0


@needs_kernel
def test_a_token_does_not_change_the_scale_of_another_one():
    torch.manual_seed(0)
    numbers = torch.randn(3, 32)
    weight = quantize(torch.randn(64, 32))
    alone = multiply(numbers[1:2], weight, None, FLOAT)
    numbers[0] *= 1e6
    assert torch.equal(multiply(numbers, weight, None, FLOAT)[1:2], alone)


@needs_kernel
def test_numbers_that_are_not_finite_make_their_rows_nan_and_no_others():
    numbers = torch.ones(7, 32)
    for row, number in enumerate([torch.nan, torch.inf, -torch.inf]):
        numbers[row, 5 * row] = number
    numbers[3] = torch.tensor([3e38, -3e38]).repeat(16)  # the range of the row is infinite
    numbers[4] = 0
    numbers[5] = 1e-38
    bias = torch.arange(64.0)
    found = multiply(numbers, quantize(torch.ones(64, 32)), bias, FLOAT)
    assert found[:3].isnan().all()
    assert not found[3].isfinite().any()
    assert torch.equal(found[4], bias)
    assert torch.equal(found[5], bias)
    assert torch.equal(found[6], bias + 32)


@needs_kernel
def test_an_output_without_weights_is_its_bias():
    weight = torch.randn(64, 16)
    weight[3] = 0
    bias = torch.full((64,), 2.0)
    assert multiply(torch.randn(4, 16), quantize(weight), bias, FLOAT)[:, 3].tolist() == [2.0] * 4


@needs_kernel
@pytest.mark.parametrize(
    ("numbers", "bias", "dtype", "reason"),
    [
        (torch.zeros(4, 48), None, FLOAT, r"\(4, 48\).*expected \(\.\.\., 32\)"),
        (torch.zeros(4, 32, dtype=torch.float64), None, FLOAT, "torch.float64"),
        (torch.zeros(4, 32), None, torch.float16, "torch.float16"),
        (torch.zeros(4, 32), torch.zeros(63), FLOAT, r"bias of \(63,\)"),
        (torch.zeros(4, 32), torch.zeros(64, dtype=BF16), FLOAT, "bias .*bfloat16"),
    ],
    ids=["columns", "input", "output", "bias", "bias in bf16"],
)
def test_tensors_that_the_kernel_would_leave_are_refused(numbers, bias, dtype, reason):
    with pytest.raises(ValueError, match=f"int8-linears: found .*{reason}"):
        multiply(numbers, quantize(torch.ones(64, 32)), bias, dtype)


@needs_kernel
def test_gradients_and_other_layers_are_those_of_the_model():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Linear(64, 3))
    numbers = torch.randn(5, 32)
    exact = model(numbers)
    switch = use(model)
    assert switch is not None
    assert torch.equal(model(numbers), exact), "gradients may be needed"
    with torch.no_grad():
        found = model(numbers)
        switch.is_on = False
        assert torch.equal(model(numbers), exact)
    assert switch.calls == 1
    assert 0 < (found - exact).abs().max() < 0.05
    assert use(torch.nn.Linear(64, 3)) is None


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with a run that lists the plugin, and the output of its training."""
    folder = tmp_path_factory.mktemp("trained")
    lines = [
        f"{('bad', 'good')[i % 2]} {' '.join(f'w{(i * k) % 7}' for k in range(i * 5 % 25))},{i % 2}" for i in range(40)
    ]
    Path(folder, "rows.csv").write_text("\n".join(["text,label", *lines]) + "\n")
    recipe = {
        "model": {"config": BERT, "tokenizer": {"kind": "word"}},
        "data": {"files": {"train": "rows.csv", "test": "rows.csv"}, "label": "label", "max_length": 32},
        "train": {"epochs": 1, "batch_size": 8, "lr": 1e-3, "device": "cpu"},
        "plugins": ["text-classification", "int8-linears"],
        "output": "run",
    }
    Path(folder, "recipe.yaml").write_text(json.dumps(recipe))
    (output,) = run_commands([(folder, "train", "recipe.yaml")])
    return folder, output


def predictions(folder, name):
    """The probabilities of the class 1."""
    return [json.loads(line)["probability_1"] for line in Path(folder, name).read_text().splitlines()]


@needs_kernel
def test_a_run_trains_without_8_bits_and_predicts_with_them(trained):
    folder, output = trained
    assert "int8-linears: training computes without 8 bits" in output
    command = (folder, "predict", "run", "rows.csv", "--without", "auto", "--out")
    (shown, _) = run_commands([(*command, "with.jsonl"), (*command, "without.jsonl", "--without", "int8-linears")])
    changes = []
    for one, other in zip(predictions(folder, "with.jsonl"), predictions(folder, "without.jsonl"), strict=True):
        changes.append(abs(one - other))
    assert 0 < max(changes) < 0.02
    line = re.search(r"in the first 40 rows, probabilities differ by at most (\S+) .*, and by (\S+) on average", shown)
    assert float(line[1]) == pytest.approx(max(changes), rel=0.1)
    assert float(line[2]) == pytest.approx(sum(changes) / len(changes), rel=0.1)


@needs_kernel
def test_a_change_above_the_bound_ends_the_command(trained):
    folder, _ = trained
    predict = (folder, "predict", "run", "rows.csv", "--out", "bound.csv")
    evaluate = (folder, "evaluate", "run")
    bound = "plugins.int8-linears.largest_change="
    for shown in run_commands([(*predict, f"{bound}1e-7"), (*evaluate, f"{bound}1e-7")], code=2):
        assert "inexact-quantization" in shown
        assert "plugins.int8-linears.largest_change" in shown
    assert not Path(folder, "bound.csv").exists()
    (shown,) = run_commands([(*predict, f"{bound}0.02", "plugins.int8-linears.rows=8")])
    assert re.search(r"in the first (8|14) rows, probabilities differ by at most", shown), "the first batch"


def test_a_processor_without_the_instructions_is_named(monkeypatch, caplog):
    flags = frozenset(_native.INSTRUCTIONS)
    monkeypatch.setattr(_native, "processor_flags", lambda: flags)  # no test can take instructions from a processor
    run = build_on_short_texts(BERT)
    run.recipe.inference = Inference(Path(), "test")
    plugin = Int8Linears()
    with caplog.at_level(logging.WARNING):
        plugin.before_prepare(run, run.unwrap_model())
    assert "this processor has no avx512_vnni: the layers stay as they are" in caplog.text
    assert plugin.switch is None


@needs_kernel
def test_a_model_without_a_layer_for_the_kernel_is_named(caplog):
    run = build_on_short_texts(BERT | {"hidden_size": 48, "intermediate_size": 96})
    run.recipe.inference = Inference(Path(), "test")
    with caplog.at_level(logging.WARNING):
        Int8Linears().before_prepare(run, run.unwrap_model())
    assert "has no linear layer that the kernel computes: the layers stay as they are" in caplog.text


def test_changes_are_those_of_probabilities_or_else_of_all_numbers():
    columns = {"label": ["a", "b"], "probability": [0.5, 0.75], "words": [["x"], []]}
    values = values_of_columns(columns)
    assert (values.rows, values.kind, values.numbers.tolist()) == (2, "probabilities", [0.5, 0.75])
    values = values_of_columns({"vector": torch.tensor([[1.0, 2.0]]), "id": [3]})
    assert (values.rows, values.kind, values.numbers.tolist()) == (1, "predictions", [1.0, 2.0])


def test_changes_add_up_and_nan_is_the_largest():
    def values(*numbers: float) -> Values:
        return Values(len(numbers), "probabilities", torch.tensor(numbers))

    changes = Changes()
    changes.add(values(0.5, 0.25).changes_to(values(0.5, 0.5)))
    assert (changes.rows, changes.count, changes.largest, changes.total) == (2, 2, 0.25, 0.25)
    changes.add(values(torch.nan).changes_to(values(torch.nan)))
    assert changes.largest == 0.25
    changes.add(values(1.0).changes_to(values(torch.nan)))
    changes.add(values(1.0).changes_to(values(0.0)))
    assert changes.largest != changes.largest
