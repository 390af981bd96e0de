"""Shared by the tests of strategies."""

from __future__ import annotations

from typing import Any

import pytest

COMPILER = [  # what torch's compiler meets and lets pass by itself, where warnings are not errors
    pytest.mark.filterwarnings(f"ignore:{line}")
    for line in (
        "<class 'torch.autograd.function.Function'> should not be instantiated:DeprecationWarning",
        "The .grad attribute of a Tensor that is not a leaf:UserWarning",
    )
]


def same(run: dict[str, Any], plain: dict[str, Any], tolerance: float, keys: tuple[str, ...] = ("losses", "norms", "metrics")) -> None:
    """A run, or the last part of one, has the losses, norms, metrics and learning rates of the plain one."""
    assert "error" not in run, run["error"]
    for key in keys:
        assert run[key] == pytest.approx(plain[key][-len(run[key]) :], rel=tolerance), key
    assert run["lrs"] == plain["lrs"][-len(run["lrs"]) :]
