"""Steps wait for the device only in the checks of the first ones, also at log points; an evaluation waits at its
end.

Modules:
    core/fastloop/runtime/host_copies.py
"""

from __future__ import annotations

import re
from collections.abc import Generator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from emulated_device import DEVICE, DeviceTensor, emulation
from emulated_steps import CHECK, EXPECTED_WARNINGS, files, recipe, train_emulated, waiting
from torch.amp import GradScaler
from training_runs import execute

from fastloop import Plugin, hookimpl
from fastloop.distributed.processes import Processes
from fastloop.lifecycle import build
from fastloop.plugins import resolve as registry
from fastloop.run import Run
from fastloop.runtime.host_copies import HostCopy
from fastloop.scalars import Scalars
from fastloop.testing import LANGUAGE, TEXTS
from fastloop_plugins.data._read_ahead import ReadAheadLoader
from fastloop_plugins.guards._numbers import loss_and_norm, read_numbers

pytestmark = EXPECTED_WARNINGS

FAST = [{"amp": {"dtype": "bf16"}}, "length-bucketing", "fused-optimizer", {"lr-scheduler": {"warmup": 3}}]
"""Speedups that a GPU run takes first. Precision is that of the emulation: torch casts nothing on its device."""


# -- the emulation itself ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("operation", "waits"),
    [
        (lambda x: x.sum().item(), 1),
        (lambda x: bool(x.any()), 1),
        (lambda x: float(x[0]), 1),
        (lambda x: x.tolist(), 1),
        (lambda x: x.cpu(), 1),
        (lambda x: torch.zeros(3).copy_(x), 1),
        (lambda x: torch.equal(x, x), 1),
        (lambda x: x.nonzero(), 1),
        (lambda x: x[x > 0], 1),
        (lambda x: torch.unique(x), 1),
        (lambda x: torch.bincount(x.long()), 1),
        (lambda x: torch.zeros(3).to(x.device), 1),
        (lambda x: torch.tensor([1.0, 2.0], device=x.device), 1),
        (lambda x: torch.zeros(3).to(x.device, non_blocking=True), 0),
        (lambda x: torch.zeros(3, device=x.device) + x * 2, 0),
        (lambda x: x[torch.arange(2, device=x.device)].masked_fill(x[:2] > 0, 0.0), 0),
        (lambda x: torch.zeros(3).sum().item(), 0),
        (lambda x: x.to("cpu", non_blocking=True), 0),
        (lambda x: HostCopy(x).read(), 1),
        (lambda x: (HostCopy(x), x + 1)[0].read(), 0),
    ],
)
def test_emulated_device_records_waits(operation, waits):
    recorded: list[str] = []
    values = DeviceTensor(torch.tensor([1.0, 0.0, 3.0]))
    with emulation(recorded):
        operation(values)
    assert len(recorded) == waits, recorded


def test_a_copy_to_the_host_has_its_numbers_once_it_was_waited_for():
    values = DeviceTensor(torch.tensor([1.0, 2.0]))
    with emulation([]):
        copy = HostCopy(values)
        early = values.to("cpu", non_blocking=True)
        values.zero_()
        assert copy.read().tolist() == [1.0, 2.0]
        assert early.tolist() == [0.0, 0.0], "nothing waited for it"
        assert HostCopy(values).arrives_within(1.0)


def test_tensors_of_the_host_and_of_the_device_do_not_mix():
    with emulation([]), pytest.raises(RuntimeError, match="inputs on the device and on the host"):
        DeviceTensor(torch.ones(3)) + torch.ones(3)


@pytest.mark.slow
def test_a_run_on_the_emulated_device_computes_what_one_on_the_cpu_does():
    still = {**TEXTS, "model": {**TEXTS["model"], "config": TEXTS["model"]["config"] | {"hidden_dropout_prob": 0.0}}}
    still["model"]["config"]["attention_probs_dropout_prob"] = 0.0
    device, summary = train_emulated(still)
    plain = recipe(still)
    expected = execute(build(registry.resolve(plain)))
    assert summary["validation"] == pytest.approx(expected["validation"], rel=1e-4)
    assert len(device.steps) == 5


# -- steps and evaluations ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", [TEXTS, LANGUAGE], ids=["classification", "language model"])
def test_no_step_of_the_default_loop_waits_and_an_evaluation_does_after_its_last_batch(task):
    device, _ = train_emulated(task)
    assert waiting(device) == {1: [CHECK]}
    (waits,) = device.evaluations
    assert files(waits) == ["fastloop/evaluation_results.py"], "losses and metrics are read together"


@pytest.mark.parametrize("log_every", [1, pytest.param(10, marks=pytest.mark.slow)])
def test_no_step_of_the_fast_recipe_waits_for_a_log_point(log_every):
    settings = {"epochs": 2, "max_grad_norm": 1.0, "micro_batch_size": 4, "log_every": log_every}
    device, _ = train_emulated(TEXTS, (*FAST, "checkpoint-best"), **settings)
    assert len(device.steps) == 10
    assert waiting(device) == {1: [CHECK], 2: [CHECK]}
    assert [len(waits) for waits in device.evaluations] == [1, 1]


class Losses(Plugin):
    """Keeps the loss of each step."""

    name = "losses"

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[torch.Tensor] = []

    @hookimpl
    def after_step(self, loss: torch.Tensor) -> None:
        self.losses.append(loss)


def test_a_line_of_the_progress_has_the_loss_of_its_step_and_waits_for_nothing(capsys):
    losses = Losses()
    device, _ = train_emulated(TEXTS, ({"progress": {"every": 1e-9}},), objects=(losses,))
    assert waiting(device) == {1: [CHECK]}
    shown = re.findall(r"step (\d+)/5, epoch 1/1, loss ([\d.]+),", capsys.readouterr().out)
    assert shown == [(str(step), f"{float(losses.losses[step - 1]):.4f}") for step in (1, 3)]


@pytest.mark.slow
def test_finite_reads_all_steps_since_last_check_at_once():
    device, _ = train_emulated(TEXTS, (*FAST, "nan-guard", {"log": False}), epochs=2, max_grad_norm=1.0)
    assert waiting(device) == {1: [CHECK], 2: [CHECK], 10: ["fastloop_plugins/guards/_numbers.py"]}


@pytest.mark.slow
def test_packed_rows_do_not_wait():
    device, _ = train_emulated(LANGUAGE, ("packing",))
    assert waiting(device) == {1: [CHECK]}


class ReadAhead(Plugin):
    """Reads batches in a thread, as device-prefetch does on CUDA."""

    name = "read-ahead"

    @hookimpl
    def configure(self) -> dict[str, Any]:
        return {"thread_loader_class": ReadAheadLoader}


@pytest.mark.slow
def test_batches_that_a_thread_reads_do_not_wait():
    plain, _ = train_emulated(plugins=({"log": False},))
    ahead, _ = train_emulated(plugins=({"log": False},), objects=(ReadAhead(),))
    assert len(ahead.steps) == len(plain.steps) > 3
    assert waiting(ahead) == waiting(plain)


@pytest.mark.slow
def test_unpinned_batch_waits_for_each_tensor():
    device, _ = train_emulated(TEXTS, pin_memory=False)
    assert {len(waits) for waits in device.steps[1:]} == {3}, "token ids, mask and labels"


# -- parts -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_batches_are_pinned_and_copied_without_blocking_on_cuda(monkeypatch):
    class Built(Exception):
        """The loaders are there, and no model can be put on the device."""

    class Looks(Plugin):
        name = "looks"

        @hookimpl(wrapper=True)
        def build_model(self, run: Run) -> Generator[None, Any, Any]:
            self.loaders = [run.train_loader, *run.eval_loaders.values()]
            raise Built
            yield

    looks, wanted = Looks(), recipe()
    cuda = SimpleNamespace(device=torch.device("cuda", 0), num_processes=1, process_index=0, is_main_process=True)
    monkeypatch.setattr("fastloop.settings.this_machine", lambda device: SimpleNamespace(device="cuda"))
    monkeypatch.setattr("fastloop.lifecycle.build_accelerator", lambda *_: (cuda, Processes()))
    with pytest.raises(Exception, match="build_model") as raised:
        build(registry.resolve(wanted, objects=[looks]))
    assert isinstance(raised.value.__cause__, Built)
    assert [loader.loader.pin_memory for loader in looks.loaders] == [True, True]
    assert [loader.loader.num_workers for loader in looks.loaders] == [0, 0]


def test_finite_makes_no_number_on_the_host_under_loss_scaling():
    waits: list[str] = []
    run: Any = SimpleNamespace(accelerator=SimpleNamespace(scaler=GradScaler("cpu")), device=DEVICE)
    with emulation(waits):
        numbers = [loss_and_norm(run, DeviceTensor(torch.tensor(loss))) for loss in (2.0, 3.0)]
        assert not waits
        assert read_numbers(numbers) == [[2.0, 0.0], [3.0, 0.0]]
    assert len(waits) == 1


@pytest.mark.slow
def test_without_a_plugin_that_receives_scalars_no_step_waits_for_a_log_point():
    device, _ = train_emulated(TEXTS, ({"log": False},), log_every=3)
    assert waiting(device) == {1: [CHECK]}


def test_pending_values_of_a_checkpoint_are_read_together():
    waits: list[str] = []
    scalars, processes = Scalars(enabled=True), Processes()
    with emulation(waits):
        scalars.restore([{"values": {"train/loss": [1.0, 2.5]}, "reductions": {}}], processes)
        scalars.values["train/loss"] += [DeviceTensor(torch.tensor(loss)) for loss in (4.0, 5.0)]
        assert scalars.state(processes) == [{"values": {"train/loss": [1.0, 2.5, 4.0, 5.0]}, "reductions": {}}]
    assert len(waits) == 1
