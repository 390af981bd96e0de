"""The plugin ``amp``.

Modules:
    plugins/fastloop_plugins/precision/amp.py
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fastloop import Plugin, PluginError, RecipeError, Strategy, Trainer, hookimpl
from fastloop.runtime.hardware import this_machine
from fastloop.testing import expect_problem, tiny_data, tiny_model
from fastloop_plugins.precision.amp import Amp


class Dtypes(Plugin):
    """Notes the dtype that the first layer computes in, and that of weights and gradients."""

    name = "dtypes"

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[str, torch.dtype]] = set()

    @hookimpl
    def before_fit(self, run) -> None:
        layer = next(module for module in run.unwrap_model().modules() if isinstance(module, nn.Linear))
        layer.register_forward_hook(lambda module, inputs, output: self.seen.add(("forward", output.dtype)))

    @hookimpl
    def before_optimizer_step(self, run) -> None:
        for parameter in run.model.parameters():
            self.seen |= {("weight", parameter.dtype), ("gradient", parameter.grad.dtype)}


@pytest.mark.parametrize("dtype", ["bf16", "auto"])
def test_the_forward_pass_is_bf16_and_weights_and_gradients_stay_fp32(tiny_run, dtype):
    dtypes = Dtypes()
    tiny_run([{"amp": {"dtype": dtype}}, dtypes], epochs=1)
    assert dtypes.seen == {("forward", torch.bfloat16), ("weight", torch.float32), ("gradient", torch.float32)}


def without_dropout() -> nn.Module:
    """On CUDA, dropout draws other masks in another dtype."""
    model = tiny_model()
    layers = [nn.Identity() if isinstance(layer, nn.Dropout) else layer for layer in model]
    assert len(list(model.parameters())) == len(list(nn.Sequential(*layers).parameters()))
    return nn.Sequential(*layers)


def test_losses_stay_in_the_band_of_reduced_precision(tiny_run):
    plain = tiny_run(model=without_dropout(), epochs=4)
    mixed = tiny_run(["amp"], model=without_dropout(), epochs=4)
    difference = [abs(a - b) / a for a, b in zip(plain.losses, mixed.losses, strict=True)]
    assert 0 < max(difference) < 0.05, "bf16 keeps 8 bits: about 0.4% an operation"
    assert abs(plain.recorder.metrics[-1][1]["loss"] - mixed.recorder.metrics[-1][1]["loss"]) < 0.02


def test_gradients_of_the_first_step_agree_to_bf16(tiny_run):
    class First(Plugin):
        name = "first"
        gradients: list[torch.Tensor]

        @hookimpl
        def after_backward(self, run) -> None:
            if run.state.step == 0:
                self.gradients = [parameter.grad.clone() for parameter in run.model.parameters()]

    plain, mixed = First(), First()
    tiny_run([plain], model=without_dropout(), epochs=1)
    tiny_run(["amp", mixed], model=without_dropout(), epochs=1)
    for a, b in zip(plain.gradients, mixed.gradients, strict=True):
        assert torch.linalg.vector_norm(a - b) < 0.02 * torch.linalg.vector_norm(a)


def test_the_model_saved_is_fp32(tiny_run):
    from safetensors.torch import load_file

    result = tiny_run(["amp"], epochs=1)
    assert {
        tensor.dtype for tensor in load_file(result.trainer.run.folder / "model" / "model.safetensors").values()
    } == {torch.float32}


@pytest.mark.skipif(this_machine().device != "cpu", reason="about machines without an accelerator")
def test_a_dtype_that_the_device_lacks_is_refused_with_those_it_has():
    with expect_problem("requirement-missing 'amp' fp16 fp32 --without", PluginError):
        Trainer(
            nn.Linear(8, 3),
            tiny_data(),
            batch_size=8,
            loss=nn.functional.cross_entropy,
            plugins=[{"amp": {"dtype": "fp16"}}],
        )


class AddsByIndex(nn.Module):
    """Adds the outputs of a layer to a fp32 tensor by index, which torch refuses in two dtypes. DBRX adds its experts
    so."""

    def __init__(self, broken: bool) -> None:
        super().__init__()
        self.layer, self.broken = nn.Linear(8, 3), broken

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.broken:
            raise RuntimeError("it never computes")
        rows = torch.arange(len(inputs), device=inputs.device)
        return torch.zeros(len(inputs), 3, device=inputs.device).index_add(0, rows, self.layer(inputs))


def test_a_model_that_fails_under_autocast_only_is_refused_in_the_first_step(tiny_run):
    with expect_problem("unsupported-precision plugins.amp AddsByIndex fp32 bf16 RuntimeError", PluginError):
        tiny_run([{"amp": {"dtype": "bf16"}}], model=AddsByIndex(broken=False))
    with pytest.raises(Exception, match="it never computes") as raised:
        tiny_run([{"amp": {"dtype": "bf16"}}], model=AddsByIndex(broken=True))
    assert not isinstance(raised.value, PluginError)


class AddsByIndexLater(AddsByIndex):
    """Fails under autocast in eval mode only. xLSTM does, for texts that are longer than its chunks."""

    def __init__(self) -> None:
        super().__init__(broken=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layer(inputs) if self.training else super().forward(inputs)


def test_a_model_that_fails_under_autocast_in_eval_mode_is_refused_in_the_first_evaluation(tiny_run):
    with expect_problem("unsupported-precision plugins.amp AddsByIndexLater fp32 bf16 RuntimeError", PluginError):
        tiny_run([{"amp": {"dtype": "bf16"}}], model=AddsByIndexLater())
    assert tiny_run([], model=AddsByIndexLater()).summary["status"] == "completed"


class TakesInputsOnce(AddsByIndex):
    """Changes its inputs in place."""

    def __init__(self) -> None:
        super().__init__(broken=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if inputs.isinf().all():
            raise ValueError("these inputs were taken before")
        taken = inputs.clone()
        inputs.fill_(torch.inf)
        return super().forward(taken)


def test_a_model_that_changes_its_inputs_before_it_fails_is_refused_with_the_same_reason(tiny_run):
    with expect_problem("unsupported-precision plugins.amp TakesInputsOnce fp32 bf16 index_add", PluginError):
        tiny_run([{"amp": {"dtype": "bf16"}}], model=TakesInputsOnce())


class RunsOut(nn.Module):
    """Has no memory for more than four samples in bf16, and counts its calls in train mode."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 3)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.calls += 1
        if len(inputs) > 4 and torch.is_autocast_enabled("cpu"):
            raise torch.OutOfMemoryError("no memory")
        result: torch.Tensor = self.layer(inputs)
        return result


def test_a_step_without_memory_is_left_to_auto_micro_batch(tiny_run):
    model = RunsOut()
    plugins = [{"amp": {"dtype": "bf16"}}, {"auto-micro-batch": {"snapshot": False}}]
    assert tiny_run(plugins, model=model, max_steps=2).summary["status"] == "completed"
    assert model.calls == 5, "one without memory, and two for each step"


def test_fp8_is_refused_with_the_plugin_that_replaces_it(tiny_run):
    with expect_problem("unsupported-precision plugins.amp.dtype 'torchao-fp8'", RecipeError):
        tiny_run([{"amp": {"dtype": "fp8"}}])
    with expect_problem("unsupported-precision amp.dtype: fp8 'torchao-fp8'", RecipeError):
        Amp(dtype="fp8")


def test_a_precision_that_replaces_parameters_is_refused_with_the_plugin_that_set_it(tiny_run):
    class Fp8(Plugin):
        name = "fp8"

        @hookimpl
        def configure(self):
            return {"mixed_precision": "fp8"}

    with expect_problem("unknown-choice 'fp8' mixed_precision", PluginError):
        tiny_run([Fp8()])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="fp16 with loss scaling needs CUDA")
@pytest.mark.parametrize("plugins", [[], ["fused-optimizer"]], ids=["ordinary", "fused"])
def test_fp16_skips_the_few_steps_that_overflow_and_trains_in_the_others(tiny_run, plugins):
    """Gradients of the tiny model overflow above a scale of about 2^19, so about 5 of the 36 steps are skipped."""

    class Skipped(Plugin):
        name = "skipped"
        count = 0

        @hookimpl
        def after_step(self, run) -> None:
            self.count += run.step_was_skipped()

    skipped, schedule = Skipped(), {"lr-scheduler": {"schedule": "constant", "warmup": 0}}
    result = tiny_run([{"amp": {"dtype": "fp16", "init_scale": 2.0**22}}, schedule, *plugins, skipped], epochs=4)
    run = result.trainer.run
    assert 1 <= skipped.count <= 10
    assert run.accelerator.scaler.get_scale() == 2.0 ** (22 - skipped.count)
    assert run.scheduler.last_epoch == 36 - skipped.count
    assert sum(result.losses[-9:]) < 0.9 * sum(result.losses[:9])


class KeepsModel(Strategy):
    """A strategy that leaves the model as it is, or applies torch's autocast."""

    name, numerics = "keeps-model", "bitwise"

    def __init__(self, autocast: bool = False) -> None:
        super().__init__()
        self.autocast = autocast

    def prepare(self, run: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, Any]:
        device = run.accelerator.device
        model.to(device)
        if self.autocast:
            model.forward = torch.autocast(device.type, torch.bfloat16)(model.forward)
        return model, optimizer


class PreparesAgain(KeepsModel):
    """A strategy that asks Accelerate for the autocast that the core has applied."""

    name = "prepares-again"

    def prepare(self, run: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, Any]:
        return run.accelerator.prepare_model(model, evaluation_mode=True), optimizer


class OwnPrecision(KeepsModel):
    """A strategy that declares that it applies the precision."""

    name, sets_precision = "own-precision", True


@pytest.mark.parametrize("strategy", [KeepsModel, PreparesAgain])
def test_a_strategy_cannot_turn_autocast_off(tiny_run, strategy):
    plain = tiny_run([{"amp": {"dtype": "bf16"}}], epochs=1)
    dtypes = Dtypes()
    result = tiny_run([{"amp": {"dtype": "bf16"}}, strategy(), dtypes], epochs=1)
    assert ("forward", torch.bfloat16) in dtypes.seen
    assert result.losses == plain.losses
    assert all(torch.equal(result.weights[name], plain.weights[name]) for name in plain.weights)


def test_a_strategy_that_sets_the_precision_and_leaves_out_autocast_is_refused_in_the_first_step(tiny_run):
    with expect_problem("no-autocast plugins.amp: fp32 'own-precision'", PluginError):
        tiny_run([{"amp": {"dtype": "bf16"}}, OwnPrecision()], epochs=1)


def test_a_strategy_may_apply_autocast_itself(tiny_run):
    dtypes = Dtypes()
    tiny_run([{"amp": {"dtype": "bf16"}}, OwnPrecision(autocast=True), dtypes], epochs=1)
    assert ("forward", torch.bfloat16) in dtypes.seen


@pytest.mark.parametrize("hook", ["before_prepare", "before_fit"])
def test_arguments_of_another_trainer_made_in_a_hook_change_nothing(tiny_run, tmp_path, hook):
    """``TrainingArguments`` resets the state that all of Accelerate's classes share."""
    from transformers import TrainingArguments

    made = []

    class ReadsArguments(Plugin):
        name = "reads-arguments"

        @hookimpl
        def before_prepare(self) -> None:
            if hook == "before_prepare":
                made.append(TrainingArguments(tmp_path, use_cpu=True).device)

        @hookimpl
        def before_fit(self) -> None:
            if hook == "before_fit":
                made.append(TrainingArguments(tmp_path, use_cpu=True).device)

    plain = tiny_run(["amp"], epochs=1)
    mixed = tiny_run(["amp", ReadsArguments()], epochs=1)
    assert made
    assert mixed.trainer.run.accelerator.mixed_precision == "bf16"
    assert all(torch.equal(mixed.weights[name], plain.weights[name]) for name in plain.weights)
