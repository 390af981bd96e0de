"""Compares a training of two processes with the one of a single process: see ``world_runs.py``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from world_runs import Ended

from fastloop.testing.runs import Trained

MEASURED = (
    "allocator",
    "checkpoints",
    "compile",
    "compile_seconds",
    "evaluate_seconds",
    "peak_memory_bytes",
    "plugins",
    "sample-audit",
    "samples_per_second",
    "save_seconds",
    "startup_seconds",
    "tokens_per_second",
    "train_seconds",
    "upload",
    "world_size",
)
"""Keys of ``summary.json`` that depend on the processes, or on the run folder."""


@dataclass(frozen=True)
class Tolerance:
    """How far numbers may differ.

    Attributes:
        relative: Share of each number.
        absolute: Added for each element of a tensor.
    """

    relative: float
    absolute: float

    def holds(self, ours: Tensor, expected: Tensor) -> bool:
        """Whether two tensors are equal within it."""
        if self.relative == 0:
            return torch.equal(ours, expected)
        return torch.allclose(ours.double(), expected.double(), rtol=self.relative, atol=self.absolute)

    def holds_for(self, ours: float, expected: float) -> bool:
        """Whether two numbers are equal within it."""
        return ours == expected or abs(ours - expected) <= self.relative * abs(expected)


EXACT = Tolerance(0.0, 0.0)
"""Two processes add two gradients, in either order the same sum. Their micro-batches are those of one process."""
ORDER_OF_SUMS = Tolerance(1e-5, 2e-6)
"""Shards: the norm of the gradients is the sum of the norms of shards, and so are other sums. In five steps, weights
then differ by up to 1.2e-7, also in bf16."""


def tolerance(strategy: str) -> Tolerance:
    """How far a run under a strategy may differ from its reference on one process."""
    return EXACT if strategy == "ddp" else ORDER_OF_SUMS


def differences(ours: Ended, expected: Ended, allowed: Tolerance) -> list[str]:
    """The differences of a process from a single process, one a line."""
    if ours.error or expected.error:
        return [f"error {ours.error!r}, and {expected.error!r} in one process"]
    assert ours.trained is not None
    assert expected.trained is not None
    problems = _unequal_steps(ours.trained, expected.trained, allowed)
    for kind in ("state", "buffers"):
        tensors = getattr(ours, kind)
        others = getattr(expected, kind)
        for name in sorted(tensors.keys() & others.keys()):
            if not allowed.holds(tensors[name], others[name]):
                problems.append(
                    f"{kind}: {name}: by {(tensors[name].double() - others[name].double()).abs().max():.1e}"
                )
    if ours.buffers.keys() != expected.buffers.keys():
        problems.append(f"buffers {[*ours.buffers]} instead of {[*expected.buffers]}")
    return problems


def _unequal_steps(ours: Trained, expected: Trained, allowed: Tolerance) -> list[str]:
    problems = []
    if ours.lrs != expected.lrs:
        problems.append(f"learning rates {ours.lrs} instead of {expected.lrs}")
    if len(ours.losses) != len(expected.losses):
        return [*problems, f"{len(ours.losses)} steps instead of {len(expected.losses)}"]
    for step, (loss, other) in enumerate(zip(ours.losses, expected.losses, strict=True), start=1):
        if not allowed.holds_for(loss, other):
            problems.append(f"loss {loss} of step {step} instead of {other}")
    if [split for split, _ in ours.metrics] != [split for split, _ in expected.metrics]:
        return [*problems, f"{len(ours.metrics)} evaluations instead of {len(expected.metrics)}"]
    for (split, metrics), (_, others) in zip(ours.metrics, expected.metrics, strict=True):
        problems += _unequal_values(metrics, others, allowed, split)
    return problems


def _unequal_values(ours: Mapping[str, Any], expected: Mapping[str, Any], allowed: Tolerance, place: str) -> list[str]:
    """Compare the values of two mappings, within them too."""
    if ours.keys() != expected.keys():
        return [f"{place}: keys {sorted(ours)} instead of {sorted(expected)}"]
    problems = []
    for key, value in ours.items():
        other = expected[key]
        if isinstance(value, Mapping) and isinstance(other, Mapping):
            problems += _unequal_values(value, other, allowed, f"{place}.{key}")
        elif isinstance(value, float) and isinstance(other, float):
            if not allowed.holds_for(value, other):
                problems.append(f"{place}.{key}: {value} instead of {other}")
        elif value != other:
            problems.append(f"{place}.{key}: {value!r} instead of {other!r}")
    return problems


def summary_differences(ours: Ended, expected: Ended, allowed: Tolerance) -> list[str]:
    """Compare what ``summary.json`` has of the training, without times and memory."""
    if ours.error or expected.error:
        return []
    assert ours.trained is not None
    assert expected.trained is not None
    kept = [
        {key: value for key, value in each.trained.summary.items() if key not in MEASURED} for each in (ours, expected)
    ]
    return _unequal_values(kept[0], kept[1], allowed, "summary")


def export_differences(ours: Path, expected: Path, allowed: Tolerance) -> list[str]:
    """Compare the exported models of two run folders: their files, weights and JSON."""
    names = _files(ours / "model")
    if names != _files(expected / "model"):
        return [f"exported files {names} instead of {_files(expected / 'model')}"]
    problems = []
    for name in names:
        mine = ours / "model" / name
        other = expected / "model" / name
        if name.endswith(".safetensors"):
            weights = load_file(mine)
            others = load_file(other)
            if weights.keys() != others.keys():
                problems.append(f"exported weights {sorted(weights)} instead of {sorted(others)}")
                continue
            unequal = [key for key in weights if not allowed.holds(weights[key], others[key])]
            problems += [f"exported weight {key}" for key in unequal]
        elif name.endswith(".json") and json.loads(mine.read_text()) != json.loads(other.read_text()):
            problems.append(f"exported file {name}")
    return problems


def _files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
