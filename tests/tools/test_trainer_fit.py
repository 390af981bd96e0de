"""``Trainer.fit`` called again: after an interrupt, an error, or a completed run. Interrupts are real signals.

Modules:
    plugins/fastloop_tools/trainer/runs.py
"""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader

from fastloop import Plugin, Run, Trainer, UsageError, hookimpl
from fastloop.testing import ProcessResult, assert_problem, expect_problem, tiny_data, tiny_model
from fastloop_plugins.training.ema import EMA

QUIET: list[Any] = [{"log": False}, {"progress": False}]


class Once(Plugin):
    """Calls a function after a step, the first time that the run gets there."""

    def __init__(self, step: int, function: Any, name: str = "once") -> None:
        super().__init__()
        self.step, self.function, self.name = step, function, name  # type: ignore[misc]

    @hookimpl
    def after_step(self, run: Run) -> None:
        if run.state.step == self.step and self.function is not None:
            function, self.function = self.function, None
            function()


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def fail() -> None:
    raise LookupError("no luck")


def make(*plugins: Any, output: str = "run", **settings: Any) -> Trainer:
    """Two epochs of nine steps, with dropout, momentum and a schedule: all of it must be restored."""
    model = tiny_model()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    defaults: dict[str, Any] = {"loss": nn.functional.cross_entropy, "epochs": 2, "device": "cpu"}
    return Trainer(
        model,
        DataLoader(tiny_data(), batch_size=8, shuffle=True),
        tiny_data(32, seed=1),
        plugins=[*QUIET, *plugins],
        optimizer=optimizer,
        scheduler=OneCycleLR(optimizer, 0.2, total_steps=18),
        output=output,
        **defaults | settings,
    )


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return trainer.task.model.state_dict()


def same(trainer: Trainer, plugins: Any = ()) -> bool:
    """Whether a run has the weights and metrics of one that nothing interrupted."""
    whole = make(*plugins, output="whole")
    expected = whole.fit()
    found = json.loads(Path("run/summary.json").read_text())
    assert (found["status"], found["steps"], found["validation"]) == ("completed", 18, expected["validation"])
    return all(torch.equal(weights(trainer)[name], value) for name, value in weights(whole).items())


@pytest.mark.parametrize("step", [1, 9, 13])
def test_an_interrupt_saves_and_another_fit_continues_to_the_same_bits(step, caplog):
    trainer = make(Once(step, interrupt))
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        trainer.fit()
    assert trainer.run.state.step == step
    assert_problem(caplog, f"interrupted step {step}: fit()")
    assert signal.getsignal(signal.SIGINT) is before
    assert json.loads(Path("run/summary.json").read_text())["reason"] == "interrupted by SIGINT"
    assert trainer.validate()["loss"] > 0, "a stopped run can be evaluated"
    trainer.fit()
    assert same(trainer)


@pytest.mark.parametrize("plugins", [["ema"], [{"amp": {"dtype": "bf16"}}], ["fast-dropout", "channels-last"]], ids=str)
def test_plugins_continue_with_it(plugins):
    trainer = make(Once(4, interrupt), *plugins)
    with pytest.raises(KeyboardInterrupt):
        trainer.fit()
    trainer.fit()
    assert same(trainer, plugins)


@pytest.mark.slow
def test_a_compiled_model_continues():
    plugins = [{"compile": {"backend": "aot_eager"}}]
    trainer = make(Once(4, interrupt), *plugins)
    with pytest.raises(KeyboardInterrupt):
        trainer.fit()
    trainer.fit()
    assert same(trainer, plugins)


def test_several_interrupts_and_a_second_one_that_stops_at_once():
    def twice() -> None:
        interrupt()
        interrupt()

    trainer = make(Once(3, twice), Once(7, interrupt, "later"), save_every=2)
    with pytest.raises(KeyboardInterrupt):
        trainer.fit()
    assert trainer.run.interrupted is None, "stopped at once, without a save at step 3"
    with pytest.raises(KeyboardInterrupt):
        trainer.fit()
    assert trainer.run.state.step == 7
    trainer.fit()
    assert same(trainer)


@pytest.mark.parametrize(
    ("setup", "expected"),
    [
        ("", "step 2, validation: loss"),
        (
            "logging.basicConfig(level='INFO', format='MY %(message)s', stream=sys.stdout)",
            "MY step 2, validation: loss",
        ),
        ("logging.getLogger('fastloop').setLevel('ERROR')", ""),
    ],
)
def test_a_script_shows_the_metrics_of_each_evaluation(setup, expected):
    Path("script.py").write_text(
        "import logging, sys, torch\n"
        "from fastloop import Trainer\n"
        f"{setup}\n"
        "data = torch.utils.data.TensorDataset(torch.ones(8, 2), torch.ones(8, 1))\n"
        "loss = torch.nn.functional.mse_loss\n"
        "trainer = Trainer(torch.nn.Linear(2, 1), data, data, batch_size=4, epochs=1, loss=loss, device='cpu')\n"
        "trainer.fit()\n"
    )
    done = forked.run("script.py")
    assert done.returncode == 0, done.stderr
    lines = [line.partition(" 0.")[0] for line in done.stdout.splitlines() if "validation" in line]
    assert [line[: len(expected)] for line in lines] == [expected] * bool(expected)


def test_sigterm_saves_and_ends_the_process_with_75():
    Path("script.py").write_text(
        "import os, signal, sys\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from test_trainer_fit import Once, make\n"
        "make(Once(5, lambda: os.kill(os.getpid(), signal.SIGTERM))).fit()\n"
        "print('not reached')\n"
    )
    done = forked.run("script.py")
    assert (done.returncode, "not reached" in done.stdout) == (75, False), done.stderr
    assert json.loads(Path("run/summary.json").read_text())["reason"] == "interrupted by SIGTERM"
    trainer = make(resume=True)
    trainer.fit()
    assert same(trainer)


@pytest.mark.slow
def test_after_an_error_it_continues_from_the_newest_checkpoint():
    trainer = make(Once(14, fail), save_every=4)
    with pytest.raises(Exception, match="no luck"):
        trainer.fit()
    trainer.fit()
    assert same(trainer)


@pytest.mark.slow
def test_after_an_error_before_the_first_step_it_starts_again():
    class Breaks(Plugin):
        name = "breaks"
        broken = True

        @hookimpl
        def before_fit(self) -> None:
            if self.broken:
                Breaks.broken = False
                raise LookupError("no luck")

    trainer = make(Breaks())
    with pytest.raises(Exception, match="no luck"):
        trainer.fit()
    trainer.fit()
    assert same(trainer)


def test_without_a_checkpoint_a_changed_model_is_refused():
    trainer = make(Once(3, fail))
    with pytest.raises(Exception, match="no luck"):
        trainer.fit()
    with expect_problem("model-changed 3", UsageError):
        trainer.fit()


def test_a_resumed_run_that_fails_early_resumes_again():
    make(max_steps=9, output="first").fit()
    trainer = make(Once(11, fail), resume="first")
    with pytest.raises(Exception, match="no luck"):
        trainer.fit()
    trainer.fit()
    assert same(trainer)


def test_a_completed_run_is_not_trained_again_but_can_be_trained_longer():
    trainer = make(epochs=1)
    trainer.fit()
    with expect_problem("run-complete 9", UsageError):
        trainer.fit()
    longer = make(resume=True)
    longer.fit()
    assert same(longer)


def test_a_plugin_object_with_the_state_of_another_trainer_is_refused():
    averages = EMA(decay=0.5)
    make(averages, epochs=1).fit()
    with expect_problem("plugin-used-before ema EMA(...)", UsageError):
        make(averages, output="other").fit()
    assert not Path("other").exists()
    assert make(averages, resume=True).fit()["steps"] == 18, "the checkpoint replaces the state"


def test_a_model_whose_structure_plugins_changed_is_refused():
    pytest.importorskip("peft")
    settings: dict[str, Any] = {
        "loss": nn.functional.cross_entropy,
        "batch_size": 8,
        "device": "cpu",
        "output": "run",
        "lr": 0.1,
    }
    plugins = [*QUIET, {"lora": {"r": 2, "target_modules": ["0"]}}]
    trainer = Trainer(tiny_model(), tiny_data(), plugins=[*plugins, Once(4, interrupt)], epochs=1, **settings)
    with pytest.raises(KeyboardInterrupt):
        trainer.fit()
    assert trainer.validate(tiny_data(8))["loss"] > 0
    with expect_problem("model-changed", UsageError):
        trainer.fit()
    again = Trainer(tiny_model(), tiny_data(), plugins=plugins, epochs=1, resume=True, **settings)
    again.fit()
    assert again.run.state.step == 9


def test_it_trains_in_another_thread_where_python_handles_no_signals():
    trainer = make(epochs=1)
    done: list[Any] = []
    thread = threading.Thread(target=lambda: done.append(trainer.fit()))
    thread.start()
    thread.join(60)
    assert done[0]["status"] == "completed"


def interrupted_on_each(strategy: str) -> Any:
    """On this process of two, each of which is interrupted: the weights at the end, or the message of the second
    call."""
    model = tiny_model()
    settings: dict[str, Any] = {
        "loss": nn.functional.cross_entropy,
        "batch_size": 8,
        "epochs": 2,
        "lr": 0.1,
        "device": "cpu",
    }
    whole = Trainer(tiny_model(), tiny_data(), plugins=[*QUIET, strategy], output="whole", **settings)
    whole.fit()
    trainer = Trainer(model, tiny_data(), plugins=[*QUIET, strategy, Once(4, interrupt)], output="run", **settings)
    with pytest.raises(KeyboardInterrupt):
        trainer.fit()
    try:
        trainer.fit()
    except UsageError as error:
        return str(error)
    expected, found = whole.run.full_state_dict(), trainer.run.full_state_dict()
    return all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.slow
def test_several_processes_are_interrupted_and_continue(processes: Callable[..., list[ProcessResult]]):
    assert [process.result for process in processes(2, interrupted_on_each, "ddp")] == [True, True]


@pytest.mark.slow
def test_sharded_models_need_a_new_object(processes: Callable[..., list[ProcessResult]]):
    for process in processes(2, interrupted_on_each, "fsdp"):
        assert "fit: plugins changed the structure of the model in the earlier call" in process.result
