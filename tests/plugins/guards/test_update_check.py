"""optimizer-check examines the first optimizer steps: a parameter with a gradient changes, or one warning names it.

Modules:
    plugins/fastloop_plugins/guards/_updates.py
"""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from parameter_runs import examines_updates
from torch import nn

from fastloop import Plugin, hookimpl
from fastloop.testing import assert_problem, tiny_model


def warnings_of(caplog: Any) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


class Watch(Plugin):
    """Keeps the steps after which the check was still there, and the learning rate of each step."""

    name = "watch"

    def __init__(self) -> None:
        super().__init__()
        self.open: list[int] = []
        self.lrs: list[float] = []

    @hookimpl
    def before_step(self, run: Any) -> None:
        self.lrs.append(run.optimizer.param_groups[0]["lr"])

    @hookimpl
    def after_step(self, run: Any) -> None:
        if examines_updates(run):
            self.open.append(run.state.step)


class Optimizer(Plugin):
    """Trains with a given optimizer."""

    name = "optimizer"

    def __init__(self, cls: Any, **options: Any) -> None:
        super().__init__()
        self.cls, self.options = cls, options

    @hookimpl
    def build_optimizer(self, run: Any, model: nn.Module) -> torch.optim.Optimizer:
        return self.cls(model.parameters(), lr=run.recipe.train.lr, **self.options)


class MatricesOnly(torch.optim.AdamW):
    """Takes every parameter, and steps those of two dimensions."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.ndim < 2:
                    parameter.grad = None
        return super().step(closure)


class Detached(torch.optim.AdamW):
    """Steps copies of the parameters, and never gives them back."""

    def __init__(self, parameters: Any, **options: Any) -> None:
        super().__init__(parameters, **options)
        self.masters: dict[int, torch.Tensor] = {}

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                master = self.masters.setdefault(id(parameter), parameter.detach().clone())
                master -= group["lr"] * parameter.grad


class ReplacesLate(Plugin):
    """Replaces a weight when everything is built."""

    name = "replaces-late"
    _replaced = False

    @hookimpl
    def before_epoch(self, run: Any) -> None:
        if self._replaced:
            return
        self._replaced = True
        layer = run.unwrap_model()[0]
        layer.weight = nn.Parameter(layer.weight.detach().clone())


def test_a_run_in_which_all_parameters_change_is_examined_at_its_first_step_only(tiny_run, caplog):
    watch = Watch()
    tiny_run([watch])
    assert watch.open == []
    assert warnings_of(caplog) == []


def test_a_bias_before_batch_norm_is_not_reported(tiny_run, caplog):
    """Batch norm subtracts the bias again, so its gradient is rounding noise. All other parameters change."""
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), *tiny_model()[1:])
    bias = model.state_dict()["0.bias"].clone()
    result = tiny_run([Optimizer(torch.optim.SGD)], model=model)
    assert torch.allclose(result.weights["0.bias"], bias, atol=1e-6)
    assert warnings_of(caplog) == []


def test_a_weight_that_is_replaced_after_everything_is_built_is_one_warning(tiny_run, caplog):
    result = tiny_run([ReplacesLate(), Watch()])
    (warning,) = warnings_of(caplog)
    assert "Not in the optimizer: 0 (weight)." in warning
    assert torch.equal(result.weights["0.weight"], tiny_model().state_dict()["0.weight"]), "it really did not train"


def test_parameters_that_the_optimizer_skips_are_one_warning_after_the_first_step(tiny_run, caplog):
    result = tiny_run([Optimizer(MatricesOnly)])
    assert len(warnings_of(caplog)) == 1
    assert_problem(caplog, "weights-unchanged 1 0 3")
    assert torch.equal(result.weights["0.bias"], tiny_model().state_dict()["0.bias"])


@pytest.mark.parametrize(
    ("cls", "lr"), [(Detached, 1e-2), (torch.optim.AdamW, 1e-12)], ids=["detached", "tiny learning rate"]
)
def test_a_model_that_does_not_change_at_all_is_one_warning_after_eight_steps(tiny_run, caplog, cls, lr):
    result = tiny_run([Optimizer(cls)], lr=lr)
    assert len(warnings_of(caplog)) == 1
    assert_problem(caplog, f"weights-unchanged 8 {lr:g}")
    assert torch.equal(result.weights["0.weight"], tiny_model().state_dict()["0.weight"])


def test_a_step_with_learning_rate_0_decides_nothing(tiny_run, caplog):
    class FromZero(Plugin):
        name = "from-zero"

        @hookimpl
        def build_scheduler(self, optimizer: Any) -> Any:
            return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 20)

    watch = Watch()
    tiny_run([FromZero(), watch])
    assert watch.lrs[0] == 0
    assert watch.open == [1], "examined again at step 2"
    assert warnings_of(caplog) == []
    tiny_run([FromZero(), Optimizer(MatricesOnly)])
    assert len(warnings_of(caplog)) == 1
    assert_problem(caplog, "weights-unchanged 2 0 3")


def test_a_group_with_learning_rate_0_is_frozen_on_purpose(tiny_run, caplog):
    class Groups(torch.optim.AdamW):
        def __init__(self, parameters: Any, lr: float) -> None:
            first, *rest = parameters
            super().__init__([{"params": [first], "lr": 0.0}, {"params": rest}], lr=lr)

    result = tiny_run([Optimizer(Groups)])
    assert torch.equal(result.weights["0.weight"], tiny_model().state_dict()["0.weight"])
    assert warnings_of(caplog) == []


@pytest.mark.parametrize("lr", [1e-2, 1e-5, 1e-8])
@pytest.mark.parametrize(
    "name", ["SGD", "AdamW", "RAdam", "RMSprop", "Adagrad", "Adadelta", "Adamax", "NAdam", "ASGD", "Rprop", "Adafactor"]
)
def test_a_parameter_whose_update_is_below_its_rounding_is_not_reported(tiny_run, caplog, name, lr):
    """With small learning rates some weights stay as they are, others change."""
    tiny_run([Optimizer(getattr(torch.optim, name))], lr=lr, epochs=1)
    assert not [warning for warning in warnings_of(caplog) if "the same after step" in warning]


@pytest.mark.parametrize("lr", [1e-2, 1e-3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_weights_of_other_dtypes(tiny_run, caplog, dtype, lr):
    model = nn.Sequential(Cast(dtype), tiny_model().to(dtype))
    tiny_run([], model=model, lr=lr)
    assert warnings_of(caplog) == []


class Cast(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs.to(self.dtype)


def test_parameters_without_a_gradient_are_not_reported(tiny_run, caplog):
    class Unused(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(*tiny_model())
            self.unused, self.switched_off = nn.Linear(4, 4), nn.Parameter(torch.ones(3))

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            for layer in list(self)[:4]:
                inputs = layer(inputs)
            return inputs + 0 * self.switched_off

    watch = Watch()
    tiny_run([watch], model=Unused())
    assert warnings_of(caplog) == []
    assert watch.open[-1] == 18, "they may get one later"


class ConstantLoss(Plugin):
    """A loss that depends on no weight in the first steps."""

    name = "constant-loss"

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.steps = steps

    @hookimpl(wrapper=True)
    def compute_loss(self, run: Any) -> Any:
        output = yield
        if run.state.step < self.steps:
            output.loss = torch.ones((), device=output.loss.device, requires_grad=True)
        return output


@pytest.mark.parametrize(("steps", "is_reported"), [(99, True), (3, False)])
def test_a_loss_that_depends_on_no_weight_is_one_warning_after_eight_steps(tiny_run, caplog, steps, is_reported):
    watch = Watch()
    tiny_run([ConstantLoss(steps), watch], max_steps=12)
    if is_reported:
        assert_problem(caplog, "no-gradients 8")
        assert watch.open[-1] == 7
    assert len(warnings_of(caplog)) == int(is_reported)


@pytest.mark.parametrize("fused", [True, False])
def test_steps_that_a_plugin_skips_decide_nothing(tiny_run, caplog, fused):
    """The first batch is NaN, and `nan-guard` skips its step: on the device with a fused optimizer, else by dropping
    the gradients."""

    class Spoils(Plugin):
        name = "spoils"

        @hookimpl
        def before_step(self, run: Any, batches: Any) -> None:
            if run.state.step == 0:
                batches[0].inputs[0].fill_(float("nan"))

    watch = Watch()
    tiny_run([{"nan-guard": {"action": "skip"}}, *["fused-optimizer"] * fused, Spoils(), watch])
    assert watch.open == [1]
    assert not [warning for warning in warnings_of(caplog) if "do not change" in warning]


def test_a_resumed_run_is_examined_again(tiny_run, tmp_path, caplog):
    tiny_run([], max_steps=9, save_every=9, output=tmp_path / "run")
    assert warnings_of(caplog) == []
    tiny_run([ReplacesLate()], output=tmp_path / "run", resume=True)
    assert [warning for warning in warnings_of(caplog) if "Not in the optimizer: 0 (weight)." in warning]


def test_it_reads_the_device_once(tiny_run, monkeypatch):
    """Two elements of each parameter, one transfer, however many parameters there are."""
    reads: list[tuple[int, ...]] = []
    tolist = torch.Tensor.tolist

    def counted(self: torch.Tensor) -> Any:
        reads.append(tuple(self.shape))
        return tolist(self)

    monkeypatch.setattr(torch.Tensor, "tolist", counted)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(20)), nn.Linear(8, 3))
    tiny_run([{"log": False}], model=model, epochs=1, evaluate_every=None)
    assert [shape for shape in reads if len(shape) == 3] == [(42, 2, 3)]
