"""Losses. Each equals that of TRL with the same name, in value and gradient. Tensors are float32."""

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid


def dpo(ratios: Tensor, tokens: Tensor, loss: str, beta: float, label_smoothing: float) -> Tensor:
    """The loss of each row, (rows,): Rafailov et al., 2023, https://arxiv.org/abs/2305.18290; ``robust``: Chowdhury et
    al., 2024, https://arxiv.org/abs/2403.00409; ``ipo``: Azar et al., 2023, https://arxiv.org/abs/2310.12036.

    ``ratios`` are log-probabilities minus those of the reference, (2, rows), of the chosen completions first, and
    ``tokens`` the numbers of their tokens."""
    if loss == "ipo":
        chosen, rejected = ratios / tokens
        squares: Tensor = (chosen - rejected - 1 / (2 * beta)) ** 2
        return squares
    margin = beta * (ratios[0] - ratios[1])
    wrong = label_smoothing
    return (wrong * logsigmoid(-margin) - (1 - wrong) * logsigmoid(margin)) / (1 - 2 * wrong)


def orpo(averages: Tensor, beta: float) -> Tensor:
    """The odds ratio's part of the loss of each row, (rows,): Hong et al., 2024, https://arxiv.org/abs/2403.07691.
    ``averages`` are mean log-probabilities of the tokens of each completion, (2, rows), of the chosen ones first."""
    small = averages < -0.6931  # log(1 - exp(x)) without cancellation
    rest = torch.where(small, torch.log1p(-averages.exp()), torch.log(-torch.expm1(averages)))
    odds = averages - rest
    return -beta * logsigmoid(odds[0] - odds[1])


def kto(
    ratios: Tensor,
    good: Tensor,
    divergence: Tensor,
    beta: float,
    desirable_weight: float,
    undesirable_weight: float,
) -> Tensor:
    """The loss of each row, (rows,): Ethayarajh et al., 2024, https://arxiv.org/abs/2402.01306.

    ``ratios`` are as for ``dpo``, (rows,). ``good`` marks good completions, and ``divergence``, 0-dim, is that of the
    model from its reference."""
    distance = beta * (ratios - divergence)
    of_good = desirable_weight * (1 - distance.sigmoid())
    of_others = undesirable_weight * (1 - (-distance).sigmoid())
    return torch.where(good, of_good, of_others)


def reward(scores: Tensor, center: float) -> Tensor:
    """The loss of each row, (rows,): Bradley and Terry, 1952, with ``center`` as the weight of the squared sum.
    ``scores`` are (2, rows), of the chosen completions first."""
    chosen, rejected = scores
    loss: Tensor = center * (chosen + rejected) ** 2 - logsigmoid(chosen - rejected)
    return loss
