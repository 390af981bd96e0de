"""The differences between two trainings, in the words of a failure message."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

SHOWN = 5
"""Number of differences that a message shows, before it gives the total."""


def few(values: Sequence[Any]) -> str:
    """The first items, and the number of further ones."""
    shown = [f"{value:.6g}" if isinstance(value, float) else str(value) for value in values[:SHOWN]]
    return "; ".join([*shown, *([f"... ({len(values)} in all)"] if len(values) > SHOWN else [])])


def unequal(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """Names of values that differ or that only one side has."""
    return [
        name
        for name in ours | theirs  # type: ignore[operator]
        if name not in ours
        or name not in theirs
        or type(ours[name]) is not type(theirs[name])
        or not _equal(ours[name], theirs[name])
    ]


def _equal(a: Any, b: Any) -> bool:
    import torch

    return torch.equal(a, b) if isinstance(a, torch.Tensor) else bool(a == b)


def packed(state: Any) -> dict[str, Any]:
    """The state of a plugin in the form of a checkpoint: tensors by their names, and the rest."""
    from fastloop.checkpoint import pack

    tensors: dict[str, Any] = {}
    rest = pack(state, tensors, "state")
    return tensors | (rest if isinstance(rest, dict) else {"state": rest})


def distance(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> float:
    """The norm of the difference of two gradients divided by the norm of the second; infinite if their weights
    differ."""
    if ours.keys() != theirs.keys():
        return math.inf
    difference = sum(float((ours[name] - gradient).double().square().sum()) for name, gradient in theirs.items())
    whole = sum(float(gradient.double().square().sum()) for gradient in theirs.values())
    return math.sqrt(difference / whole) if whole else difference
