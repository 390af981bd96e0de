"""What repeats say: medians, intervals, and whether there is anything to claim."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

DRAWS = 4000
LEAST_PAIRS = 5
"""Below this the interval of a median of pairs is no 95% one, so nothing is claimed."""

Suggestion = Literal["faster", "slower", "no difference beyond noise", "too few repeats to tell"]


def median(values: Sequence[float]) -> float:
    """The median."""
    import numpy as np

    return float(np.median(values))


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95% percentile bootstrap interval of the median; the same at every call."""
    import numpy as np

    if not values:
        return math.nan, math.nan
    generator = np.random.default_rng(0)
    medians = np.median(generator.choice(np.asarray(values, dtype=float), (DRAWS, len(values))), axis=1)
    low, high = np.percentile(medians, [2.5, 97.5], method="nearest")
    return float(low), float(high)


def verdict(ratios: Sequence[float]) -> Suggestion:
    """What the paired ratios of a speed over the one it is compared with allow to say."""
    if len(ratios) < LEAST_PAIRS:
        return "too few repeats to tell"
    low, high = interval(ratios)
    if low > 1:
        return "faster"
    return "slower" if high < 1 else "no difference beyond noise"


def break_even(extra_seconds: float, saved_a_step: float) -> int | None:
    """Steps after which what a plugin costs once is won back; None: never."""
    if saved_a_step <= 0:
        return None
    return max(0, math.ceil(extra_seconds / saved_a_step))
