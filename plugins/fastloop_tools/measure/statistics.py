"""Statistics of repeated measurements: medians, intervals, and significance."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

DRAWS = 4000
LEAST_PAIRS = 5
"""With fewer pairs, the bootstrap interval of the median covers less than 95%, so no difference is reported."""

Outcome = Literal["faster", "slower", "no difference beyond noise", "too few repeats to tell"]


def median(values: Sequence[float]) -> float:
    """The median."""
    import numpy as np

    return float(np.median(values))


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95% percentile bootstrap interval of the median; deterministic."""
    import numpy as np

    if not values:
        return math.nan, math.nan
    generator = np.random.default_rng(0)
    medians = np.median(generator.choice(np.asarray(values, dtype=float), (DRAWS, len(values))), axis=1)
    low, high = np.percentile(medians, [2.5, 97.5], method="nearest")
    return float(low), float(high)


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
