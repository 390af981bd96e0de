"""Losses. Each equals that of TRL with the same name, in value and gradient. Tensors are float32."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid


def dpo(ratios: Tensor, tokens: Tensor, options: Any) -> Tensor:
    """The loss of each row, (rows,): Rafailov et al., 2023, https://arxiv.org/abs/2305.18290; ``robust``: Chowdhury et
    al., 2024, https://arxiv.org/abs/2403.00409; ``ipo``: Azar et al., 2023, https://arxiv.org/abs/2310.12036.

    Args:
        ratios: Log-probability of each completion minus that of the reference: (2, rows), the chosen ones first.
        tokens: Their tokens, over which ``ipo`` averages.
        options: ``loss``, ``beta`` and ``label_smoothing``.
    """
    if options.loss == "ipo":
        chosen, rejected = ratios / tokens
        return (chosen - rejected - 1 / (2 * options.beta)) ** 2
    margin, wrong = options.beta * (ratios[0] - ratios[1]), options.label_smoothing
    return (wrong * logsigmoid(-margin) - (1 - wrong) * logsigmoid(margin)) / (1 - 2 * wrong)


def orpo(averages: Tensor, options: Any) -> Tensor:
    """The odds ratio's part of the loss of each row, (rows,): Hong et al., 2024, https://arxiv.org/abs/2403.07691.

    Args:
        averages: Mean log-probability of the tokens of each completion: (2, rows), the chosen ones first.
        options: ``beta``.
    """
    small = averages < -0.6931  # log(1 - exp(x)) without cancellation
    rest = torch.where(small, torch.log1p(-averages.exp()), torch.log(-torch.expm1(averages)))
    odds = averages - rest
    return -options.beta * logsigmoid(odds[0] - odds[1])


def kto(ratios: Tensor, good: Tensor, divergence: Tensor, options: Any) -> Tensor:
    """The loss of each row, (rows,): Ethayarajh et al., 2024, https://arxiv.org/abs/2402.01306.

    Args:
        ratios: As for ``dpo``, (rows,).
        good: Whether each completion is good.
        divergence: The estimate of the divergence between model and reference, 0-dim.
        options: ``beta``, ``desirable_weight`` and ``undesirable_weight``.
    """
    distance = options.beta * (ratios - divergence)
    better, worse = options.desirable_weight, options.undesirable_weight
    return torch.where(good, better * (1 - distance.sigmoid()), worse * (1 - (-distance).sigmoid()))


def reward(scores: Tensor, center: float) -> Tensor:
    """The loss of each row, (rows,): Bradley and Terry, 1952, with the sum of the scores near 0.

    Args:
        scores: Those of each completion: (2, rows), the chosen ones first.
        center: The weight of the squared sum.
    """
    chosen, rejected = scores
    return center * (chosen + rejected) ** 2 - logsigmoid(chosen - rejected)
