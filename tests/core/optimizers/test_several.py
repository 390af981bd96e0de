"""Several optimizers in one run: the dicts that build_optimizer and build_scheduler may return.

Modules:
    core/fastloop/optimizers/combining.py
    core/fastloop/optimizers/several.py
    core/fastloop/optimizers/several_schedulers.py
"""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from interrupted_runs import Case, check_interrupted
from torch import Tensor, nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import LambdaLR

from fastloop import CheckpointError, Plugin, PluginError, hookimpl
from fastloop.optimizers.several import Optimizers, ScaledOptimizers
from fastloop.testing import VECTORS, expect_problem, tiny_data, tiny_model, train
from fastloop.testing.runs import STOPS_AT, DisableDropout, InterruptAtStep

SCHEDULE = {"lr-scheduler": {"schedule": "cosine", "warmup": 4}}
TOO_LARGE = 2.0**24
"""Gradients of the tiny model overflow in fp16 above a loss scale of about 2^19."""


def halves(model: nn.Module) -> tuple[nn.Module, nn.Module]:
    """The first and the last module with weights."""
    layers = [layer for layer in model.modules() if isinstance(layer, nn.Linear)]
    return layers[0], layers[-1]


class Two(Plugin):
    """AdamW for the first layer, SGD with momentum for the rest."""

    name = "two"
    numerics = "changes-training"

    @hookimpl
    def build_optimizer(self, run, model) -> dict[str, Any]:
        first, _ = halves(model)
        own = {id(weight) for weight in first.parameters()}
        rest = [weight for weight in model.parameters() if id(weight) not in own]
        return {"adam": AdamW(first.parameters(), lr=1e-2, weight_decay=0.0), "sgd": SGD(rest, lr=0.1, momentum=0.9)}


class Alternates(Two):
    """Two updates a step, each of one optimizer, each with gradients of its own. SGD steps every other step only."""

    name = "alternates"

    @hookimpl
    def train_step(self, run, batches) -> Tensor:
        loss: Tensor = run.accumulate_gradients(batches)
        run.apply_gradients(loss, "adam")
        if run.state.step % 2:
            run.apply_gradients(run.accumulate_gradients(batches), "sgd")
        return loss


class Rates(Plugin):
    """Records the learning rate of each group after each step."""

    name = "rates"

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[float, ...]] = []

    @hookimpl
    def after_step(self, run) -> None:
        self.seen.append(tuple(group["lr"] for group in run.optimizer.param_groups))


class TwoSchedules(Plugin):
    """A schedule for each optimizer, by its own steps."""

    name = "two-schedules"

    @hookimpl
    def build_scheduler(self, run, optimizer) -> dict[str, Any]:
        return {
            "adam": LambdaLR(optimizer["adam"], lambda step: 1 / (1 + step)),
            "sgd": LambdaLR(optimizer["sgd"], lambda step: 0.9**step),
        }


def plain_loop(
    alternate: bool, micro: int = 8, clip: float | None = None, schedules: bool = False, seed: int = 123
) -> tuple[list[float], dict[str, Tensor]]:
    """The loop that a person would write with two optimizers: two epochs, batches of 8."""
    data, model = tiny_data(), tiny_model()
    inputs, targets = data.tensors
    adam = AdamW(model[0].parameters(), lr=1e-2, weight_decay=0.0)
    sgd = SGD(model[3].parameters(), lr=0.1, momentum=0.9)
    by_adam, by_sgd = LambdaLR(adam, lambda step: 1 / (1 + step)), LambdaLR(sgd, lambda step: 0.9**step)
    if not schedules:
        by_adam, by_sgd = LambdaLR(adam, lambda step: 1), LambdaLR(sgd, lambda step: 1)
    torch.manual_seed(seed)
    model.train()
    losses: list[float] = []

    def backward(step: Tensor) -> float:
        adam.zero_grad()
        sgd.zero_grad()
        total = torch.zeros(())
        for index, ids in enumerate(step.split(micro)):
            loss = nn.functional.cross_entropy(model(inputs[ids]), targets[ids])
            if len(ids) != len(step):
                loss = loss * (len(ids) / len(step))
            loss.backward()
            total = total + loss.detach() if index else loss.detach()
        return total.item()

    def update(clipped: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
        if clip is not None:
            nn.utils.clip_grad_norm_(clipped.parameters(), clip)
        for optimizer in optimizers:
            optimizer.step()

    for epoch in range(2):
        order = torch.randperm(len(data), generator=torch.Generator().manual_seed(seed + epoch))
        for step in order.split(8):
            losses.append(backward(step))
            update(model[0] if alternate else model, [adam] if alternate else [adam, sgd])
            if alternate and len(losses) % 2 == 0:
                backward(step)
                update(model[3], [sgd])
            by_adam.step()
            if not (alternate and len(losses) % 2):
                by_sgd.step()
    return losses, model.state_dict()


def same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    return all(torch.equal(ours[name], theirs[name]) for name in ours | theirs)


@pytest.mark.parametrize("plugin", [Two, Alternates])
@pytest.mark.parametrize(("micro", "clip"), [(8, None), (2, 0.1)], ids=["whole", "accumulated and clipped"])
@pytest.mark.parametrize("schedules", [False, True], ids=["constant", "scheduled"])
def test_losses_and_weights_are_those_of_a_hand_written_loop(tiny_run, plugin, micro, clip, schedules):
    losses, weights = plain_loop(plugin is Alternates, micro, clip, schedules)
    ours = tiny_run([plugin(), *[TwoSchedules()] * schedules], micro_batch_size=micro, max_grad_norm=clip)
    assert ours.losses == losses
    assert same(ours.weights, weights)
    assert ours.summary["steps"] == 18


def test_each_scheduler_counts_the_steps_of_its_optimizer(tiny_run):
    rates = Rates()
    tiny_run([Alternates(), TwoSchedules(), rates])
    expected = [(1e-2 / (2 + step), 0.1 * 0.9 ** ((step + 1) // 2)) for step in range(18)]
    assert rates.seen == [pytest.approx(pair) for pair in expected]


def test_one_scheduler_changes_the_rates_of_all(tiny_run):
    rates = Rates()
    both, one = tiny_run([Alternates(), SCHEDULE, rates]), tiny_run([SCHEDULE])
    assert [lr for lr, _ in rates.seen] == both.recorder.lrs == one.recorder.lrs
    assert [10 * lr for lr, _ in rates.seen] == pytest.approx([lr for _, lr in rates.seen])


RESUMED = {
    "joint": [Two],
    "one at a time": [Alternates],
    "scheduled": [Alternates, TwoSchedules],
    "one schedule": [Alternates, SCHEDULE],
    "averaged and saved in the background": [Two, {"ema": {"decay": 0.9}}, "async-save", SCHEDULE],
}


@pytest.mark.parametrize("name", RESUMED)
def test_a_run_that_is_interrupted_and_resumed_ends_as_one_that_is_not(name):
    def objects() -> list[Plugin]:
        return [entry() for entry in RESUMED[name] if isinstance(entry, type)]

    entries = [entry for entry in RESUMED[name] if not isinstance(entry, type)]
    settings = {"max_grad_norm": 0.5, "micro_batch_size": 4, "lr": 1e-2}
    check_interrupted(Case(VECTORS, entries, settings, objects), "Ctrl-C", 3)


def test_a_checkpoint_of_other_optimizers_is_refused(tiny_run, tmp_path):
    class Renamed(Two):
        @hookimpl
        def build_optimizer(self, run, model):
            return dict(zip(("adam", "momentum"), super().build_optimizer(run, model).values(), strict=True))

    tiny_run([Two()], output=tmp_path / "run", epochs=1)
    with expect_problem("resume-differs 'sgd' 'momentum'", CheckpointError):
        tiny_run([Renamed()], output=tmp_path / "run", resume=True)
    with expect_problem("resume-differs optimizer.param_groups.0.optimizer 'adam' None", CheckpointError):
        tiny_run(output=tmp_path / "run", resume=True)
    tiny_run(output=tmp_path / "one", epochs=1)
    with expect_problem("resume-differs None 'adam'", CheckpointError):
        tiny_run([Two()], output=tmp_path / "one", resume=True)


class Fp16(Plugin):
    """fp16 as `amp` has it on CUDA, on any device."""

    name = "fp16"

    def __init__(self, scale: float = TOO_LARGE) -> None:
        super().__init__()
        self.scale = scale
        self.skipped: list[bool] = []
        self.changed: list[tuple[bool, bool]] = []

    @hookimpl
    def before_prepare(self, run) -> None:
        run.accelerator.state._mixed_precision = "fp16"  # so that Accelerate unscales before it clips
        run.accelerator.native_amp = True
        run.accelerator.scaler = torch.amp.GradScaler(run.device.type, init_scale=self.scale)

    @hookimpl(wrapper=True)
    def compute_loss(self, run):
        with torch.autocast(run.device.type, torch.float16):
            return (yield)

    @hookimpl
    def before_optimizer_step(self, run) -> None:
        self.before = [weight.detach().clone() for layer in halves(run.model) for weight in layer.parameters()]

    @hookimpl
    def after_step(self, run) -> None:
        after = [weight for layer in halves(run.model) for weight in layer.parameters()]
        changes = [not torch.equal(a, b) for a, b in zip(self.before, after, strict=True)]
        self.skipped.append(run.step_was_skipped())
        self.changed.append((any(changes[:2]), any(changes[2:])))


@pytest.mark.parametrize("clip", [None, 0.5])
def test_an_overflow_in_fp16_skips_all_optimizers_that_step_together(tiny_run, clip):
    class Overflow(Fp16):
        @hookimpl
        def after_backward(self, run):
            if run.state.step in (3, 8):  # in the gradients of one optimizer only
                halves(run.model)[run.state.step == 8].weight.grad.fill_(float("inf"))

    fp16 = Overflow(scale=256.0)
    result = tiny_run([Two(), SCHEDULE, fp16], max_grad_norm=clip)
    assert isinstance(result.trainer.run.optimizer, ScaledOptimizers)
    assert [step for step, skipped in enumerate(fp16.skipped) if skipped] == [3, 8]
    # the schedule starts at 0
    assert [step for step, changed in enumerate(fp16.changed) if changed == (False, False)] == [0, 3, 8]
    assert fp16.changed.count((True, True)) == 15
    assert result.trainer.run.scheduler.last_epoch == 16
    assert result.summary["steps"] == 18


@pytest.mark.parametrize("clip", [None, 0.5])
def test_each_optimizer_is_stepped_by_the_scaler(tiny_run, clip):
    fp16, plain = Fp16(), Fp16(scale=1.0)
    scaled = tiny_run([Alternates(), fp16], epochs=4, max_grad_norm=clip)
    unscaled = tiny_run([Alternates(), plain], epochs=4, max_grad_norm=clip)
    assert 1 < sum(fp16.skipped) < 18
    assert not any(plain.skipped)
    assert sum(scaled.losses[-9:]) < 0.9 * sum(scaled.losses[:9])
    assert scaled.losses[-1] == pytest.approx(unscaled.losses[-1], rel=0.2)


def test_a_direct_step_with_scaled_gradients_is_refused(tiny_run):
    class Direct(Alternates):
        @hookimpl
        def train_step(self, run, batches):
            loss = run.accumulate_gradients(batches)
            run.optimizer["adam"].step()
            return loss

    with expect_problem("scaled-gradients 'adam' fp16 run.apply_gradients", PluginError):
        tiny_run([Direct(), Fp16(scale=1.0)])


def test_what_plugins_see_of_several_optimizers(tiny_run, caplog):
    class Look(Plugin):
        name = "look"

        @hookimpl
        def before_optimizer_step(self, run):
            gradients = [weight.grad for weight in run.model.parameters() if weight.grad is not None]
            self.norm = run.gradient_norm(), nn.utils.get_total_norm(gradients), len(gradients)

        @hookimpl
        def after_fit(self, run):
            optimizer = run.optimizer
            assert type(optimizer) is Optimizers
            self.groups = [(group["optimizer"], len(group["params"])) for group in optimizer.param_groups]
            assert optimizer["adam"].param_groups[0] is optimizer.param_groups[0]
            assert len(optimizer.state) == 4
            with expect_problem("unknown-optimizer run.optimizer 'adma' 'adam'", PluginError):
                optimizer["adma"]
            with expect_problem("several-optimizers", PluginError):
                optimizer.add_param_group({"params": []})

    look, guard = Look(), {"nan-guard": {"action": "skip"}}
    with caplog.at_level(logging.WARNING, "fastloop"):
        tiny_run([Alternates(), look, guard, {"ema": {"decay": 0.9}}, "checkpoint-best"])
    assert look.groups == [("adam", 2), ("sgd", 2)]
    assert look.norm[2] == 2, "only the gradients that are applied are left"
    torch.testing.assert_close(*look.norm[:2])
    assert not caplog.records


def test_fused_optimizer_passes_its_argument_to_the_plugin_that_builds_the_dict(tiny_run):
    class Fused(Two):
        @hookimpl
        def build_optimizer(self, run, model):
            first, last = halves(model)
            return {
                "first": AdamW(first.parameters(), lr=1e-2, **run.settings.optimizer),
                "last": AdamW(last.parameters(), lr=1e-2, **run.settings.optimizer),
            }

    run = tiny_run([Fused(), "fused-optimizer"]).trainer.run
    assert [group["fused"] for group in run.optimizer.param_groups] == [True, True]


class Empty(Two):
    @hookimpl
    def build_optimizer(self, run, model):
        return {}


class NoOptimizer(Two):
    @hookimpl
    def build_optimizer(self, run, model):
        return {"all": model}


class Shared(Two):
    @hookimpl
    def build_optimizer(self, run, model):
        return {"a": SGD(model.parameters(), lr=0.1), "b": SGD(model[0].parameters(), lr=0.1)}


class NoGradient(Two):
    @hookimpl
    def train_step(self, run, batches):
        loss = run.accumulate_gradients(batches)
        run.apply_gradients(loss, "adam")
        run.apply_gradients(loss, "sgd")
        return loss


class OtherName(Two):
    @hookimpl
    def train_step(self, run, batches):
        run.apply_gradients(run.accumulate_gradients(batches), "adma")


class NoDict(OtherName):
    @hookimpl
    def build_optimizer(self, run, model):
        return SGD(model.parameters(), lr=0.1)


class OtherSchedule(Two):
    @hookimpl
    def build_scheduler(self, optimizer):
        return {"adma": LambdaLR(optimizer["adam"], lambda step: 1)}


class ScheduleWithoutDict(Plugin):
    name = "schedule"

    @hookimpl
    def build_scheduler(self, optimizer):
        return {"adam": LambdaLR(optimizer, lambda step: 1)}


WRONG = {
    Empty: "wrong-result build_optimizer dict",
    NoOptimizer: "wrong-result build_optimizer 'all' Sequential Optimizer",
    Shared: "shared-parameter build_optimizer 'a' 'b' (16, 8)",
    NoGradient: "no-gradient run.apply_gradients: 'sgd' run.accumulate_gradients",
    OtherName: "unknown-optimizer run.optimizer 'adma' 'adam' build_optimizer adam, sgd",
    NoDict: "unknown-optimizer run.apply_gradients: 'adma' build_optimizer dict",
    OtherSchedule: "unknown-optimizer build_scheduler 'adma' 'adam' adam, sgd",
    ScheduleWithoutDict: "unknown-optimizer build_scheduler 'adam'",
}


@pytest.mark.parametrize("plugin", WRONG)
def test_errors_name_the_optimizer(tiny_run, plugin):
    with expect_problem(WRONG[plugin], PluginError):
        tiny_run([plugin()])


def test_deepspeed_refuses_several(tiny_run):
    pytest.importorskip("deepspeed")
    with expect_problem("unsupported-model plugins.deepspeed build_optimizer 'adam' 'sgd' DeepSpeed", PluginError):
        tiny_run([Two(), "deepspeed"])


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("plugin", [Two, Alternates])
def test_two_processes_compute_what_one_does(processes, tmp_path, plugin, strategy):
    settings = {
        "train": {"epochs": 2, "batch_size": 8, "micro_batch_size": 2, "seed": 1, "device": "cpu", "max_grad_norm": 0.5}
    }
    plugins = [*VECTORS["plugins"], {"progress": False}, SCHEDULE]
    one = VECTORS | settings | {"plugins": plugins, "output": "one"}
    two = VECTORS | settings | {"plugins": [*plugins, strategy], "output": "two"}
    (alone,) = (ended.result for ended in processes(1, train, one, plugin(), DisableDropout(), folder=tmp_path))
    first, second = (ended.result for ended in processes(2, train, two, plugin(), DisableDropout(), folder=tmp_path))
    assert first.losses == second.losses
    assert first.replicas == second.replicas
    assert first.losses == pytest.approx(alone.losses, rel=1e-5)
    torch.testing.assert_close(first.weights, alone.weights, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_a_sharded_checkpoint_resumes_on_one_process(processes, tmp_path):
    settings = {"train": {"epochs": 2, "batch_size": 8, "seed": 1, "device": "cpu", "save_every": None}}
    plugins = [*VECTORS["plugins"], {"progress": False}, SCHEDULE]
    one = VECTORS | settings | {"plugins": plugins, "output": "one"}
    two = VECTORS | settings | {"plugins": [*plugins, "fsdp"], "output": "two"}
    objects = [Alternates(), DisableDropout()]
    (whole,) = (ended.result for ended in processes(1, train, one, *objects, folder=tmp_path))
    processes(2, train, two, *objects, InterruptAtStep(), folder=tmp_path)
    (resumed,) = (ended.result for ended in processes(1, _resume, one, *objects, folder=tmp_path))
    assert resumed.losses == pytest.approx(whole.losses[STOPS_AT:], rel=1e-5)
    torch.testing.assert_close(resumed.weights, whole.weights, rtol=1e-4, atol=1e-6)


def _resume(recipe: Any, *objects: Plugin) -> Any:
    from pathlib import Path

    return train(recipe | {"output": "resumed"}, *objects, resume=Path("two"))
