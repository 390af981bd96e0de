"""The promises of a plugin about its trainings, each as a function that compares them: with the plugin and without,
and with and without a break."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fastloop.cli.numerics import BOUNDS, HOLDS, compare
from fastloop.problem import counted
from fastloop.testing.differences import distance, few, packed, unequal
from fastloop.testing.runs import Trained

BOUNDED = 10
"""Steps whose losses keep the bound of a class other than bitwise. Later steps magnify a difference of the first
ones."""

REPAIRS = {
    "bitwise": "Touch no number and draw no random one, or promise less: set `numerics`",
    "reassociated": "Compute the same in another order only, or promise less: set `numerics`",
    "reduced-precision": "Round less, or promise less: set `numerics`",
    "changes-training": "See whether `options` and `task` of the test suit it",
}
"""Numerics class -> what the author of a plugin can do if it breaks the promise of the class."""


@dataclass(frozen=True)
class BrokenPromise:
    """A promise that the trainings of a plugin break: parts of a message.

    Attributes:
        promised: The promise, as the object of "promises".
        difference: The result of the trainings instead.
        repair: The remedy for the plugin's author: a sentence without its full stop.
    """

    promised: str
    difference: str
    repair: str


def check_losses(numerics: str, ours: Trained, plain: Trained, again: Trained, where: str = "") -> BrokenPromise | None:
    """Compare the losses of each step. The plugin may end the training before the control runs end.

    Args:
        ours: The training with the plugin.
        plain: The training without it.
        again: The same once more: their difference is noise.
        where: The end of the promise, such as ``" on two processes with 'ddp'"``.
    """
    ends_early = bool(early_end(ours))
    if numerics == "changes-training":
        return _check_learning(ours.losses, ends_early, where)
    if ends_early:
        steps = len(ours.losses)
        plain = dataclasses.replace(plain, losses=plain.losses[:steps])
        again = dataclasses.replace(again, losses=again.losses[:steps])
    if len(ours.losses) != len(plain.losses):
        return BrokenPromise(
            f"numerics {numerics!r}: as many steps as there are without it{where}",
            f"{len(ours.losses)} instead of {len(plain.losses)}",
            REPAIRS[numerics],
        )
    step = first_difference(ours.losses, plain.losses)
    if numerics == "bitwise" and step is not None:
        return BrokenPromise(
            f"numerics 'bitwise': the losses that there are without it, to the bit{where}",
            f"from step {step + 1} on other ones: {ours.losses[step]!r} instead of {plain.losses[step]!r}",
            REPAIRS[numerics],
        )
    return _check_bound(numerics, ours, plain, again, where)


def _check_learning(losses: list[float], ends_early: bool, where: str) -> BrokenPromise | None:
    """Check that a training that a plugin changes still learns: the losses fall. If it ends early, they are finite."""
    finite = all(math.isfinite(loss) for loss in losses)
    if ends_early:
        promised = "finite losses"
        holds = finite
    else:
        promised = "a training that learns"
        half = max(len(losses) // 2, 1)  # whole epochs, so both halves have the same samples
        holds = finite and sum(losses[-half:]) < sum(losses[:half])
    if holds:
        return None
    return BrokenPromise(f"{promised}{where}", f"the losses {few(losses)}", REPAIRS["changes-training"])


def check_effect(
    strategy: str, alone: tuple[Trained, Trained], together: tuple[Trained, Trained]
) -> BrokenPromise | None:
    """Check that a plugin that changes the training of one process changes that of two, too.

    Args:
        alone: The training of one process with the plugin, and without it.
        together: The same of process 0 of two under a strategy.
    """
    if _are_equal(*alone) or not _are_equal(*together):
        return None
    return BrokenPromise(
        f"a training on two processes with {strategy!r} that the plugin changes, as on one process",
        "the losses and weights of a training without it",
        "If the strategy does not set what the plugin reads, such as `weight.grad`, declare it: "
        f"`conflicts = {{{strategy!r}: REASON}}`",
    )


def _are_equal(ours: Trained, plain: Trained) -> bool:
    """Whether two trainings have the same losses and final weights."""
    return ours.losses == plain.losses and not unequal(ours.weights, plain.weights)


def _check_bound(numerics: str, ours: Trained, plain: Trained, again: Trained, where: str) -> BrokenPromise | None:
    """Check that the losses of the first steps keep the bound of the numerics class."""
    runs = [{"losses": run.losses[:BOUNDED]} for run in (ours, plain, again)]
    comparison = compare(numerics, *runs)
    if comparison["verdict"] == HOLDS:
        return None
    return BrokenPromise(
        f"numerics {numerics!r}: each step's loss within {comparison['bound']:g} of what it is without it{where}",
        f"a relative difference of {comparison['difference']:.2e}",
        REPAIRS[numerics],
    )


def check_gradients(numerics: str, ours: Trained, plain: Trained, again: Trained) -> BrokenPromise | None:
    """Compare the gradients of the first step. Arguments as in ``check_losses``."""
    difference = distance(ours.gradients, plain.gradients)
    noise = distance(again.gradients, plain.gradients)
    if difference <= max(BOUNDS[numerics], 2 * noise):
        return None
    return BrokenPromise(
        f"numerics {numerics!r}: the first step's gradients as they are without it",
        f"a relative difference of {difference:.2e}, and {BOUNDS[numerics]:g} is allowed",
        REPAIRS[numerics],
    )


def check_final_loss(numerics: str, ours: Trained, plain: Trained, seeds: Sequence[Trained]) -> BrokenPromise | None:
    """Compare the last evaluation loss. It may differ by as much as it does between seeds.

    Args:
        seeds: Trainings without the plugin, with other seeds.
    """
    expected = final_loss(plain)
    others = [expected, *(final_loss(run) for run in seeds)]
    spread = max(others) - min(others)
    actual = final_loss(ours)
    if abs(actual - expected) <= spread:  # False for NaN
        return None
    return BrokenPromise(
        f"numerics {numerics!r}: the final metric as it is without it",
        f"an evaluation loss of {actual:.6g} instead of {expected:.6g}, while other seeds change it by up to "
        f"{spread:.3g}",
        REPAIRS[numerics],
    )


def final_loss(run: Trained) -> float:
    """The loss of the last evaluation."""
    _, metrics = run.metrics[-1]
    return metrics["loss"]


def check_bits(ours: Trained, plain: Trained) -> BrokenPromise | None:
    """Compare everything that a bitwise plugin leaves alone beside the losses. It may add metrics."""
    differences = []
    common = []
    for (split, metrics), (_, expected) in zip(ours.metrics, plain.metrics, strict=False):
        common.append((split, {name: metrics.get(name) for name in expected}))
    if len(ours.metrics) != len(plain.metrics):
        differences.append(f"{counted(len(ours.metrics), 'evaluation')} instead of {len(plain.metrics)}")
    elif common != plain.metrics:
        differences.append("other metrics of evaluations")
    weights = unequal(ours.weights, plain.weights)
    if weights:
        differences.append(f"other final weights: {few(weights)}")
    for generator in unequal(ours.random[-1], plain.random[-1]):
        differences.append(f"another state of the random numbers of {generator}")
    if not differences:
        return None
    return BrokenPromise(
        "numerics 'bitwise': the training that there is without it, to the bit",
        "; ".join(differences),
        REPAIRS["bitwise"],
    )


def check_batch_norm(numerics: str, ours: Trained, plain: Trained) -> BrokenPromise | None:
    """Compare how many passes in train mode the layers of batch norm counted."""
    differences = []
    for name, count in plain.weights.items():
        if not name.endswith("num_batches_tracked"):
            continue
        actual = ours.weights.get(name)
        if actual is None or int(actual) != int(count):
            differences.append(f"{name} is {actual} instead of {int(count)}")
    if not differences:
        return None
    return BrokenPromise(
        f"numerics {numerics!r}: as many passes in train mode as there are without it",
        few(differences),
        "Put the model into eval mode for passes of the plugin's own (fastloop.evaluation_results.evaluating)",
    )


def check_continuation(
    whole: Trained, resumed: Trained, event: str, step: int, where: str = ""
) -> BrokenPromise | None:
    """Compare a run that resumed with one that had no break: the same bits, and the same state of the plugin.

    Args:
        event: The event before the resume: ``was interrupted after step 9``.
        step: The step from which it continued.
        where: As in ``check_losses``.
    """
    differences = []
    losses = whole.losses[step:]
    if len(resumed.losses) != len(losses):
        differences.append(f"{len(resumed.losses)} further steps instead of {len(losses)}")
    else:
        first = first_difference(resumed.losses, losses)
        if first is not None:
            differences.append(f"other losses from step {step + first + 1} on")
    weights = unequal(whole.weights, resumed.weights)
    if weights:
        differences.append(f"other weights: {few(weights)}")
    elif whole.replicas != resumed.replicas:
        differences.append("other weights on this process")
    metrics = whole.metrics[len(whole.metrics) - len(resumed.metrics) :]
    if resumed.metrics != metrics:
        at_end = resumed.metrics[-1][1]
        differences.append(f"other metrics: in the end {at_end}, and {whole.metrics[-1][1]} without a break")
    saved, saved_again = resumed.states
    states = unequal(packed(saved), packed(saved_again))
    if states:
        differences.append(f"that save_state, right after load_state, gives another {few(states)}")
    if not differences:
        return None
    return BrokenPromise(
        f"the same result from a run that {event} and resumed{where}",
        "; ".join(differences),
        "Return from save_state all that the numbers depend on, and take it back in load_state",
    )


def first_difference(ours: Sequence[Any], theirs: Sequence[Any]) -> int | None:
    """The first position at which two sequences of one length differ; None: they are equal."""
    for index, (our_value, their_value) in enumerate(zip(ours, theirs, strict=True)):
        if our_value != their_value:
            return index
    return None


def early_end(run: Trained) -> str:
    """After how many steps a plugin ended the training by ``run.state.request_stop``, and why; empty: it did not."""
    if run.summary["status"] != "stopped":
        return ""
    return f"it ends the training after {len(run.losses)} steps ({run.summary['reason']})"
