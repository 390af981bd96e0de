"""Shared by the tests of strategies."""

from __future__ import annotations

import json
from collections.abc import Container, Iterable
from pathlib import Path
from typing import Any

import pytest
from long_form import LONG

COMPILER = [  # warnings that torch's compiler ignores by default
    pytest.mark.filterwarnings(f"ignore:{line}")
    for line in (
        "<class 'torch.autograd.function.Function'> should not be instantiated:DeprecationWarning",
        "The .grad attribute of a Tensor that is not a leaf:UserWarning",
    )
]


def same(
    run: dict[str, Any], plain: dict[str, Any], tolerance: float, keys: tuple[str, ...] = ("losses", "norms", "metrics")
) -> None:
    """A run, or the last part of one, has the losses, norms, metrics and learning rates of the plain one."""
    assert "error" not in run, run["error"]
    for key in keys:
        assert run[key] == pytest.approx(plain[key][-len(run[key]) :], rel=tolerance), key
    assert run["lrs"] == plain["lrs"][-len(run["lrs"]) :]


def of_this_form(runs: Iterable[Any], long_only: Container[str]) -> list[Any]:
    """The runs, names, or tuples that begin with a name, but those that only the long form has."""
    chosen = []
    for run in runs:
        name = run["name"] if isinstance(run, dict) else run if isinstance(run, str) else run[0]
        if LONG or name not in long_only:
            chosen.append(run)
    return chosen


def save_at_end(starts: Iterable[Iterable[dict[str, Any]]], step: int, keep: Container[str] = ()) -> None:
    """Let runs save at their last step alone, except those that another run resumes from, and those of ``keep``."""
    runs = [run for start in starts for run in start]
    resumed = {run["resume"].partition("/")[0] for run in runs if "resume" in run}
    for run in runs:
        if run["name"] not in resumed and run["name"] not in keep:
            run["train"] = run.get("train", {}) | {"save_every": step}


def logged_norms(folder: Path) -> dict[int, float]:
    """Step -> ``grad_norm``, as metrics.jsonl of a run folder has it."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["grad_norm"] for line in lines if "split" not in line}
