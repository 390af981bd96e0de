"""Steps wait for the device only in the checks of the first ones, also at log points; an evaluation waits at its
end."""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from emulated_device import DEVICE, DeviceTensor, EmulatedDevice, emulation
from torch.amp import GradScaler
from training_runs import execute
from transformers import TrainerCallback

from fastloop import Plugin, PluginCrash, hookimpl
from fastloop.distributed.processes import Processes
from fastloop.lifecycle import build
from fastloop.plugins import resolve as registry
from fastloop.recipe import make_recipe
from fastloop.run import Run
from fastloop.runtime.host_copies import HostCopy
from fastloop.scalars import Scalars
from fastloop.testing import LANGUAGE, TEXTS, assert_problem, expect_problem, write_texts
from fastloop_plugins.data._read_ahead import ReadAheadLoader
from fastloop_plugins.guards._numbers import loss_and_norm, read_numbers

pytestmark = [
    pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true but no accelerator is found"),
    pytest.mark.filterwarnings("ignore:for .* copying from a non-meta parameter"),
]

FAST = [{"amp": {"dtype": "bf16"}}, "length-bucketing", "fused-optimizer", {"lr-scheduler": {"warmup": 3}}]
"""Speedups that a GPU run takes first. Precision is that of the emulation: torch casts nothing on its device."""


def recipe(task: Mapping[str, Any] = TEXTS, plugins: tuple[Any, ...] = (), **train: Any) -> Any:
    """67 texts in batches of 8: nine steps an epoch."""
    write_texts(Path())
    settings = {"epochs": 1, "batch_size": 8, "lr": 1e-3, "device": "cpu"} | train
    if not any("progress" in plugin for plugin in plugins):
        plugins = (*plugins, {"progress": False})
    return make_recipe({**task, "train": settings, "plugins": list(plugins), "output": "run"})


@pytest.fixture
def emulated(monkeypatch):
    """Trains on the emulated device: ``emulated(task, plugins, epochs=2)`` -> the plugin that recorded the waits, and
    the summary."""

    def train(
        *arguments: Any, pin_memory: bool = True, objects: tuple[Plugin, ...] = (), **settings: Any
    ) -> tuple[EmulatedDevice, dict[str, Any]]:
        device = EmulatedDevice(pin_memory)
        with device.emulate(monkeypatch):
            wanted = recipe(*arguments, **settings)
            return device, execute(build(registry.resolve(wanted, objects=[*objects, device])))

    return train


def files(waits: list[str]) -> list[str]:
    """The source file of each wait."""
    return [wait.partition(" in ")[2].partition(": ")[0] for wait in waits]


def waiting(device: EmulatedDevice) -> dict[int, list[str]]:
    """Number of each step that waits -> the source file of each wait."""
    return {number: files(waits) for number, waits in enumerate(device.steps, 1) if waits}


CHECK, COPY = "fastloop_plugins/guards/_updates.py", "fastloop/runtime/host_copies.py"
"""The first steps are read once each until all weights are known to change: step 1, and step 2 where warm-up starts
from a rate of 0."""


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
def test_a_run_on_the_emulated_device_computes_what_one_on_the_cpu_does(emulated):
    still = {**TEXTS, "model": {**TEXTS["model"], "config": TEXTS["model"]["config"] | {"hidden_dropout_prob": 0.0}}}
    still["model"]["config"]["attention_probs_dropout_prob"] = 0.0
    device, summary = emulated(still)
    plain = recipe(still)
    expected = execute(build(registry.resolve(plain)))
    assert summary["validation"] == pytest.approx(expected["validation"], rel=1e-4)
    assert len(device.steps) == 5


# -- steps and evaluations ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", [TEXTS, LANGUAGE], ids=["classification", "language model"])
def test_no_step_of_the_default_loop_waits_and_an_evaluation_does_after_its_last_batch(emulated, task):
    device, _ = emulated(task)
    assert waiting(device) == {1: [CHECK]}
    (waits,) = device.evaluations
    assert files(waits) == ["fastloop/evaluation_results.py"], "losses and metrics are read together"


@pytest.mark.parametrize("log_every", [1, pytest.param(10, marks=pytest.mark.slow)])
def test_no_step_of_the_fast_recipe_waits_for_a_log_point(emulated, log_every):
    settings = {"epochs": 2, "max_grad_norm": 1.0, "micro_batch_size": 4, "log_every": log_every}
    device, _ = emulated(TEXTS, (*FAST, "checkpoint-best"), **settings)
    assert len(device.steps) == 10
    assert waiting(device) == {1: [CHECK], 2: [CHECK]}
    assert [len(waits) for waits in device.evaluations] == [1, 1]


def test_a_line_of_the_progress_has_the_loss_of_its_step_and_waits_for_nothing(emulated, capsys):
    lines = Lines()
    device, _ = emulated(TEXTS, ({"progress": {"every": 1e-9}},), objects=(lines,))
    assert waiting(device) == {1: [CHECK]}
    shown = re.findall(r"step (\d+)/5, epoch 1/1, loss ([\d.]+),", capsys.readouterr().out)
    assert shown == [(str(step), f"{float(lines.losses[step - 1]):.4f}") for step in (1, 3)]


class Lines(Plugin):
    """Keeps what loggers receive, and where in the run they do."""

    name = "lines"

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[str, int, dict[str, float]]] = []
        self.events: list[str] = []
        self.losses: list[Any] = []

    @hookimpl
    def after_step(self, run: Run, loss: torch.Tensor) -> None:
        self.events.append(f"step {run.state.step}")
        self.losses.append(loss)

    @hookimpl
    def log_scalars(self, scalars: Mapping[str, float], step: int) -> None:
        kind = next(iter(scalars)).partition("/")[0]
        self.lines.append((kind, step, dict(scalars)))
        self.events.append(f"log {kind} {step}")

    @hookimpl
    def after_epoch(self) -> None:
        self.events.append("epoch")

    @hookimpl
    def before_evaluate(self) -> None:
        self.events.append("evaluate")

    @hookimpl
    def save_state(self) -> None:
        self.events.append("save")


SAME = ("train/loss", "train/grad_norm", "train/lr", "validation/loss")
"""Logged values that do not measure the machine."""
STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def test_lines_of_an_accelerator_are_those_of_the_cpu_and_come_one_log_point_later(emulated):
    task = {**TEXTS, "model": {**TEXTS["model"], "config": TEXTS["model"]["config"] | STILL}}
    settings = {"log_every": 2, "evaluate_every": 3, "save_every": 3, "epochs": 2}
    schedule = ({"lr-scheduler": {"warmup": 3}},)
    there, here = Lines(), Lines()
    emulated(task, schedule, objects=(there,), **settings)
    written = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    execute(build(registry.resolve(recipe(task, schedule, **settings), objects=[here])))
    assert [line[:2] for line in there.lines] == [line[:2] for line in here.lines], "no line is lost, or changes places"
    for (_, step, scalars), (_, _, expected) in zip(there.lines, here.lines, strict=True):
        assert list(scalars) == list(expected)
        for name in SAME:
            if name in expected:
                assert scalars[name] == pytest.approx(expected[name], rel=1e-4), (step, name)
    first_epoch = there.events[: there.events.index("epoch") + 1]
    assert first_epoch == [
        "step 1", "step 2", "step 3", "log train 2", "evaluate", "log validation 3", "save",
        "step 4", "step 5", "log train 4", "epoch",
    ]  # fmt: skip
    assert here.events[:3] == ["step 1", "step 2", "log train 2"]
    assert there.events.index("log train 6") < there.events.index("log train 8") < there.events.index("log train 10")
    training = [(line["step"], line["epoch"]) for line in written if "split" not in line]
    assert training == [(2, 1), (4, 1), (6, 2), (8, 2), (10, 2)], "the step and the epoch of each line"


class CallbackLines(TrainerCallback):
    """A callback of transformers: the state when ``on_log`` is called with the values of a log point. It stops the run
    at the second one."""

    lines: list[tuple[int, float | None, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if "learning_rate" in logs:
            self.lines.append((state.global_step, state.epoch, logs["learning_rate"]))
            control.should_training_stop = len(self.lines) == 2


def test_a_plugin_that_waits_for_scalars_receives_them_in_their_step(emulated):
    plugins = (
        {"transformers-callbacks": {"callbacks": [f"{__name__}:CallbackLines"]}},
        {"lr-scheduler": {"warmup": 4}},
    )
    settings = {"log_every": 2, "evaluate_every": None, "epochs": 2}
    CallbackLines.lines = []
    device, summary = emulated(TEXTS, plugins, **settings)
    there, CallbackLines.lines = CallbackLines.lines, []
    execute(build(registry.resolve(recipe(TEXTS, plugins, **settings))))
    assert there == CallbackLines.lines
    assert [step for step, _, _ in there] == [2, 4]
    assert summary["steps"] == 4, "the callback stopped the run in its step"
    assert [step for step, waits in waiting(device).items() if COPY in waits] == [2, 4]


class Fails(Plugin):
    """Fails after a step."""

    name = "fails"

    @hookimpl
    def before_step(self, run: Run) -> None:
        if run.state.step == 3:
            raise RuntimeError("broken")


def test_a_failed_run_logs_the_pending_log_point_first(emulated):
    lines = Lines()
    with expect_problem("plugin-crashed broken", PluginCrash):
        emulated(TEXTS, objects=(lines, Fails()), log_every=2)
    assert [line[:2] for line in lines.lines] == [("train", 2)]
    assert lines.lines[0][2]["train/loss"] == pytest.approx(sum(map(float, lines.losses[:2])) / 2)


def test_a_problem_with_the_pending_log_point_does_not_hide_the_error_of_a_run(emulated, caplog):
    class Refuses(Plugin):
        name = "refuses"

        @hookimpl
        def log_scalars(self) -> None:
            raise RuntimeError("full")

    with expect_problem("plugin-crashed broken", PluginCrash):
        emulated(TEXTS, objects=(Refuses(), Fails()), log_every=2)
    assert_problem(caplog, "values-not-logged 2")


@pytest.mark.slow
def test_finite_reads_all_steps_since_last_check_at_once(emulated):
    device, _ = emulated(TEXTS, (*FAST, "nan-guard", {"log": False}), epochs=2, max_grad_norm=1.0)
    assert waiting(device) == {1: [CHECK], 2: [CHECK], 10: ["fastloop_plugins/guards/_numbers.py"]}


@pytest.mark.slow
def test_packed_rows_do_not_wait(emulated):
    device, _ = emulated(LANGUAGE, ("packing",))
    assert waiting(device) == {1: [CHECK]}


class ReadAhead(Plugin):
    """Reads batches in a thread, as device-prefetch does on CUDA."""

    name = "read-ahead"

    @hookimpl
    def configure(self) -> dict[str, Any]:
        return {"thread_loader_class": ReadAheadLoader}


@pytest.mark.slow
def test_batches_that_a_thread_reads_do_not_wait(emulated):
    plain, _ = emulated(plugins=({"log": False},))
    ahead, _ = emulated(plugins=({"log": False},), objects=(ReadAhead(),))
    assert len(ahead.steps) == len(plain.steps) > 3
    assert waiting(ahead) == waiting(plain)


@pytest.mark.slow
def test_unpinned_batch_waits_for_each_tensor(emulated):
    device, _ = emulated(TEXTS, pin_memory=False)
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
def test_values_of_plugins_are_read_with_the_losses_of_a_log_point(emulated):
    class Logs(Plugin):
        """Logs a value on the device, and changes it in place afterwards."""

        name = "logs"
        received: list[dict[str, float]] = []

        @hookimpl
        def after_step(self, run: Run, loss: torch.Tensor) -> None:
            value = loss * 0 + run.state.step
            run.log("logs/steps", value)
            run.log("logs/last", value, reduce="max")
            run.log("logs/integer", value.long(), reduce="sum")
            value.zero_()

        @hookimpl
        def log_scalars(self, scalars: Mapping[str, float]) -> None:
            self.received.append({name: value for name, value in scalars.items() if name.startswith("logs/")})

    device, _ = emulated(TEXTS, objects=(Logs(),), log_every=2, evaluate_every=None, max_grad_norm=1.0)
    assert waiting(device) == {1: [CHECK]}
    assert Logs.received[:2] == [
        {"logs/steps": mean, "logs/last": mean + 0.5, "logs/integer": 2 * mean} for mean in (1.5, 3.5)
    ]


@pytest.mark.slow
def test_without_a_plugin_that_receives_scalars_no_step_waits_for_a_log_point(emulated):
    device, _ = emulated(TEXTS, ({"log": False},), log_every=3)
    assert waiting(device) == {1: [CHECK]}


def test_pending_values_of_a_checkpoint_are_read_together():
    waits: list[str] = []
    scalars, processes = Scalars(enabled=True), Processes()
    with emulation(waits):
        scalars.restore([{"values": {"train/loss": [1.0, 2.5]}, "reductions": {}}], processes)
        scalars.values["train/loss"] += [DeviceTensor(torch.tensor(loss)) for loss in (4.0, 5.0)]
        assert scalars.state(processes) == [{"values": {"train/loss": [1.0, 2.5, 4.0, 5.0]}, "reductions": {}}]
    assert len(waits) == 1
