"""A run that was killed and resumed ends like an uninterrupted one: weights, metrics and data order, to the bit.

Most runs are killed in a forked child, by SIGKILL from inside at a chosen moment; the others are this process's.

Modules:
    core/fastloop/checkpoint/resume.py
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import random
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import forked
import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

from fastloop import CheckpointError, Plugin, checkpoint, hookimpl
from fastloop.testing import assert_problem, expect_problem, tiny_data, tiny_model

TIMES = ("samples_per_second", "tokens_per_second", "memory_bytes")


class Indexed(Dataset):
    """67 samples whose first feature is their index; with ``noise``, a random part that all three generators draw."""

    def __init__(self, noise: bool = False) -> None:
        self.noise = noise

    def __len__(self) -> int:
        return 67

    def __getitem__(self, index: int):
        inputs, target = tiny_data()[index]
        if self.noise:
            inputs = inputs + 0.1 * torch.randn(8) + 0.1 * float(np.random.rand()) + 0.1 * random.random()
        inputs = inputs.clone()
        inputs[0] = index / 100
        return inputs, target


class Stream(IterableDataset):
    """The same samples, one after another."""

    def __iter__(self) -> Iterator[Any]:
        yield from (Indexed()[index] for index in range(67))


class RandomStream(IterableDataset):
    """A stream that shuffles itself with torch's generator, and adds noise."""

    def __iter__(self) -> Iterator[Any]:
        yield from (Indexed(noise=True)[index] for index in torch.randperm(67).tolist())


class SampleAudit(Plugin):
    """Writes the sample ids of every step to a file as they are used; a step done again overwrites."""

    name = "audit-for-tests"

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    @hookimpl
    def before_fit(self) -> None:
        with self.path.open("a") as file:
            file.write("[-1, []]\n")  # what follows is another process's

    @hookimpl(wrapper=True)
    def compute_loss(self, run, model, batch):
        if model.training:
            ids = [round(float(value) * 100) for value in batch[0][:, 0]]
            with self.path.open("a") as file:
                file.write(json.dumps([run.state.step, ids]) + "\n")
        return (yield)


class Dies(Plugin):
    """SIGKILL to its own process, at a chosen moment."""

    name = "dies"

    def __init__(self, moment: str, step: int) -> None:
        super().__init__()
        self.moment, self.step = moment, step

    def here(self, moment: str, run: Any) -> None:
        if moment == self.moment and run.state.step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)

    @hookimpl
    def after_backward(self, run) -> None:
        self.here("in a step", run)

    @hookimpl
    def after_step(self, run) -> None:
        self.here("after a step", run)

    @hookimpl
    def before_evaluate(self, run) -> None:
        self.here("in an evaluation", run)

    @hookimpl
    def after_evaluate(self, run) -> None:
        self.here("after an evaluation", run)

    @hookimpl
    def save_state(self, run) -> None:
        self.here("in a save", run)


class Scaler(Plugin):
    """Loss scaling as fp16 has it, with the CPU's GradScaler: it grows every third step, and one step overflows and is
    skipped."""

    name = "scaler"
    skipped = 0

    @hookimpl
    def after_prepare(self, run) -> None:
        from accelerate.optimizer import AcceleratedOptimizer

        run.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=3)
        run.optimizer = AcceleratedOptimizer(run.optimizer, device_placement=False, scaler=run.accelerator.scaler)

    @hookimpl
    def after_backward(self, run) -> None:
        if run.state.step == 7:
            next(run.model.parameters()).grad.fill_(float("inf"))

    @hookimpl
    def after_step(self, run) -> None:
        self.skipped += run.step_was_skipped()


class Own(Plugin):
    """State of every kind that a checkpoint takes; it changes the numbers, so a loss of it shows."""

    name = "own"

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[str, Any] = {"sum": torch.zeros(()), "pair": (1, "a"), "by step": {0: 0.0}, "nothing": None}

    @hookimpl
    def before_optimizer_step(self, run) -> None:
        self.kept["sum"] = self.kept["sum"] + 0.1
        self.kept["pair"] = (self.kept["pair"][0] + 1, "a")
        self.kept["by step"][run.state.step] = float(self.kept["sum"])
        with torch.no_grad():
            for parameter in run.model.parameters():
                parameter.grad.add_(0.001 * self.kept["sum"] * self.kept["pair"][0] + 0.001 * len(self.kept["by step"]))

    @hookimpl
    def save_state(self) -> dict[str, Any]:
        return self.kept

    @hookimpl
    def load_state(self, state) -> None:
        self.kept = state


WORKERS = {"dataloader-workers": {"num_workers": 2}}
SCHEDULE = {"lr-scheduler": {"schedule": "cosine", "warmup": 4}}
EVERYTHING = [
    WORKERS,
    SCHEDULE,
    {"ema": {"decay": 0.9}},
    "checkpoint-best",
    "amp",
    {"early-stopping": {"patience": 50}},
]

RUNS: dict[str, tuple[Callable[[], list[Any]], dict[str, Any]]] = {
    "plain": (list, {}),
    "accumulated": (list, {"micro_batch_size": 2, "max_grad_norm": 0.5}),
    "scheduled": (lambda: [SCHEDULE], {}),
    "random data": (list, {"data": Indexed(noise=True)}),
    "random data in workers": (lambda: [WORKERS], {"data": Indexed(noise=True)}),
    "stream": (list, {"data": Stream()}),
    "stream in workers": (lambda: [WORKERS], {"data": Stream()}),
    "random stream": (list, {"data": RandomStream()}),
    "random stream in workers": (lambda: [WORKERS], {"data": RandomStream()}),
    "averaged": (lambda: [{"ema": {"decay": 0.9}}, "checkpoint-best"], {}),
    "mixed precision": (lambda: ["amp"], {}),
    "loss scaling": (lambda: [Scaler()], {}),
    "a plugin's own state": (lambda: [Own()], {}),
    "everything": (
        lambda: [*EVERYTHING, Scaler(), Own()],
        {"micro_batch_size": 4, "max_grad_norm": 1.0, "data": Indexed(noise=True)},
    ),
}


def record(folder: Path, audit: Path) -> dict[str, Any]:
    """All of a finished run that must not depend on interruptions."""
    summary = json.loads((folder / "summary.json").read_text())
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps: dict[int, list[list[int]]] = {}
    previous = None
    for step, ids in map(json.loads, audit.read_text().splitlines()):
        if step != previous:
            steps[step] = []
        steps[step].append(ids)
        previous = step
    return {
        "model": (folder / "model" / "model.safetensors").read_bytes(),
        "metrics": [{key: value for key, value in line.items() if key not in TIMES} for line in lines],
        "summary": {
            key: summary[key] for key in ("status", "steps", "epochs", "samples", "validation", "test", "best")
        },
        "sample-audit": steps,
    }


HANGING = 240
"""Seconds after which a forked run shows where it waits, and ends. A run takes less than 20, also under load."""


@pytest.fixture(scope="module")
def wholes(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A folder of uninterrupted runs, and their results by plugins and arguments: many tests compare with the same."""
    return tmp_path_factory.mktemp("wholes"), {}


@pytest.fixture
def train(tiny_run, wholes):
    """``train(folder, ...)``: three epochs of nine steps, saved every fourth, evaluated at every fifth; ``dies`` forks,
    and is killed. Runs in the folder ``whole`` with the same named plugins and settings are trained once."""

    kept, results = wholes

    def run_whole(plugins: list[Any], arguments: dict[str, Any]) -> Any:
        key = json.dumps([plugins, arguments], sort_keys=True)
        if key in results:
            number = [*results].index(key)
            shutil.copytree(kept / str(number), "whole")
            shutil.copy(kept / f"{number}.audit", "whole.audit")
            return results[key]
        result = run("whole", plugins, shared=False, **arguments)
        shutil.copytree("whole", kept / str(len(results)))
        shutil.copy("whole.audit", kept / f"{len(results)}.audit")
        results[key] = result
        return result

    def run(
        folder: str,
        plugins: list[Any],
        dies: Dies | None = None,
        resume: bool | str = False,
        shared: bool = True,
        **arguments: Any,
    ) -> Any:
        is_named = all(isinstance(plugin, str | dict) for plugin in plugins)
        if folder == "whole" and is_named and shared and not {"data", "output"} & arguments.keys():
            return run_whole(plugins, arguments)
        defaults = {
            "data": Indexed(),
            "epochs": 3,
            "log_every": 3,
            "save_every": 4,
            "evaluate_every": 5,
            "test_loader": tiny_data(16, seed=2),
        }
        arguments = {**defaults, **arguments, "output": folder, "resume": resume}
        audit = SampleAudit(Path(f"{folder}.audit"))
        if dies is None:
            return tiny_run([*plugins, audit], **arguments)
        child = os.fork()
        if child == 0:
            try:
                faulthandler.dump_traceback_later(HANGING, exit=True)
                tiny_run([*plugins, audit, dies], **arguments)
            finally:
                os._exit(1)  # it should have been killed
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status), "the run was killed"
        assert os.WTERMSIG(status) == signal.SIGKILL
        return None

    return run


QUICK = ("plain", "accumulated", "stream", "everything")


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in RUNS]
)
def test_killed_in_the_middle_of_an_epoch_and_resumed(train, name):
    plugins, arguments = RUNS[name]
    whole = train("whole", plugins(), **arguments)
    train("run", plugins(), Dies("in a step", 14), **arguments)
    resumed = train("run", plugins(), resume=True, **arguments)
    assert resumed.trainer.run.state.step == 27
    assert len(resumed.losses) == 27 - 12, "it went on from step 12, the last save"
    assert resumed.losses == whole.losses[12:]
    assert record(Path("run"), Path("run.audit")) == record(Path("whole"), Path("whole.audit"))
    if name == "loss scaling":
        scaler = resumed.trainer.run.accelerator.scaler
        assert scaler.get_scale() == whole.trainer.run.accelerator.scaler.get_scale() != 256.0
        assert next(plugin for plugin in whole.trainer.resolved.plugins if plugin.name == "scaler").skipped == 1


@pytest.mark.parametrize(
    ("moment", "step"),
    [
        pytest.param("after a step", 4, marks=pytest.mark.slow),
        ("in a save", 8),
        pytest.param("after a step", 9, marks=pytest.mark.slow),
        ("in an evaluation", 10),
        ("after an evaluation", 15),
        ("in a step", 18),
        pytest.param("in a save", 20, marks=pytest.mark.slow),
        pytest.param("in an evaluation", 27, marks=pytest.mark.slow),
    ],
)
def test_killed_at_any_moment(train, moment, step):
    """Right before and in a save, in an evaluation and after it, at the end of an epoch and of the run."""
    plugins = [{"ema": {"decay": 0.9}}, "checkpoint-best"]
    train("whole", plugins)
    first = 4 if step > 4 else 2
    train("run", plugins, Dies(moment, step), save_every=first)
    train("run", plugins, resume=True)
    assert record(Path("run"), Path("run.audit")) == record(Path("whole"), Path("whole.audit"))


@pytest.mark.slow
def test_killed_again_and_again(train):
    train("whole", EVERYTHING)
    train("run", EVERYTHING, Dies("in a step", 6))
    for moment, step in (("in a step", 9), ("in a save", 12), ("in an evaluation", 15), ("after a step", 21)):
        train("run", EVERYTHING, Dies(moment, step), resume=True)
    train("run", EVERYTHING, resume=True)
    assert record(Path("run"), Path("run.audit")) == record(Path("whole"), Path("whole.audit"))


def test_saved_and_evaluated_by_epoch(train):
    by_epoch = {"save_every": "epoch", "evaluate_every": "epoch"}
    train("whole", ["checkpoint-best"], **by_epoch)
    train("run", ["checkpoint-best"], Dies("in an evaluation", 18), **by_epoch)
    train("run", ["checkpoint-best"], resume=True, **by_epoch)
    assert record(Path("run"), Path("run.audit")) == record(Path("whole"), Path("whole.audit"))


def test_killed_before_first_checkpoint_restarts(train, caplog):
    train("run", [], Dies("in a step", 2))
    assert len(train("run", [], resume=True).losses) == 27
    assert_problem(caplog, "no-checkpoint run:")


# -- Ctrl-C ------------------------------------------------------------------------------------------------------------


class Interrupts(Plugin):
    """SIGINT to its own process, once or twice."""

    name = "interrupts"

    def __init__(self, moment: str, step: int, times: int = 1) -> None:
        super().__init__()
        self.moment, self.step, self.times = moment, step, times

    def here(self, moment: str, run: Any) -> None:
        if moment == self.moment and run.state.step == self.step:
            for _ in range(self.times):
                os.kill(os.getpid(), signal.SIGINT)

    @hookimpl
    def before_fit(self, run) -> None:
        self.here("before training", run)

    @hookimpl
    def after_backward(self, run) -> None:
        self.here("in a step", run)

    @hookimpl
    def before_evaluate(self, run, split) -> None:
        self.here("in the test" if split == "test" else "in an evaluation", run)

    @hookimpl
    def after_fit(self, run) -> None:
        self.here("after training", run)

    @hookimpl
    def export_model(self, run) -> None:
        self.here("in the export", run)


@pytest.mark.parametrize(
    ("moment", "step", "every"),
    [
        ("in a step", 13, 5),
        ("in a step", 8, "epoch"),
        ("in a step", 14, 5),
        ("in an evaluation", 9, "epoch"),
        ("in an evaluation", 10, 5),
        ("in a step", 26, 5),
    ],
    ids=[
        "mid-epoch",
        "last step of an epoch",
        "when an evaluation is due",
        "evaluating an epoch",
        "evaluating",
        "the last step",
    ],
)
def test_ctrl_c_saves_at_the_end_of_the_step_and_the_resumed_run_is_the_same(train, moment, step, every):
    arguments = {"evaluate_every": every, "save_every": None}
    train("whole", ["checkpoint-best"], **arguments)
    stopped = train("run", ["checkpoint-best", Interrupts(moment, step)], **arguments)
    assert (stopped.summary["status"], stopped.summary["reason"]) == ("stopped", "interrupted by SIGINT")
    assert stopped.summary["steps"] == step + (moment == "in a step")
    assert not Path("run/model").exists()
    train("run", ["checkpoint-best"], resume=True, **arguments)
    assert record(Path("run"), Path("run.audit")) == record(Path("whole"), Path("whole.audit"))


def test_ctrl_c_before_training_saves_before_the_first_step(train):
    whole = train("whole", [])
    stopped = train("run", [Interrupts("before training", 0)])
    assert (stopped.summary["status"], stopped.summary["steps"]) == ("stopped", 0)
    assert train("run", [], resume=True).losses == whole.losses


@pytest.mark.parametrize("moment", ["after training", "in the test", "in the export"])
@pytest.mark.parametrize("save_every", [None, 4])
def test_ctrl_c_after_training_completes_the_run(train, moment, save_every):
    train("whole", ["checkpoint-best"])
    ended = train("run", ["checkpoint-best", Interrupts(moment, 27)], save_every=save_every)
    assert ended.summary["status"] == "completed"
    assert record(Path("run"), Path("run.audit")) == record(Path("whole"), Path("whole.audit"))


def test_a_requested_evaluation_survives_ctrl_c(train):
    class Asks(Plugin):
        name = "asks"

        @hookimpl
        def after_step(self, run) -> None:
            if run.state.step == 13:
                run.state.request_evaluate()

    arguments = {"evaluate_every": "epoch", "save_every": None}
    train("whole", [Asks()], **arguments)
    train("run", [Asks(), Interrupts("in a step", 12)], **arguments)
    train("run", [Asks()], resume=True, **arguments)
    assert record(Path("run"), Path("run.audit")) == record(Path("whole"), Path("whole.audit"))


def test_a_second_ctrl_c_stops_at_once(train):
    with pytest.raises(KeyboardInterrupt):
        train("run", [Interrupts("in a step", 13, times=2)])
    summary = json.loads(Path("run/summary.json").read_text())
    assert (summary["status"], summary["reason"], summary["steps"]) == ("stopped", "KeyboardInterrupt", 13)
    train("run", [], resume=True)
    train("whole", [])
    assert record(Path("run"), Path("run.audit")) == record(Path("whole"), Path("whole.audit"))


# -- what is not resumed, or not from there ----------------------------------------------------------------------------


def test_a_checkpoint_of_another_model_is_refused_and_nothing_is_changed(train):
    train("run", [], epochs=1)
    before = {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file()}
    with expect_problem("resume-differs", CheckpointError):
        train("run", [], resume=True, model=torch.nn.Linear(8, 3))
    assert {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file()} == before


def damage_newest(folder: str) -> None:
    newest = sorted(Path(folder, "checkpoints").glob("step-*"))[-1] / "state.safetensors"
    newest.write_bytes(newest.read_bytes()[:-9])


def test_corrupt_newest_checkpoint_is_skipped_with_a_message(train, caplog):
    train("whole", [])
    train("run", [], Dies("in a step", 14), keep_checkpoints=3)
    damage_newest("run")
    resumed = train("run", [], resume=True, keep_checkpoints=3)
    assert_problem(caplog, "damaged-checkpoint step-00000012 state.safetensors")
    assert len(resumed.losses) == 27 - 8
    assert record(Path("run"), Path("run.audit")) == record(Path("whole"), Path("whole.audit"))


def test_resume_fails_if_every_checkpoint_is_corrupt(train):
    train("run", [], Dies("in a step", 14))
    damage_newest("run")
    with expect_problem("damaged-checkpoint", CheckpointError):
        train("run", [], resume=True)


def test_completed_run_resumes_for_more_epochs(train):
    train("whole", ["checkpoint-best"], epochs=3, save_every="epoch", evaluate_every="epoch")
    train("run", ["checkpoint-best"], epochs=1, save_every="epoch", evaluate_every="epoch")
    resumed = train("run", ["checkpoint-best"], epochs=3, save_every="epoch", evaluate_every="epoch", resume=True)
    assert len(resumed.losses) == 18
    first, second = record(Path("run"), Path("run.audit")), record(Path("whole"), Path("whole.audit"))
    assert first["model"] == second["model"]
    assert first["summary"] == second["summary"]
    assert first["sample-audit"] == second["sample-audit"]


def test_a_completed_run_resumed_trains_nothing(train):
    first = train("run", ["checkpoint-best"], save_every="epoch")
    again = train("run", ["checkpoint-best"], save_every="epoch", resume=True)
    assert again.losses == []
    for key in ("status", "steps", "validation", "test", "best"):
        assert again.summary[key] == first.summary[key]


def test_a_checkpoint_can_be_named_and_the_run_folder_moved(train):
    train("whole", [])
    train("run", [], Dies("in a step", 14))
    shutil.move("run", "elsewhere")
    Path("run.audit").rename("elsewhere.audit")
    resumed = train("elsewhere", [], resume="elsewhere/checkpoints/step-00000012")
    assert resumed.losses
    assert record(Path("elsewhere"), Path("elsewhere.audit")) == record(Path("whole"), Path("whole.audit"))


# -- the command line --------------------------------------------------------------------------------------------------


RECIPE = """
model: {module: "net.py:Net"}
data: {module: "net.py:data"}
train: {epochs: 60, batch_size: 8, lr: 0.01, save_every: 7, device: cpu}
plugins:
  - module: {loss: cross_entropy}
  - checkpoint-best
  - lr-scheduler
output: OUTPUT
"""
NET = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
torch.set_num_threads(1)

class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(8, 16), nn.Dropout(0.1), nn.Linear(16, 3))

def data():
    inputs = torch.randn(67, 8, generator=torch.Generator().manual_seed(0))
    split = TensorDataset(inputs, inputs[:, :3].argmax(1))
    return {"train": split, "validation": split, "test": split}
"""


def checkpoint_names(folder: str) -> set[str]:
    return {path.name for path in Path(folder).glob("checkpoints/step-*")}


def wait_for(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline, "the condition never held"
        time.sleep(0.005)


@pytest.mark.slow
def test_fastloop_train_killed_from_outside_and_resumed_by_the_command_line():
    Path("net.py").write_text(NET)
    for name in ("whole", "run"):
        Path(f"{name}.yaml").write_text(RECIPE.replace("OUTPUT", name))
    train = ("-m", "fastloop", "train")
    assert forked.run(*train, "whole.yaml").returncode == 0
    for resume, delay in (([], 0.05), (["--resume"], 0.2)):
        seen = checkpoint_names("run")
        with forked.Command(*train, "run.yaml", *resume) as command:
            wait_for(lambda seen=seen: not checkpoint_names("run") <= seen)
            time.sleep(delay)
            command.kill()
            assert command.poll() == -signal.SIGKILL, command.stderr
    done = forked.run(*train, "run.yaml", "--resume")
    assert done.returncode == 0, done.stderr
    # written whole, and not yet renamed
    assert re.search(r" run/checkpoints/(\.step-\d+\.partial|step-\d+) ", done.stdout)
    for name in ("model/model.safetensors", "checkpoints/step-00000540/model.safetensors"):
        assert Path("run", name).read_bytes() == Path("whole", name).read_bytes()
    first, second = (json.loads(Path(name, "summary.json").read_text()) for name in ("run", "whole"))
    for key in ("status", "steps", "validation", "test", "best"):
        assert first[key] == second[key]


def test_ctrl_c_exits_130_and_prints_resume_command():
    Path("net.py").write_text(NET)
    Path("run.yaml").write_text(RECIPE.replace("OUTPUT", "run"))
    with forked.Command("-m", "fastloop", "train", "run.yaml", "train.epochs=100000") as command:
        wait_for(lambda: checkpoint_names("run"))
        command.send_signal(signal.SIGINT)
        assert command.wait(300) == 130, command.stderr
        assert "Traceback" not in command.stderr
        assert "Continue with: fastloop train run.yaml train.epochs=100000 --resume" in command.stdout
    assert json.loads(Path("run/summary.json").read_text())["status"] == "stopped"


class Scores(Plugin):
    """Adds a metric that falls with every step."""

    name = "scores"
    adds_metrics = {"score": "max"}

    @hookimpl(wrapper=True, trylast=True)
    def evaluate(self, run):
        metrics = yield
        return metrics | {"score": -float(run.state.step)}


class DiesInTest(Dies):
    """SIGKILL when the test split is to be evaluated: training is over, and nothing is left to save."""

    def __init__(self) -> None:
        super().__init__("", 0)

    @hookimpl
    def before_evaluate(self, split) -> None:
        if split == "test":
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("every", [5, "epoch"])
def test_a_run_that_a_plugin_stopped_stays_stopped(train, every):
    plugins = [{"early-stopping": {"monitor": "score", "mode": "max", "patience": 1}}, Scores()]
    arguments = {"evaluate_every": every, "save_every": every, "epochs": 4}
    train("whole", plugins, **arguments)
    train("run", plugins, DiesInTest(), **arguments)
    resumed = train("run", plugins, resume=True, **arguments)
    assert resumed.losses == []
    assert resumed.summary["status"] == "stopped"
    assert record(Path("run"), Path("run.audit")) == record(Path("whole"), Path("whole.audit"))
    on = train("run", [Scores()], resume=True, **arguments)
    assert on.losses, "without the plugin it goes on"


class Draws(Plugin):
    """Draws random numbers at a point that a resumed run reaches again."""

    name = "draws"

    @hookimpl
    def before_fit(self) -> None:
        torch.rand(3)

    @hookimpl
    def before_epoch(self) -> None:
        torch.rand(3)


@pytest.mark.parametrize(("step", "save_every"), [(14, 4), (18, 9)], ids=["mid-epoch", "epoch end"])
def test_resume_does_not_repeat_random_draws(train, step, save_every):
    train("whole", [Draws()])
    train("run", [Draws()], Dies("in a step", step), save_every=save_every)
    train("run", [Draws()], resume=True)
    assert record(Path("run"), Path("run.audit")) == record(Path("whole"), Path("whole.audit"))


def test_resume_in_other_folder_keeps_existing_run(train):
    train("a", [], Dies("in a step", 14))
    train("run", [], epochs=4)
    train("run", [], resume="a/checkpoints/step-00000012")
    assert (Path("run.1") / "summary.json").exists()
    assert [path.name for path in Path("run/checkpoints").glob("step-*")] == ["step-00000027"]
    assert all(json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines())


def test_resume_from_older_checkpoint_discards_later_ones(train):
    train("whole", [])
    train("run", [], Dies("in a step", 26), keep_checkpoints=4)
    train("run", [], Dies("in a step", 15), resume="run/checkpoints/step-00000012", save_every=1, keep_checkpoints=1)
    assert [path.name for path in Path("run/checkpoints").glob("step-*")] == ["step-00000015"]
    train("run", [], resume=True)
    assert record(Path("run"), Path("run.audit")) == record(Path("whole"), Path("whole.audit"))


def test_resume_reports_removed_plugin(train, caplog):
    train("run", [{"ema": {"decay": 0.9}}], epochs=1)
    train("run", [], epochs=2, resume=True)
    assert_problem(caplog, "plugin-removed 'ema'")


def test_a_resumed_run_reports_that_nothing_is_left_to_train(train, caplog):
    caplog.set_level(logging.INFO, "fastloop")
    train("run", [], epochs=2)
    train("run", [], epochs=2, resume=True)
    assert "nothing is left to train at step" in caplog.text
    weights = record(Path("run"), Path("run.audit"))["model"]
    train("run", [], epochs=1, resume=True)
    assert_problem(caplog, "run-complete train.epochs --resume")
    assert record(Path("run"), Path("run.audit"))["model"] == weights


def test_other_trained_parameters_are_refused(train):
    train("run", [], epochs=1)
    model = tiny_model()
    model[0].weight.requires_grad = False
    with expect_problem("resume-differs run/checkpoints/ 0.weight", CheckpointError):
        train("run", [], resume=True, model=model)


def test_resume_from_checkpoint_without_data_fingerprint(tiny_run):
    from fastloop import checkpoint

    tiny_run(output="run", max_steps=3)
    path, _ = checkpoint.find_newest(Path("run"))
    model, state = checkpoint.read(path)
    del state["data"]
    checkpoint.write(path, model, state)
    assert tiny_run(output="run", resume=True).summary["steps"] == 18


class Forgets(Plugin):
    """Its state has another form than the one that it loads."""

    name = "forgets"

    @hookimpl
    def save_state(self) -> dict[str, Any]:
        return {"count": 3}

    @hookimpl
    def load_state(self, state: dict[str, Any]) -> None:
        self.count = state["number"]


def test_a_state_that_a_plugin_does_not_understand_is_refused_by_name(tiny_run):
    tiny_run([Forgets()], epochs=1, output="run")
    with pytest.raises(CheckpointError) as refused:
        tiny_run([Forgets()], epochs=2, output="run", resume=True)
    assert refused.value.exit_code == 2
    assert_problem(refused.value.problem, "invalid-state run/checkpoints/step-00000009 'forgets' KeyError 'number'")
    assert "test_resume.py, line " in str(refused.value)


@pytest.mark.parametrize(
    ("place", "value", "named"),
    [
        (("scheduler", "base_lrs"), [], "base_lrs"),
        (("scheduler", "last_epoch"), "two", "scheduler.last_epoch"),
        (("optimizer", "param_groups", 0, "betas"), None, "optimizer.param_groups.0.betas"),
        (("scalars", 0, "values", "train/loss"), 5, "scalars.train/loss"),
        (("modes",), {"0": "eval"}, "modes.0"),
        (("plugins", "ema", "updates"), "two", "plugin 'ema'"),
        (("plugins", "log", "offset"), None, "plugin 'log'"),
    ],
)
def test_a_malformed_value_of_a_state_is_refused_with_its_place(tiny_run, place, value, named):
    plugins = ["ema", "log", SCHEDULE]
    tiny_run(plugins, max_steps=2, output="run")
    folder = Path("run/checkpoints/step-00000002")
    model, state = checkpoint.read(folder)
    inner: Any = state
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    checkpoint.write(folder, model, state)
    with expect_problem(f"invalid-state step-00000002 {named}", CheckpointError):
        tiny_run(plugins, max_steps=4, output="run", resume=True)
