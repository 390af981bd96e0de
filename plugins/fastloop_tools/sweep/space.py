"""The search space: ranges and lists of values on the command line."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING

from fastloop.errors import UsageError
from fastloop_tools.sweep import grid

if TYPE_CHECKING:
    from optuna.trial import Trial

LOG_RATIO = 100
"""Smallest ratio of a positive float range's ends from which its scale is logarithmic: two orders of magnitude."""
_RANGE = re.compile(r"(log\()?\s*([^\s(]*?)\s*\.\.\s*([^\s)]*?)\s*(\))?")
_INTEGER = re.compile(r"[+-]?\d+")


@dataclass(frozen=True)
class Axis:
    """A key to search: its range or list as on the command line, the values of a list, or both ends of a range, which
    are included, and integers for a range of integers."""

    key: str
    text: str
    values: tuple[str, ...] = ()
    ends: tuple[float, float] = (0, 0)
    log: bool = False

    def describe(self) -> str:
        """The values of the search, for the log."""
        if self.values:
            return f"{self.key}: one of {', '.join(self.values)}"
        low, high = self.ends
        kind = "integers" if isinstance(low, int) and isinstance(high, int) else "numbers"
        scale = "logarithmic" if self.log else "linear"
        return f"{self.key}: {kind} from {low} to {high}, {scale} scale"

    def suggest(self, trial: Trial) -> str:
        """The value of a trial, as on the command line."""
        if self.values:
            return str(trial.suggest_categorical(self.key, self.values))
        low, high = self.ends
        if isinstance(low, int) and isinstance(high, int):
            return str(trial.suggest_int(self.key, low, high, log=self.log))
        return repr(trial.suggest_float(self.key, low, high, log=self.log))

    def examples(self) -> list[str]:
        """All values of a list, and both ends of a range, to check them before the first trial."""
        return list(self.values) or [repr(end) for end in self.ends]


def parse(overrides: Iterable[str]) -> tuple[list[Axis], list[str]]:
    """Divide overrides into the axes to search and the overrides of all trials.

    Raises:
        UsageError: A range is empty or not one of numbers, or a list is wrong; see ``grid.parse``.
    """
    overrides = list(overrides)
    parsed = grid.parse(overrides)
    axes = [Axis(key, ",".join(values), tuple(values)) for key, values in parsed.axes.items()]
    fixed = []
    for item in parsed.fixed:
        axis = _parse_range(item)
        if axis is None:
            fixed.append(item)
        else:
            axes.append(axis)
    order = [item.partition("=")[0] for item in overrides]
    return sorted(axes, key=lambda axis: order.index(axis.key)), fixed


def _parse_range(item: str) -> Axis | None:
    """The axis of ``key=a..b`` or ``key=log(a..b)``; None for another value, such as the path ``../data``."""
    key, _, text = item.partition("=")
    match = _RANGE.fullmatch(text.strip())
    if match is None and not text.startswith("log("):
        return None
    low, high = (_number(match[2]), _number(match[3])) if match else (None, None)
    log = text.startswith("log(")
    if low is None and high is None and not log:
        return None
    if match is None or low is None or high is None or bool(match[1]) != bool(match[4]):
        raise UsageError(
            "not a range of numbers.",
            code="wrong-format",
            place=item,
            expected=f"such as {key}=1e-5..1e-3, {key}=4..16 or {key}=log(1..1024)",
        )
    if key == "output":
        raise UsageError(
            "expected one folder. Each run gets a folder of its own in it.", code="wrong-format", place=item
        )
    if low >= high:
        raise UsageError(
            code="out-of-range",
            place=item,
            found="an empty range",
            expected="the lower end first, and two different ends",
        )
    if log and low <= 0:
        raise UsageError(
            code="out-of-range", place=item, found=f"{low} on a logarithmic scale", expected="two positive ends"
        )
    if not (isinstance(low, int) and isinstance(high, int)):
        low = float(low)
        high = float(high)
        # as decimals: as floats, 9e-3 / 9e-5 is less than 100
        if low > 0 and Decimal(match[3]) >= LOG_RATIO * Decimal(match[2]):
            log = True
    return Axis(key, text, ends=(low, high), log=log)


def _number(text: str) -> float | None:
    """An int or a finite float; None for another text."""
    if _INTEGER.fullmatch(text):
        return int(text)
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None
