"""fused-optimizer: the same steps in one pass."""

from __future__ import annotations

import pytest
import torch

from fastloop import PluginError
from fastloop_plugins.fused_optimizer import FusedOptimizer


@pytest.mark.parametrize("implementation", ["fused", "foreach"])
def test_it_takes_the_same_steps(tiny_run, implementation):
    plain, ours = tiny_run(), tiny_run([FusedOptimizer(implementation=implementation)])
    assert ours.losses == pytest.approx(plain.losses, rel=1e-5)
    group = ours.trainer.run.optimizer.param_groups[0]
    assert group[implementation] is True


@pytest.mark.parametrize("optimizer", ["AdamW", "Adam", "SGD", "Adagrad"])
def test_it_serves_the_optimizers_that_torch_fuses(tiny_run, optimizer):
    plain, ours = (tiny_run(plugins, optimizer=optimizer) for plugins in ([], [FusedOptimizer()]))
    assert ours.losses == pytest.approx(plain.losses, rel=1e-5)


def test_a_run_goes_on_with_it(tiny_run, tmp_path):
    whole = tiny_run([FusedOptimizer()])
    tiny_run([FusedOptimizer()], max_steps=9, save_every=9, output=tmp_path / "cut")
    rest = tiny_run([FusedOptimizer()], output=tmp_path / "cut", resume=True)
    assert rest.losses == whole.losses[9:]
    assert all(torch.equal(rest.weights[name], whole.weights[name]) for name in whole.weights)


@pytest.mark.parametrize(("optimizer", "repair"), [("RMSprop", "implementation: foreach"), ("LBFGS", "--without fused-optimizer")])
def test_an_optimizer_without_it_is_refused_with_the_repair(tiny_run, optimizer, repair):
    with pytest.raises(PluginError, match=f"torch's {optimizer} has no fused implementation.*{repair}"):
        tiny_run([FusedOptimizer()], optimizer=optimizer)
