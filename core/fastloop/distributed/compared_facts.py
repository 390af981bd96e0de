"""Facts on which the processes of a run must agree. They compare them in the first steps and at each evaluation.

A process that reads other samples, or trains other parameters, than the others expect may end without an error, and
with wrong results. So the processes exchange short facts, in one collective operation, and each of them raises the same
error. Later steps exchange nothing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fastloop.errors import ProcessesDisagree

if TYPE_CHECKING:
    from fastloop.data import Loader
    from fastloop.run import Run
    from fastloop.state import Batch

STEPS = 2
"""Optimizer steps of a run, or of its continuation after a resume, in which the processes compare facts."""

STREAM_REMEDY = (
    "An iterable dataset must give every process all samples, in the same order: fastloop shares them out. If it gives "
    "each process its own share, set its attribute shards_itself = True. If only its random numbers differ, seed them "
    "alike, or set shards_itself = False."
)
REMEDIES = {
    "trained parameters": "Freeze the same layers on each process, and build the same model.",
    "micro-batches of a step": "Let the dataset and the sampler have the same length on each process.",
    "first sample": STREAM_REMEDY,
}
"""Fact -> what to do if processes disagree on it."""


@dataclass(frozen=True)
class StepFacts:
    """The facts of a training step on one process.

    Attributes:
        share: Index of the process among those that divide the samples: processes with the same index train on the same
            samples.
        ids: Ids of the samples of the step's micro-batches; None: they may repeat.
        equal: Fact -> its value, which must be the same on each process.
    """

    share: int
    ids: tuple[int, ...] | None
    equal: Mapping[str, Any]


def check_step(run: Run, batches: Sequence[Batch]) -> None:
    """Compare the facts of a step that is done. Every process must call it.

    Raises:
        ProcessesDisagree: Names the fact, and two processes with their values.
    """
    sampler = run.train_loader.sampler
    may_repeat = sampler is not None and sampler.user_order is not None
    ids: list[int] = []
    for batch in batches:
        if batch.samples:  # else a filler, which repeats a sample with weight 0
            ids += batch.ids
    parameters = json.dumps(run.build_record.parameters).encode()
    facts = StepFacts(
        share=run.loaders.processes.rank,
        ids=None if may_repeat else tuple(ids),
        equal={
            "trained parameters": hashlib.sha256(parameters).hexdigest()[:12],
            "micro-batches of a step": len(batches),
            "first sample": batches[0].stream_digest,
        },
    )
    gathered: list[StepFacts] = run.processes.all_gather_object(facts)
    place = f"{run.recipe.where}: step {run.state.step}"
    compare([one.equal for one in gathered], place)
    _compare_samples(gathered, place)


def check_stream(run: Run, loader: Loader, batch: Batch) -> None:
    """Compare the first sample that each process read of an iterable dataset to evaluate. Every process must call it.

    Args:
        batch: The first batch of this process.

    Raises:
        ProcessesDisagree: A process read another sample.
    """
    gathered = run.processes.all_gather_object({"first sample": batch.stream_digest})
    compare(gathered, f"{run.recipe.where}: evaluation of {type(loader.dataset).__name__}")


def compare(gathered: Sequence[Mapping[str, Any]], place: str) -> None:
    """Compare the facts of all processes, in order of rank.

    Raises:
        ProcessesDisagree: A fact differs.
    """
    for name, expected in gathered[0].items():
        for rank, facts in enumerate(gathered):
            if facts[name] != expected:
                raise ProcessesDisagree(
                    f"processes disagree on the {name}: process 0 has {expected!r}, and process {rank} has "
                    f"{facts[name]!r}. {REMEDIES[name]}",
                    code="processes-disagree",
                    place=place,
                )


def _compare_samples(gathered: Sequence[StepFacts], place: str) -> None:
    """Check that processes with different shares have no sample in common, and that those with the same share have the
    same ones."""
    owners: dict[int, int] = {}
    first_of_share: dict[int, int] = {}
    for rank, facts in enumerate(gathered):
        if facts.ids is None:
            return
        twin = first_of_share.setdefault(facts.share, rank)
        if twin != rank:
            if gathered[twin].ids != facts.ids:
                raise ProcessesDisagree(
                    f"processes {twin} and {rank} must train on the same samples, and have {gathered[twin].ids} and "
                    f"{facts.ids}.",
                    code="processes-disagree",
                    place=place,
                    remedy="Let the dataset and the sampler be the same on each process.",
                )
            continue
        for number in facts.ids:
            owner = owners.setdefault(number, rank)
            if owner != rank:
                raise ProcessesDisagree(
                    f"processes {owner} and {rank} both train on sample {number}.",
                    code="processes-disagree",
                    place=place,
                    remedy="Let the dataset and the sampler be the same on each process.",
                )
