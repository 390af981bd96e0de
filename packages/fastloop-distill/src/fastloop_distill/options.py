"""Options of ``distill``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from fastloop import option


@dataclass(kw_only=True)
class DistillOptions:
    """Options."""

    teacher: Annotated[str, option("The teacher: a run, the folder of a model, or a name on the hub.")]
    temperature: Annotated[float, option("Divides the logits of both before their softmax.", gt=0)] = 2.0
    weight: Annotated[float, option("Share of the soft loss; the task's loss has the rest.", ge=0, le=1)] = 0.5
    states: Annotated[
        Literal["none", "mse", "cosine"], option("The loss between hidden states of student and teacher.")
    ] = "none"
    states_weight: Annotated[float, option("Factor of the loss between hidden states.", gt=0)] = 1.0
    teacher_layers: Annotated[
        list[int], option("The teacher's layer for each one of the student, from 0; empty: spread evenly.")
    ] = field(default_factory=list)
    layers: Annotated[list[int], option("Train only these layers of model.name, from 0; empty: all.")] = field(
        default_factory=list
    )
    cache_mb: Annotated[int, option("Memory of a process for logits of texts, in MiB; 0: no cache.", ge=0)] = 64
