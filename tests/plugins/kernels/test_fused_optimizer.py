"""fused-optimizer: the same steps in one pass.

Modules:
    plugins/fastloop_plugins/kernels/fused_optimizer.py
"""

from __future__ import annotations

import importlib.util
import inspect
from typing import Any

import pytest
import torch
from torch import nn

from fastloop import PluginError
from fastloop.recipe import make_recipe
from fastloop.runtime.hardware import Machine, this_machine
from fastloop.testing import expect_problem
from fastloop_plugins.kernels import fused_optimizer
from fastloop_plugins.kernels.fused_optimizer import FUSED, FUSED_ON_SHARDS, FusedOptimizer, has_fused_kernel


@pytest.mark.parametrize("implementation", ["fused", "foreach"])
def test_it_takes_the_same_steps(tiny_run, implementation):
    plain, ours = tiny_run(), tiny_run([FusedOptimizer(implementation=implementation)])
    assert ours.losses == pytest.approx(plain.losses, rel=1e-5)
    group = ours.trainer.run.optimizer.param_groups[0]
    assert group[implementation] is True


@pytest.mark.parametrize("optimizer", ["AdamW", "Adam", "SGD", "Adagrad"])
def test_it_serves_the_optimizers_that_torch_fuses(tiny_run, optimizer):
    if not has_fused_kernel(make_recipe({"train": {"optimizer": optimizer}}), this_machine().device):
        pytest.skip(f"this torch fuses {optimizer} on the CPU only")
    plain, ours = (tiny_run(plugins, optimizer=optimizer) for plugins in ([], [FusedOptimizer()]))
    assert ours.losses == pytest.approx(plain.losses, rel=1e-5)


class LateLayer(nn.Module):
    """Uses one of its layers from the third step on, as layer drop may."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.late, self.head, self.steps = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3), 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.steps += self.training
        hidden = self.first(inputs)
        scores: torch.Tensor = self.head(self.late(hidden) if self.steps > 2 else hidden)
        return scores


def test_a_weight_may_get_its_first_gradient_late(tiny_run):
    sgd = {"name": "SGD", "momentum": 0.9, "nesterov": True}
    plain, ours = (tiny_run(plugins, model=LateLayer(), optimizer=sgd) for plugins in ([], [FusedOptimizer()]))
    assert ours.losses == pytest.approx(plain.losses, rel=1e-5)
    with expect_problem("unsupported-optimizer 2 3", PluginError):
        tiny_run([FusedOptimizer()], model=LateLayer(), optimizer={"name": "SGD", "momentum": 0.9, "dampening": 0.1})


@pytest.mark.parametrize(
    ("optimizer", "repair"), [("RMSprop", "implementation: foreach"), ("LBFGS", "--without fused-optimizer")]
)
def test_an_optimizer_without_it_is_refused_with_the_repair(tiny_run, optimizer, repair):
    with expect_problem(f"unsupported-optimizer {optimizer} {repair}", PluginError):
        tiny_run([FusedOptimizer()], optimizer=optimizer)


# -- 8 bits ------------------------------------------------------------------------------------------------------------

installed = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="the extra optim8bit is not installed"
)


def wide_model() -> nn.Module:
    """With a weight large enough for 8 bits."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 640), nn.ReLU(), nn.Linear(640, 3))


def moments(run: Any) -> list[torch.dtype]:
    values: list[Any] = list(run.optimizer.state.values())
    return [state["state1"].dtype for state in values]


@installed
def test_8_bits_train_nearly_as_32_do(tiny_run):
    plain, ours = (tiny_run(plugins, model=wide_model()) for plugins in ([], [FusedOptimizer(implementation="8bit")]))
    assert ours.losses != plain.losses
    assert sum(ours.losses[-9:]) == pytest.approx(sum(plain.losses[-9:]), rel=0.1)
    assert sum(ours.losses[-9:]) < 0.8 * sum(ours.losses[:9])
    assert set(moments(ours.trainer.run)) == {torch.uint8, torch.float32}, "large weights' in 8 bits, small ones' in 32"


@installed
def test_a_run_with_8_bits_goes_on_with_the_same_numbers(tiny_run, tmp_path):
    ours = {"plugins": [FusedOptimizer(implementation="8bit")]}
    whole = tiny_run(**ours, model=wide_model())
    tiny_run(**ours, model=wide_model(), max_steps=9, save_every=9, output=tmp_path / "cut")
    rest = tiny_run(**ours, model=wide_model(), output=tmp_path / "cut", resume=True)
    assert rest.losses == whole.losses[9:]


def test_8_bits_promise_less_and_need_an_extra(tiny_run):
    assert FusedOptimizer().numerics == "reassociated"
    plugin = FusedOptimizer(implementation="8bit")
    assert plugin.numerics == "reduced-precision"
    needs = [need.missing(plugin, Machine("mps", "", ("fp32",))) for need in plugin.requirements]
    assert all(name in needs[0] for name in ("cuda", "xpu", "cpu", "mps"))
    if importlib.util.find_spec("bitsandbytes") is None:
        with expect_problem("requirement-missing bitsandbytes>=0.50 'fastloop-train[optim8bit]'", PluginError):
            tiny_run([plugin])


def test_an_optimizer_that_has_no_8_bits_is_refused_with_those_that_have():
    recipe = make_recipe({"train": {"optimizer": "NAdam"}})
    with expect_problem("unsupported-optimizer train.optimizer AdamW", PluginError):
        FusedOptimizer(implementation="8bit").check_recipe(recipe)


def test_fused_names_are_torchs_optimizers_with_a_fused_kernel():
    optimizers = {
        name: cls
        for name, cls in vars(torch.optim).items()
        if isinstance(cls, type) and cls is not torch.optim.Optimizer
    }
    assert {name for name, cls in optimizers.items() if "fused" in inspect.signature(cls).parameters} == set(FUSED)
    for name in optimizers:
        assert has_fused_kernel(make_recipe({"train": {"optimizer": name}}), "cpu") == (name in FUSED)
    assert has_fused_kernel(make_recipe({"train": {"optimizer": "torch.optim:SGD"}}), "cuda")
    assert not has_fused_kernel(make_recipe({"train": {"optimizer": "torch.optim:RMSprop"}}), "cuda")


@pytest.mark.parametrize(("torch_version", "is_served"), [("2.11.0", False), ("2.13.0+cu130", True)])
def test_a_torch_that_fuses_an_optimizer_on_the_cpu_only_is_refused_on_cuda(monkeypatch, torch_version, is_served):
    machine = Machine("cuda", "H100", ("fp32", "bf16"), ("bf16",))
    monkeypatch.setattr(fused_optimizer, "version", lambda package: torch_version)
    monkeypatch.setattr(fused_optimizer, "this_machine", lambda device: machine)
    recipe = make_recipe({"train": {"optimizer": "Adagrad"}})
    assert (FusedOptimizer.recommend(recipe, machine) is not None) is is_served
    if is_served:
        FusedOptimizer().check_recipe(recipe)
    else:
        with pytest.raises(PluginError) as error:
            FusedOptimizer().check_recipe(recipe)
        for name in ("Adagrad", "2.13", "2.11.0", "plugins.fused-optimizer.implementation: foreach"):
            assert name in str(error.value)
    FusedOptimizer(implementation="foreach").check_recipe(recipe)


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize(("processes", "fsdp", "is_sharded"), [(1, {}, False), (2, {}, True), (2, False, False)])
def test_auto_selects_it_for_shards_only_if_its_kernel_steps_them(name, processes, fsdp, is_sharded):
    machine = Machine("cpu", "", ("fp32",), (), processes)
    recipe = make_recipe({"train": {"optimizer": name}, "plugins": [{"fsdp": fsdp}]})
    expected = name in FUSED_ON_SHARDS or not is_sharded
    assert (FusedOptimizer.recommend(recipe, machine) is not None) is expected
