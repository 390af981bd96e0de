"""Implementations of the hook train_step, and how they call run.accumulate_gradients and run.apply_gradients.

``test_same_numbers.py`` compares what these two compute, such as clipped gradients, with plain PyTorch.

Modules:
    core/fastloop/loop.py
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from interrupted_runs import Case, check_interrupted
from torch import Tensor

from fastloop import Batch, Plugin, PluginError, hookimpl
from fastloop.distributed.tensors import total_norm
from fastloop.runtime.random_states import random_states, restore_random_states
from fastloop.testing import VECTORS, Call, expect_problem, tiny_data, tiny_model, train
from fastloop.testing.runs import DisableDropout

SCHEDULE = {"lr-scheduler": {"schedule": "linear", "warmup": 3}}


class Plain(Plugin):
    """Implements the core's step itself."""

    name = "plain"

    @hookimpl
    def train_step(self, run, batches) -> Tensor:
        loss: Tensor = run.accumulate_gradients(batches)
        run.apply_gradients(loss)
        return loss


class TwoPasses(Plugin):
    """Sharpness-aware minimization: the second gradient is computed at shifted weights, and applied to the original
    ones."""

    name = "two-passes"
    numerics = "changes-training"

    @hookimpl
    def train_step(self, run, batches) -> Tensor:
        loss: Tensor = run.accumulate_gradients(batches)
        weights = [weight for weight in run.model.parameters() if weight.grad is not None]
        before = [weight.detach().clone() for weight in weights]
        with torch.no_grad():
            norm = total_norm(weight.grad for weight in weights)
            for weight in weights:
                weight.add_(0.05 * weight.grad / norm)
        run.optimizer.zero_grad()
        run.accumulate_gradients(batches)
        with torch.no_grad():
            for weight, original in zip(weights, before, strict=True):
                weight.copy_(original)
        run.apply_gradients(loss)
        return loss


class TwoUpdates(Plugin):
    """Two updates in a step."""

    name = "two-updates"

    @hookimpl
    def train_step(self, run, batches) -> Tensor:
        for _ in range(2):
            loss = run.accumulate_gradients(batches)
            run.apply_gradients(loss)
        return loss


class Averages(Plugin):
    """Averages the inputs of the next epoch, in the middle of each one."""

    name = "averages"

    def __init__(self) -> None:
        super().__init__()
        self.means: list[Tensor] = []

    @hookimpl
    def after_step(self, run) -> None:
        if run.state.step in (3, 14):
            batches = [*run.training_batches(run.state.epoch + 1)]
            self.means.append(torch.cat([batch.inputs[0] for batch in batches]).mean(0))
            next(batch := run.training_batches())
            torch.rand(1)
            batch.close()


def equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    return all(torch.equal(ours[name], theirs[name]) for name in ours | theirs)


def gradients(run: Any) -> list[Tensor]:
    """Copies of the gradients, which are then cleared."""
    copies = [weight.grad.clone() for weight in run.model.parameters()]
    run.optimizer.zero_grad()
    return copies


@pytest.mark.parametrize("micro", [8, 2])
def test_a_plugin_that_calls_both_helpers_once_is_the_core_to_the_bit(tiny_run, micro):
    arguments = {"micro_batch_size": micro, "max_grad_norm": 0.5}
    core, ours = tiny_run([SCHEDULE], **arguments), tiny_run([SCHEDULE, Plain()], **arguments)
    assert ours.losses == core.losses
    assert ours.recorder.lrs == core.recorder.lrs
    assert equal(ours.weights, core.weights)
    for key in ("status", "steps", "samples", "epochs", "validation"):
        assert ours.summary[key] == core.summary[key]


def test_micro_batches_add_up_to_the_gradients_of_the_whole_batch(tiny_run):
    class Compare(Plain):
        checked = 0

        @hookimpl
        def train_step(self, run, batches):
            split_loss, split = run.accumulate_gradients(batches), gradients(run)
            inputs = [torch.cat(parts) for parts in zip(*(batch.inputs for batch in batches), strict=True)]
            samples = sum(batch.samples for batch in batches)
            whole_loss, whole = run.accumulate_gradients([Batch(inputs, samples, samples)]), gradients(run)
            torch.testing.assert_close(split_loss, whole_loss)
            torch.testing.assert_close(split, whole)
            assert len(batches) > 1
            self.checked += 1
            return super().train_step(run, batches)

    compare = Compare()
    tiny_run([compare], model=tiny_model(dropout=0.0), micro_batch_size=2, epochs=1)
    assert compare.checked == 9  # the last step has three samples in two micro-batches


def test_the_loss_is_the_mean_over_the_step_and_detached(tiny_run):
    class Check(Plain):
        losses: list[tuple[Tensor, Tensor]] = []

        @hookimpl(wrapper=True)
        def compute_loss(self):
            output = yield
            self.newest = output.loss.detach()
            return output

        @hookimpl
        def after_step(self, loss):
            self.losses.append((loss, self.newest))

    tiny_run([Check()])
    assert len(Check.losses) == 18
    assert all(
        loss.dim() == 0 and not loss.requires_grad and torch.equal(loss, newest) for loss, newest in Check.losses
    )


@pytest.mark.parametrize("restored", [True, False])
def test_a_second_pass_draws_the_same_dropout_if_the_random_states_are_restored(tiny_run, restored):
    class Twice(Plain):
        same: list[bool]

        @hookimpl
        def train_step(self, run, batches):
            states = random_states()
            run.accumulate_gradients(batches)
            first = gradients(run)
            if restored:
                restore_random_states(states)
            loss = run.accumulate_gradients(batches)
            self.same.append(
                all(torch.equal(a, weight.grad) for a, weight in zip(first, run.model.parameters(), strict=True))
            )
            run.apply_gradients(loss)
            return loss

    Twice.same = []
    tiny_run([Twice()], model=tiny_model(dropout=0.5))
    assert all(Twice.same) if restored else not any(Twice.same)


class Head(Plugin):
    """Steps the last layer only, and lets the other one keep its gradients."""

    name = "head"
    numerics = "changes-training"

    def __init__(self) -> None:
        super().__init__()
        self.norms: list[tuple[Tensor, Tensor]] = []

    @hookimpl
    def build_optimizer(self, run, model) -> torch.optim.Optimizer:
        return torch.optim.SGD(model[3].parameters(), lr=0.1)

    @hookimpl
    def before_optimizer_step(self, run) -> None:
        norm = run.gradient_norm()
        run.optimizer.zero_grad()
        run.model[0].zero_grad()
        run.accumulate_gradients(self.batches)
        self.norms.append((norm, total_norm(gradients(run))))

    @hookimpl
    def before_step(self, batches) -> None:
        self.batches = batches


def test_gradients_that_no_optimizer_applies_do_not_add_up(tiny_run):
    """The norm, by which clipping scales, is that of the step."""
    head = Head()
    tiny_run([head], model=tiny_model(dropout=0.0), epochs=1)
    ours, theirs = zip(*head.norms, strict=True)
    assert ours == theirs
    assert len(ours) == 9


class TwoOptimizers(Plugin):
    """Lets ``run.optimizer`` step the last layer, and steps the first one by an optimizer of its own in one hook.

    Args:
        hook: None: ``run.optimizer`` steps both.
    """

    name = "two-optimizers"
    numerics = "changes-training"

    def __init__(self, hook: str | None) -> None:
        super().__init__()
        self.hook = hook
        self.fails = True

    @hookimpl
    def build_optimizer(self, run, model) -> torch.optim.Optimizer:
        self.own = torch.optim.SGD(model[0].parameters(), lr=0.1)
        stepped = model if self.hook is None else model[3]
        return torch.optim.SGD(stepped.parameters(), lr=0.1)

    @hookimpl
    def before_step(self, run) -> None:
        assert run.model[0].weight.grad is None

    @hookimpl
    def before_optimizer_step(self) -> None:
        if self.hook == "before_optimizer_step":
            self.own.step()

    @hookimpl
    def after_step(self) -> None:
        if self.hook == "after_step":
            self.own.step()

    @hookimpl(wrapper=True)
    def compute_loss(self, run, batch):
        output = yield
        if self.fails and run.state.step == 3 and run.model[0].weight.grad is not None:
            self.fails = False
            raise ValueError("the second micro-batch of the step")
        return output

    @hookimpl
    def recover(self, error) -> bool:
        return isinstance(error, ValueError)


@pytest.mark.parametrize(
    ("hook", "plugins", "micro_batch_size"),
    [
        ("after_step", [], 8),
        ("after_step", [], 2),
        ("after_step", [Plain()], 2),
        ("before_optimizer_step", [], 2),
        ("before_optimizer_step", [TwoUpdates()], 8),
        ("before_optimizer_step", [TwoUpdates()], 2),
    ],
)
def test_a_plugin_steps_parameters_that_the_optimizer_does_not_hold(tiny_run, hook, plugins, micro_batch_size):
    """Also in a step that is repeated after an error."""
    steps = [TwoOptimizers(None), TwoOptimizers(hook)]
    one, two = (
        tiny_run([step, *plugins], model=tiny_model(dropout=0.0), micro_batch_size=micro_batch_size) for step in steps
    )
    assert two.losses == one.losses
    assert equal(two.weights, one.weights)
    assert [step.fails for step in steps] == [micro_batch_size == 8] * 2


def test_a_second_pass_adds_to_the_gradients(tiny_run):
    class Adds(Plain):
        @hookimpl
        def train_step(self, run, batches):
            run.accumulate_gradients(batches)
            once = [weight.grad.clone() for weight in run.model.parameters()]
            loss = run.accumulate_gradients(batches)
            torch.testing.assert_close(
                [weight.grad for weight in run.model.parameters()], [2 * gradient for gradient in once]
            )
            run.apply_gradients(loss)
            return loss

    assert tiny_run([Adds()], model=tiny_model(dropout=0.0)).summary["steps"] == 18


def test_several_updates_are_one_step_of_the_counters_and_the_schedule(tiny_run, hook_calls):
    one = tiny_run([SCHEDULE], max_grad_norm=0.1)
    hook_calls.clear()
    two = tiny_run([SCHEDULE, TwoUpdates()], max_grad_norm=0.1)
    assert (two.summary["steps"], two.summary["samples"]) == (one.summary["steps"], one.summary["samples"]) == (18, 134)
    assert two.recorder.lrs == one.recorder.lrs
    assert sum(two.losses[-9:]) < sum(one.losses[-9:])
    step = ["before_step", "train_step", *["compute_loss", "after_backward", "before_optimizer_step"] * 2]
    names = [call.hook for call in hook_calls]
    first = names.index("before_step")
    assert names[first : first + len(step) + 1] == [*step, "after_step"]
    assert hook_calls.count(Call("after_step", ("run", "loss"))) == 18


def test_a_task_adds_tokens_that_its_step_computes(tiny_run):
    class Generates(Plain):
        @hookimpl
        def train_step(self, run, batches) -> Tensor:
            run.state.tokens += 5
            loss: Tensor = super().train_step(run, batches)
            return loss

    plain, more = tiny_run([]), tiny_run([Generates()])
    assert more.trainer.run.state.tokens == plain.trainer.run.state.tokens + 5 * more.summary["steps"]
    assert more.losses == plain.losses


def test_none_leaves_the_step_to_the_core(tiny_run):
    class Sometimes(TwoUpdates):
        @hookimpl
        def train_step(self, run, batches):
            return super().train_step(run, batches) if run.state.step == 17 else None

    core, ours = tiny_run(), tiny_run([Sometimes()])
    assert ours.losses[:17] == core.losses[:17]
    assert not equal(ours.weights, core.weights)


class NoUpdate(Plain):
    @hookimpl
    def train_step(self, run, batches):
        return run.accumulate_gradients(batches)


class NoLoss(Plain):
    @hookimpl
    def train_step(self, run, batches):
        super().train_step(run, batches)


class Number(Plain):
    @hookimpl
    def train_step(self, run, batches):
        return super().train_step(run, batches).item()


class Attached(Plain):
    @hookimpl
    def train_step(self, run, batches):
        return super().train_step(run, batches) * torch.ones((), requires_grad=True)


WRONG = {
    NoUpdate: "no-update 'plain': train_step: run.apply_gradients",
    NoLoss: "wrong-result 'plain': train_step: run.apply_gradients None",
    Number: "wrong-result 'plain': train_step float Tensor",
    Attached: "wrong-result 'plain': train_step () requires_grad=True",
}


@pytest.mark.parametrize("plugin", WRONG)
def test_a_step_that_breaks_the_contract_ends_the_run(tiny_run, plugin):
    with expect_problem(WRONG[plugin], PluginError):
        tiny_run([plugin()])


def test_two_owners_of_the_step_are_refused(tiny_run):
    with expect_problem("hook-implemented-twice 'plain' 'two-updates' train_step", PluginError):
        tiny_run([Plain(), TwoUpdates()])


def test_under_loss_scaling_gradients_are_scaled_and_losses_are_not(tiny_run):
    class Scaled(TwoPasses):
        scales: list[float] = []

        @hookimpl
        def after_prepare(self, run):
            from accelerate.optimizer import AcceleratedOptimizer

            run.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
            run.optimizer = AcceleratedOptimizer(run.optimizer, device_placement=False, scaler=run.accelerator.scaler)

        @hookimpl
        def after_backward(self, run):
            self.scales.append(float(total_norm(weight.grad for weight in run.model.parameters())))

        @hookimpl
        def before_optimizer_step(self, run):
            self.scales[-1] /= float(run.gradient_norm())

    model = tiny_model(dropout=0.0)
    scaled, plain = tiny_run([Scaled()], model=model), tiny_run([TwoPasses()], model=tiny_model(dropout=0.0))
    assert Scaled.scales == pytest.approx([1024.0] * 18)
    assert scaled.losses == pytest.approx(plain.losses, rel=1e-4)


def test_a_run_that_is_interrupted_and_resumed_ends_as_one_that_is_not():
    settings = {"max_grad_norm": 0.5, "micro_batch_size": 4, "lr": 1e-2}
    plugins = [SCHEDULE, {"ema": {"decay": 0.9}}]
    check_interrupted(Case(VECTORS, plugins, settings, lambda: [TwoPasses()]), "SIGTERM", 3)


@pytest.mark.slow
@pytest.mark.parametrize("plugin", [TwoPasses, TwoUpdates])
def test_two_processes_compute_what_one_does(processes, tmp_path, plugin):
    settings = {
        "train": {
            "epochs": 2,
            "batch_size": 8,
            "micro_batch_size": 2,
            "lr": 1e-2,
            "seed": 1,
            "device": "cpu",
            "max_grad_norm": 0.5,
        }
    }
    plugins = [*VECTORS["plugins"], {"progress": False}, SCHEDULE]
    one = VECTORS | settings | {"plugins": plugins, "output": "one"}
    two = VECTORS | settings | {"plugins": [*plugins, "ddp"], "output": "two"}
    (alone,) = (ended.result for ended in processes(1, train, one, plugin(), DisableDropout(), folder=tmp_path))
    first, second = (ended.result for ended in processes(2, train, two, plugin(), DisableDropout(), folder=tmp_path))
    assert first.losses == second.losses
    assert first.replicas == second.replicas
    assert first.losses == pytest.approx(alone.losses, rel=1e-5)
    assert first.lrs == alone.lrs
    torch.testing.assert_close(first.weights, alone.weights, rtol=1e-4, atol=1e-6)


def test_reading_training_batches_elsewhere_does_not_change_the_training(tiny_run):
    plain = tiny_run(device="cpu")
    averages = Averages()
    found = tiny_run([averages], device="cpu")
    inputs = tiny_data().tensors[0]
    assert len(averages.means) == 2
    for mean in averages.means:
        torch.testing.assert_close(mean, inputs.mean(0))
    assert found.losses == plain.losses
    assert equal(found.weights, plain.weights)
