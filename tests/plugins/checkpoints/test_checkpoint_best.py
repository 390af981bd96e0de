"""The plugin ``checkpoint-best``.

Modules:
    plugins/fastloop_plugins/checkpoints/checkpoint_best.py
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from killed_runs import exit_code
from recording_plugins import ScriptedScore, WeightRecorder
from safetensors.torch import load_file
from torch import nn

from fastloop import Plugin, Trainer, UsageError, checkpoint, hookimpl
from fastloop.checkpoint import saving
from fastloop.cli.summary import show_summary
from fastloop.testing import assert_problem, expect_problem, tiny_data, tiny_model
from fastloop_plugins.checkpoints.async_save import HostCopies, snapshot
from fastloop_plugins.checkpoints.checkpoint_best import remaining_saves


def best(**options):
    return {"checkpoint-best": {"monitor": "score", **options}}


def cut_weights(folder: Path) -> None:
    """Remove the last byte of the weights of all best checkpoints."""
    for path in folder.glob("checkpoints/best-*/model.safetensors"):
        path.write_bytes(path.read_bytes()[:-1])


class CutsAtTheEnd(Plugin):
    """Damages the best weights after the last evaluation."""

    name = "cuts-at-the-end"

    @hookimpl(tryfirst=True)
    def after_fit(self, run) -> None:
        cut_weights(run.folder)


class DiesInAStep(Plugin):
    """SIGKILL to its own process before step 21."""

    name = "dies-in-a-step"

    @hookimpl
    def before_step(self, run) -> None:
        if run.state.step == 20:
            os.kill(os.getpid(), signal.SIGKILL)


class DiesSoonAfterACheckpoint(Plugin):
    """SIGKILL to its own process at any place, some seconds after the first checkpoint for resume."""

    name = "dies-soon-after-a-checkpoint"

    def __init__(self, delay: float) -> None:
        super().__init__()
        self.delay = delay

    @hookimpl
    def before_fit(self, run) -> None:
        threading.Thread(target=self.watch, args=[run.folder], daemon=True).start()

    def watch(self, folder: Path) -> None:
        while not list(folder.glob("checkpoints/step-*")):
            time.sleep(0.005)
        time.sleep(self.delay)
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("options", "mode", "words", "extreme"),
    [({}, "max", "higher is better", "highest"), ({"mode": "min"}, "min", "lower is better", "lowest")],
)
def test_the_direction_of_the_metric_is_printed(tiny_run, capsys, options, mode, words, extreme):
    result = tiny_run([best(**options), ScriptedScore(0.5, 0.9), "progress"], epochs=2)
    assert result.summary["best"]["mode"] == mode
    run = result.trainer.run
    progress = next(plugin for plugin in run.plugins if plugin.name == "progress")
    assert f"{extreme} score {result.summary['best']['value']:.4f}" in progress.describe(run, 1, 0, 0.0)
    capsys.readouterr()
    show_summary(result.summary, run.folder)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("best")]
    assert words in line


@pytest.mark.parametrize(
    ("options", "scores", "step"),
    [
        ({}, (0.5, 0.9, 0.7, 0.8), 18),
        ({"mode": "min"}, (0.5, 0.9, 0.3, 0.8), 27),
        ({}, (float("nan"), 0.1, float("nan"), 0.05), 18),
        ({}, (0.5, 0.5, 0.5, 0.5), 9),
    ],
    ids=["larger is better", "smaller is better", "NaN never", "the first of equals"],
)
def test_the_run_ends_with_the_weights_that_evaluated_best(tiny_run, options, scores, step):
    weights = WeightRecorder()
    result = tiny_run([best(**options), ScriptedScore(*scores), weights], epochs=4)
    assert result.summary["best"]["step"] == step
    assert result.summary["best"].keys() == {"step", "metric", "mode", "value", "path", "metrics"}
    assert result.summary["best"]["metric"] == "score"
    assert result.summary["best"]["path"] == f"checkpoints/best-{step:08d}"
    folder = result.trainer.run.folder
    kept = load_file(folder / result.summary["best"]["path"] / "model.safetensors")
    exported = load_file(folder / "model" / "model.safetensors")
    for name, tensor in weights.steps[step - 1].items():
        assert torch.equal(kept[name], tensor)
        assert torch.equal(exported[name], tensor)
        assert torch.equal(result.weights[name], tensor)


def test_the_test_split_is_evaluated_with_the_best_weights(tiny_run):
    result = tiny_run([best(), ScriptedScore(0.5, 0.9, 0.7, 0.0)], epochs=3, test_loader=tiny_data(32, seed=1))
    losses = [metrics["loss"] for split, metrics in result.recorder.metrics if split == "validation"]
    assert result.summary["test"]["loss"] == losses[1] != losses[2]


@pytest.mark.slow
def test_keep_holds_that_many_and_rotation_never_removes_the_best(tiny_run):
    result = tiny_run(
        [best(keep_checkpoints=2), ScriptedScore(0.9, 0.5, 0.7, 0.6, 0.1)], epochs=5, save_every=1, keep_checkpoints=1
    )
    names = sorted(path.name for path in (result.trainer.run.folder / "checkpoints").iterdir())
    assert names == ["best-00000009", "best-00000027", "step-00000045"]
    assert all(checkpoint.verify(result.trainer.run.folder / "checkpoints" / name) is None for name in names)


def test_losses_are_those_of_a_run_without_it(tiny_run):
    assert tiny_run(["checkpoint-best"]).losses == tiny_run().losses


def test_with_ema_the_averages_that_were_evaluated_are_kept_and_exported(tiny_run):
    weights = WeightRecorder()
    result = tiny_run([best(), {"ema": {"decay": 0.9}}, ScriptedScore(0.5, 0.9, 0.7), weights], epochs=3)
    exported = load_file(result.trainer.run.folder / "model" / "model.safetensors")
    assert result.summary["best"]["step"] == 18
    assert all(torch.equal(exported[name], tensor) for name, tensor in weights.evaluated[1].items())


def test_a_run_resumed_after_a_newer_best_ends_with_the_same_best(tiny_run):
    """Killed between the evaluation that found a new best and the next save: the older best must still be there."""

    scores = (0.5, 0.9, 0.7)
    whole = tiny_run([best(), ScriptedScore(*scores)], epochs=3)
    plugins = [best(), ScriptedScore(*scores), DiesInAStep()]
    assert exit_code(plugins, epochs=3, output="run", save_every=13) == -signal.SIGKILL
    known = json.loads(Path("run/checkpoints/step-00000013/state.json").read_text())["state"]["best"]
    assert checkpoint.verify(Path("run") / known["path"]) is None
    resumed = tiny_run([best(), ScriptedScore(*scores[1:])], epochs=3, output="run", save_every=13, resume=True)
    assert resumed.summary["best"] == whole.summary["best"]
    assert all(torch.equal(resumed.weights[name], whole.weights[name]) for name in whole.weights)
    assert sorted(path.name for path in Path("run/checkpoints").glob("*best*")) == ["best-00000018"]


def test_a_run_that_stopped_between_evaluations_resumes_with_the_best_of_its_checkpoint(tiny_run):
    """The evaluation at the stop found a better best, after the last checkpoint: the folder that the checkpoint names
    must stay."""
    whole = tiny_run([best(), ScriptedScore(0.6, 0.5, 0.4)], epochs=3)
    stopped = tiny_run([best(), ScriptedScore(0.6, 0.9)], epochs=3, output="run", max_steps=13, save_every=13)
    assert (stopped.summary["best"]["step"], whole.summary["best"]["step"]) == (13, 9)
    resumed = tiny_run([best(), ScriptedScore(0.5, 0.4)], epochs=3, output="run", save_every=13, resume=True)
    assert resumed.summary["best"] == whole.summary["best"]
    assert all(torch.equal(resumed.weights[name], whole.weights[name]) for name in whole.weights)
    assert sorted(path.name for path in Path("run/checkpoints").glob("*best*")) == ["best-00000009"]


def test_a_run_that_resumes_from_another_folder_ends_with_the_best_of_both(tiny_run):
    whole = tiny_run([best(), ScriptedScore(0.5, 0.9, 0.7)], epochs=3)
    usual = {"epochs": 3, "save_every": 18}
    tiny_run([best(), ScriptedScore(0.5, 0.9)], output="other", max_steps=18, **usual)
    resumed = tiny_run([best(), ScriptedScore(0.7)], output="run", resume="other", **usual)
    assert resumed.summary["best"] == whole.summary["best"]
    assert all(torch.equal(resumed.weights[name], whole.weights[name]) for name in whole.weights)
    for folder in ("other", "run"):
        assert checkpoint.verify(Path(folder, "checkpoints/best-00000018")) is None


def test_a_resumed_run_that_keeps_fewer_removes_the_others(tiny_run):
    tiny_run(
        [best(keep_checkpoints=2), ScriptedScore(0.9, 0.8)], epochs=3, output="run", max_steps=18, keep_checkpoints=1
    )
    assert sorted(path.name for path in Path("run/checkpoints").glob("best-*")) == ["best-00000009", "best-00000018"]
    resumed = tiny_run([best(), ScriptedScore(0.7)], epochs=3, output="run", keep_checkpoints=1, resume=True)
    assert resumed.summary["best"]["step"] == 9
    assert sorted(path.name for path in Path("run/checkpoints").glob("best-*")) == ["best-00000009"]


@pytest.mark.slow
def test_killed_while_saving_the_best_before_it_is_whole():
    """SIGKILL at many moments of a run that saves a better best all the time: the newest named best is always whole."""
    scores = [index / 1000 for index in range(1000)]
    for delay in range(12):
        output = Path(f"run{delay}")
        plugins = [best(), ScriptedScore(*scores), DiesSoonAfterACheckpoint(0.003 * delay)]
        code = exit_code(plugins, model=nn.Linear(8, 3), epochs=100, output=output, evaluate_every=1, save_every=1)
        assert code == -signal.SIGKILL
        state = checkpoint.read(checkpoint.find_newest(output)[0])[1]
        assert checkpoint.verify(output / state["state"]["best"]["path"]) is None


@pytest.mark.parametrize(
    ("saves", "in_folder", "saving", "remaining"),
    [
        ([], [2], None, []),
        ([2, 4], [], None, [2, 4]),
        ([2, 4, 6], [4, 6], None, [4, 6]),
        ([2, 4, 6, 8], [4, 6], None, [4, 6, 8]),
        ([4, 5], [4, 6], None, [4, 5]),
        ([2], [], 2, [2]),
        ([2, 4, 6], [2, 4], 6, [4, 6]),
        ([2, 4, 6, 8], [2, 4], 8, [4, 8]),
        ([4, 5], [4, 6], 5, [4, 5]),
        ([4, 6], [4, 6], 6, [4, 6]),
    ],
)
def test_saves_remain_while_a_run_can_resume_from_them(saves, in_folder, saving, remaining):
    assert remaining_saves(saves, in_folder, keep=2, saving=saving) == remaining


class WritesAfterAnEvaluation(Plugin):
    """Writes the checkpoint of one step in a thread, once the evaluation of the next step is done."""

    name = "writes-after-an-evaluation"

    def __init__(self, step: int) -> None:
        super().__init__()
        self.step = step
        self.is_evaluated = threading.Event()

    @hookimpl
    def after_evaluate(self, run) -> None:
        if run.state.step > self.step:
            self.is_evaluated.set()

    @hookimpl
    def write_checkpoint(self, run, folder, model, state):
        if run.state.step != self.step:
            return None
        copies, *_ = snapshot(model, state, HostCopies())
        pool = ThreadPoolExecutor(1)
        written = pool.submit(self.write, run, folder, copies)
        pool.shutdown(wait=False)
        return written

    def write(self, run, folder, copies) -> None:
        assert self.is_evaluated.wait(60)
        saving.write(run, folder, *copies)


def test_the_best_of_a_checkpoint_that_is_still_written_stays_beside_those_of_a_later_step(tiny_run):
    """The run resumes from step 4, and the checkpoint of step 6 is in the folder, while that of step 5 is written."""
    usual = {"epochs": 1, "max_steps": 6, "output": "run", "keep_checkpoints": 2}
    tiny_run([best(), ScriptedScore(0.1, 0.2, 0.3)], evaluate_every=2, save_every=2, **usual)
    resumed = tiny_run(
        [best(), ScriptedScore(0.4, 0.5), WritesAfterAnEvaluation(5)],
        evaluate_every=1,
        save_every=5,
        resume="run/checkpoints/step-00000004",
        **usual,
    )
    assert resumed.summary["best"]["step"] == 6
    names = sorted(path.name for path in Path("run/checkpoints").iterdir())
    assert names == ["best-00000005", "best-00000006", "step-00000005", "step-00000006"]


def test_best_weights_that_a_resumed_run_finds_damaged_are_no_longer_the_best(tiny_run, caplog):
    tiny_run([best(), ScriptedScore(0.9)], epochs=1, output="run")
    cut_weights(Path("run"))
    resumed = tiny_run([best(), ScriptedScore(0.5)], epochs=2, output="run", resume=True)
    assert_problem(caplog, "damaged-checkpoint checkpoints/best-00000009 lost: model.safetensors")
    assert resumed.summary["best"]["step"] == 18


def test_best_weights_that_are_damaged_at_the_end_are_refused_and_the_run_can_be_resumed(tiny_run):
    damaged = "damaged-checkpoint run/checkpoints/best-00000009: model.safetensors `--resume`"
    with expect_problem(damaged, UsageError):
        tiny_run([best(), ScriptedScore(0.9, 0.5), CutsAtTheEnd()], output="run")
    resumed = tiny_run([best(), ScriptedScore(0.5)], output="run", resume=True)
    assert resumed.summary["status"] == "completed"


def test_unknown_metric_error_lists_available_metrics(tiny_run):
    with expect_problem("unknown-metric plugins.checkpoint-best.monitor: 'acuracy' loss", UsageError):
        tiny_run([{"checkpoint-best": {"monitor": "acuracy"}}])


def test_without_an_evaluation_split_it_is_refused():
    trainer = Trainer(
        tiny_model(), tiny_data(), loss=nn.functional.cross_entropy, batch_size=8, plugins=["checkpoint-best"]
    )
    with expect_problem("unknown-split plugins.checkpoint-best.monitor", UsageError):
        trainer.fit()
