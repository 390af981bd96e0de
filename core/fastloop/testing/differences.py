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
    if len(values) > SHOWN:
        shown.append(f"... ({len(values)} in all)")
    return "; ".join(shown)


def unequal(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """Names of values that differ or that only one side has."""
    names = []
    for name in {**ours, **theirs}:
        is_in_both = name in ours and name in theirs
        if not is_in_both or not _equal(ours[name], theirs[name]):
            names.append(name)
    return names


def _equal(a: Any, b: Any) -> bool:
    """Whether two values have one type and are equal."""
    import torch

    if type(a) is not type(b):
        return False
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else bool(a == b)


def packed(state: Any) -> dict[str, Any]:
    """The state of a plugin in the form of a checkpoint: tensors by their names, and the rest."""
    from fastloop.checkpoint import pack

    tensors: dict[str, Any] = {}
    rest = pack(state, tensors, "state")
    if not isinstance(rest, dict):
        rest = {"state": rest}
    return tensors | rest


def distance(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> float:
    """The norm of the difference of two gradients divided by the norm of the second; infinite if their weights
    differ."""
    if ours.keys() != theirs.keys():
        return math.inf
    difference = sum(float((ours[name] - gradient).double().square().sum()) for name, gradient in theirs.items())
    whole = sum(float(gradient.double().square().sum()) for gradient in theirs.values())
    return math.sqrt(difference / whole) if whole else difference
