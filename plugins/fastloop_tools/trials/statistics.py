"""Statistics of repeated measurements: medians, intervals, and significance."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist, fmean, stdev
from typing import Literal

DRAWS = 4000
LEAST_PAIRS = 5
"""With fewer pairs, the bootstrap interval of the median covers less than 95%, so no difference is reported."""

STUDENT = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281)
"""The 97.5% quantiles of Student's t distribution with 1 to 10 degrees of freedom."""

Outcome = Literal["faster", "slower", "no difference beyond noise", "too few repeats to tell"]


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95% percentile bootstrap interval of the median; deterministic."""
    import numpy as np

    if not values:
        return math.nan, math.nan
    generator = np.random.default_rng(0)
    medians = np.median(generator.choice(np.asarray(values, dtype=float), (DRAWS, len(values))), axis=1)
    low, high = np.percentile(medians, [2.5, 97.5], method="nearest")
    return float(low), float(high)


def mean_interval(values: Sequence[float], overlap: float = 0.0) -> tuple[float, float] | None:
    """The 95% interval of the mean, for values that are about normally distributed; None for fewer than two values.

    It uses Student's t, which is exact for few values, such as one for each of three seeds. The bootstrap of
    ``interval`` is not.

    Args:
        overlap: Validation samples divided by training samples, for values of models whose training sets overlap: 1 /
            (k - 1) for k folds. Such values are correlated. The variance of their mean is corrected by Nadeau and
            Bengio, "Inference for the Generalization Error", 2003. 0: the values are independent.
    """
    if len(values) < 2:
        return None
    half = _student(len(values) - 1) * stdev(values) * math.sqrt(1 / len(values) + overlap)
    return fmean(values) - half, fmean(values) + half


def _student(degrees: int) -> float:
    """The 97.5% quantile of Student's t. Above 10 degrees of freedom, the expansion in Abramowitz and Stegun, 26.7.5,
    is exact to 2e-4."""
    if degrees <= len(STUDENT):
        return STUDENT[degrees - 1]
    z = NormalDist().inv_cdf(0.975)
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / degrees + second / degrees**2 + third / degrees**3


def verdict(ratios: Sequence[float]) -> Outcome:
    """Whether paired ratios of two speeds show a significant difference."""
    if len(ratios) < LEAST_PAIRS:
        return "too few repeats to tell"
    low, high = interval(ratios)
    if low > 1:
        return "faster"
    return "slower" if high < 1 else "no difference beyond noise"


def break_even(extra_seconds: float, saved_a_step: float) -> int | None:
    """Steps until the time saved exceeds a one-time cost; None: never."""
    if saved_a_step <= 0:
        return None
    return max(0, math.ceil(extra_seconds / saved_a_step))
