"""Advantages and losses of single tensors."""

import math

import pytest
import torch
from fastloop_plugins.text import Completion

from fastloop_grpo.losses import LossSettings, advantages, deviations, equal_groups, policy_loss, sampler_weights
from fastloop_grpo.rollout import completion_sample, empty_sample

NAN = math.nan


@pytest.mark.parametrize("scale", [True, False])
@pytest.mark.parametrize("value", [0.1, 1 / 3, 0.7, 1e6])
@pytest.mark.parametrize("count", [2, 3, 7])
def test_equal_rewards_have_an_advantage_of_exactly_zero(value, count, scale):
    rewards = torch.tensor([[value] * count, [value] * (count - 1) + [value + 1]], dtype=torch.float64)
    found = advantages(rewards, scale)
    assert found[0].tolist() == [0.0] * count
    assert found[1].abs().min() > 0
    assert equal_groups(rewards).tolist() == [True, False]


def test_advantages_leave_out_what_has_no_reward():
    rewards = torch.tensor([[1.0, NAN, 3.0, NAN], [NAN, NAN, NAN, NAN], [2.0, NAN, NAN, NAN]], dtype=torch.float64)
    deviation = math.sqrt(2)
    expected = 1 / (deviation + 1e-4)
    assert advantages(rewards, True).tolist()[0] == pytest.approx([-expected, 0, expected, 0])
    assert advantages(rewards, False).tolist() == [[-1, 0, 1, 0], [0] * 4, [0] * 4]
    assert deviations(rewards).tolist() == pytest.approx([deviation, 0, 0])
    assert equal_groups(rewards).tolist() == [False, True, True]


def batch(sizes, gains, **more):
    sizes = torch.tensor(sizes)
    rows = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
    return {"completions": rows, "sizes": sizes.float(), "advantages": torch.tensor(gains)} | more


def settings(name, **more):
    given = {"beta": 0.0, "low": 0.2, "high": 0.2, "max_new_tokens": 5, "sampler_cap": 2.0} | more
    return LossSettings(name, **given)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("dapo", -(3 * 1.0 + 1 * -2.0) / 4),
        ("grpo", -(1.0 + -2.0) / 2),
        ("gspo", -(1.0 + -2.0) / 2),
        ("dr_grpo", -(3 * 1.0 + 1 * -2.0) / (2 * 5)),
    ],
)
def test_means_of_a_first_update(name, expected):
    found = torch.tensor([-1.0, -2.0, -0.5, -3.0], requires_grad=True)
    result = policy_loss(found, batch([3, 1], [1.0, -2.0], old=found.detach()), settings(name))
    assert result.loss.item() == pytest.approx(expected)
    assert not result.clipped.any()


def test_ratios_are_clipped_on_both_sides():
    old = torch.zeros(4)
    found = torch.tensor([0.5, 0.5, -0.5, -0.5], requires_grad=True)
    result = policy_loss(found, batch([1, 1, 1, 1], [1.0, -1.0, 1.0, -1.0], old=old), settings("dapo", high=0.3))
    assert result.clipped.tolist() == [True, False, False, True]
    result.loss.backward()
    assert found.grad.tolist() == pytest.approx([0, math.exp(0.5) / 4, -math.exp(-0.5) / 4, 0])


def test_a_batch_without_a_token_has_no_gradient():
    found = torch.zeros(0, requires_grad=True)
    for name in ("dapo", "grpo", "gspo", "dr_grpo"):
        result = policy_loss(found, batch([0], [1.0], old=found.detach()), settings(name))
        assert result.loss.item() == 0
        result.loss.backward()


def test_an_engine_weights_tokens_by_a_capped_ratio():
    old = torch.log(torch.tensor([0.5, 0.5, 0.5, 0.5]))
    sampled = torch.tensor([math.log(0.25 / 2), math.log(0.5), math.log(1.0), NAN])
    assert sampler_weights(old, sampled, 2.0).tolist() == pytest.approx([2.0, 1.0, 0.5, 1.0])
    result = policy_loss(old, batch([4], [1.0], old=old, sampled=sampled), settings("dapo"))
    assert result.loss.item() == pytest.approx(-4.5 / 4)


def test_the_gradient_of_another_sampler_is_that_of_the_model():
    """All tokens of a vocabulary of three, in the frequencies of their sampler."""
    logits = torch.tensor([0.3, -0.2, 0.1], requires_grad=True)
    gains = torch.tensor([1.0, -0.5, 2.0])
    model = logits.detach().softmax(0)
    expected = torch.autograd.grad(-(model * gains * logits.log_softmax(0)).sum(), logits)[0]
    counts = torch.tensor([5, 2, 3])  # the sampler has 1/2, 1/5 and 3/10
    tokens = torch.repeat_interleave(torch.arange(3), counts)
    sampled = (counts / 10).log()[tokens]
    for cap, is_equal in ((10.0, True), (1.0, False)):
        found = logits.log_softmax(0)[tokens]
        given = batch([1] * 10, gains[tokens].tolist(), old=found.detach(), sampled=sampled)
        result = policy_loss(found, given, settings("dapo", sampler_cap=cap))
        gradient = torch.autograd.grad(result.loss, logits)[0]
        assert torch.allclose(gradient, expected, atol=1e-6) == is_equal


def test_targets_are_the_tokens_of_a_completion():
    sample = completion_sample([5, 6], Completion([7, 2], True), 0.5, masked=False)
    assert sample.input_ids.tolist() == [5, 6, 7, 2]
    assert sample.targets.tolist() == [-100, 7, 2, -100]
    assert sample.size == 2
    masked = completion_sample([5, 6], Completion([7, 2], False), 0.5, masked=True)
    assert masked.targets.tolist() == [-100] * 4
    assert masked.size == len(masked.sampled) == empty_sample(0).size == 0
