"""A step that a plugin or fp16's loss scaling skips: the learning rate schedule and averages of the weights wait.

The forward pass runs in fp16 on the CPU, and gradients overflow for real: the first loss scale is far too large.

Modules:
    core/fastloop/distributed/skipped_steps.py
"""

from __future__ import annotations

import json
from collections.abc import Generator
from typing import Any

import pytest
import torch

from fastloop import Plugin, hookimpl
from fastloop.testing import find_problems

SCHEDULE = {"lr-scheduler": {"schedule": "linear", "warmup": 0}}
TOO_LARGE = 2.0**24
"""Gradients of the tiny model overflow in fp16 above a loss scale of about 2^19."""


class Fp16(Plugin):
    """fp16 as `amp` has it on CUDA, with the CPU's GradScaler. It records every step."""

    name = "fp16"

    def __init__(self) -> None:
        super().__init__()
        self.skipped: list[bool] = []
        self.unchanged: list[bool] = []
        self.fell: list[bool] = []
        self.schedule: list[int] = []
        self.unread: list[bool] = []

    @hookimpl
    def before_prepare(self, run: Any) -> None:
        run.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=TOO_LARGE)

    @hookimpl(wrapper=True)
    def compute_loss(self) -> Generator[None, Any, Any]:
        with torch.autocast("cpu", torch.float16):
            return (yield)

    @hookimpl
    def before_optimizer_step(self, run: Any) -> None:
        self.before = [parameter.detach().clone() for parameter in run.model.parameters()]
        self.scale = run.accelerator.scaler.get_scale()

    @hookimpl
    def after_step(self, run: Any) -> None:
        self.unread.append(isinstance(run._skipped_steps.skipped[0], torch.Tensor))
        self.skipped.append(run.step_was_skipped())
        self.unchanged.append(all(torch.equal(a, b) for a, b in zip(run.model.parameters(), self.before, strict=True)))
        self.fell.append(run.accelerator.scaler.get_scale() < self.scale)
        self.schedule.append(run.scheduler.last_epoch if run.scheduler is not None else 0)


@pytest.mark.parametrize("plugins", [[], ["fused-optimizer"]], ids=["ordinary", "fused"])
def test_an_overflow_changes_no_weight_and_does_not_advance_the_schedule(tiny_run, plugins):
    fp16 = Fp16()
    result = tiny_run([*plugins, SCHEDULE, fp16], epochs=4)
    assert 3 < sum(fp16.skipped) < 18
    assert fp16.skipped == fp16.fell == fp16.unchanged
    trained = [fp16.skipped[: step + 1].count(False) for step in range(36)]
    assert fp16.schedule == trained
    assert result.summary["steps"] == 36
    assert result.summary["samples"] == 4 * 67, "skipped steps and their samples count"
    states: list[Any] = list(result.trainer.run.optimizer.state.values())
    assert {int(state["step"]) for state in states} == {trained[-1]}
    assert sum(result.losses[-9:]) < 0.9 * sum(result.losses[:9])


@pytest.mark.parametrize("plugins", [[], ["fused-optimizer"]], ids=["ordinary", "fused"])
def test_the_gradient_norm_is_of_unscaled_gradients_and_changes_no_number(tiny_run, plugins):
    logged, quiet = Fp16(), Fp16()
    result = tiny_run([*plugins, logged], log_every=1)
    plain = tiny_run([*plugins, quiet, {"log": False}])
    assert result.losses == plain.losses
    assert all(torch.equal(result.weights[name], plain.weights[name]) for name in plain.weights)
    lines = map(json.loads, (result.trainer.run.folder / "metrics.jsonl").read_text().splitlines())
    norms = [line["grad_norm"] for line in lines if "split" not in line]
    assert [norm is None for norm in norms] == logged.skipped == quiet.skipped
    assert 0 < sum(logged.skipped) < 18
    assert all(0 < norm < 10 for norm in norms if norm is not None)


def test_a_resumed_run_skips_the_same_steps(tiny_run, tmp_path):
    first, rest, whole = Fp16(), Fp16(), Fp16()
    undisturbed = tiny_run(["fused-optimizer", SCHEDULE, whole])
    tiny_run(["fused-optimizer", SCHEDULE, first], max_steps=4, save_every=4, output=tmp_path / "run", epochs=2)
    resumed = tiny_run(["fused-optimizer", SCHEDULE, rest], output=tmp_path / "run", resume=True)
    assert first.skipped + rest.skipped == whole.skipped
    assert sum(first.skipped) > 0 < sum(rest.skipped)
    assert resumed.losses == undisturbed.losses[4:]


def test_without_a_schedule_a_fused_step_is_not_waited_for(tiny_run):
    fp16 = Fp16()
    tiny_run(["fused-optimizer", fp16])
    # the check of the first updates asks while steps are skipped: 1, 2, 4, 8
    examined = [2**power - 1 for power in range(4)]
    assert all(unread for step, unread in enumerate(fp16.unread) if step not in examined)
    assert sum(fp16.skipped) > 3


def test_overflows_of_the_first_steps_are_not_taken_for_weights_that_do_not_change(tiny_run, caplog):
    tiny_run(["fused-optimizer", Fp16()], epochs=4)
    assert not find_problems(caplog, "weights-unchanged")


class Weights(Plugin):
    """Keeps the weights after each step."""

    name = "weights"

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[dict[str, torch.Tensor]] = []

    @hookimpl
    def before_fit(self, run: Any) -> None:
        self.first = {name: weight.detach().clone() for name, weight in run.model.named_parameters()}

    @hookimpl
    def after_step(self, run: Any) -> None:
        self.seen.append({name: weight.detach().clone() for name, weight in run.model.named_parameters()})


@pytest.mark.parametrize("options", [{"decay": 0.5}, {"mean": True}], ids=str)
def test_a_skipped_step_is_no_update_of_an_average(tiny_run, options):
    fp16, weights = Fp16(), Weights()
    result = tiny_run([{"ema": options}, weights, fp16], epochs=4)
    assert 3 < sum(fp16.skipped) < 18
    average = weights.first
    trained = [seen for seen, skipped in zip(weights.seen, fp16.skipped, strict=True) if not skipped]
    for number, seen in enumerate(trained, start=1):
        decay = options.get("decay", 1 - 1 / number)
        average = {name: decay * average[name] + (1 - decay) * seen[name] for name in average}
    for name, tensor in average.items():
        torch.testing.assert_close(result.weights[name], tensor, rtol=1e-5, atol=1e-6)


class Skips(Plugin):
    """Skips some steps, and records every step."""

    name = "skips"

    def __init__(self, *steps: int) -> None:
        super().__init__()
        self.steps = steps
        self.skipped: list[int] = []
        self.changed: list[int] = []
        self.schedule: list[int] = []

    @hookimpl
    def before_optimizer_step(self, run: Any) -> None:
        self.before = [parameter.detach().clone() for parameter in run.model.parameters()]
        if run.state.step in self.steps:
            run.skip_update()

    @hookimpl
    def after_step(self, run: Any) -> None:
        step = run.state.step - 1
        if run.step_was_skipped():
            self.skipped.append(step)
        if any(not torch.equal(a, b) for a, b in zip(run.model.parameters(), self.before, strict=True)):
            self.changed.append(step)
        self.schedule.append(run.scheduler.last_epoch)


STEPS = list(range(18))
OTHERS = [step for step in STEPS if step not in (4, 9)]


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW", "ASGD", "Rprop"])
def test_a_step_that_a_plugin_skips_advances_neither_optimizer_nor_schedule(tiny_run, optimizer):
    skips = Skips(4, 9)
    result = tiny_run([SCHEDULE, skips], optimizer=optimizer)
    assert (skips.skipped, skips.changed) == ([4, 9], OTHERS)
    assert skips.schedule == [len([step for step in OTHERS if step <= now]) for now in STEPS]
    assert result.summary["steps"] == 18
    states: list[Any] = list(result.trainer.run.optimizer.state.values())
    assert {int(state["step"]) for state in states if "step" in state} <= {16}


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("plugins", [[], ["fused-optimizer"]], ids=["ordinary", "fused"])
def test_a_plugin_skips_steps_under_loss_scaling(tiny_run, plugins, clip):
    class Fits(Fp16):
        @hookimpl
        def before_prepare(self, run: Any) -> None:
            run.accelerator.state._mixed_precision = "fp16"  # so that Accelerate unscales before it clips
            run.accelerator.native_amp = True
            run.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=256.0)

    skips = Skips(4, 9)
    result = tiny_run([*plugins, SCHEDULE, Fits(), skips], max_grad_norm=clip)
    assert (skips.skipped, skips.changed) == ([4, 9], OTHERS)
    assert result.trainer.run.scheduler.last_epoch == 16


class SecondOnly(Plugin):
    """Two updates a step, of which the first one is skipped."""

    name = "second-only"
    first = False

    @hookimpl
    def train_step(self, run: Any, batches: list[Any]) -> torch.Tensor:
        loss: torch.Tensor
        for first in (True, False):
            self.first = first
            loss = run.accumulate_gradients(batches)
            run.apply_gradients(loss)
        return loss

    @hookimpl
    def before_optimizer_step(self, run: Any) -> None:
        if self.first:
            run.skip_update()


def test_a_step_with_one_skipped_update_is_no_skipped_step(tiny_run):
    skips = Skips()
    tiny_run([SCHEDULE, SecondOnly(), skips])
    assert (skips.skipped, skips.changed) == ([], STEPS)
    assert skips.schedule[-1] == 18


@pytest.mark.parametrize("options", [{"decay": 0.5}, {"mean": True}], ids=str)
def test_a_step_that_nan_guard_skips_advances_neither_schedule_nor_average(tiny_run, options):
    class BadBatch(Plugin):
        name = "bad-batch"

        @hookimpl
        def before_step(self, run: Any, batches: list[Any]) -> None:
            if run.state.step == 4:
                batches[0].inputs[0].fill_(float("nan"))

    weights, skips = Weights(), Skips()
    guard = {"nan-guard": {"action": "skip"}}
    result = tiny_run([guard, {"ema": options}, SCHEDULE, weights, skips, BadBatch()])
    assert skips.skipped == [4]
    assert skips.schedule[4:6] == [4, 5]
    average = weights.first
    trained = [seen for step, seen in enumerate(weights.seen) if step != 4]
    for number, seen in enumerate(trained, start=1):
        decay = options.get("decay", 1 - 1 / number)
        average = {name: decay * average[name] + (1 - decay) * seen[name] for name in average}
    for name, tensor in average.items():
        torch.testing.assert_close(result.weights[name], tensor, rtol=1e-5, atol=1e-6)
