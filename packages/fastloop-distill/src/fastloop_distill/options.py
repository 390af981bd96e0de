"""Options of ``distill``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fastloop import option


@dataclass(kw_only=True)
class DistillOptions:
    """Options."""

    teacher: str = option("The teacher: a run, the folder of a model, or a name on the hub.")
    temperature: float = option("Divides the logits of both before their softmax.", default=2.0, gt=0)
    weight: float = option("Share of the soft loss; the task's loss has the rest.", default=0.5, ge=0, le=1)
    states: Literal["none", "mse", "cosine"] = option(
        "The loss between hidden states of student and teacher.", default="none"
    )
    states_weight: float = option("Factor of the loss between hidden states.", default=1.0, gt=0)
    teacher_layers: list[int] = option(
        "The teacher's layer for each one of the student, from 0; empty: spread evenly.", default_factory=list
    )
    layers: list[int] = option("Train only these layers of model.name, from 0; empty: all.", default_factory=list)
    cache_mb: int = option("Memory of a process for logits of texts, in MiB; 0: no cache.", default=64, ge=0)
