"""``train.optimizer: Muon``: Muon for 2-D weights and AdamW for the rest, against a plain loop of torch.

Modules:
    plugins/fastloop_plugins/training/_batched_muon.py
    plugins/fastloop_plugins/training/muon.py
"""

from __future__ import annotations

import pytest
import torch
from interrupted_runs import Case, check_interrupted
from recipe_runs import LR, assert_same, make_run, torch_loop, trained
from torch.optim import AdamW, Muon
from torch.utils._python_dispatch import TorchDispatchMode

from fastloop import RecipeError
from fastloop.testing import expect_problem
from fastloop_plugins.training import _batched_muon
from fastloop_plugins.training._batched_muon import BatchedMuon, orthogonalize_, stack_in_bf16


def both(model, adamw=(), **arguments):
    """The two optimizers of a plain loop."""
    named = dict(model.named_parameters())
    matrices = [weight for name, weight in named.items() if weight.ndim == 2 and name not in adamw]
    rest = [weight for name, weight in named.items() if weight.ndim != 2 or name in adamw]
    shared = {"lr": LR, "weight_decay": 0.1}
    muon = Muon(matrices, adjust_lr_fn="match_rms_adamw", **shared, **arguments)
    return [muon, AdamW(rest, **shared, fused=True)]


def test_it_equals_two_optimizers_in_a_plain_loop():
    assert_same(trained(optimizer="Muon", weight_decay=0.1), torch_loop(both))


def test_arguments_are_muons_and_patterns_keep_adamw():
    ours = trained(
        optimizer={"name": "Muon", "momentum": 0.8},
        weight_decay=0.1,
        plugins=[{"muon-optimizer": {"adamw": ["head.*"]}}],
    )
    assert_same(ours, torch_loop(lambda model: both(model, ["head.weight"], momentum=0.8)))


def test_it_resumes_with_the_same_weights():
    check_interrupted(Case(train={"optimizer": "Muon"}), "limit", 5)


def test_another_optimizer_is_left_alone():
    assert_same(trained(optimizer="AdamW", plugins=["muon-optimizer"]), trained(optimizer="AdamW"))


@pytest.mark.parametrize(
    ("optimizer", "patterns", "message"),
    [
        ({"name": "Muon", "betas": [0.9, 0.9]}, [], "unknown-argument train.optimizer.betas"),
        ({"name": "Muon", "momentum": 0.9, "adjust_lr_fn": "x"}, [], "call-failed"),
        (
            "Muon",
            ["haed.*"],
            "no-match plugins.muon-optimizer.adamw 'haed 'head",
        ),
        ("Muon", ["*"], "unsupported-model plugins.muon-optimizer.adamw: 2-D"),
    ],
)
def test_errors_name_the_key(optimizer, patterns, message):
    with expect_problem(message, RecipeError):
        make_run(optimizer=optimizer, plugins=[{"muon-optimizer": {"adamw": patterns}}])


class Operations(TorchDispatchMode):
    """Counts operations."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def gpt2_matrices(width=16, dtype=torch.float32):
    """Weights of the shapes of GPT-2's 48 matrices, with gradients."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(width, 3 * width), (width, width), (width, 4 * width), (4 * width, width)] * 12
    weights = [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]
    for weight in weights:
        weight.grad = torch.randn(weight.shape, generator=generator).to(dtype)
    return weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "options", [{}, {"momentum": 0.5}, {"adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.3, "momentum": 0.8}]
)
def test_batches_equal_torchs_muon_within_rounding(options, dtype, monkeypatch):
    monkeypatch.setattr(_batched_muon, "STACKED", 5 * 16 * 48)  # stacks of several sizes
    ours, torchs = gpt2_matrices(dtype=dtype), gpt2_matrices(dtype=dtype)
    optimizers = BatchedMuon(ours, lr=0.01, **options), Muon(torchs, lr=0.01, **options)
    for _ in range(5):
        for optimizer in optimizers:
            optimizer.step()
    close = {"rtol": 0.0, "atol": 2e-3} if dtype == torch.float32 else {"rtol": 2**-6, "atol": 2**-5}
    for one, other in zip(ours, torchs, strict=True):
        torch.testing.assert_close(one, other, **close)
    states = [[state["momentum_buffer"] for state in optimizer.state.values()] for optimizer in optimizers]
    assert all(torch.equal(one, other) for one, other in zip(*states, strict=True))


@pytest.mark.parametrize("shape", [(12, 64), (64, 12), (16, 16)], ids=["wide", "tall", "square"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_stack_is_orthogonalized_as_torch_does_each_matrix(shape, dtype):
    from torch.optim._muon import _zeropower_via_newtonschulz as of_torch

    generator = torch.Generator().manual_seed(0)
    matrices = [torch.randn(shape, generator=generator).to(dtype) for _ in range(3)]
    before = [matrix.clone() for matrix in matrices]
    arguments = (3.4445, -4.775, 2.0315), 5, 1e-7
    stack = orthogonalize_(stack_in_bf16(matrices), *arguments)
    assert (stack.shape, stack.dtype) == ((3, *shape), torch.bfloat16)
    for ours, matrix, copy in zip(stack, matrices, before, strict=True):
        assert torch.equal(matrix, copy), "gradients and momenta stay"
        torch.testing.assert_close(ours, of_torch(copy, *arguments), rtol=2**-6, atol=2**-7)


class LargeResults(TorchDispatchMode):
    """Keeps the results of operations that have at least a number of elements, so that no memory is used twice."""

    def __init__(self, least):
        super().__init__()
        self.least, self.tensors = least, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.numel() >= self.least:
            self.tensors.append(result)
        return result


def test_iterations_share_their_memory():
    stack = torch.randn(4, 16, 64).bfloat16()
    with LargeResults(4 * 16 * 16) as results:
        orthogonalize_(stack, (3.4445, -4.775, 2.0315), 5, 1e-7)
    assert len(results.tensors) > 15
    assert len({tensor.untyped_storage().data_ptr() for tensor in [stack, *results.tensors]}) == 4


def test_torchs_muon_reads_the_state_and_writes_it():
    ours, torchs = BatchedMuon(gpt2_matrices()), Muon(gpt2_matrices())
    ours.step()
    torchs.load_state_dict(ours.state_dict())
    torchs.step()
    ours.load_state_dict(torchs.state_dict())
    assert ours.state_dict()["param_groups"] == torchs.state_dict()["param_groups"]


def test_a_step_has_few_operations():
    counts = []
    for optimizer in (BatchedMuon(gpt2_matrices()), Muon(gpt2_matrices())):
        optimizer.step()
        with Operations() as counted:
            optimizer.step()
        counts.append(counted.count)
    assert counts[0] * 8 < counts[1], counts


def test_momentum_without_nesterov_equals_torchs_in_fp32():
    """In bf16, torch 2.13 divides the momentum itself by its norm. This optimizer does not."""
    ours, torchs = gpt2_matrices(), gpt2_matrices()
    optimizers = BatchedMuon(ours, lr=0.01, nesterov=False), Muon(torchs, lr=0.01, nesterov=False)
    for _ in range(5):
        for optimizer in optimizers:
            optimizer.step()
    for one, other in zip(ours, torchs, strict=True):
        torch.testing.assert_close(one, other, rtol=0.0, atol=2e-3)
