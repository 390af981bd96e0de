"""Facts on which the processes of a run must agree. They compare them in the first steps and at each evaluation.

A process that reads other samples, or trains other parameters, than the others expect may end without an error, and
with wrong results. So the processes exchange short facts, in one collective operation, and each of them raises the same
error. Later steps exchange nothing.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fastloop.distributed.tensors import as_bytes, elements_at, in_memory_order
from fastloop.errors import ProcessesDisagree

if TYPE_CHECKING:
    from fastloop.data import Loader
    from fastloop.run import Run
    from fastloop.state import Batch
    from fastloop.strategy import Strategy

STEPS = 2
"""Optimizer steps of a run, or of its continuation after a resume, in which the processes compare facts."""

SAMPLED = 256
"""Elements of each weight that processes compare, evenly spaced: about 1 KiB, however large the weight is."""
DIVERGENCE = 0.05
"""Least difference of a weight over processes that is an error, relative to how far it moved since the run began, in
2-norms. Gradients of other samples move it by more. Updates on processors of two kinds differ by up to 0.01: Muon
computes them in bf16."""
ROUNDING = 4
"""Least difference that is an error, relative to the weight, in 2-norms and in units of its dtype's machine epsilon.
An optimizer that rounds its weights at random differs by about 1."""
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
"""Bytes of an element -> the integers as which a checksum adds its bits."""
SUMMED = 2**20
"""Elements that a checksum adds at a time: torch copies them as int64, 8 MiB, before it adds them."""

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
"""Fact -> what to do if processes disagree on it. A fact about a key of a recipe has none here."""
RECIPE_REMEDY = "Give each process the same recipe, and the same overrides."


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
    parameters = json.dumps(run.settings_record.parameters).encode()
    equal = {
        "trained parameters": hashlib.sha256(parameters).hexdigest()[:12],
        "micro-batches of a step": len(batches),
        "first sample": batches[0].stream_digest,
    }
    facts = StepFacts(
        share=run.loaders.processes.rank,
        ids=None if may_repeat else tuple(ids),
        equal=_recipe_facts(run) | equal,
    )
    gathered: list[StepFacts] = run.processes.all_gather_object(facts)
    place = f"{run.recipe.where}: step {run.state.step}"
    compare([one.equal for one in gathered], place)
    _compare_samples(gathered, place)


def _recipe_facts(run: Run) -> dict[str, Any]:
    """Key of the section ``train`` -> its value, such as ``{"key train.lr": 0.01}``. A process that evaluates at other
    steps than the others waits for them."""
    facts = {}
    for key, value in vars(run.recipe.train).items():
        if isinstance(value, int | float | str | None):  # else it may hold objects, which have no common form
            facts[f"key train.{key}"] = value
    return facts


@dataclass(frozen=True)
class WeightSample:
    """Elements of a weight on one process: 1-dim, double precision, on the CPU.

    Attributes:
        before: When the run began.
        now: After the step that is compared.
        eps: Machine epsilon of the weight's dtype.
    """

    before: Tensor
    now: Tensor
    eps: float

    def differs_from(self, other: WeightSample) -> bool:
        """Whether other gradients moved ``other``, the same weight on another process. False if one has a NaN."""
        difference = _distance(self.now, other.now)
        movement = max(_distance(self.before, self.now), _distance(other.before, other.now))
        rounding = self.eps * float(torch.linalg.vector_norm(self.now))
        return difference > DIVERGENCE * movement and difference > ROUNDING * rounding


def sample_weights(run: Run) -> dict[str, Tensor]:
    """Name -> a copy of up to ``SAMPLED`` elements, of each weight that ``check_weights`` will compare."""
    samples = {}
    for name, weight in _compared_weights(run).items():
        # 1,000 elements: every fourth, so 250 of them
        spacing = math.ceil(weight.numel() / SAMPLED) or 1
        samples[name] = elements_at(weight, torch.arange(0, weight.numel(), spacing, device=weight.device))
    return samples


def check_weights(run: Run, before: Mapping[str, Tensor]) -> None:
    """Compare the trained weights after a step that is done. Every process must call it.

    The processes exchange a checksum, which is added up on the device. If checksums differ, they exchange a part of
    each weight, too.

    Args:
        before: The result of ``sample_weights`` when the run began.

    Raises:
        ProcessesDisagree: The strategy promises equal weights, and a weight differs by more than ``ROUNDING`` and
            ``DIVERGENCE``.
    """
    if not run.strategy.keeps_weights_equal:
        return
    checksums = run.processes.all_gather_object(_checksum(_compared_weights(run), run.device))
    if None in checksums or len(set(checksums)) == 1:
        return
    samples: dict[str, WeightSample] = {}
    for name, now in sample_weights(run).items():
        dtype = torch.complex128 if now.is_complex() else torch.float64
        samples[name] = WeightSample(
            before=before[name].to("cpu", dtype), now=now.to("cpu", dtype), eps=torch.finfo(now.dtype).eps
        )
    first, *others = run.processes.all_gather_object(samples)
    remedy = _remedy(type(run.strategy))
    for rank, other in enumerate(others, start=1):
        for name, sample in other.items():
            if sample.differs_from(first[name]):
                raise ProcessesDisagree(
                    f"process {rank} trains other weights than process 0 under the strategy {run.strategy.name!r}, "
                    f"such as {name}. Either the strategy does not average gradients over the processes, or a hook "
                    "changes gradients or weights in another way on each process.",
                    code="processes-disagree",
                    place=f"{run.recipe.where}: step {run.state.step}",
                    remedy=remedy,
                )


def _remedy(strategy: type[Strategy]) -> str:
    """The remedy if processes train other weights. Users cannot edit a strategy of the fastloop project."""
    from fastloop.plugins.manager import distribution_of
    from fastloop.plugins.packages import OWN_DISTRIBUTIONS

    distribution = distribution_of(strategy)  # type: ignore[arg-type]  # mypy takes no class as hashable
    if distribution is not None and distribution.name in OWN_DISTRIBUTIONS:
        return "Let hooks change gradients and weights in the same way on each process."
    return (
        "Average gradients as docs/write-a-strategy.md shows, and let hooks do the same on each process. If weights "
        f"are meant to differ, declare keeps_weights_equal = False in {strategy.__name__}."
    )


def _distance(one: Tensor, other: Tensor) -> float:
    return float(torch.linalg.vector_norm(one - other))


def _compared_weights(run: Run) -> dict[str, Tensor]:
    """Name -> weight, of those that the optimizer steps. Empty if the strategy lets them differ, or if some are
    sharded, quantized or not in the model."""
    if not run.strategy.keeps_weights_equal:
        return {}
    parameters = dict(run.unwrap_model().named_parameters())
    weights: dict[str, Tensor] = {}
    for name, _ in run.settings_record.parameters:
        weight = parameters.get(name)
        if weight is None or is_traceable_wrapper_subclass(weight):
            return {}
        weights[name] = weight.detach()
    return weights


def _checksum(weights: Mapping[str, Tensor], device: torch.device) -> str | None:
    """A checksum of the bits of weights, added up on ``device``. The host waits for it once. None: there are none.

    A sum is the same in each order, so it takes the elements as they lie in memory.
    """
    if not weights:
        return None
    sums = []
    for weight in weights.values():
        bits = as_bytes(in_memory_order(weight)).view(INTEGERS[weight.element_size()])
        total = torch.zeros((), dtype=torch.int64, device=bits.device)
        for piece in torch.split(bits, SUMMED):
            total += piece.sum(dtype=torch.int64)
        sums.append(total.to(device))
    return hashlib.sha256(json.dumps(torch.stack(sums).tolist()).encode()).hexdigest()[:12]


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
                    f"{facts[name]!r}. {REMEDIES.get(name, RECIPE_REMEDY)}",
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
