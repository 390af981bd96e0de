"""Tests of sam and muon: their behaviour, and fastloop's conformance tests."""

import pytest
import torch
from fastloop import PluginError
from fastloop.testing import VECTORS, Conformance, tiny_data, tiny_model
from torch import nn

from step_variants.muon import Muon
from step_variants.sam import SAM


def sam_by_hand(rho: float, epochs: int = 2, seed: int = 123) -> list[float]:
    """Losses of a loop that a person would write, with dropout."""
    (inputs, targets), model = tiny_data().tensors, tiny_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    torch.manual_seed(seed)
    losses = []
    for epoch in range(epochs):
        for ids in torch.randperm(len(targets), generator=torch.Generator().manual_seed(seed + epoch)).split(8):
            state = torch.get_rng_state()
            loss = nn.functional.cross_entropy(model(inputs[ids]), targets[ids])
            loss.backward()
            norm = nn.utils.get_total_norm([weight.grad for weight in model.parameters()])
            originals = [weight.detach().clone() for weight in model.parameters()]
            with torch.no_grad():
                for weight in model.parameters():
                    weight.add_(weight.grad * (rho / (norm + 1e-12)))
            optimizer.zero_grad()
            torch.set_rng_state(state)
            nn.functional.cross_entropy(model(inputs[ids]), targets[ids]).backward()
            with torch.no_grad():
                for weight, original in zip(model.parameters(), originals, strict=True):
                    weight.copy_(original)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses


def test_losses_are_those_of_a_hand_written_sam(tiny_run):
    assert tiny_run([SAM(rho=0.1)]).losses == sam_by_hand(0.1)


def test_a_small_rho_is_close_to_the_plain_step_and_a_large_one_is_not(tiny_run):
    plain = tiny_run().losses
    assert tiny_run([SAM(rho=1e-6)]).losses == pytest.approx(plain, rel=1e-3)
    assert tiny_run([SAM(rho=1.0)]).losses != pytest.approx(plain, rel=1e-2)


def test_weights_are_restored_if_the_second_pass_fails(tiny_run):
    class Fails(nn.Sequential):
        calls = 0

        def forward(self, inputs):
            Fails.calls += self.training
            if Fails.calls == 2:
                raise RuntimeError("on purpose")
            return super().forward(inputs)

    model = Fails(*tiny_model())
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    with pytest.raises(RuntimeError, match="on purpose"):
        tiny_run([SAM(rho=1.0)], model=model)
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())


def test_muon_steps_the_matrices_and_adamw_the_rest(tiny_run):
    run = tiny_run([Muon(adamw=["3."])], weight_decay=0.1).trainer.run
    groups = {group["optimizer"]: group for group in run.optimizer.param_groups}
    assert [tuple(weight.shape) for weight in groups["muon"]["params"]] == [(16, 8)]
    assert [tuple(weight.shape) for weight in groups["adamw"]["params"]] == [(16,), (3, 16), (3,)]
    assert {(group["lr"], group["weight_decay"]) for group in groups.values()} == {(1e-2, 0.1)}


def test_muon_needs_weights_for_both(tiny_run):
    with pytest.raises(
        PluginError, match="plugins.muon.adamw: found 0 matrices for Muon and 4 other weights for AdamW"
    ):
        tiny_run([Muon(adamw=["weight"])])


def test_they_learn_together(tiny_run):
    losses = tiny_run([SAM(), Muon()], epochs=6, lr=3e-2).losses
    assert sum(losses[-9:]) < 0.6 * sum(losses[:9])


class TestSAMConformance(Conformance):
    plugin = "sam"
    slow = ("processes[fsdp]", "processes[deepspeed]")


class TestMuonConformance(Conformance):
    plugin = "muon"
    task = VECTORS | {"train": {"lr": 3e-2}}
    refuses = ("deepspeed",)  # it steps one optimizer
    slow = ("processes[fsdp]", "processes[deepspeed]")
