"""Advantages and losses. Each equals that of TRL with the same name, in value and gradient."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

MARGIN = 1e-4
"""Is added to a standard deviation before a division by it, as in TRL."""


@dataclass(frozen=True)
class LossSettings:
    """How the loss is computed.

    Attributes:
        name: ``grpo``, ``dapo``, ``dr_grpo`` or ``gspo``.
        beta: Weight of the divergence from the reference.
        low, high: The ratio is clipped below ``1 - low`` and above ``1 + high``.
        max_new_tokens: Tokens of a completion at most, by which ``dr_grpo`` divides.
        sampler_cap: Largest weight of a token whose engine reports another probability than the model.
    """

    name: str
    beta: float
    low: float
    high: float
    max_new_tokens: int
    sampler_cap: float


@dataclass(frozen=True)
class PolicyLoss:
    """The loss of a batch.

    Attributes:
        loss: 0-dim, with a gradient.
        clipped: Whether each token's ratio is clipped, (tokens,) bool.
        divergence: The divergence of each token from the reference, (tokens,); 0 without a reference.
        weights: The weight of each token by its sampler, (tokens,); 1 for one that the model has drawn.
    """

    loss: Tensor
    clipped: Tensor
    divergence: Tensor
    weights: Tensor


def advantages(rewards: Tensor, scale: bool) -> Tensor:
    """Rewards minus the mean of their group, divided by its standard deviation if ``scale``: Shao et al., 2024,
    https://arxiv.org/abs/2402.03300. Exactly 0 in a group whose rewards are equal.

    Args:
        rewards: (prompts, completions) float64. NaN: no reward applies. It is left out, and its advantage is 0.
    """
    centered = rewards - rewards.nanmean(1, keepdim=True)
    if scale:
        centered = centered / (deviations(rewards)[:, None] + MARGIN)
    return centered.masked_fill(equal_groups(rewards)[:, None], 0.0).nan_to_num()


def deviations(rewards: Tensor) -> Tensor:
    """The standard deviation of each group, (prompts,), with n - 1 in the denominator; 0 for a single reward."""
    centered = rewards - rewards.nanmean(1, keepdim=True)
    count = (~rewards.isnan()).sum(1)
    return (centered.nan_to_num().square().sum(1) / (count - 1).clamp(min=1)).sqrt()


def equal_groups(rewards: Tensor) -> Tensor:
    """Whether all rewards of a group are equal, so that it has no signal: (prompts,) bool. NaN are left out."""
    smallest = rewards.nan_to_num(nan=torch.inf).amin(1)
    largest = rewards.nan_to_num(nan=-torch.inf).amax(1)
    return smallest >= largest


def policy_loss(log_probabilities: Tensor, batch: Mapping[str, Tensor], settings: LossSettings) -> PolicyLoss:
    """The loss of completions: the clipped objective of PPO with the advantages of a group.

    Args:
        log_probabilities: Those of all tokens of completions, end to end: (tokens,) float32.
        batch: ``completions`` is the number of each token's completion, (tokens,) int64; ``sizes`` the number of tokens
            of each completion, and ``advantages``, both (completions,) float32; ``old`` the log-probabilities before
            the first update. Optional: ``reference``, those of the model before training; ``sampled``, those of an
            engine, NaN for a token that the model has drawn. All three are (tokens,) float32.
        settings: ``gspo``: one ratio for a completion: Zheng et al., 2025, https://arxiv.org/abs/2507.18071.
    """
    rows = batch["completions"]
    sizes = batch["sizes"]
    advantage = batch["advantages"][rows]  # of each token: that of its completion
    change = log_probabilities - batch["old"]
    if settings.name == "gspo":
        sums = torch.zeros_like(sizes).index_add(0, rows, change)
        change = (sums / sizes.clamp(min=1))[rows]
    ratio = change.exp()
    bounded = ratio.clamp(1 - settings.low, 1 + settings.high)
    losses = -torch.min(ratio * advantage, bounded * advantage)
    clipped_below = (ratio < 1 - settings.low) & (advantage < 0)
    clipped_above = (ratio > 1 + settings.high) & (advantage > 0)
    weights = torch.ones_like(losses)
    if "sampled" in batch:
        weights = sampler_weights(batch["old"], batch["sampled"], settings.sampler_cap)
        losses = losses * weights
    divergence = torch.zeros_like(log_probabilities)
    if "reference" in batch:
        distance = batch["reference"] - log_probabilities
        estimate = distance.exp() - distance - 1  # Schulman, 2020, http://joschu.net/blog/kl-approx.html
        divergence = ratio * estimate  # so that its gradient is unbiased: https://arxiv.org/abs/2512.02556
        losses = losses + settings.beta * divergence
    clipped = clipped_below | clipped_above
    return PolicyLoss(mean_loss(losses, rows, sizes, settings), clipped, divergence.detach(), weights)


def sampler_weights(old: Tensor, sampled: Tensor, cap: float) -> Tensor:
    """The ratio of the model's probability of each token to that of its sampler, at most ``cap``: Yao et al., 2025,
    https://fengyao.notion.site/off-policy-rl. 1 where the sampler reports none."""
    return (old - sampled).exp().clamp(max=cap).nan_to_num(nan=1.0)


def mean_loss(losses: Tensor, rows: Tensor, sizes: Tensor, settings: LossSettings) -> Tensor:
    """The mean of the losses of tokens over what ``loss_weight`` counts.

    ``dapo`` is the mean over tokens: Yu et al., 2025, https://arxiv.org/abs/2503.14476. ``dr_grpo`` is the sum of each
    completion over ``max_new_tokens``: Liu et al., 2025, https://arxiv.org/abs/2503.20783. The others are the mean over
    completions of their means.
    """
    if settings.name == "dapo":
        return losses.sum() / max(len(losses), 1)
    if settings.name == "dr_grpo":
        return losses.sum() / (len(sizes) * settings.max_new_tokens)
    return (losses / sizes[rows]).sum() / len(sizes)


def loss_weight(tokens: int, completions: int, name: str) -> int:
    """The number that the loss of a batch is the mean over: its tokens for ``dapo``, otherwise its completions."""
    return tokens if name == "dapo" else completions
