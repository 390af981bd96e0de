"""Shared by the tests of strategies."""

from __future__ import annotations

import json
from pathlib import Path
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


def logged_norms(folder: Path) -> dict[int, float]:
    """Step -> ``grad_norm``, as metrics.jsonl of a run folder has it."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["grad_norm"] for line in lines if "split" not in line}
